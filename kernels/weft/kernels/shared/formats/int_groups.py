"""Matrices of 4 or 8 bits whose scales and offsets belong to groups of neighbours along a row.

MXFP4 (OCP Microscaling Formats Specification 1.0, section 5.2) is one of them: numbers in e2m1, in
groups of 32 whose scales are powers of two. NVFP4 is another: groups of 16 whose scales are in
e4m3, and a factor in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from weft.kernels.shared import cpu

LARGEST_GROUP = 256
"""Longest group that kernels take; a longer one is kept as several with the same scale."""
SMALLEST_GROUP = 32
_HIGHEST = 15
"""Largest number of 4 bits."""
_CENTRE = 8
"""Added to 4-bit numbers without offsets, so that they are stored from 0 on."""
_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MXFP4_GROUP = 32
"""Numbers of a row of MXFP4 that share a scale."""
_MXFP4_BIAS, _MXFP4_NO_SCALE = 127, 255
NVFP4_GROUP = 16
"""Numbers of a row of NVFP4 that share a scale."""
_BYTE_BIAS = 18
"""Bias of the exponents of byte scales, which makes the largest one, 448 in e4m3, 1.75. So a scale
times the largest power of two that kernels apply to e2m1 is still a number of bfloat16.
"""
_LIFTED = 2.0**8
"""What e4m3 is divided by to be a byte scale: its smallest, 2^-9, then has an exponent of 1."""


@dataclass(frozen=True, slots=True)
class IntGroups:
    """A matrix of scale * number + offset, one scale and offset for each group of a row.

    This form represents the integers of GPTQ, AWQ, compressed-tensors' pack-quantized and GGUF
    exactly; an integer zero point becomes the offset -scale * zero.
    """

    data: torch.Tensor
    """4 bits: [N, K / 2 rounded up] uint8, with the first of two numbers in the lower bits; numbers
    from 0 to 15, or without offsets from -8 to 7, stored as number + 8. 8 bits: [N, K] int8. With
    `is_e2m1` they are e2m1 codes.
    """
    scales: torch.Tensor
    """[N, K / group rounded up] float32 or float16, finite. Of NVFP4 uint8: 5 bits of exponent with
    a bias of 18, then 3 of mantissa. Here 0 belongs to groups whose numbers are all 0.
    """
    offsets: torch.Tensor | None
    """Of the shape and dtype of `scales`; None: all are 0."""
    columns: int
    """K."""
    group: int
    """Columns of a group: 32, 64, 128 or 256, of NVFP4 16. The last one may be cut off."""
    is_e2m1: bool = False
    """Whether 4 bits are a number in e2m1 (sign, two bits of exponent, one of mantissa). It counts
    twice here, so that it is whole; such a matrix has no offsets.
    """
    order: torch.Tensor | None = None
    """[K] int32: the original column of each of `numbers`, where the columns of a group are not
    adjacent; None: they are. Products take the columns of their input in this order.
    """
    factors: torch.Tensor | None = None
    """[N] float32: what the rows of NVFP4 are multiplied by beside their scales; else None."""

    def __post_init__(self) -> None:
        wide = self.columns if self.bits == 8 else -(-self.columns // 2)
        fits = self.data.dim() == 2 and self.data.dtype in (torch.uint8, torch.int8)
        fits = fits and self.data.shape[1] == wide and self.data.is_contiguous()
        fits = fits and self.group in (NVFP4_GROUP, 32, 64, 128, LARGEST_GROUP)
        dtypes = (torch.uint8,) if self.is_nvfp4 else (torch.float32, torch.float16)
        for part in (self.scales, *([] if self.offsets is None else [self.offsets])):
            fits = fits and part.shape == (self.data.shape[0], -(-self.columns // self.group))
            fits = fits and part.dtype in dtypes
            fits = fits and part.dtype == self.scales.dtype and part.is_contiguous()
        if self.order is not None:
            fits = fits and self.order.shape == (self.columns,)
            fits = fits and self.order.dtype == torch.int32 and self.order.is_contiguous()
        fits = fits and not (self.is_e2m1 and (self.bits == 8 or self.offsets is not None))
        fits = fits and (self.is_e2m1 or not self.is_nvfp4)
        fits = fits and self.is_nvfp4 == (self.factors is not None)
        if self.factors is not None:
            fits = fits and self.factors.shape == self.data.shape[:1]
            fits = fits and self.factors.dtype == torch.float32 and self.factors.is_contiguous()
        if not fits:
            raise ValueError(
                f"{tuple(self.data.shape)} {self.data.dtype} with scales "
                f"{tuple(self.scales.shape)} {self.scales.dtype} is no matrix of {self.columns} "
                f"columns in groups of {self.group}"
            )

    @property
    def bits(self) -> Literal[4, 8]:
        return 4 if self.data.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    @property
    def is_nvfp4(self) -> bool:
        return self.group == NVFP4_GROUP

    def numbers(self) -> torch.Tensor:
        """[N, K] int16, in the order of `order`."""
        if self.bits == 8:
            return self.data.to(torch.int16)
        both = torch.stack((self.data & 15, self.data >> 4), dim=-1).flatten(1)
        numbers = both[:, : self.columns].to(torch.int16)
        if self.is_e2m1:
            return torch.tensor(_TWICE_E2M1, dtype=torch.int16, device=both.device)[numbers.int()]
        return numbers - _CENTRE if self.offsets is None else numbers

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in floats, [N, K]: in float32, then rounded once."""
        scales = byte_scales(self.scales) if self.is_nvfp4 else self.scales
        wide = self.numbers().float().mul_(self._wide(scales))
        if self.factors is not None:
            wide *= self.factors[:, None]
        if self.offsets is not None:
            wide += self._wide(self.offsets)
        if self.order is not None:
            wide = torch.empty_like(wide).index_copy_(1, self.order.long(), wide)
        return wide.to(dtype)

    def dequantised_rows(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Some of the rows ([L] int64) in floats."""
        offsets = None if self.offsets is None else self.offsets[rows]
        factors = None if self.factors is None else self.factors[rows]
        own = replace(
            self, data=self.data[rows], scales=self.scales[rows], offsets=offsets, factors=factors
        )
        return own.dequantised(dtype)

    def _wide(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().repeat_interleave(self.group, 1)[:, : self.columns]


def supports_group(group: int, columns: int) -> bool:
    """Whether kernels take groups of this size, as they are or cut into smaller ones."""
    return group >= columns or math.gcd(group, LARGEST_GROUP) >= SMALLEST_GROUP


def pack_int_groups(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    group: int,
    bits: Literal[4, 8] = 4,
) -> IntGroups:
    """Puts numbers, scales and offsets into the one form that kernels take, without loss.

    Args:
        numbers: [N, K] whole numbers of any dtype: of 4 bits 0 to 15, or without offsets -8 to 7;
            of 8 bits -128 to 127.
        scales: [N, K / group rounded up], any float dtype; kept in float16 if that holds them all
            and the offsets exactly, else in float32.
        offsets: Like `scales`, or None.
        group: Columns of a group; K or more: one scale a row.

    Raises:
        ValueError: Groups of this size are not supported, or a scale or offset is not finite.
    """
    columns = numbers.shape[1]
    parts = [scales.float(), *([] if offsets is None else [offsets.float()])]
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        raise ValueError("a scale or an offset is not finite")
    own = LARGEST_GROUP if group >= columns else math.gcd(group, LARGEST_GROUP)
    if not supports_group(group, columns):
        raise ValueError(f"groups of {group} are not supported, only multiples of 32")
    if own != group:  # The same scale for several groups, as many as there are columns.
        first = torch.arange(0, columns, own, device=numbers.device) // group
        parts = [part[:, first] for part in parts]
    parts = [part.contiguous() for part in _halved(parts)]
    if bits == 8:
        data = numbers.to(torch.int8).contiguous()
    else:
        plus = numbers.to(torch.int8) + (_CENTRE if offsets is None else 0)
        even = F.pad(plus.view(torch.uint8), (0, columns % 2))
        data = (even[:, ::2] | even[:, 1::2] << 4).contiguous()
    return IntGroups(data, parts[0], parts[1] if len(parts) > 1 else None, columns, own)


def mxfp4_groups(blocks: torch.Tensor, scales: torch.Tensor) -> IntGroups:
    """A matrix in MXFP4, without loss.

    Args:
        blocks: [N, K / 32, 16] uint8: two numbers each, the first in the lower half.
        scales: [N, K / 32] uint8: exponents of 2, with a bias of 127.

    Raises:
        ValueError: Shapes or dtypes do not fit together, or a scale is no number.
    """
    fits = blocks.shape == (*scales.shape, MXFP4_GROUP // 2)
    if not fits or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"{tuple(blocks.shape)} {blocks.dtype} with scales {tuple(scales.shape)} "
            f"{scales.dtype} are no MXFP4"
        )
    if bool((scales == _MXFP4_NO_SCALE).any()):
        raise ValueError("a scale is no number")
    half = torch.full(scales.shape, 0.5, device=scales.device)
    (powers,) = _halved([torch.ldexp(half, scales.int() - _MXFP4_BIAS)])
    data, columns = blocks.flatten(1).contiguous(), scales.shape[1] * MXFP4_GROUP
    return IntGroups(data, powers, None, columns, MXFP4_GROUP, is_e2m1=True)


def nvfp4_groups(data: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> IntGroups:
    """A matrix in NVFP4, without loss.

    Args:
        data: [N, K / 2] uint8: two numbers in e2m1 each, the first in the lower half.
        scales: [N, K / 16] float8_e4m3fn.
        factors: [N] float32: what each row is multiplied by beside its scales.

    Raises:
        ValueError: Shapes or dtypes do not fit together, or a scale or factor is no number.
    """
    columns = 2 * data.shape[-1]
    fits = scales.shape == (data.shape[0], columns // NVFP4_GROUP)
    fits = fits and columns % NVFP4_GROUP == 0 and factors.shape == data.shape[:1]
    fits = fits and data.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
    if not fits:
        raise ValueError(
            f"{tuple(data.shape)} {data.dtype} with scales {tuple(scales.shape)} {scales.dtype} "
            f"and factors {tuple(factors.shape)} are no NVFP4"
        )
    wide = scales.float()
    if not bool(torch.isfinite(wide).all() & torch.isfinite(factors).all()):
        raise ValueError("a scale is no number")
    # The sign of a scale moves to its numbers; where a scale is 0, so are the numbers.
    flips = torch.where(wide < 0, 0x88, 0).to(torch.uint8)
    keeps = torch.where(wide == 0, 0, 0xFF).to(torch.uint8)
    groups = data.view(len(data), -1, NVFP4_GROUP // 2)
    codes = ((groups ^ flips[..., None]) & keeps[..., None]).flatten(1).contiguous()
    # Bits of float32 from the last of the exponent's five to the third of the mantissa.
    bits = (wide.abs() / _LIFTED).view(torch.int32)
    bytes_ = torch.where(wide == 0, 0, (bits >> 20) - (127 - _BYTE_BIAS << 3))
    own = factors.float() * (_LIFTED / 2)
    return IntGroups(
        codes, bytes_.to(torch.uint8), None, columns, NVFP4_GROUP, True, None, own.contiguous()
    )


def byte_scales(scales: torch.Tensor) -> torch.Tensor:
    """Byte scales of NVFP4 (`IntGroups.scales`) in float32; of groups without numbers any value."""
    return ((scales.int() << 20) + (127 - _BYTE_BIAS << 23)).view(torch.float32)


def join_rows(parts: list[IntGroups]) -> IntGroups:
    """One matrix of the rows of several that are alike, without loss. Raises ValueError if their
    columns, groups or kinds differ.
    """
    first = parts[0]
    kinds = {(part.columns, part.group, part.is_e2m1, part.scales.dtype) for part in parts}
    if len(kinds) > 1 or any(part.offsets is not None or part.order is not None for part in parts):
        raise ValueError(f"matrices of {kinds} have no rows in common")
    factors = [part.factors for part in parts if part.factors is not None]
    return replace(
        first,
        data=torch.cat([part.data for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        factors=torch.cat(factors) if factors else None,
    )


def _halved(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Float16 only if it holds all of them exactly."""
    if all(torch.equal(part.half().float(), part) for part in parts):
        return [part.half() for part in parts]
    return parts


def quantise_groups(weight: torch.Tensor) -> IntGroups:
    """Rounds to 4 bits, in the smallest groups: the numbers of each lie evenly between its smallest
    and largest.

    Args:
        weight: [N, K], any float dtype.

    Raises:
        ValueError: A number is not finite, or too large for a scale of float16.
    """
    native, columns, group = cpu.native_cpu_for(weight), weight.shape[1], SMALLEST_GROUP
    weight = weight.contiguous()
    lowest, highest = _ranges(weight, group, native)
    scales, offsets = ((highest - lowest) / _HIGHEST).half(), lowest.half()
    if not bool((torch.isfinite(scales) & torch.isfinite(offsets)).all()):
        raise ValueError("a weight that is not finite cannot be quantised")
    if native is None:
        return pack_int_groups(_numbers(weight, group, scales, offsets), scales, offsets, group)
    data = torch.empty((weight.shape[0], -(-columns // 2)), dtype=torch.uint8)
    wide = scales.float(), offsets.float()
    native.round_groups(*_described(weight, group), *(x.data_ptr() for x in (*wide, data)))
    return IntGroups(data, scales, offsets, columns, group)


def _ranges(
    weight: torch.Tensor, group: int, native: cpu.NativeCpu | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest of each group, [N, groups] float32."""
    if native is None:
        grouped = _grouped(weight, group)
        return grouped.amin(2), grouped.amax(2)
    size = (weight.shape[0], -(-weight.shape[1] // group))
    lowest, highest = torch.empty(size), torch.empty(size)
    native.group_ranges(*_described(weight, group), lowest.data_ptr(), highest.data_ptr())
    return lowest, highest


def _numbers(
    weight: torch.Tensor, group: int, scales: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """[N, K], 0 to 15; where the numbers of a group are about equal, the offset holds their
    value.
    """
    step = scales.float()[..., None]
    ratio = (_grouped(weight, group) - offsets.float()[..., None]) / step
    numbers = torch.where(step > 0, ratio, 0).add_(0.5).floor_().clamp_(0, _HIGHEST)
    return numbers.flatten(1)[:, : weight.shape[1]]


def _grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[N, groups, group] float32; the row's last number is repeated to fill its last group."""
    columns = weight.shape[1]
    wide = F.pad(weight.float()[None], (0, -columns % group), mode="replicate")[0]
    return wide.view(weight.shape[0], -1, group)


def _described(weight: torch.Tensor, group: int) -> tuple[int, ...]:
    return (weight.dtype == torch.bfloat16, weight.data_ptr(), *weight.shape, group)
