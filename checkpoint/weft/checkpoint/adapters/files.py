"""Opens and validates the files of an adapter's directory. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.vocabularies import TOKENIZER_FILE
from weft.contract.errors import AdapterError
from weft.contract.give_way import give_way

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
DRAFT_FOLDER = "draft"
"""Subfolder of an adapter that holds its draft adapter: LoRA files for the draft head, used for the
adapter's requests.
"""

TEXT_FILES: Mapping[str, int] = {
    TOKENIZER_FILE: 64 << 20,
    "tokenizer_config.json": 2 << 20,
    "special_tokens_map.json": 2 << 20,
    "added_tokens.json": 2 << 20,
    "chat_template.jinja": 2 << 20,
    "chat_template.json": 2 << 20,
}
"""Files of an adapter's own tokenizer, and the largest size of each in bytes. An adapter has a
tokenizer if it has the first file.
"""

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes per element by dtype name of the safetensors format."""

_MAX_CONFIG_BYTES = 2 << 20
_MAX_HEADER_BYTES = 32 << 20
_MAX_NAME, _MAX_DIMENSIONS, _TOO_LARGE = 1024, 8, 1 << 48
"""Limits on tensors. Products of thousands of long numbers take minutes, and error messages contain
names.
"""
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of a tensor in its file."""

    dtype: str
    """Dtype as the format spells it: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    end: int


class AdapterFiles:
    """An open adapter directory: its configuration and the header of its tensors.

    It reads by file descriptor and never by mmap: if another process truncates the file, the read
    raises an error instead of killing this process.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], weights: int) -> None:
        """Reads the header; `weights` is a descriptor that the caller closes."""
        self.directory = directory
        self.config = config
        self._weights = weights
        self._stat = _identity(weights)
        self.tensors: Mapping[str, TensorEntry] = _read_header(directory, weights)
        """Tensors by name, in file order."""

    def read(self, entry: TensorEntry) -> bytearray:
        """Reads the bytes of one tensor."""
        data = bytearray(entry.end - entry.start)
        _read_at(self.directory, self._weights, entry.start, memoryview(data))
        return data

    def pieces(self, num_bytes: int) -> list[range]:
        size = os.fstat(self._weights).st_size
        return [range(at, min(size, at + num_bytes)) for at in range(0, size, num_bytes)]

    def piece_digest(self, piece: range) -> bytes:
        """BLAKE2b-256 of a piece of the weight file."""
        data = bytearray(len(piece))
        _read_at(self.directory, self._weights, piece.start, memoryview(data))
        return hashlib.blake2b(data, digest_size=32).digest()

    @property
    def has_tokenizer(self) -> bool:
        return os.path.lexists(self.directory / TOKENIZER_FILE)

    def text_files(self) -> dict[str, bytes]:
        """The files of the adapter's own tokenizer that exist, by name. Raises AdapterError for a
        file that is too large, or is no regular file of the directory.
        """
        if not self.has_tokenizer:
            return {}
        there = {n: size for n, size in TEXT_FILES.items() if os.path.lexists(self.directory / n)}
        return {name: bytes(_read_file(self.directory, name, size)) for name, size in there.items()}

    def check_unchanged(self) -> None:
        """Raises AdapterError if the weight file has been written to since it was opened."""
        if _identity(self._weights) != self._stat:
            raise AdapterError(
                f"adapter {self.directory}: {WEIGHTS_FILE} was changed while it was read; "
                "write adapters beside and rename them into place"
            )


@contextmanager
def open_adapter(directory: Path) -> Iterator[AdapterFiles]:
    """Opens a PEFT adapter directory. Raises AdapterError if a file is missing, leads out of the
    directory, is no regular file or is damaged, or if its header asks for more than the file has.
    """
    config = _read_config(directory)
    weights = _open_inside(directory, WEIGHTS_FILE)
    try:
        yield AdapterFiles(directory, config, weights)
    except OSError as error:
        raise AdapterError(
            f"adapter {directory}: cannot read {WEIGHTS_FILE}: {error.strerror or error}"
        ) from error
    finally:
        os.close(weights)


def _open_inside(directory: Path, name: str) -> int:
    """Does not follow links: if a link has replaced the file since its name was resolved, the
    system refuses to open it.
    """
    path = directory / name
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(directory.resolve(strict=True)):
            raise AdapterError(
                f"adapter {directory}: {name} is a link to {real}, outside the directory; "
                "copy the file itself (cp -rL)"
            )
        # Without O_NONBLOCK the open would block on a FIFO.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise AdapterError(f"adapter {directory}: {_missing(directory, name)}") from error
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"adapter {directory}: cannot open {name}: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError(f"adapter {directory}: {name} is not a regular file")
    return descriptor


def _missing(directory: Path, name: str) -> str:
    if not directory.is_dir():
        return "there is no such directory"
    if name == WEIGHTS_FILE and (directory / "adapter_model.bin").exists():
        return "adapter_model.bin is a pickle, which is not read; save it as safetensors"
    return f"{name} is missing"


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_config(directory: Path) -> Mapping[str, Any]:
    where = f"adapter {directory}: {CONFIG_FILE}"
    content = _parse(_read_file(directory, CONFIG_FILE, _MAX_CONFIG_BYTES), where)
    if not isinstance(content, dict):
        raise AdapterError(f"{where}: expected a JSON object")
    return content


def _read_file(directory: Path, name: str, max_bytes: int) -> bytearray:
    descriptor = _open_inside(directory, name)
    try:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise AdapterError(
                f"adapter {directory}: {name} has {size} bytes, more than {max_bytes}"
            )
        data = bytearray(size)
        _read_at(directory, descriptor, 0, memoryview(data))
    finally:
        os.close(descriptor)
    return data


def _read_at(directory: Path, descriptor: int, offset: int, out: memoryview) -> None:
    while out:
        count = os.preadv(descriptor, [out], offset)
        if count == 0:
            raise AdapterError(f"adapter {directory}: a file ended at byte {offset} while read")
        out = out[count:]
        offset += count


def _parse(data: bytearray, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{where} is not JSON: {error}") from error


def _read_header(directory: Path, descriptor: int) -> dict[str, TensorEntry]:
    """The format: https://github.com/huggingface/safetensors#format."""
    where = f"adapter {directory}: {WEIGHTS_FILE}"
    file_bytes = os.fstat(descriptor).st_size
    if file_bytes < _LENGTH_BYTES:
        raise AdapterError(f"{where} is truncated: {file_bytes} bytes")
    length = bytearray(_LENGTH_BYTES)
    _read_at(directory, descriptor, 0, memoryview(length))
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        raise AdapterError(
            f"{where} asks for a header of {header_bytes} bytes; the file has {file_bytes} bytes "
            f"and a header may have {_MAX_HEADER_BYTES}"
        )
    data = bytearray(header_bytes)
    _read_at(directory, descriptor, _LENGTH_BYTES, memoryview(data))
    content = _parse(data, f"{where}: the header")
    if not isinstance(content, dict):
        raise AdapterError(f"{where}: the header is not a JSON object")
    content.pop(_METADATA, None)
    if longest := max((name for name in content if len(name) > _MAX_NAME), default=""):
        raise AdapterError(
            f"{where}: tensor {longest[:80]}...: its name has {len(longest)} characters, more than "
            f"{_MAX_NAME}"
        )
    base = _LENGTH_BYTES + header_bytes
    tensors = {name: _entry(where, name, entry, base) for name, entry in content.items()}
    _check_coverage(where, tensors, base, file_bytes)
    return tensors


def _entry(where: str, name: str, entry: Any, base: int) -> TensorEntry:
    give_way()
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
        is_valid = isinstance(dtype, str) and all(
            isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _TOO_LARGE
            for number in numbers
        )
        is_valid = is_valid and len(shape) <= _MAX_DIMENSIONS
    except (TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid:
        raise AdapterError(f"{where}: tensor {name}: its entry in the header is malformed")
    if dtype not in DTYPE_BYTES:
        raise AdapterError(f"{where}: tensor {name}: unknown dtype {dtype}")
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - start != needed:
        raise AdapterError(
            f"{where}: tensor {name}: {tuple(shape)} of {dtype} takes {needed} bytes, "
            f"the header gives it {end - start}"
        )
    return TensorEntry(dtype, tuple(shape), base + start, base + end)


def _check_coverage(
    where: str, tensors: Mapping[str, TensorEntry], base: int, file_bytes: int
) -> None:
    position = base
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > file_bytes:
            raise AdapterError(
                f"{where} is truncated: tensor {name} ends at byte {entry.end} of {file_bytes}"
            )
        if entry.start != position:
            raise AdapterError(f"{where}: tensor {name} does not begin where the last one ends")
        position = entry.end
    if position != file_bytes:
        raise AdapterError(f"{where} has {file_bytes - position} bytes that belong to no tensor")
