"""Parameters from the safetensors files of a Hugging Face directory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.files import Progress, weight_files
from weft.engine.model.weights.reader import TensorSlice

_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_FLOATS = tuple(_DTYPE_BYTES)
_WHOLE_NUMBERS = ("I64", "I32", "I8", "U8", "BOOL")
_NAMES_SHOWN = 8


class _File:
    """A checkpoint file, mapped into memory while its tensors are being read.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: set[str] = set()
        """Names of the tensors of which nothing was read yet."""
        self._opened: Any = None

    def open(self) -> Any:
        """Opens the file with safetensors, until `close`.

        Raises:
            ModelError: It cannot be read.
        """
        if self._opened is None:
            try:
                self._opened = safe_open(self.path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {self.path}: {error}") from error
        return self._opened

    def close(self) -> None:
        """Unmaps the file; `open` maps it again."""
        self._opened = None


class _Tensor(NamedTuple):
    """A tensor's entry in the header of its file."""

    file: _File
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Size of a number in the file, bytes."""
        return _DTYPE_BYTES.get(self.dtype, 1)


class Checkpoint:
    """The tensors of a model directory, read one by one through mmap; a `CheckpointReader`.

    Use as a context manager. Once something of each of its tensors was read, a file is unmapped
    with the next read of another, so that of files with neighbouring layers one is in memory at a
    time.
    """

    def __init__(
        self,
        model_dir: Path,
        progress: Progress | None = None,
        unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Reads the files' headers.

        Args:
            model_dir: Has the files.
            progress: Called as tensors are read.
            unused: Says which tensors are known to have no part in inference.

        Raises:
            ModelError: The files are missing or malformed.
        """
        self._progress = progress
        self._where = model_dir
        self._unused = unused
        self._files = [_File(path) for path in weight_files(model_dir)]
        self._tensors: dict[str, _Tensor] = {}
        self._mapped: _File | None = None
        self._missing: list[str] = []
        self._skipped: set[str] = set()
        self._done_bytes = 0
        for file in self._files:
            self._read_header(file)
        self._total_bytes = sum(
            math.prod(tensor.shape) * tensor.item_bytes for tensor in self._tensors.values()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files:
            file.close()

    def has(self, name: str) -> bool:
        """Whether the files have a tensor of this name."""
        return name in self._tensors

    def has_below(self, prefix: str) -> bool:
        """Whether the files have tensors whose names begin so."""
        return any(name.startswith(prefix) for name in self._tensors)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """See `CheckpointReader.shape_of`."""
        return self._tensors[name].shape if name in self._tensors else None

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """See `CheckpointReader.read_into`.

        Raises:
            ModelError: As there, or too many tensors are missing by now.
        """
        if self._is_missing(part.name):
            out.zero_()
            return
        tensor = self._check(part, _kinds_for(out.dtype))
        out.copy_(self._map(tensor.file).get_tensor(part.name)[part.slices])
        tensor.file.names.discard(part.name)
        self._advance(out.numel() * tensor.item_bytes)

    def check_alike(self, name: str, copy: str) -> None:
        """Checks that two tensors, where both are there, are the same.

        Raises:
            ModelError: They differ.
        """
        if not self.are_alike(name, copy):
            raise ModelError(
                f"{self._where}: {copy} is not {name}, though config.json has "
                "tie_word_embeddings: set it to false, or remove the tensor"
            )

    def are_alike(self, name: str, copy: str) -> bool:
        """Whether two tensors, where both are there, are the same."""
        if not (self.has(name) and self.has(copy)):
            return True
        files = [self._tensors[one].file for one in (name, copy)]
        first, second = (
            file.open().get_tensor(one) for file, one in zip(files, (name, copy), strict=True)
        )
        is_same = first.shape == second.shape and first.dtype == second.dtype
        is_same = is_same and torch.equal(first, second)
        for file in files:
            file.close()
        return is_same

    def _is_missing(self, name: str) -> bool:
        """Whether the tensor is missing; `finish` reports all such at once."""
        if name in self._tensors:
            return bool(self._missing)
        self._missing.append(name)
        if len(self._missing) > _NAMES_SHOWN:
            raise self._lacks()
        return True

    def skip(self, prefix: str) -> None:
        """See `CheckpointReader.skip`."""
        self._skipped.add(prefix)

    def finish(self) -> None:
        """Checks that model and files name the same tensors.

        Raises:
            ModelError: Tensors are missing or left over; the message names them.
        """
        if self._missing:
            raise self._lacks()
        left = sorted(name for file in self._files for name in self._wanted(file.names))
        if left:
            raise ModelError(
                f"{self._where} has tensors that the model does not use: {_listing(left)}"
            )
        self._advance(self._total_bytes - self._done_bytes)

    def _lacks(self) -> ModelError:
        return ModelError(f"{self._where} lacks tensors: {_listing(self._missing)}")

    def _read_header(self, file: _File) -> None:
        opened = file.open()
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if name in self._tensors:
                raise ModelError(f"{file.path}: tensor {name} stands in two files")
            piece = opened.get_slice(name)
            shape, dtype = tuple(piece.get_shape()), str(piece.get_dtype())
            self._tensors[name] = _Tensor(file, shape, dtype)
        file.names = {name for name in opened.keys() if not self._unused(name)}  # noqa: SIM118
        file.close()

    def _map(self, file: _File) -> Any:
        before, self._mapped = self._mapped, file
        if before is not None and before is not file and not self._wanted(before.names):
            before.close()
        return file.open()

    def _wanted(self, names: set[str]) -> list[str]:
        """Those that no other rank reads."""
        if not self._skipped:
            return list(names)
        return [name for name in names if self._skipped.isdisjoint(_prefixes(name))]

    def _check(self, part: TensorSlice, dtypes: tuple[str, ...]) -> _Tensor:
        name, tensor = part.name, self._tensors[part.name]
        if tensor.shape != part.shape:
            raise ModelError(
                f"{self._where}: {name} has shape {tensor.shape}, config.json asks for {part.shape}"
            )
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{self._where}: {name} is {tensor.dtype}; only {', '.join(dtypes)} are supported"
            )
        return tensor

    def _advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _kinds_for(dtype: torch.dtype) -> tuple[str, ...]:
    """File dtypes that may be read as a dtype; quantised numbers only as themselves."""
    if dtype == torch.float8_e4m3fn:
        return ("F8_E4M3",)
    return _FLOATS if dtype.is_floating_point else _WHOLE_NUMBERS


def is_rotary_buffer(name: str) -> bool:
    """Whether a tensor of old checkpoints is a rotary table, which is computed instead."""
    return name.endswith("rotary_emb.inv_freq")


def _prefixes(name: str) -> list[str]:
    """The beginnings of a name up to each of its dots."""
    return [name[: at + 1] for at, letter in enumerate(name) if letter == "."]


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and more" if len(names) > _NAMES_SHOWN else shown
