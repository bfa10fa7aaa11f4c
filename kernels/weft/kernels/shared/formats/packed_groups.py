"""Matrices of 4 bits in groups as a GPU's kernels read them.

A row lies in blocks of 2 * half columns, where half is 32 or 64. Byte i of a block has column i in
its lower bits and column half + i in its upper bits. So a load of neighbouring bytes becomes two
tiles of neighbouring columns, and threads exchange nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from weft.kernels.shared.formats.int_groups import NVFP4_GROUP, IntGroups

LONG_UNIT = 128
"""Longest group; a longer one is kept as several with the same scale."""
LONG_HALF, _SHORT_HALF = 64, 32
"""Half the columns of a block: of groups of 128, and of shorter groups."""
WORD_UNIT = 2 * _SHORT_HALF
"""Columns of a block of NVFP4, whose four scales are one word."""
_BIAS = 127
_ALIGNED = 16
"""The scales of a group's rows begin at multiples of this."""


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A matrix of scale * number + offset, one scale and offset for each group of a row."""

    data: torch.Tensor
    """[N, blocks * half] uint8: 4 bits as in `IntGroups`. Blocks are filled up with zeros."""
    scales: torch.Tensor
    """[groups of the filled-up blocks, N rounded up to 16] float16 or float32, zero for groups and
    rows that do not exist. Of MXFP4 uint8: exponents of 2 with a bias of 127, for the numbers as
    they are. Of NVFP4 int32: a block's four scales, bytes as in `IntGroups`. The lowest one is of
    its first 16 lower numbers, the next one of its first 16 upper numbers, the others of the rest.
    """
    offsets: torch.Tensor | None
    """Of the shape and dtype of `scales`; None: all are 0."""
    rows: int
    """N."""
    columns: int
    """K."""
    unit: int
    """Columns of a group: 32, 64 or 128. Of NVFP4 64, those of a word of scales."""
    is_e2m1: bool
    """Whether numbers are e2m1, as in `IntGroups`."""
    order: torch.Tensor | None = None
    """[K] int32: original columns, as in `IntGroups`; None: columns are in order."""
    factors: torch.Tensor | None = None
    """[N] float32 of NVFP4: what rows are multiplied by, for the numbers as they are; else None."""

    @property
    def half(self) -> int:
        return half_of(self.unit)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def unpacked(self) -> IntGroups:
        """The matrix in the form that does not depend on a device."""
        return _unpacked(self, self.data, *self._kinds())

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in floats, [N, K], rounded once."""
        return self.unpacked().dequantised(dtype)

    def dequantised_rows(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`dequantised` of the rows with numbers `rows`, [L] int64."""
        scales, offsets = self._kinds()
        own = None if offsets is None else offsets[:, rows]
        factors = None if self.factors is None else self.factors[rows]
        like = replace(self, factors=factors)
        return _unpacked(like, self.data[rows], scales[:, rows], own).dequantised(dtype)

    def _kinds(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        offsets = None if self.offsets is None else self.offsets[:, : self.rows]
        return self.scales[:, : self.rows], offsets


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The matrices of all experts of a layer, as `PackedGroups` each."""

    data: torch.Tensor
    """[E, N, blocks * half]."""
    scales: torch.Tensor
    """[E, groups, N rounded up]."""
    offsets: torch.Tensor | None
    first: PackedGroups
    """The first expert's matrix, which holds what all experts have in common."""
    factors: torch.Tensor | None = None
    """[E, N] or None."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.data.shape[0], *self.first.shape)

    @classmethod
    def empty(cls, count: int, first: PackedGroups) -> PackedExperts:
        """Room for `count` matrices like the first one."""
        data, scales, offsets, factors = (
            None if part is None else part.new_empty((count, *part.shape))
            for part in (first.data, first.scales, first.offsets, first.factors)
        )
        assert data is not None
        assert scales is not None
        own = _first_of(first, data, scales, offsets)
        own = replace(own, factors=None if factors is None else factors[0])
        return cls(data, scales, offsets, own, factors)

    def put(self, index: int, matrix: PackedGroups) -> PackedExperts:
        """Copies an expert's matrix to its place.

        Returns:
            These experts, or a copy with wider scales if the matrix needs them.

        Raises:
            ValueError: The matrix has another shape or kind, or columns in an order of its own.
        """
        if matrix.order is not None:
            raise ValueError(f"expert {index}: experts with an order of columns are not packed")
        mine, its = (
            (one.shape, one.unit, one.is_e2m1, one.offsets is None, one.factors is None)
            for one in (self.first, matrix)
        )
        if mine != its:
            raise ValueError(f"expert {index}: groups {its} are not like the others, {mine}")
        if matrix.scales.dtype == torch.float32 != self.scales.dtype:
            offsets = None if self.offsets is None else self.offsets.float()
            scales = self.scales.float()
            first = _first_of(self.first, self.data, scales, offsets)
            return PackedExperts(self.data, scales, offsets, first).put(index, matrix)
        self.data[index].copy_(matrix.data)
        self.scales[index].copy_(matrix.scales)
        if self.offsets is not None and matrix.offsets is not None:
            self.offsets[index].copy_(matrix.offsets)
        if self.factors is not None and matrix.factors is not None:
            self.factors[index].copy_(matrix.factors)
        return self


def _first_of(
    like: PackedGroups, data: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
) -> PackedGroups:
    first = None if offsets is None else offsets[0]
    return replace(like, data=data[0], scales=scales[0], offsets=first)


def half_of(unit: int) -> int:
    """Half the columns of a block, for groups of `unit` columns."""
    return LONG_HALF if unit >= LONG_UNIT else _SHORT_HALF


def pack_groups(matrix: IntGroups) -> PackedGroups:
    """Lays a matrix of 4 bits out for a GPU, without loss.

    Raises:
        ValueError: The matrix has 8 bits.
    """
    if matrix.bits != 4:
        raise ValueError("only matrices of 4 bits are packed for GPUs")
    rows, columns = matrix.shape
    unit = WORD_UNIT if matrix.is_nvfp4 else min(matrix.group, LONG_UNIT)
    half = half_of(unit)
    filled = -(-columns // (2 * half)) * 2 * half
    zero = 0 if matrix.is_e2m1 or matrix.offsets is not None else 8
    numbers = torch.stack((matrix.data & 15, matrix.data >> 4), dim=-1).flatten(1)[:, :columns]
    blocks = F.pad(numbers, (0, filled - columns), value=zero).view(rows, -1, 2, half)
    data = (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1).contiguous()

    def turned(part: torch.Tensor) -> torch.Tensor:
        wide = part.repeat_interleave(max(1, matrix.group // unit), 1)[:, : filled // unit]
        wide = F.pad(wide, (0, filled // unit - wide.shape[1], 0, -rows % _ALIGNED)).t()
        return wide.contiguous()

    scales, factors = matrix.scales, matrix.factors
    if matrix.is_nvfp4:
        scales = _words(scales, filled)
    elif matrix.is_e2m1:
        scales = _exponents(scales)
    offsets = None if matrix.offsets is None else turned(matrix.offsets)
    return PackedGroups(
        data,
        turned(scales),
        offsets,
        rows,
        columns,
        unit,
        matrix.is_e2m1,
        matrix.order,
        None if factors is None else 2 * factors,
    )


def _words(scales: torch.Tensor, filled: int) -> torch.Tensor:
    """[N, blocks] int32 of byte scales [N, groups]."""
    wide = F.pad(scales, (0, filled // NVFP4_GROUP - scales.shape[1]))
    # Groups of a block: two of the lower half, two of the upper half.
    blocks = wide.view(len(scales), -1, 2, 2).transpose(2, 3).contiguous()
    return blocks.view(len(scales), -1).view(torch.int32)


def _bytes_of(words: torch.Tensor, groups: int) -> torch.Tensor:
    """[N, groups]: the inverse of `_words`, of words [blocks, N]."""
    blocks = words.t().contiguous().view(torch.uint8).view(words.shape[1], -1, 2, 2)
    return blocks.transpose(2, 3).flatten(1)[:, :groups].contiguous()


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Biased exponents, uint8, of twice the scales. Scales are powers of 2, so that none is
    rounded.
    """
    return (torch.frexp(scales.float()).exponent + _BIAS).to(torch.uint8)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    half = torch.full(exponents.shape, 0.5, device=exponents.device)
    return torch.ldexp(half, exponents.int() - _BIAS)


def _unpacked(
    like: PackedGroups, data: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
) -> IntGroups:
    """`data`: [N, blocks * half]; scales and offsets: [groups, N]."""
    blocks = data.view(data.shape[0], -1, like.half)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=2).flatten(1)
    even = F.pad(numbers[:, : like.columns], (0, like.columns % 2))
    data = (even[:, ::2] | even[:, 1::2] << 4).contiguous()
    if like.factors is not None:
        own = _bytes_of(scales, like.columns // NVFP4_GROUP)
        return IntGroups(
            data, own, None, like.columns, NVFP4_GROUP, True, like.order, like.factors / 2
        )
    groups = -(-like.columns // like.unit)
    return IntGroups(
        data,
        (_powers(scales) if like.is_e2m1 else scales)[:groups].t().contiguous(),
        None if offsets is None else offsets[:groups].t().contiguous(),
        like.columns,
        like.unit,
        like.is_e2m1,
        like.order,
    )
