"""Compiled kernels as files: those that a worker uses, and how another one keeps them.

Files are named by what they were compiled from and for: an entry of Triton's cache by the kernel's
sources, its options and the GPU's architecture, a library of C code by source, flags, compiler and
CPU. So a file that does not fit is never looked up.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from weft.contract.cache_folder import cache_folder
from weft.contract.errors import InvalidRequest

MAX_FILES = 20_000
MAX_FILE_BYTES = 64 << 20
MAX_BYTES = 1 << 30
"""Most files that one worker takes of another, and most bytes."""
PART_BYTES = 1 << 20
"""Most bytes of a file in one message."""
_TRITON = re.compile(r"triton/([A-Za-z0-9_-]{16,128})/([A-Za-z0-9_][A-Za-z0-9._-]{0,254})")
_NATIVE = re.compile(r"native/([0-9a-f]{32}\.so)")
_GROUP = "__grp__"
"""How the name of a file of Triton's begins that lists an entry's files by their paths."""


class KernelFolders(NamedTuple):
    triton: Path
    native: Path

    @classmethod
    def of_host(cls) -> KernelFolders:
        """Raises RuntimeError if the user has no home folder."""
        named = os.environ.get("TRITON_CACHE_DIR")
        home = Path(os.environ.get("TRITON_HOME") or Path.home())
        triton = Path(named) if named else home / ".triton" / "cache"
        return cls(triton, cache_folder() / "native")


def kernel_version() -> str:
    """Two processes with another version have no kernels in common."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return f"triton {triton}, {sys.implementation.cache_tag}, {platform.machine()}"


def used_kernels(folders: KernelFolders, since: float, process: int) -> Iterator[tuple[str, Path]]:
    """Names and paths of the files that a process uses: entries of Triton's cache that were used at
    or after a time (seconds since the epoch), and libraries that it has loaded.
    """
    if folders.triton.is_dir():
        for entry in sorted(folders.triton.iterdir()):
            if not entry.is_dir() or entry.stat().st_mtime < since:
                continue
            for path in sorted(entry.iterdir()):
                name = f"triton/{entry.name}/{path.name}"
                if path.is_file() and not path.is_symlink() and _TRITON.fullmatch(name):
                    yield name, path
    for path in sorted(_loaded(process, folders.native)):
        if _NATIVE.fullmatch(f"native/{path.name}"):
            yield f"native/{path.name}", path


def _loaded(process: int, folder: Path) -> set[Path]:
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:
        return set()
    mapped = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return {path for path in mapped if path.parent == folder.resolve()}


class KernelKeeper:
    """Puts files of another worker where Triton and our own code look for them. Files that are
    there already stay. Used as a context manager: entries take their places at the end, whole.

    Raises InvalidRequest, from any call, for names, sizes or digests that are not right.
    """

    def __init__(self, folders: KernelFolders) -> None:
        self._folders = folders
        self._num_bytes = 0
        self.num_files = 0

    def __enter__(self) -> KernelKeeper:
        self._folders.triton.mkdir(parents=True, exist_ok=True)
        self._folders.native.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._new = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folders.triton))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._place()
        finally:
            shutil.rmtree(self._new, ignore_errors=True)

    def take(self, name: str, content: bytes, digest: bytes) -> None:
        if _TRITON.fullmatch(name) is None and _NATIVE.fullmatch(name) is None:
            raise InvalidRequest(f"{name[:80]!r} is no name of a compiled kernel", param="kernels")
        self.num_files += 1
        self._num_bytes += len(content)
        is_small = self._num_bytes <= MAX_BYTES and len(content) <= MAX_FILE_BYTES
        if self.num_files > MAX_FILES or not is_small:
            raise InvalidRequest("there are too many compiled kernels, or too large ones")
        if digest_of(content) != digest:
            raise InvalidRequest(f"{name}: its bytes are not those of its digest", param="kernels")
        path = self._new / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def _place(self) -> None:
        for entry in _folders_in(self._new / "triton"):
            place = self._folders.triton / entry.name
            for group in entry.glob(f"{_GROUP}*"):
                group.write_text(json.dumps({"child_paths": _children(group, place)}))
            if not place.exists():
                os.replace(entry, place)
        native = self._new / "native"
        for path in sorted(native.iterdir()) if native.is_dir() else []:
            if not (self._folders.native / path.name).exists():
                shutil.move(path, self._folders.native / path.name)


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _folders_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _children(group: Path, place: Path) -> dict[str, str]:
    """The files of an entry, where they will lie here: whatever paths another host wrote."""
    try:
        names = json.loads(group.read_bytes())["child_paths"].keys()
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InvalidRequest(f"{group.name}: no list of files", param="kernels") from None
    own = {path.name for path in group.parent.iterdir()}
    return {name: str(place / name) for name in names if name in own}
