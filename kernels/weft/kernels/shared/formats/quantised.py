"""Matrices stored as numbers of few bits with scales.

The numbers and their scales are one object whose type says how the scales lie; a kernel names the
types that it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.fp8 import FP8, FP8_MAX

INT8_MAX = 127
"""Largest number. -128 is not used, so that a matrix and its negative are equally exact."""
FP8_GROUP = 128
"""Columns of a block of FP8 that share a scale."""


@dataclass(frozen=True, slots=True)
class Int8Channels:
    """Rows of int8 with one scale each, which compressed-tensors calls a channel."""

    data: torch.Tensor
    """[N, K] int8."""
    scales: torch.Tensor
    """[N] float32, finite and not negative."""

    def __post_init__(self) -> None:
        fits = self.data.dim() == 2 and self.data.dtype == torch.int8
        fits = fits and self.scales.shape == self.data.shape[:1]
        if not fits or self.scales.dtype != torch.float32:
            raise ValueError(
                f"{tuple(self.data.shape)} {self.data.dtype} with scales "
                f"{tuple(self.scales.shape)} {self.scales.dtype} is no matrix of int8 channels"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in floats, [N, K], rounded once."""
        return (self.data.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Channels:
    """Rows of FP8 with one scale each. A scale of a whole tensor is repeated for each row."""

    data: torch.Tensor
    """[N, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[N] float32, finite and not negative."""

    def __post_init__(self) -> None:
        _check_fp8(self.data, self.scales, self.data.shape[:1], "channels")

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in floats, [N, K], rounded once."""
        return self.data.float().mul_(self.scales[:, None]).to(dtype)

    def dequantised_rows(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`dequantised` of the rows with numbers `rows`, [L] int64."""
        return Fp8Channels(_rows_of(self.data, rows), self.scales[rows]).dequantised(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """FP8 with a scale for each block of `rows` times FP8_GROUP numbers.

    Blocks at the end of an axis may be cut off. Checkpoints of DeepSeek and Qwen3 have blocks of
    128 rows. If a projection's rows are no multiple of 128, its fused product has smaller blocks.
    """

    data: torch.Tensor
    """[N, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[N / rows, K / FP8_GROUP], both rounded up; float32, finite and not negative."""
    rows: int
    """Rows of a block: a power of two."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows & (self.rows - 1):
            raise ValueError(f"blocks of {self.rows} rows")
        n, k = self.data.shape
        _check_fp8(self.data, self.scales, (-(-n // self.rows), -(-k // FP8_GROUP)), "blocks")

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in floats, [N, K], rounded once."""
        return self._dequantised(self.data, self.scales.repeat_interleave(self.rows, 0), dtype)

    def dequantised_rows(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`dequantised` of the rows with numbers `rows`, [L] int64."""
        return self._dequantised(_rows_of(self.data, rows), self.scales[rows // self.rows], dtype)

    def _dequantised(
        self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        wide = scales.repeat_interleave(FP8_GROUP, 1)[: data.shape[0], : data.shape[1]]
        return data.float().mul_(wide).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """FP8 matrices of all experts of a layer, with one kind of scales."""

    data: torch.Tensor
    """[E, N, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[E, N] float32 of channels, or [E, N / rows, K / FP8_GROUP] of blocks."""
    rows: int
    """Rows of a block; 0: scales are of channels. If gate and up are one matrix, no block has rows
    of both.
    """

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.data.shape[0], self.data.shape[1], self.data.shape[2]

    @classmethod
    def empty(cls, count: int, first: Fp8Matrix) -> Fp8Experts:
        """Room for `count` matrices like the first one."""
        rows = first.rows if isinstance(first, Fp8Blocks) else 0
        data, scales = (one.new_empty((count, *one.shape)) for one in (first.data, first.scales))
        return cls(data, scales, rows)

    def put(self, index: int, matrix: Fp8Matrix) -> None:
        """Copies an expert's matrix to its place.

        Raises:
            ValueError: The matrix has another shape or kind.
        """
        rows = matrix.rows if isinstance(matrix, Fp8Blocks) else 0
        if (matrix.shape, rows) != (self.shape[1:], self.rows):
            raise ValueError(
                f"expert {index}: {matrix.shape} in blocks of {rows} rows is not like the others, "
                f"{self.shape[1:]} in blocks of {self.rows}"
            )
        self.data[index].copy_(matrix.data)
        self.scales[index].copy_(matrix.scales)


Fp8Matrix: TypeAlias = Fp8Channels | Fp8Blocks

QuantisedMatrix: TypeAlias = Int8Channels | Fp8Channels | Fp8Blocks


def quantise_channels(weight: torch.Tensor) -> Int8Channels:
    """Rounds each row of `weight`, [N, K], any float dtype, to int8, so that its largest magnitude
    becomes 127. Raises ValueError if a number is not finite.
    """
    if (native := cpu.native_cpu_for(weight)) is None:
        data, scales = _quantise_reference(weight)
    else:
        weight = weight.contiguous()
        data = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(weight.shape[0], dtype=torch.float32)
        is_bf16 = weight.dtype == torch.bfloat16
        pointers = (data.data_ptr(), scales.data_ptr())
        native.quantise_rows(is_bf16, weight.data_ptr(), *weight.shape, *pointers)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a weight that is not finite cannot be quantised")
    return Int8Channels(data, scales)


def _quantise_reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = weight.float()
    largest = wide.abs().amax(dim=1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    scales = largest / INT8_MAX
    # A row of zeros, or of numbers that are nearly as small as floats can be, stays zeros.
    inverse = torch.where(scales > torch.finfo(torch.float32).tiny, 1 / scales, 0)
    return (wide * inverse[:, None]).round_().to(torch.int8), scales


def quantise_fp8_channels(weight: torch.Tensor) -> Fp8Channels:
    """Rounds each row of `weight`, [N, K], any float dtype, to FP8, so that its largest magnitude
    becomes FP8_MAX. Raises ValueError if a number is not finite.
    """
    wide = weight.float()
    largest = wide.abs().amax(dim=1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    scales, inverse = _fp8_scales(largest)
    return Fp8Channels(_rounded_fp8(wide * inverse[:, None]), scales)


def _fp8_scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("a weight that is not finite cannot be quantised")
    scales = largest / FP8_MAX
    # Blocks whose numbers are nearly as small as floats can be become zeros.
    return scales, torch.where(scales > torch.finfo(torch.float32).tiny, 1 / scales, 0)


def _rounded_fp8(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _rows_of(data: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Takes rows as bytes, since indexing has no operation for FP8."""
    return data.view(torch.uint8)[rows].view(FP8)


def _check_fp8(data: torch.Tensor, scales: torch.Tensor, wanted: Sequence[int], kind: str) -> None:
    is_matrix = data.dim() == 2 and data.dtype == FP8 and data.is_contiguous()
    is_scaled = scales.shape == tuple(wanted) and scales.dtype == torch.float32
    if not is_matrix or not is_scaled or not scales.is_contiguous():
        raise ValueError(
            f"{tuple(data.shape)} {data.dtype} with scales {tuple(scales.shape)} {scales.dtype} "
            f"is no contiguous matrix of FP8 {kind}"
        )
