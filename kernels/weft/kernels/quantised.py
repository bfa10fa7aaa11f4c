"""Matrices kept as numbers of few bits and scales.

The numbers and their scales are one object whose type says how the scales lie; a kernel names the
types that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from weft.kernels import cpu

INT8_MAX = 127
"""Largest number: -128 is not used, so that a matrix and its negative are equally exact."""


@dataclass(frozen=True, slots=True)
class Int8Channels:
    """Rows of int8 with one scale each: what int8 in compressed-tensors calls a channel."""

    data: torch.Tensor
    """[N, K] int8."""
    scales: torch.Tensor
    """[N] float32, finite and not negative."""

    def __post_init__(self) -> None:
        """Raises ValueError if data and scales do not fit together."""
        fits = self.data.dim() == 2 and self.data.dtype == torch.int8
        fits = fits and self.scales.shape == self.data.shape[:1]
        if not fits or self.scales.dtype != torch.float32:
            raise ValueError(
                f"{tuple(self.data.shape)} {self.data.dtype} with scales "
                f"{tuple(self.scales.shape)} {self.scales.dtype} is no matrix of int8 channels"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows N and columns K."""
        return self.data.shape[0], self.data.shape[1]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in floats, [N, K], rounded once."""
        return (self.data.float() * self.scales[:, None]).to(dtype)


QuantisedMatrix: TypeAlias = Int8Channels
"""Any of the kinds of quantised matrices. Each has `data`, `shape` and `dequantised`."""


def quantise_channels(weight: torch.Tensor) -> Int8Channels:
    """Rounds each row to int8, the largest magnitude of the row being 127.

    Args:
        weight: [N, K], any float dtype.

    Raises:
        ValueError: A number is not finite.
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
