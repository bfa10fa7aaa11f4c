"""Parameters from the safetensors files of a Hugging Face directory, or made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from weft.engine.errors import ModelError
from weft.engine.models.files import Progress, weight_files

_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_WHOLE_NUMBERS = ("I64", "I32", "BOOL")
_NAMES_SHOWN = 8


class Checkpoint:
    """The tensors of a model directory, read by mmap one by one; a `WeightSource`.

    Use as a context manager; the files stay mapped until it ends.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        """Opens the files and reads their headers.

        Raises:
            ModelError: The files are missing or malformed.
        """
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._where = model_dir
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._unread: set[str] = set()
        self._missing: list[str] = []
        self._done_bytes = 0
        try:
            self._open(weight_files(model_dir))
        except BaseException:
            self._stack.close()
            raise
        self._total_bytes = sum(self._bytes_of(name) for name in self._file_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """What the layers compute in."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the layers live."""
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
        self._check(name, tuple(out.shape))
        out.copy_(self._file_of[name].get_tensor(name))
        self._unread.discard(name)
        self._advance(self._bytes_of(name))

    def has(self, name: str) -> bool:
        """Whether the files have a tensor of this name."""
        return name in self._file_of

    def read_part_into(self, name: str, index: int, count: int, out: torch.Tensor) -> None:
        """As `read_into`, of entry `index` of a tensor whose first axis has `count` entries."""
        if self._is_missing(name):
            return
        self._check(name, (count, *out.shape))
        out.copy_(self._file_of[name].get_slice(name)[index])
        self._unread.discard(name)
        self._advance(self._bytes_of(name) // count)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor that the files have."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def whole_numbers(self, name: str, count: int) -> torch.Tensor:
        """A table of the checkpoint: [count] int64 on the host; true counts as 1.

        Raises:
            ModelError: It is not there, or has another shape or dtype.
        """
        if name not in self._file_of:
            raise ModelError(f"{self._where} lacks tensors: {name}")
        self._check(name, (count,), _WHOLE_NUMBERS)
        table: torch.Tensor = self._file_of[name].get_tensor(name)
        self._unread.discard(name)
        return table.to(torch.int64)

    def _is_missing(self, name: str) -> bool:
        """There is nothing to read: `finish` will raise."""
        if name in self._file_of:
            return bool(self._missing)
        self._missing.append(name)
        if len(self._missing) > _NAMES_SHOWN:
            raise self._lacks()
        return True

    def finish(self, unused: Callable[[str], bool]) -> None:
        """Checks that model and files name the same tensors.

        Args:
            unused: Says which left-over tensors are known to have no part in inference.

        Raises:
            ModelError: Tensors are missing or left over; the message names them.
        """
        if self._missing:
            raise self._lacks()
        left = sorted(name for name in self._unread if not unused(name))
        if left:
            raise ModelError(
                f"{self._where} has tensors that the model does not use: {_listing(left)}"
            )
        self._advance(self._total_bytes - self._done_bytes)

    def _lacks(self) -> ModelError:
        return ModelError(f"{self._where} lacks tensors: {_listing(self._missing)}")

    def _open(self, files: tuple[Path, ...]) -> None:
        for path in files:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._file_of:
                    raise ModelError(f"{path}: tensor {name} stands in two files")
                self._file_of[name] = file
        self._unread = set(self._file_of)

    def _check(
        self, name: str, expected: tuple[int, ...], dtypes: Collection[str] = _DTYPE_BYTES
    ) -> None:
        piece = self._file_of[name].get_slice(name)
        shape = self.shape_of(name)
        if shape != expected:
            raise ModelError(
                f"{self._where}: {name} has shape {shape}, config.json asks for {expected}"
            )
        if piece.get_dtype() not in dtypes:
            raise ModelError(
                f"{self._where}: {name} is {piece.get_dtype()}; "
                f"only {', '.join(dtypes)} are supported"
            )

    def _bytes_of(self, name: str) -> int:
        piece = self._file_of[name].get_slice(name)
        shape: list[int] = piece.get_shape()
        return math.prod(shape) * _DTYPE_BYTES.get(str(piece.get_dtype()), 1)

    def _advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


class RandomWeights:
    """Made-up parameters for benchmarks, the same for the same seed; a `WeightSource`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def dtype(self) -> torch.dtype:
        """What the layers compute in."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the layers live."""
        return self._device

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Norm weights become 1, biases 0, the others normal with deviation 0.02."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            out.normal_(0.0, 0.02, generator=self._generator)

    def has(self, name: str) -> bool:
        """Of experts there are separate ones."""
        return not name.endswith("experts.gate_up_proj")

    def read_part_into(self, name: str, index: int, count: int, out: torch.Tensor) -> None:
        """As `read_into`."""
        self.read_into(name, out)


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and more" if len(names) > _NAMES_SHOWN else shown
