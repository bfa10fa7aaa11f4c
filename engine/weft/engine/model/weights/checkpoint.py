"""Parameters from the safetensors files of a Hugging Face directory, or made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.files import Progress, weight_files

_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_WHOLE_NUMBERS = ("I64", "I32", "BOOL")
_NAMES_SHOWN = 8


class _File:
    """A checkpoint file, mapped into memory while its tensors are being read.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: set[str] = set()
        """Names of the tensors not yet read."""
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

    def was_read(self, name: str) -> None:
        """Notes that a tensor was read; closes the file after the last one, to free host memory."""
        self.names.discard(name)
        if not self.names:
            self.close()


class _Tensor(NamedTuple):
    """A tensor's entry in the header of its file."""

    file: _File
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in the file, bytes."""
        return math.prod(self.shape) * _DTYPE_BYTES.get(self.dtype, 1)


class Checkpoint:
    """The tensors of a model directory, read one by one through mmap; a `WeightSource`.

    Use as a context manager. A file is mapped from the first to the last of its tensors that are
    read, so that of files with neighbouring layers one is in memory at a time.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Reads the files' headers.

        Args:
            model_dir: Has the files.
            dtype: What the layers compute in.
            device: Where the layers live.
            progress: Called as tensors are read.
            unused: Says which tensors are known to have no part in inference.

        Raises:
            ModelError: The files are missing or malformed.
        """
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._where = model_dir
        self._unused = unused
        self._files = [_File(path) for path in weight_files(model_dir)]
        self._tensors: dict[str, _Tensor] = {}
        self._parts_read: dict[str, int] = {}
        self._missing: list[str] = []
        self._done_bytes = 0
        for file in self._files:
            self._read_header(file)
        self._total_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())

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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device that the layers live on."""
        return self._device

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copies the tensor `name`, converted to the dtype of `out`.

        A missing tensor is noted for `finish`, so that one message names several.

        Raises:
            ModelError: Its shape is not that of `out`, it is not a float tensor, or too many
                tensors are missing by now.
        """
        if self._is_missing(name):
            return
        tensor = self._check(name, tuple(out.shape))
        out.copy_(tensor.file.open().get_tensor(name))
        tensor.file.was_read(name)
        self._advance(tensor.num_bytes)

    def check_alike(self, name: str, copy: str) -> None:
        """Checks that two tensors, where both are there, are the same.

        Raises:
            ModelError: They differ.
        """
        if not (self.has(name) and self.has(copy)):
            return
        files = [self._tensors[one].file for one in (name, copy)]
        first, second = (
            file.open().get_tensor(one) for file, one in zip(files, (name, copy), strict=True)
        )
        is_same = first.shape == second.shape and torch.equal(first, second)
        for file in files:
            file.close()
        if not is_same:
            raise ModelError(
                f"{self._where}: {copy} is not {name}, though config.json has "
                "tie_word_embeddings: set it to false, or remove the tensor"
            )

    def has(self, name: str) -> bool:
        """Whether the files have a tensor of this name."""
        return name in self._tensors

    def read_part_into(self, name: str, index: int, count: int, out: torch.Tensor) -> None:
        """Like `read_into`, for entry `index` of a tensor whose first axis has `count` entries."""
        if self._is_missing(name):
            return
        tensor = self._check(name, (count, *out.shape))
        out.copy_(tensor.file.open().get_slice(name)[index])
        self._parts_read[name] = num_read = self._parts_read.get(name, 0) + 1
        if num_read == count:
            tensor.file.was_read(name)
        self._advance(tensor.num_bytes // count)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that the files contain."""
        return self._tensors[name].shape

    def whole_numbers(self, name: str, count: int) -> torch.Tensor:
        """A table of the checkpoint: [count] int64 on the host; true counts as 1.

        Raises:
            ModelError: It is not there, or has another shape or dtype.
        """
        if name not in self._tensors:
            raise ModelError(f"{self._where} lacks tensors: {name}")
        tensor = self._check(name, (count,), _WHOLE_NUMBERS)
        table: torch.Tensor = tensor.file.open().get_tensor(name)
        table = table.to(torch.int64, copy=True)
        tensor.file.was_read(name)
        return table

    def _is_missing(self, name: str) -> bool:
        """Whether the tensor is missing; `finish` reports all such at once."""
        if name in self._tensors:
            return bool(self._missing)
        self._missing.append(name)
        if len(self._missing) > _NAMES_SHOWN:
            raise self._lacks()
        return True

    def finish(self) -> None:
        """Checks that model and files name the same tensors.

        Raises:
            ModelError: Tensors are missing or left over; the message names them.
        """
        if self._missing:
            raise self._lacks()
        left = sorted(name for file in self._files for name in file.names)
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

    def _check(
        self, name: str, expected: tuple[int, ...], dtypes: Collection[str] = _DTYPE_BYTES
    ) -> _Tensor:
        tensor = self._tensors[name]
        if tensor.shape != expected:
            raise ModelError(
                f"{self._where}: {name} has shape {tensor.shape}, config.json asks for {expected}"
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


class RandomWeights:
    """Random parameters for benchmarks, the same for the same seed; a `WeightSource`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device that the layers live on."""
        return self._device

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fills norm weights with 1, biases with 0, others from a normal distribution with
        deviation 0.02.
        """
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            out.normal_(0.0, 0.02, generator=self._generator)

    def has(self, name: str) -> bool:
        """Reports experts as separate tensors."""
        return not name.endswith("experts.gate_up_proj")

    def read_part_into(self, name: str, index: int, count: int, out: torch.Tensor) -> None:
        """Like `read_into`, for one entry of a stacked tensor."""
        self.read_into(name, out)


def is_rotary_buffer(name: str) -> bool:
    """Whether a tensor of old checkpoints is a rotary table, which is computed instead."""
    return name.endswith("rotary_emb.inv_freq")


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and more" if len(names) > _NAMES_SHOWN else shown
