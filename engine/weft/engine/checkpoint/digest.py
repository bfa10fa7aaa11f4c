"""The digest that names a model: weights, configuration and dtype."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.files import weight_files
from weft.kernels.build import cache_folder

_VERSION = b"weft-model-1"
_DRAFT_VERSION = b"weft-draft-1"
_MTP_VERSION = b"weft-mtp-1"
_CHUNK_BYTES = 1 << 22
_MAX_THREADS = 4


def model_digest(
    config: ModelConfig, dtype: str, files: Sequence[Path], scheme: bytes = b""
) -> bytes:
    """BLAKE2b-256 over the weights' files, the fingerprint of the configuration, the dtype and the
    quantisation.

    Args:
        config: Normalised configuration.
        dtype: The dtype in which layers compute.
        files: The files of weights in their fixed order.
        scheme: Fingerprint of the quantisation; empty: none.

    Returns:
        32 bytes.

    Raises:
        OSError: A file cannot be read.
    """
    return combine_digests(config, dtype, cached_file_digests(files), scheme)


def combine_digests(
    config: ModelConfig, dtype: str, file_digests: Sequence[bytes], scheme: bytes = b""
) -> bytes:
    """`model_digest` from digests of the weights' files that are known already."""
    numbers = [dtype.encode(), *([scheme] if scheme else [])]
    return _combine(_VERSION, config.fingerprint(), *numbers, *file_digests)


def draft_digest(fingerprint: bytes, dtype: str, files: Sequence[Path]) -> bytes:
    """BLAKE2b-256 that names a draft head; the target's digest covers the parts that both share.

    Args:
        fingerprint: The part of its configuration that counts.
        dtype: The dtype in which it computes.
        files: Its files of weights in their fixed order.

    Returns:
        32 bytes.

    Raises:
        OSError: A file cannot be read.
    """
    return _combine(_DRAFT_VERSION, fingerprint, dtype.encode(), *cached_file_digests(files))


def mtp_digest(model: bytes) -> bytes:
    """32 bytes that name the MTP head of a model's own files, from `model_digest`."""
    return _combine(_MTP_VERSION, model)


def head_digest(fingerprint: bytes, dtype: str, draft_dir: Path) -> bytes:
    """`draft_digest` of a head's directory.

    Args:
        fingerprint: Fingerprint of the head's configuration.
        dtype: Dtype in which the head computes, with or without torch's prefix.
        draft_dir: The directory.

    Raises:
        ModelError: A file cannot be read.
    """
    name = dtype.removeprefix("torch.")
    try:
        return draft_digest(fingerprint, name, weight_files(draft_dir))
    except OSError as error:
        raise ModelError(f"cannot read the weights in {draft_dir}: {error}") from error


def _combine(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def cached_file_digests(files: Sequence[Path]) -> list[bytes]:
    """BLAKE2b-256 of each file; those seen before with the same stat values are not read again."""
    with ThreadPoolExecutor(max_workers=max(1, min(_MAX_THREADS, len(files)))) as pool:
        return list(pool.map(_cached_file_digest, files))


def file_digest(path: Path, report: Callable[[int], None] | None = None) -> bytes:
    """BLAKE2b-256 of a file's bytes; `report` is called with the number read so far."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if report is not None:
                report(file.tell())
    return digest.digest()


def _cached_file_digest(path: Path) -> bytes:
    real = path.resolve()
    stat = real.stat()
    # Every write changes the last value, even if a program resets the others.
    key = [str(real), stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino, stat.st_ctime_ns]
    name = hashlib.blake2b(str(real).encode(), digest_size=16).hexdigest()
    record = _record_folder() / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(record.read_bytes())
        if stored["key"] == key and len(known := bytes.fromhex(stored["digest"])) == 32:
            return known
    digest = file_digest(real)
    # If the digest cannot be stored, the next start reads the file again.
    with suppress(OSError):
        _write_atomically(record, {"key": key, "digest": digest.hex()})
    return digest


def _record_folder() -> Path:
    return cache_folder() / "digests"


def _write_atomically(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
