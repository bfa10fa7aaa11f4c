"""Models in object stores and other file systems that fsspec knows: s3://, gs://, az://, ..."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout
from weft.checkpoint.http_ranges import HttpRanges
from weft.checkpoint.hub import is_wanted
from weft.contract.cache_folder import cache_folder
from weft.contract.errors import ModelError

_MANIFEST = "fetched.json"
"""A file next to the folder, which lists the store's files in the folder, each with its `ukey`."""
_LOCK = "lock"
_PIECE_BYTES, _THREADS = 16 << 20, 8
"""Bytes of a large file that are asked for at a time, and how many pieces at a time."""
_WRITE_BYTES = 1 << 20
"""Bytes of a piece that are written at a time."""
_LINK_S = 12 * 3600
"""Seconds for which a store's signed link to a file is asked for."""
_LOCK_TIMEOUT_S = 3600.0
"""Longest wait for another process that fetches the same model."""


def is_url(model: str) -> bool:
    """Whether a model is given by a URL."""
    return "://" in model


def fetch(url: str) -> Path:
    """A copy of a model's folder in the cache, after downloading files that are missing or have
    changed.

    It shows a progress bar for each file on a terminal's standard error. A file that is complete is
    not fetched again. If several processes ask for a folder, one fetches and the others wait.
    Credentials come from the environment, as the store's library reads them; in the URL they would
    be visible in the list of processes.

    Raises ModelError if the library for this kind of URL is not installed, the folder cannot be
    read, has no config.json or has a file whose name leads out of it, or another process takes too
    long to fetch it.
    """
    import fsspec

    try:
        store, root = fsspec.core.url_to_fs(url)
        found = {
            str(PurePosixPath(path).relative_to(store._strip_protocol(root))): path
            for path in store.find(root)
        }
        files = {name: path for name, path in found.items() if is_wanted(name)}
        if "config.json" not in files:
            raise ModelError(f"model {url}: there is no config.json", param="model")
        for name in files:
            # Keys of a store may be any texts.
            if ".." in PurePosixPath(name).parts:
                raise ModelError(f"model {url}: {name!r} leads out of the folder", param="model")
        return _copy(store, url, files)
    except ImportError as error:
        raise ModelError(f"model {url}: {error}", param="model") from error
    except ModelError:
        raise
    except Exception as error:  # Each store's library has errors of its own.
        raise ModelError(f"model {url}: {type(error).__name__}: {error}", param="model") from error


def _copy(store: Any, url: str, files: dict[str, str]) -> Path:
    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / "models" / "fetched" / name / PurePosixPath(url.rstrip("/")).name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.with_name(_LOCK), timeout=_LOCK_TIMEOUT_S):
            _update(store, folder, files)
    except Timeout as error:
        raise ModelError(
            f"model {url}: another process has fetched it for {_LOCK_TIMEOUT_S:.0f} s; end it if "
            "it hangs",
            param="model",
        ) from error
    return folder


def _update(store: Any, folder: Path, files: dict[str, str]) -> None:
    from fsspec.callbacks import TqdmCallback

    here = _read_manifest(folder)
    for gone in here.keys() - files.keys():
        (folder / gone).unlink(missing_ok=True)
        del here[gone]
    # Weights come last, so that the index of an interrupted copy names the files that it lacks.
    for file in sorted(files, key=lambda name: (name.endswith(".safetensors"), name)):
        state, target = str(store.ukey(files[file])), folder / file
        if here.get(file) == state and target.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        bar = TqdmCallback(tqdm_kwargs={"desc": file, "unit": "B", "unit_scale": True})
        if not _fetch_pieces(store, files[file], part, bar):
            store.get_file(files[file], str(part), callback=bar)
        if str(store.ukey(files[file])) != state:
            raise ModelError(f"{file} has changed in the store while it was fetched", param="model")
        os.replace(part, target)
        here[file] = state
        manifest = folder.with_name(f"{_MANIFEST}.part")
        manifest.write_text(json.dumps(here))
        os.replace(manifest, folder.with_name(_MANIFEST))


def _fetch_pieces(store: Any, source: str, part: Path, bar: Any) -> bool:
    """Fetches a large file in pieces, several at a time, since one connection rarely takes all that
    a store gives. False: the file is small, or the store gives no pieces of it.
    """
    size = store.size(source)
    if not size or size <= _PIECE_BYTES:
        return False
    # Threads that wait for a file inside the kernel keep their cores busy, eight times as long as
    # the copying takes.
    lock = threading.Lock()

    def piece(at: int) -> bool:
        end = min(at + _PIECE_BYTES, size)
        if ranges is None or not ranges.read(at, end, write):
            data = store.cat_file(source, start=at, end=end)
            if len(data) != end - at:
                return False
            view = memoryview(data)
            for begin in range(0, len(data), _WRITE_BYTES):
                write(view[begin : begin + _WRITE_BYTES], at + begin)
        bar.relative_update(end - at)
        return True

    def write(data: memoryview, at: int) -> None:
        with lock:
            os.pwrite(file.fileno(), data, at)

    ranges = _ranges(store, source, size)
    with part.open("wb", buffering=0) as file, ThreadPoolExecutor(_THREADS, "fetch") as threads:
        if not piece(0):
            return False
        bar.set_size(size)
        if all(threads.map(piece, range(_PIECE_BYTES, size, _PIECE_BYTES))):
            return True
    raise ModelError(f"{source}: the store has given a piece of another length", param="model")


def _ranges(store: Any, source: str, size: int) -> HttpRanges | None:
    """A file's ranges over plain HTTP, which takes a small part of the processor time that the
    stores' libraries need for a byte; None: the store gives no links to its files.
    """
    try:
        link = source if is_url(source) else store.sign(source, expiration=_LINK_S)
    except Exception:  # Each library says in its own way that it has no key to sign with.
        return None
    return HttpRanges.of(str(link), size)


def _read_manifest(folder: Path) -> dict[str, str]:
    try:
        content = json.loads(folder.with_name(_MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(name): str(state) for name, state in content.items()}
