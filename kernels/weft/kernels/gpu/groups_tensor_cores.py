"""Products of 3 to 128 rows with weights of 4 bits in groups of 128, on tensor cores of compute
capability 9.0.

Bytes of the weight pass through shared memory, and each thread takes from them the numbers that
tensor cores want of it: the weight is the first operand and stays in registers. Numbers are exact
in bfloat16; scales and offsets are applied to a group's sums in float32. Few rows are multiplied
warp by warp (mma), more by four warps at once (wgmma). It is written in Gluon, since Triton would
pass the numbers in floats through shared memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from weft.kernels.gpu.dependent_launch import LaunchOptions, launch_options
from weft.kernels.gpu.groups_product import sum_parts
from weft.kernels.packed_groups import LONG_UNIT, PackedGroups

MAX_ROWS = 128
"""Most rows; `groups_product` multiplies more in less time."""
_MAX_NARROW_ROWS = 16
"""Most rows that warps multiply by themselves."""
_LARGE_WEIGHT = 1 << 24
"""Numbers beyond which programs of more columns take less time."""
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Triton 3.9 has other names for both; the earlier one of copies raises there."""


class TensorShape(NamedTuple):
    """What a program computes, and how programs share K."""

    rows: int
    columns: int
    """Of a gated pair, of each; 16 a warp at least."""
    warps: int
    stages: int
    """Groups of x and of the weight that are being loaded."""
    splits: int = 1
    """Programs that share K; a further launch sums their parts. Not where gated."""

    @property
    def is_wide(self) -> bool:
        """Whether four warps multiply at once."""
        return self.rows > _MAX_NARROW_ROWS


def tensor_shape(rows: int, columns: int, k: int, *, is_gated: bool) -> TensorShape:
    """The launch shape of a product (measured on an H100, K of 4,096 and 14,336)."""
    if rows <= _MAX_NARROW_ROWS:
        few = 8 if rows <= 8 else 16
        if is_gated:
            return TensorShape(few, 32, 2, 6)
        return TensorShape(few, 64, 4, 6, _splits(512, triton.cdiv(columns, 64), k))
    few = 32 if rows <= 32 else 64
    if is_gated:
        return TensorShape(few, 64, 4, 4)
    tile = 128 if columns * k > _LARGE_WEIGHT else 64
    programs = triton.cdiv(columns, tile) * triton.cdiv(rows, few)
    return TensorShape(few, tile, tile // 16, 4, _splits(256, programs, k))


def _splits(wanted: int, programs: int, k: int) -> int:
    """Among how many programs K is cut, for about as many as are wanted; at most 8."""
    return max(1, min(8, wanted // programs, -(-k // LONG_UNIT)))


def can_multiply(x: torch.Tensor, weight: PackedGroups) -> bool:
    """Whether `multiply_wide` takes x, [M, K], on its device."""
    return (
        2 < x.shape[0] <= MAX_ROWS
        and x.shape[1] % 8 == 0
        and x.dtype == torch.bfloat16
        and weight.unit == LONG_UNIT
        and not weight.is_e2m1
        and has_kernel(x.device)
    )


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Whether the device multiplies as the kernel does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiply_wide(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: PackedGroups,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
    shape: TensorShape | None = None,
    options: LaunchOptions | None = None,
) -> None:
    """x @ weight^T + bias + residual, or the activation of a gated pair's two products.

    Args:
        out: [M, N], where gated [M, N / 2], contiguous: receives the result, rounded once; may be
            the residual.
        x: [M, K] that `can_multiply` accepts, contiguous.
        weight: Where gated the rows of gate come first.
        bias: [N] or None.
        residual: [M, N] or None; None where gated.
        is_gated: silu(gate) * up.
        shape: How to launch; None: what suits.
        options: Launch options; None: those of the device.
    """
    (rows, k), columns = x.shape, out.shape[1]
    shape = shape or tensor_shape(rows, columns, k, is_gated=is_gated)
    is_split, target = shape.splits > 1, out
    if is_split:
        target = torch.empty((shape.splits, rows, columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, shape.rows), triton.cdiv(columns, shape.columns), shape.splits)
    options = options or launch_options(x.device)
    _tensor_cores_kernel[grid](
        target,
        x,
        weight.data.view(torch.int32),
        weight.scales,
        weight.offsets,
        None if is_split else bias,
        None if is_split else residual,
        rows=rows,
        columns=columns,
        width=weight.scales.shape[1],
        K=k,
        IS_GATED=is_gated,
        IS_WIDE=shape.is_wide,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        WARPS=shape.warps,
        STAGES=shape.stages,
        SPLITS=shape.splits,
        num_warps=shape.warps,
        **options,
    )
    if is_split:
        sum_parts(out, target, bias, residual, options)


_PAIRS = gl.constexpr(
    """
    {
    .reg .b32 first, second, centre;
    mov.b32 centre, 0x43084308;
    prmt.b32 first, $4, $5, $8;
    prmt.b32 second, $6, $7, $8;
    lop3.b32 $0, first, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, second, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 first, first, 4;
    shr.u32 second, second, 4;
    lop3.b32 $2, first, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, second, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $0, $0, centre;
    sub.bf16x2 $1, $1, centre;
    sub.bf16x2 $2, $2, centre;
    sub.bf16x2 $3, $3, centre;
    }
    """
)
"""Of 16 bytes the selected two of each half: their lower numbers, then their upper ones. A number
in the last bits of 128's mantissa is 128 more than itself, of which 136 is subtracted; exact.
"""


@gluon.constexpr_function
def _powers(count: int, rank: int, dim: int, start: int = 1) -> list[list[int]]:
    """Bases of `count` places of a dimension, in steps of `start`."""
    bases, step = [], start
    while step < start * count:
        bases.append([step if place == dim else 0 for place in range(rank)])
        step *= 2
    return bases


@gluon.constexpr_function
def _sums_layout(is_wide: bool, rows: int, warps: int) -> gl.NVMMADistributedLayout:
    """Of products [columns, rows]."""
    version, shape = ([3, 0], [16, rows, 16]) if is_wide else ([2, 0], [16, 8])
    return gl.NVMMADistributedLayout(version, warps_per_cta=[warps, 1], instr_shape=shape)


@gluon.constexpr_function
def _x_layout(is_wide: bool) -> gl.NVMMASharedLayout | gl.SwizzledSharedLayout:
    """Of rows of x in shared memory."""
    if is_wide:
        return gl.NVMMASharedLayout(128, 16, rank=2)
    return gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])


@gluon.constexpr_function
def _words_layout(columns: int, warps: int) -> gl.DistributedLinearLayout:
    """Of words [columns, 16] for all four threads of a row."""
    rows = [[8, 0], *_powers(columns // 16 // warps, 2, 0, 16 * warps)]
    lanes = [[0, 0], [0, 0], *_powers(8, 2, 0)]
    return gl.DistributedLinearLayout(
        [*_powers(16, 2, 1), *rows], lanes, _powers(warps, 2, 0, 16), [], [columns, 16]
    )


@gluon.constexpr_function
def _numbers_layout(columns: int, warps: int) -> gl.DistributedLinearLayout:
    """Of numbers [columns, 16 bytes, word or number, thread of a row]."""
    rows = [[8, 0, 0, 0], *_powers(columns // 16 // warps, 4, 0, 16 * warps)]
    lanes = [*_powers(4, 4, 3), *_powers(8, 4, 0)]
    own = [*_powers(4, 4, 2), *_powers(4, 4, 1), *rows]
    return gl.DistributedLinearLayout(own, lanes, _powers(warps, 4, 0, 16), [], [columns, 4, 4, 4])


@gluon.jit
def _operands(
    words: gl.tensor,
    select: gl.tensor,
    COLUMNS: gl.constexpr,
    by: gl.constexpr,
    layout: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Words [COLUMNS, 16] of a group as two operands, [COLUMNS, 64] each: numbers less 8."""
    apart = gl.reshape(words, [COLUMNS, 4, 4])
    apart = gl.convert_layout(apart, gl.SliceLayout(3, by), assert_trivial=True)
    lower, upper = gl.inline_asm_elementwise(
        _PAIRS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [apart[:, :, :, None], select],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip
    return _operand(lower, COLUMNS, layout), _operand(upper, COLUMNS, layout)


@gluon.jit
def _operand(numbers: gl.tensor, COLUMNS: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    # Column, 16 bytes, half of them, which of two numbers, thread.
    apart = gl.permute(gl.reshape(numbers, [COLUMNS, 4, 2, 2, 4]), (0, 1, 2, 4, 3))
    return gl.convert_layout(gl.reshape(apart, [COLUMNS, 64]), layout, assert_trivial=True)


@gluon.jit
def _multiply(
    lower: gl.tensor,
    upper: gl.tensor,
    taken: gl.shared_memory_descriptor,
    IS_WIDE: gl.constexpr,
    second_of: gl.constexpr,
    zeros: gl.tensor,
) -> gl.tensor:
    """A group's product with its columns of x in shared memory, [ROWS, 128]; wide: its beginning,
    in two parts of which each counts for `_finished`.
    """
    first = taken.slice(0, 64, dim=1).permute((1, 0))
    second = taken.slice(64, 64, dim=1).permute((1, 0))
    if IS_WIDE:
        part = warpgroup_mma(lower, first, zeros, use_acc=False, is_async=True)
        part = warpgroup_mma(upper, second, part, is_async=True)
    else:
        part = mma_v2(lower, first.load(second_of), zeros)
        part = mma_v2(upper, second.load(second_of), part)
    return part


@gluon.jit
def _finished(
    part: gl.tensor,
    lower: gl.tensor,
    upper: gl.tensor,
    LATER: gl.constexpr,
    IS_WIDE: gl.constexpr,
) -> gl.tensor:
    """A product once it is complete, of which the operands stay in registers until then; `LATER`
    parts of others may still be multiplied.
    """
    if IS_WIDE:
        part, lower, upper = warpgroup_mma_wait(LATER, deps=[part, lower, upper])
    return part


@gluon.jit
def _are_in(
    is_row: gl.tensor, place: gl.tensor, group: gl.tensor, end: gl.tensor, K: gl.constexpr
) -> gl.tensor:
    """Whether values of x exist in a group."""
    if K % 128 == 0:
        are_in = is_row & (place < 128)[None, :]
    else:
        are_in = is_row & (place + group * 128 < K)[None, :]
    return are_in & (group < end)


@gluon.jit
def _given(scales: gl.tensor, offsets: gl.tensor, at: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Scales and offsets as they are kept; where there are none, another stands for them."""
    scale = gl.load(scales + at)
    offset = scale
    if offsets is not None:
        offset = gl.load(offsets + at)
    return scale, offset


@gluon.jit
def _scaled(
    part: gl.tensor, sums: gl.tensor, given: gl.tuple, HAS_OFFSETS: gl.constexpr
) -> gl.tensor:
    """A group's sums with scales; an offset belongs to each number, which is 8 less than stored."""
    scale = given[0].to(gl.float32)
    total = part * scale[:, None]
    if HAS_OFFSETS:
        total += sums * (given[1].to(gl.float32) + 8.0 * scale)[:, None]
    return total


@gluon.jit(do_not_specialize=["rows"])
def _tensor_cores_kernel(
    out: gl.tensor,
    x: gl.tensor,
    data: gl.tensor,
    scales: gl.tensor,
    offsets: gl.tensor,
    bias: gl.tensor,
    residual: gl.tensor,
    rows: int,
    columns: int,
    width: int,
    IS_DEPENDENT: gl.constexpr,
    K: gl.constexpr,
    IS_GATED: gl.constexpr,
    IS_WIDE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
) -> None:
    """Parts of a split product are written as they are, [SPLITS, rows, columns] float32."""
    if IS_DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    sums_of: gl.constexpr = _sums_layout(IS_WIDE, ROWS, WARPS)
    x_shared: gl.constexpr = _x_layout(IS_WIDE)
    first_of: gl.constexpr = gl.DotOperandLayout(0, sums_of, 2)
    second_of: gl.constexpr = gl.DotOperandLayout(1, sums_of, 2)
    by_column: gl.constexpr = gl.SliceLayout(1, sums_of)
    words_of: gl.constexpr = _words_layout(COLUMNS, WARPS)
    numbers_of: gl.constexpr = _numbers_layout(COLUMNS, WARPS)
    GROUPS: gl.constexpr = (K + 127) // 128
    OWN: gl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    tile = gl.program_id(1)
    split = gl.program_id(2)
    begin = split * OWN
    end = gl.minimum(begin + OWN, GROUPS)

    # Columns that do not exist read what belongs to the last.
    copied: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, copied))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, copied))
    at = data + (gl.minimum(column, columns - 1) * (GROUPS * 16))[:, None] + word[None, :]
    to_up = columns * (GROUPS * 16)
    is_word = (column >= 0)[:, None] & (word < 16)[None, :]
    words_shared: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, order=[1, 0])
    bank = gl.allocate_shared_memory(gl.int32, [STAGES, COLUMNS, 16], words_shared)
    bank_up = bank
    if IS_GATED:
        bank_up = gl.allocate_shared_memory(gl.int32, [STAGES, COLUMNS, 16], words_shared)
    for i in gl.static_range(STAGES - 1):
        exists = is_word & (begin + i < end)
        _copy(bank.index(i), at + (begin + i) * 16, mask=exists)
        if IS_GATED:
            _copy(bank_up.index(i), at + (to_up + (begin + i) * 16), mask=exists)
    own = gl.minimum(tile * COLUMNS + gl.arange(0, COLUMNS, layout=by_column), columns - 1)
    # A program without groups reads scales of others, and multiplies none.
    current = gl.minimum(begin, GROUPS - 1) * width
    following = gl.minimum(begin + 1, GROUPS - 1) * width
    given = _given(scales, offsets, own + current)
    given_next = _given(scales, offsets, own + following)
    given_up = given
    given_up_next = given_next
    if IS_GATED:
        given_up = _given(scales, offsets, own + (current + columns))
        given_up_next = _given(scales, offsets, own + (following + columns))
    if IS_DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

    ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, ROWS, 128], x_shared)
    x_copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x_copied))
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, x_copied))
    from_x = x + (row * K)[:, None] + place[None, :]
    is_row = (row < rows)[:, None]
    # The first words are counted with the first columns of x.
    for i in gl.static_range(STAGES - 1):
        is_in = _are_in(is_row, place, begin + i, end, K)
        _copy(ring.index(i), from_x + (begin + i) * 128, mask=is_in)
        async_copy.commit_group()

    thread = gl.arange(
        0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, numbers_of)))
    )
    select = (0x1100 + 0x2222 * thread)[None, None, None, :]
    zeros = gl.zeros([COLUMNS, ROWS], gl.float32, sums_of)
    ones = gl.full([COLUMNS, 64], 1.0, gl.bfloat16, first_of)
    total = zeros
    up = zeros
    sums = zeros
    stage = 0
    for group in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        if IS_WIDE:
            fence_async_shared()
        _barrier()
        ahead = group + STAGES - 1
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        is_in = _are_in(is_row, place, ahead, end, K)
        _copy(ring.index(free), from_x + ahead * 128, mask=is_in)
        exists = is_word & (ahead < end)
        _copy(bank.index(free), at + ahead * 16, mask=exists)
        if IS_GATED:
            _copy(bank_up.index(free), at + (to_up + ahead * 16), mask=exists)
        async_copy.commit_group()
        following = gl.minimum(group + 2, GROUPS - 1) * width
        taken = ring.index(stage)
        if offsets is not None:
            begun = _multiply(ones, ones, taken, IS_WIDE, second_of, zeros)
            sums = _finished(begun, ones, ones, 0, IS_WIDE)
        lower, upper = _operands(
            bank.index(stage).load(words_of), select, COLUMNS, numbers_of, first_of
        )
        part = _multiply(lower, upper, taken, IS_WIDE, second_of, zeros)
        if IS_GATED:
            # The other operands are made while these are multiplied.
            lower_up, upper_up = _operands(
                bank_up.index(stage).load(words_of), select, COLUMNS, numbers_of, first_of
            )
            part_up = _multiply(lower_up, upper_up, taken, IS_WIDE, second_of, zeros)
            part = _finished(part, lower, upper, 2, IS_WIDE)
            total += _scaled(part, sums, given, offsets is not None)
            part_up = _finished(part_up, lower_up, upper_up, 0, IS_WIDE)
            up += _scaled(part_up, sums, given_up, offsets is not None)
            given_up = given_up_next
            given_up_next = _given(scales, offsets, own + (following + columns))
        else:
            part = _finished(part, lower, upper, 0, IS_WIDE)
            total += _scaled(part, sums, given, offsets is not None)
        given = given_next
        given_next = _given(scales, offsets, own + following)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    async_copy.wait_group(0)
    if bias is not None:
        total += gl.load(bias + own).to(gl.float32)[:, None]
        if IS_GATED:
            up += gl.load(bias + own + columns).to(gl.float32)[:, None]
    if IS_GATED:
        total = gl.fdiv(total, 1.0 + gl.exp(-total)) * up
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    out_column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, stored))
    out_row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, stored))
    mask = (out_column < columns)[:, None] & (out_row < rows)[None, :]
    to = (split * rows + out_row)[None, :] * columns + out_column[:, None]
    if residual is None:
        whole = gl.convert_layout(total.to(out.dtype.element_ty), stored)
    else:
        whole = gl.convert_layout(total, stored)
        whole += gl.load(residual + to, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + to, whole.to(out.dtype.element_ty), mask=mask)
