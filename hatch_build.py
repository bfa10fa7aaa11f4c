"""What hatchling adds to a wheel: the REST edge, and native code for each kind of CPU."""

import hashlib
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = platform.machine()
MACHINE = os.environ.get("WEFT_WHEEL_MACHINE") or HERE
"""What the wheel is for, as `platform.machine()` names it there."""
COMPILER = "cc" if MACHINE == HERE else f"{MACHINE}-linux-gnu-gcc"
OLD_LOG = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
"""glibc 2.29 has a newer `log` too, which differs in errno alone."""
COMPILE_TIMEOUT_S = 900.0


class WeftBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles each C file for each variant of `weft.kernels.shared.packaged`.

    `build/native` keeps what was compiled, under a hash of all that goes into it. With
    WEFT_WHEEL_MACHINE the wheel is for another kind of machine, whose cross compiler must be there.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        require_edge = [sys.executable, str(root / "scripts" / "build_rest.py"), "--require"]
        edge = root / "services" / "rest" / "bin" / "weft-rest"
        if MACHINE != HERE:
            edge = edge.with_name(f"weft-rest-{MACHINE}")
            require_edge += ["--machine", MACHINE]
        subprocess.run(require_edge, check=True, timeout=COMPILE_TIMEOUT_S)
        build_data["shared_scripts"] = {str(edge): "weft-rest"}
        build_data["force_include"] |= _compile_all(root, root / "build" / "native")
        build_data["pure_python"] = False
        # `auditwheel repair` writes the oldest glibc that it runs on in place of `linux`.
        build_data["tag"] = f"py3-none-linux_{MACHINE}"


def _compile_all(root: Path, folder: Path) -> dict[str, str]:
    """Compiles into `folder`; each file's path in the wheel by its path."""
    sys.path[:0] = [str(root / "kernels"), str(root / "contract")]
    from weft.kernels.shared.build import COMMON_FLAGS
    from weft.kernels.shared.packaged import VARIANTS, Variant, packaged_path

    folder.mkdir(parents=True, exist_ok=True)
    old = folder / f"old-{MACHINE}.h"
    old.write_text(f'__asm__(".symver log,log@{OLD_LOG[MACHINE]}");\n')
    compiler = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout

    def compile_one(source: Path, variant: Variant) -> tuple[str, str]:
        target = packaged_path(source, variant)
        flags = (*COMMON_FLAGS, *variant.flags, "-fopenmp", "-include", str(old))
        parts = [source, *sorted(source.parent.glob("*.h")), old]
        key = hashlib.blake2b(compiler + repr((MACHINE, flags)).encode(), digest_size=8)
        for part in parts:
            key.update(part.read_bytes())
        library = folder / f"{target.stem}-{key.hexdigest()}.so"
        if not library.exists():
            code, linked = library.with_suffix(".o"), library.with_suffix(".tmp")
            _run([COMPILER, *flags, "-c", str(source), "-o", str(code)])
            # OpenMP's names stay open: the runtime that torch has loaded has them.
            _run([COMPILER, "-shared", "-s", str(code), "-o", str(linked), "-lm"])
            linked.replace(library)
        package_root = root / source.relative_to(root).parts[0]
        return str(library), str(target.relative_to(package_root))

    sources = sorted(root.glob("*/weft/**/*.c"))
    variants = VARIANTS[MACHINE]
    with ThreadPoolExecutor() as pool:
        pairs = [pool.submit(compile_one, s, v) for v in variants for s in sources]
        return dict(pair.result() for pair in pairs)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)
