"""Integers that checkpoints pack into words of 32 bits, read into one form.

| layout | numbers | scales | zero points |
| --- | --- | --- | --- |
| gptq | `qweight` [K / 8, N] | `scales` [K / group, N] | `qzeros` [K / group, N / 8] |
| awq | `qweight` [K, N / 8] | `scales` [K / group, N] | `qzeros` [K / group, N / 8] |
| compressed-tensors | `weight_packed` [N, K / 8] | `weight_scale` [N, K / group] |
`weight_zero_point` [N / 8, K / group], if not symmetric |

The sizes are those of 4 bits; a word holds half as many numbers of 8 bits. The lowest bits of a
word hold its first number, except in awq (`_AWQ_ORDER`). A weight is scale * (number - zero point);
numbers and zero points count from 0.

GPTQ's first version stores zero points less 1, so that those of symmetric groups are 7 or 127. Some
writers name the first version and store 8 or 128, as the second version does. Where the columns of
a group are not adjacent (act order), `g_idx` (gptq) or `weight_g_idx`, [K], says to which group
each column belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from weft.checkpoint.int_config import IntPacking
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.shared.formats.int_groups import IntGroups, pack_int_groups, supports_group

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The number, of eight adjacent ones, that each four bits of a word hold, from the lowest bits on.
"""


@dataclass(frozen=True, slots=True)
class IntParts:
    """A projection as a checkpoint stores it."""

    numbers: torch.Tensor
    """[N, K] uint8."""
    scales: torch.Tensor
    """[N, groups] float32."""
    zeros: torch.Tensor
    """[N, groups] float32."""
    order: torch.Tensor | None
    """[K] int64: the group of each column; None: the columns of a group are adjacent."""

    def cut(self, rows: slice, columns: slice, group: int) -> IntParts:
        """A rank's share, where a group has `group` columns. Raises ValueError if the share begins
        or ends within a group.
        """
        numbers = self.numbers[rows, columns]
        if self.order is not None:
            order = self.order[columns]
            return IntParts(numbers, self.scales[rows], self.zeros[rows], order)
        begin, end, _ = columns.indices(self.numbers.shape[1])
        if begin % group or (end % group and end != self.numbers.shape[1]):
            raise ValueError(f"a rank's share cuts a group of {group} columns")
        own = slice(begin // group, -(-end // group))
        return IntParts(numbers, self.scales[rows, own], self.zeros[rows, own], None)

    def dequantised(self, group: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight in floats, [N, K], rounded once."""
        columns = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        order = columns // group if self.order is None else self.order
        return ((self.numbers.float() - self.zeros[:, order]) * self.scales[:, order]).to(dtype)


def read_parts(
    name: str, shape: tuple[int, int], packing: IntPacking, weights: Weights
) -> IntParts:
    """Reads a whole projection of `shape` [N, K]. Raises ModelError if a tensor is damaged."""
    per, (rows, columns) = 32 // packing.bits, shape
    groups = -(-columns // (packing.group or columns))
    if packing.layout == "compressed-tensors":
        return _read_compressed(name, shape, packing, weights)
    scales = _floats(f"{name}.scales", (groups, rows), weights)
    zeros = _words(f"{name}.qzeros", (groups, -(-rows // per)), weights)
    if packing.layout == "awq":
        words = _words(f"{name}.qweight", (columns, -(-rows // per)), weights)
        numbers = _awq(words)[:, :rows].T
        zero_points = _awq(zeros)[:, :rows].T
    else:
        words = _words(f"{name}.qweight", (-(-columns // per), rows), weights)
        numbers = _apart(words.T, packing.bits)[:, :columns]
        zero_points = _apart(zeros, packing.bits)[:, :rows].T
    order = _order(f"{name}.g_idx", columns, groups, packing, weights)
    return IntParts(numbers, scales.T, _zero_points(zero_points, packing), order)


def _zero_points(kept: torch.Tensor, packing: IntPacking) -> torch.Tensor:
    """Zero points as float32, from the numbers in the file. A symmetric group's zero point is the
    middle, so the numbers show how the file stores them, whatever version its configuration names.
    """
    middle, shift = 1 << (packing.bits - 1), packing.zero_shift
    if packing.is_symmetric:
        shift = next((by for by in (0, 1) if bool((kept == middle - by).all())), shift)
    # A zero point of 0, stored less 1, is the largest number.
    return ((kept.int() + shift) & (2 * middle - 1)).float()


def _read_compressed(
    name: str, shape: tuple[int, int], packing: IntPacking, weights: Weights
) -> IntParts:
    per, (rows, columns) = 32 // packing.bits, shape
    groups, middle = -(-columns // (packing.group or columns)), 1 << (packing.bits - 1)
    found = tuple(weights.table(f"{name}.weight_shape", 2).tolist())
    if found not in (shape, (0, 0)):  # (0, 0): it is missing, which `finish` reports.
        raise ModelError(f"{weights.full_name(name)}.weight_shape is {found}, not {shape}")
    words = _words(f"{name}.weight_packed", (rows, -(-columns // per)), weights)
    numbers = _apart(words, packing.bits)[:, :columns]
    scales = _floats(f"{name}.weight_scale", (rows, groups), weights)
    zeros = torch.full_like(scales, middle)
    if not packing.is_symmetric:
        zero_name = f"{name}.weight_zero_point"
        if weights.shape_of(zero_name) == (rows, groups) != (-(-rows // per), groups):
            whole = weights.tensor(TensorSlice(zero_name, (rows, groups)), torch.int8)
            zeros = whole.float() + middle
        else:
            packed = _words(zero_name, (-(-rows // per), groups), weights)
            zeros = _apart(packed.T, packing.bits)[:, :rows].T.float()
    order = _order(f"{name}.weight_g_idx", columns, groups, packing, weights)
    return IntParts(numbers, scales, zeros, order)


def join_parts(
    parts: Sequence[IntParts], packing: IntPacking, dtype: torch.dtype
) -> IntGroups | torch.Tensor:
    """Stacks the projections of a product along their rows. Columns are sorted by group where
    groups are not adjacent. Returns floats of `dtype` where projections have different orders, a
    rank's share has parts of groups, or groups are too short for kernels. Raises ValueError if a
    scale is not finite.
    """
    columns = parts[0].numbers.shape[1]
    group = packing.group or columns
    order = _sorted_columns(parts, group)
    if order is None or not supports_group(group, columns):
        return torch.cat([part.dequantised(group, dtype) for part in parts])
    numbers, scales, zeros = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("numbers", "scales", "zeros")
    )
    middle = 1 << (packing.bits - 1)
    is_centred = bool((zeros == middle).all())
    is_sorted = parts[0].order is None
    numbers = (numbers if is_sorted else numbers[:, order]).to(torch.int16)
    if packing.bits == 8:
        zeros = zeros - middle
    if is_centred or packing.bits == 8:
        numbers -= middle
    offsets = None if is_centred else -scales * zeros
    packed = pack_int_groups(numbers, scales, offsets, group, 4 if packing.bits == 4 else 8)
    return packed if is_sorted else replace(packed, order=order.to(torch.int32))


def _sorted_columns(parts: Sequence[IntParts], group: int) -> torch.Tensor | None:
    """[K] int64: the columns of all parts, those of each group together; None: there is no such
    order, because groups have other lengths, or other columns in another part.
    """
    first, columns = parts[0].order, parts[0].numbers.shape[1]
    neighbours = torch.arange(columns, device=parts[0].numbers.device)
    if all(part.order is None for part in parts):
        return neighbours
    if first is None:
        return None
    if any(part.order is None or not torch.equal(part.order, first) for part in parts):
        return None
    order = first.argsort(stable=True)
    return order if torch.equal(first[order], neighbours // group) else None


def _words(name: str, shape: tuple[int, int], weights: Weights) -> torch.Tensor:
    return weights.tensor(TensorSlice(name, shape), torch.int32)


def _floats(name: str, shape: tuple[int, int], weights: Weights) -> torch.Tensor:
    return weights.tensor(TensorSlice(name, shape), torch.float32)


def _apart(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, C] int32 -> [R, C * 32 / bits] uint8, from the lowest bits on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _awq(words: torch.Tensor) -> torch.Tensor:
    apart = _apart(words, 4).view(*words.shape, 8)
    inverse = torch.tensor(_AWQ_ORDER, device=words.device).argsort()
    return apart[..., inverse].flatten(-2)


def _order(
    name: str, columns: int, groups: int, packing: IntPacking, weights: Weights
) -> torch.Tensor | None:
    if weights.shape_of(name) is None:
        return None
    order = weights.table(name, columns).to(weights.device)
    if bool(((order < 0) | (order >= groups)).any()):
        raise ModelError(f"{weights.full_name(name)}: there is no such group")
    own = torch.arange(columns, device=order.device) // (packing.group or columns)
    return None if torch.equal(order, own) else order
