"""Packs TRL's client for weights, and what of vLLM it imports, for a GPU machine without network.

    python scripts/trl_kit.py     # makes build/trl-kit/site.tar.xz, some 4 MiB

The machine is that of `gpu_kit.py`, and has accelerate and requests besides. Both packages' Python
files are packed as their wheels have them, without compiled code and without folders that the
client never imports. This vLLM is the latest that loads with the machine's NCCL, which is older
than 2.29.7.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from gpu_kit import MIB, ROOT, TARGET, uv, without_tests

PACKAGES = ("trl==1.16.0", "vllm==0.29.0")
COMPILED = ("cbor2==6.3.0", "pyzmq==27.3.0")
"""Packages that vLLM imports and the machine lacks."""
LEFT_OUT = (
    *("vllm/entrypoints", "vllm/models", "vllm/model_executor/models", "vllm/vllm_flash_attn"),
    *("trl/cli", "trl/trainer"),
)
KIT = ROOT / "build" / "trl-kit" / "site.tar.xz"


def install(site: Path) -> None:
    """Installs into `site` what is packed, for the machine's Python."""
    others = site.with_name("compiled")
    for folder, packages in ((site, PACKAGES), (others, COMPILED)):
        wheels = ("--only-binary", ":all:", "--no-deps", *TARGET)
        uv("pip", "install", "--target", folder, *wheels, *packages)
    for path in [*site.rglob("*")]:
        is_kept = path.suffix == ".py" or path.name == "METADATA"
        if not path.is_dir() and not is_kept:
            path.unlink()
    for name in LEFT_OUT:
        shutil.rmtree(site / name)
    for path in others.iterdir():
        path.rename(site / path.name)
    shutil.rmtree(site / "bin", ignore_errors=True)


def main() -> int:
    KIT.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        install(site)
        with tarfile.open(KIT, "w:xz") as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, arcname=path.name, filter=without_tests)
    print(f"{KIT.stat().st_size / MIB:.2f} MiB  {KIT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
