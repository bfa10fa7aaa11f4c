"""Packs what Weft needs on a GPU machine that has torch and transformers but no network.

    make gpu-kit
    . build/gpu-kit/enter.sh        # there, in the root of a copy of this tree

The machine has Linux on x86-64, Python 3.12 and the packages of `HAS`. Archives in `build/gpu-kit`
have the other packages, the demo model without its weights, the REST edge, and the compiled C code
of the wheel that `make wheel` built, if there is one; otherwise the machine compiles it on first
use. `enter.sh` unpacks them and sets PATH, PYTHONPATH and GPU_KIT_DEMO. It leaves the edge or the C
code out, and says so, where the tree's sources differ from those that were compiled.
"""

from __future__ import annotations

import argparse
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from hashlib import sha256
from importlib.metadata import distribution
from pathlib import Path

from weft.checkpoint.resolve import resolve_model

ROOT = Path(__file__).resolve().parent.parent
HAS = (
    *("huggingface-hub", "numpy", "safetensors", "tokenizers", "torch", "transformers", "triton"),
    # Large, and Weft runs without them; the last is for another CUDA than theirs.
    *("fa3-fwd", "nixl", "nixl-cu12"),
)
"""Packages that are left out, with what they alone need."""
TARGET = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_31")
ROOTS: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
    "dev-mode-dirs"
]
REST = Path("services/rest")
ENTER = """\
# Source it in the root of the tree. GPU_KIT_HOME: where packages are unpacked.
kit=$(dirname "${{BASH_SOURCE[0]}}")
home=${{GPU_KIT_HOME:-/tmp/weft-gpu-kit}}/{name}
if [ ! -e "$home/.done" ]; then
    mkdir -p "$home" && tar -xJf "$kit/site.tar.xz" -C "$home" && touch "$home/.done" ||
        echo "gpu-kit: the packages cannot be unpacked into $home" >&2
fi
for part in {compiled}; do
    if sha256sum --check --status "$kit/$part.sha256"; then
        tar -xJf "$kit/$part.tar.xz"
    else
        echo "gpu-kit: no $part, since its sources have changed; 'make gpu-kit' again" >&2
    fi
done
weft_roots=
for root in {roots}; do
    weft_roots=$weft_roots$PWD/$root:
done
export PATH="$home/bin:$PATH" PYTHONPATH="$weft_roots$home/site" GPU_KIT_DEMO="$home/demo"
unset kit home part root weft_roots
"""
PROGRAMS = {"python": 'exec python3 "$@"', "weft": 'exec python3 -m weft.cli "$@"'}
LIMIT_S = 600
MIB = 2**20


def uv(*arguments: str | Path) -> None:
    """Runs uv in the root of the tree."""
    command = [Path(sys.executable).with_name("uv"), *arguments, "--quiet"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S)


def install(site: Path, more: list[str], others: list[str]) -> None:
    """Installs into `site` what the machine lacks, for its Python.

    Args:
        site: A new folder.
        more: Further requirements. One of a package in `HAS` takes it out of there.
        others: Packages that are left out besides those.
    """
    wanted = {re.split(r"[^\w.-]", requirement)[0] for requirement in more}
    with tempfile.TemporaryDirectory() as folder:
        has, added, pinned = (Path(folder) / name for name in ("has.txt", "added.in", "pinned.txt"))
        has.write_text("\n".join(sorted({*HAS, *others} - wanted)))
        added.write_text("\n".join(more))
        sources = ("--group", "pyproject.toml:gpu-kit", "pyproject.toml", added)
        uv("pip", "compile", *sources, "--excludes", has, *TARGET, "--output-file", pinned)
        # Copies, since `strip` would change uv's cache, and what other environments have of it.
        wheels = ("--only-binary", ":all:", "--no-deps", "--link-mode", "copy")
        uv("pip", "install", "--target", site, *wheels, *TARGET, "--requirements", pinned)
    for name in ("bin", "include"):
        shutil.rmtree(site / name, ignore_errors=True)
    trim_nixl(site)
    # Those in other folders were edited by auditwheel, and may not be loadable afterwards.
    code = [one for one in site.rglob("*.so") if not one.parent.name.endswith(".libs")]
    subprocess.run(["strip", "--strip-unneeded", *code], check=True, timeout=LIMIT_S)


def trim_nixl(site: Path) -> None:
    """Leaves of NIXL, if it is there, what moves pages by UCX, and the libraries it loads."""
    own, others = site / ".nixl_cu13.mesonpy.libs", site / "nixl_cu13.libs"
    libraries = {path.name: path for folder in (own, others) for path in folder.glob("*.so*")}
    kept = [*site.glob("nixl_cu13/*.so"), *own.glob("plugins/libplugin_UCX.so")]
    kept += others.glob("ucx/libuc[mt]_*.so*")
    for code in kept:
        done = subprocess.run(["readelf", "-d", code], capture_output=True, text=True, check=True)
        needed = re.findall(r"NEEDED.*\[(.+)\]", done.stdout)
        kept += {libraries[name] for name in needed if name in libraries}.difference(kept)
    for code in (*own.rglob("*.so*"), *others.rglob("*.so*")):
        if code not in kept:
            code.unlink()
    for folder in (*site.glob("nixl_ep*"), *site.glob("nixl_cu13.scripts")):
        shutil.rmtree(folder)


def lay_out_edge(stage: Path) -> dict[str, bytes]:
    """Lays out the REST edge. Returns its sources."""
    edge = REST / "bin" / "weft-rest"
    (stage / edge).parent.mkdir(parents=True)
    shutil.copy(ROOT / edge, stage / edge)
    command = ["git", "ls-files", "-z", str(REST)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name: (ROOT / name).read_bytes() for name in listed.split("\0") if name}


def lay_out_native(stage: Path) -> dict[str, bytes]:
    """Lays out the compiled C code of a wheel. Returns its sources; none without a wheel."""
    sources = {}
    for wheel in (ROOT / "dist").glob("weft-*_x86_64.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith((".so", ".c", ".h")):
                    continue
                folder = Path(name).parent
                root = next(root for root in ROOTS if (ROOT / root / folder).is_dir())
                if name.endswith(".so"):
                    (stage / root / folder).mkdir(parents=True, exist_ok=True)
                    (stage / root / name).write_bytes(archive.read(name))
                else:
                    sources[f"{root}/{name}"] = archive.read(name)
    return sources


def lay_out_rest(home: Path) -> None:
    """Lays out the demo model's small files, the programs, and what says Weft's version."""
    weft = distribution("weft")
    described = home / "site" / f"weft-{weft.version}.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text(weft.read_text("METADATA") or "")
    (home / "demo").mkdir()
    for path in resolve_model("demo").glob("*.json"):
        shutil.copy(path, home / "demo")
    (home / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (home / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (home / "bin" / name).chmod(0o755)


def without_tests(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A filter of archives; files belong to whoever unpacks them."""
    if Path(member.name).name in ("__pycache__", "tests"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-kit")
    more = {"nargs": "+", "default": [], "metavar": "REQUIREMENT"}
    parser.add_argument("--with", dest="more", help="packed as well, such as nixl", **more)
    parser.add_argument("--has", help="packages that the machine has besides", **more)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        install(stage / "site" / "site", options.more, options.has)
        lay_out_rest(stage / "site")
        sources = {"edge": lay_out_edge(stage / "edge"), "native": lay_out_native(stage / "native")}
        compiled = [part for part, files in sources.items() if files]
        for part in ("site", *compiled):
            with tarfile.open(options.folder / f"{part}.tar.xz", "w:xz") as archive:
                for path in sorted((stage / part).iterdir()):
                    archive.add(path, arcname=path.name, filter=without_tests)
    for part in compiled:
        files = sources[part].items()
        lines = (f"{sha256(content).hexdigest()}  {name}\n" for name, content in files)
        (options.folder / f"{part}.sha256").write_text("".join(lines))
    names = {"name": secrets.token_hex(4), "roots": " ".join(ROOTS)}
    enter = ENTER.format(compiled=" ".join(compiled), **names)
    (options.folder / "enter.sh").write_text(enter)
    sizes = {path.name: path.stat().st_size for path in sorted(options.folder.iterdir())}
    for name, size in (*sizes.items(), ("in all", sum(sizes.values()))):
        print(f"{size / MIB:7.2f} MiB  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
