"""The digest that names a model: weights, configuration and dtype."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from weft.checkpoint.audio_config import AudioConfig
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.vision_config import VisionConfig
from weft.contract.cache_folder import cache_folder
from weft.contract.cores import num_cores

_VERSION = b"weft-model-1"
_MTP_VERSION = b"weft-mtp-1"
_TOWER_VERSION = b"weft-tower-1"
_PARTS_VERSION = b"weft-file-1"
_CHUNK_BYTES, _READ_BYTES, _PART_BYTES = 1 << 22, 1 << 20, 1 << 26
_MAX_THREADS = 32
_SKETCH_VERSION = b"weft-sketch-1"
_HEAD_BYTES, _SAMPLE_BYTES, _SAMPLES = 64 << 10, 4 << 10, 256


def combine_digests(
    config: ModelConfig, dtype: str, file_digests: Sequence[bytes], scheme: bytes = b""
) -> bytes:
    """The digest that names a model: BLAKE2b-256, 32 bytes, over the weights' files, the
    configuration's fingerprint, the dtype and the quantisation.

    Args:
        dtype: The dtype in which layers compute.
        file_digests: Of the files of weights in their fixed order, from `FileDigests`.
        scheme: Fingerprint of the quantisation; empty: none.
    """
    numbers = [dtype.encode(), *([scheme] if scheme else [])]
    return combine(_VERSION, config.fingerprint(), *numbers, *file_digests)


def mtp_digest(model: bytes) -> bytes:
    """32 bytes that name the MTP head in a model's own files, from the model's digest."""
    return combine(_MTP_VERSION, model)


def tower_digest(model: bytes, tower: VisionConfig | AudioConfig) -> bytes:
    """32 bytes that name the tower in a model's own files, from the model's digest."""
    return combine(_TOWER_VERSION, model, tower.fingerprint())


def combine(*parts: bytes) -> bytes:
    """BLAKE2b-256 over parts, each preceded by its length."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class FileDigests:
    """Digests of files, which threads compute from construction on; a context manager.

    A file's digest is BLAKE2b-256 over those of its parts of 64 MiB, so that several threads share
    a file. With `trusts_records` a file that was seen before with the same stat values is not read
    again.
    """

    def __init__(self, files: Sequence[Path], *, trusts_records: bool = True) -> None:
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, num_cores()), "digest")
        self._digests: list[tuple[_Record, bytes | list[Future[bytes]]]] = []
        for path in files:
            record = _Record.of(path)
            known = record.digest() if trusts_records else None
            begins = range(0, max(1, record.num_bytes), _PART_BYTES)
            self._digests.append(
                (record, known or [self._threads.submit(_part_digest, path, at) for at in begins])
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> list[bytes]:
        """32 bytes for each file. Raises OSError if a file cannot be read."""
        found = []
        for record, digest in self._digests:
            if not isinstance(digest, bytes):
                digest = combine(_PARTS_VERSION, *[part.result() for part in digest])
                record.store(digest)
            found.append(digest)
        return found


def cached_file_digests(files: Sequence[Path]) -> list[bytes]:
    with FileDigests(files) as digests:
        return digests.wait()


def known_file_digests(files: Sequence[Path]) -> list[bytes] | None:
    """The files' digests, if all of them were read before and have not changed since."""
    found = [_Record.of(path).digest() for path in files]
    return [one for one in found if one is not None] if all(found) else None


def sketch(files: Sequence[Path]) -> bytes:
    """32 bytes over samples of files: their sizes, their first bytes, and bytes at even distances.
    Two trainings of a model differ in it, without anyone reading whole files; a change of a few
    bytes may not. Raises OSError.
    """
    parts = []
    for path in files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            parts.append(size.to_bytes(8, "little"))
            parts.append(os.pread(file.fileno(), _HEAD_BYTES, 0))
            step = max(_SAMPLE_BYTES, size // _SAMPLES)
            parts += [os.pread(file.fileno(), _SAMPLE_BYTES, at) for at in range(0, size, step)]
    return combine(_SKETCH_VERSION, *parts)


def file_digest(path: Path, report: Callable[[int], None] | None = None) -> bytes:
    """BLAKE2b-256 of a file's bytes; `report` is called with the number of bytes read so far."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if report is not None:
                report(file.tell())
    return digest.digest()


def _part_digest(path: Path, begin: int) -> bytes:
    digest, left = hashlib.blake2b(digest_size=32), _PART_BYTES
    # The same memory for all reads, since the pages of new memory would be mapped and zeroed each
    # time.
    memory = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while left and (count := file.readinto(memory[:left])):
            digest.update(memory[:count])
            left -= count
    return digest.digest()


class _Record(NamedTuple):
    """Where a file's digest is kept between runs."""

    path: Path
    key: list[str | int]
    """Names the file's present content in the cache of digests."""
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> _Record:
        real = path.resolve()
        stat = real.stat()
        # Every write changes the last value, even if a program resets the others.
        key = [stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino, stat.st_ctime_ns]
        name = hashlib.blake2b(str(real).encode(), digest_size=16).hexdigest()
        known: list[str | int] = [_PARTS_VERSION.decode(), str(real), *key]
        return cls(_record_folder() / f"{name}.json", known, stat.st_size)

    def digest(self) -> bytes | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(self.path.read_bytes())
            if stored["key"] == self.key and len(known := bytes.fromhex(stored["digest"])) == 32:
                return known
        return None

    def store(self, digest: bytes) -> None:
        """Does nothing if the folder cannot be written to; the next start then reads the file
        again.
        """
        with suppress(OSError):
            _write_atomically(self.path, {"key": self.key, "digest": digest.hex()})


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
