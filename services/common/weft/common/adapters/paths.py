"""Immutable copies of adapters: the caller's folder is checked and copied once.

Copies lie in `<root>/.weft/<digest>/` and do not change. Paths are resolved one component at a time
from the root's descriptor without following links, so that what was checked is what is copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.checkpoint.adapters.files import (
    CONFIG_FILE,
    DRAFT_FOLDER,
    TEXT_FILES,
    WEIGHTS_FILE,
)
from weft.checkpoint.vocabularies import TOKENIZER_FILE
from weft.contract.errors import InvalidRequest, Overloaded, WeftError

FILES = {CONFIG_FILE: 2 << 20, WEIGHTS_FILE: 1 << 40}
"""Files of an adapter, and the largest size of each in bytes. In addition only its own tokenizer
and the folder of a draft adapter are copied. That folder has the same files.
"""
_LIMITS = {**FILES, **TEXT_FILES}
COPIES = ".weft"
_TEMPORARY = "new-"
_STALE_S = 3600.0
"""Seconds after which an incomplete copy counts as abandoned."""
_MAX_PATH_CHARS = 1024
_DRAFT_ATTEMPTS = 8
"""Attempts to store a draft adapter while other processes store theirs; after that
another's stays.
"""
_CHUNK_BYTES = 8 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def components(path: str, root: Path | None = None) -> list[str]:
    """Splits a path into folders below the root.

    Args:
        root: Absolute paths may begin with it; None: there is none.

    Raises:
        InvalidRequest: The path leads out of the root, or into Weft's own folder.
    """
    if not path or len(path) > _MAX_PATH_CHARS or "\0" in path:
        raise _refused(f"give the adapter's folder, at most {_MAX_PATH_CHARS} characters")
    if root is not None and path.startswith(f"{root.absolute()}/"):
        path = path.removeprefix(f"{root.absolute()}/").lstrip("/")
    if path.startswith("/"):
        raise _refused("give it relative to the adapter root: this absolute path is not below it")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise _refused("give a folder in the adapter root, not the root itself")
    if ".." in parts or COPIES in parts:
        raise _refused(f"`..` and {COPIES} are not allowed")
    return parts


def copy_adapter(
    root: Path, path: str, digest_of: Callable[[Path], bytes], max_bytes: int
) -> bytes:
    """Copies an adapter to its immutable place, unless it is already there; returns its digest.

    Args:
        path: Path of the adapter's folder, relative to the root or below it.
        digest_of: Checks a folder and gives the digest of its content, 32 bytes.
        max_bytes: A larger adapter is refused.

    Raises:
        InvalidRequest: The path leads out of the root, there is no adapter, or it is too large.
        Overloaded: The copy cannot be written.
        WeftError: Raised by `digest_of`: the files are not an adapter.
    """
    parts = components(path, root)
    copies = root / COPIES
    temporary = copies / f"{_TEMPORARY}{secrets.token_hex(8)}"
    with _opened_folder(root, parts) as folder:
        try:
            temporary.mkdir(parents=True)
            left = _copy_files(folder, path, temporary, max_bytes, max_bytes)
            left = _copy_texts(folder, path, temporary, left, max_bytes)
            _copy_draft(folder, path, temporary, left, max_bytes)
            digest = _digest(digest_of, temporary, path)
            _publish(temporary, copies / digest.hex())
        except OSError as error:
            raise Overloaded(
                f"the adapter cannot be copied into {copies}: {error.strerror}", stage="validate"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return digest


def remove_copies(root: Path, kept: set[str]) -> None:
    """Removes copies that no entry names. The caller holds the registry's lock."""
    try:
        found = list((root / COPIES).iterdir())
    except OSError:
        return
    for folder in found:
        is_copy = len(folder.name) == 64 and folder.name not in kept
        with contextlib.suppress(OSError):
            is_stale = (
                folder.name.startswith(_TEMPORARY)
                and time.time() - folder.stat().st_mtime > _STALE_S
            )
            if is_copy:
                # The rename keeps a half-removed folder from passing for a copy if this process
                # dies here.
                folder = folder.rename(root / COPIES / f"{_TEMPORARY}{secrets.token_hex(8)}")
            if is_copy or is_stale:
                shutil.rmtree(folder)


@contextlib.contextmanager
def _opened_folder(root: Path, parts: list[str]) -> Iterator[int]:
    """Follows no links; yields the folder's descriptor."""
    descriptor = -1
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            inner = os.open(part, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        where = "/".join(parts)
        raise _refused(
            f"{where}: no such folder in the adapter root (links are not followed)"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _copy_files(folder: int, path: str, target: Path, left: int, max_bytes: int) -> int:
    """Returns `left` less the bytes copied."""
    for name, limit in FILES.items():
        left -= _copy_file(folder, path, name, target, min(limit, left), max_bytes)
    return left


def _copy_texts(folder: int, path: str, target: Path, left: int, max_bytes: int) -> int:
    """Copies an adapter's own tokenizer, if it has one; returns `left` less the bytes copied."""
    there = set(os.listdir(folder))
    for name, limit in TEXT_FILES.items() if TOKENIZER_FILE in there else ():
        if name in there:
            left -= _copy_file(folder, path, name, target, min(limit, left), max_bytes)
    return left


def _copy_draft(folder: int, path: str, target: Path, left: int, max_bytes: int) -> None:
    try:
        inner = os.open(DRAFT_FOLDER, _DIRECTORY, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refused(f"{path}/{DRAFT_FOLDER} is not a folder (links are not followed)") from error
    try:
        (target / DRAFT_FOLDER).mkdir()
        _copy_files(inner, f"{path}/{DRAFT_FOLDER}", target / DRAFT_FOLDER, left, max_bytes)
    finally:
        os.close(inner)


def _copy_file(folder: int, path: str, name: str, target: Path, limit: int, max_bytes: int) -> int:
    try:
        source = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        raise _refused(
            f"{path} has no file {name} (links are not followed); give the folder of a PEFT "
            "adapter that was saved as safetensors"
        ) from error
    with os.fdopen(source, "rb") as reader:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(f"{path}/{name} is not a file")
        too_large = _refused(
            f"{path}/{name} is too large: an adapter may have {max_bytes} bytes, this file "
            f"{_LIMITS[name]}"
        )
        if status.st_size > limit:
            raise too_large
        size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(target / name, flags, 0o444), "wb") as writer:
            while data := reader.read(_CHUNK_BYTES):
                size += len(data)
                if size > limit:  # The file is growing.
                    raise too_large
                writer.write(data)
            writer.flush()
            os.fsync(writer.fileno())
    return size


def _digest(digest_of: Callable[[Path], bytes], folder: Path, path: str) -> bytes:
    """Errors name the caller's path, not that of the copy."""
    try:
        return digest_of(folder)
    except WeftError as error:
        error.message = error.message.replace(str(folder), path)
        error.param = error.param or "path"
        raise


def _publish(temporary: Path, final: Path) -> None:
    """Renames a complete copy to its final name, unless one with the same content exists.

    A draft adapter is not part of that content. In an existing copy it is replaced; workers that
    read the copy in between draft without it.
    """
    try:
        temporary.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        _publish_draft(temporary, final)


def _publish_draft(temporary: Path, final: Path) -> None:
    for attempt in range(_DRAFT_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            (final / DRAFT_FOLDER).rename(temporary / f"former-{attempt}")
        try:
            (temporary / DRAFT_FOLDER).rename(final / DRAFT_FOLDER)
            return
        except FileNotFoundError:
            return  # The adapter brings no draft adapter.
        except OSError as error:
            # Another copy of the same adapter came in between.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"path: {message}", stage="validate", param="path")
