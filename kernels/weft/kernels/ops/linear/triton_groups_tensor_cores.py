"""Products of 3 to 128 rows with weights of 4 bits in groups, on tensor cores of compute capability
9.0.

Bytes of the weight pass through shared memory, and each thread takes from them the numbers that
tensor cores expect in its registers: the weight is the first operand. Numbers are exact in
bfloat16; scales and offsets are applied to a group's sums in float32. Few rows are multiplied warp
by warp (mma), more by four warps at once (wgmma). The kernel is written in Gluon, since Triton
would pass the numbers as floats through shared memory.

A program takes 128 columns of x at a time. They are one block of the weight, or two where groups
are shorter than 128 (`packed_groups`). A block's lower and upper numbers are two operands, which
belong to the same group unless groups have 32 columns.
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
from weft.kernels.ops.linear.triton_groups_product import sum_parts
from weft.kernels.shared.dependent_launch import launch_options
from weft.kernels.shared.formats.packed_groups import LONG_UNIT, PackedGroups
from weft.kernels.shared.sm90 import on_sm90

MAX_ROWS = 128
"""Most rows; for more, `triton_groups_product` takes less time."""
_FASTER_ROWS = {
    (False, 128, False): range(5, MAX_ROWS + 1),
    (False, 128, True): range(5, MAX_ROWS + 1),
    (False, 64, False): range(3, MAX_ROWS + 1),
    (False, 64, True): range(17, MAX_ROWS + 1),
    (False, 32, False): range(3, MAX_ROWS + 1),
    (False, 32, True): range(17, 33),
    (True, 128, False): range(3, MAX_ROWS + 1),
    (True, 128, True): range(3, 33),
    (True, 64, False): range(3, 17),
    (True, 64, True): range(3, 17),
    (True, 32, False): range(3, 17),
    (True, 32, True): range(3, 17),
}
"""Numbers of rows for which this kernel is faster than `multiply_groups`, by whether the weight has
offsets, by its unit and by whether it is gated. Measured on an H200 with the products of
Llama-3.1-8B, except offsets in groups of 64, which have the numbers of groups of 32.
"""
_MAX_NARROW_ROWS = 16
"""Most rows that warps multiply separately."""
_LARGE_WEIGHT = 1 << 24
"""Elements of a weight from which on programs of more columns take less time, for 33 rows
and more.
"""
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Triton 3.9 has new names for both. There the older one for copies raises an error."""


class TensorCoresLaunchConfig(NamedTuple):
    """What a program computes, and how programs share K."""

    rows: int
    columns: int
    """Output columns of a program, at least 16 for each warp; of a gated pair so many of each."""
    warps: int
    stages: int
    """Steps of 128 columns of x and of the weight that are being loaded."""
    splits: int = 1
    """Number of programs that share K; a further launch sums their parts. 1 where gated."""
    is_paired: bool = False
    """Whether a program computes two tiles of `columns` columns, and unpacks the numbers of one
    while tensor cores multiply the other. A gated pair is always computed so, with False here.
    """

    @property
    def of_program(self) -> int:
        """Output columns of a program, in one tile or two; of a gated pair so many of each."""
        return self.columns * (2 if self.is_paired else 1)

    @property
    def is_wide(self) -> bool:
        """Whether four warps multiply at once."""
        return self.rows > _MAX_NARROW_ROWS


def tensor_cores_launch_config(
    rows: int, columns: int, k: int, *, is_gated: bool, can_pair: bool = True
) -> TensorCoresLaunchConfig:
    """How a product is launched (measured on an H100 and an H200 with groups of 128, K of 4,096 and
    14,336). `can_pair`: whether registers suffice for two products of so many rows.
    """
    if rows <= _MAX_NARROW_ROWS:
        few = 8 if rows <= 8 else 16
        if is_gated:
            return TensorCoresLaunchConfig(few, 32, 2, 6)
        return TensorCoresLaunchConfig(few, 64, 4, 6, _splits(512, triton.cdiv(columns, 64), k))
    few = 32 if rows <= 32 else 64
    if is_gated:
        return TensorCoresLaunchConfig(few, 64, 4, 4)
    is_large = columns * k > _LARGE_WEIGHT
    is_paired = can_pair and (few == 32 or is_large)
    tile = 64 if is_paired or not is_large else 128
    programs = triton.cdiv(columns, 2 * tile if is_paired else tile) * triton.cdiv(rows, few)
    splits = _splits(256, programs, k)
    if few == 32 and is_paired:
        return TensorCoresLaunchConfig(few, tile, 4, 3, splits, is_paired)
    return TensorCoresLaunchConfig(few, tile, tile // 16, 4, splits, is_paired)


def _splits(wanted: int, programs: int, k: int) -> int:
    """Number of programs that share K, for about `wanted` programs in all; at most 8."""
    return max(1, min(8, wanted // programs, -(-k // LONG_UNIT)))


def can_multiply(x: torch.Tensor, weight: PackedGroups, *, is_gated: bool) -> bool:
    """Whether `multiply_wide` takes x, [M, K], on its device, and is faster."""
    return (
        x.shape[0] in _FASTER_ROWS[weight.offsets is not None, weight.unit, is_gated]
        and x.shape[1] % 8 == 0
        and x.dtype == torch.bfloat16
        and not weight.is_e2m1
        and has_kernel(x.device)
    )


@functools.cache
def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiply_wide(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: PackedGroups,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
    launch: TensorCoresLaunchConfig | None = None,
) -> None:
    """x @ weight^T + bias + residual, or the activation of a gated pair's two products.

    Args:
        out: [M, N], where gated [M, N / 2], contiguous: receives the result, rounded once; may be
            the residual.
        x: [M, K] that `can_multiply` accepts, contiguous.
        weight: Where gated the rows of gate come first.
        bias: [N] or None.
        residual: [M, N] or None; None where gated.
    """
    (rows, k), columns = x.shape, out.shape[1]
    if launch is None:
        can_pair = rows in _FASTER_ROWS[weight.offsets is not None, weight.unit, True]
        launch = tensor_cores_launch_config(rows, columns, k, is_gated=is_gated, can_pair=can_pair)
    is_split, target = launch.splits > 1, out
    if is_split:
        target = torch.empty((launch.splits, rows, columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, launch.rows), triton.cdiv(columns, launch.of_program), launch.splits)
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
        IS_PAIRED=launch.is_paired,
        IS_WIDE=launch.is_wide,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        WARPS=launch.warps,
        STAGES=launch.stages,
        SPLITS=launch.splits,
        UNIT=weight.unit,
        HALF=weight.half,
        num_warps=launch.warps,
        **launch_options(x.device),
    )
    if is_split:
        sum_parts(out, target, bias, residual)


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
"""Takes the selected two bytes of each half of 16, and turns their lower and then their upper
numbers into floats. A number in the last bits of 128's mantissa makes a float that is larger by
128. Then 136 is subtracted, since numbers are stored with 8 added. All this is exact.
"""


@gluon.constexpr_function
def _powers(count: int, rank: int, dim: int, start: int = 1) -> list[list[int]]:
    """Bases of `count` bits of dimension `dim`, in doubling steps from `start`."""
    bases, step = [], start
    while step < start * count:
        bases.append([step if place == dim else 0 for place in range(rank)])
        step *= 2
    return bases


@gluon.constexpr_function
def _sums_layout(is_wide: bool, rows: int, warps: int) -> gl.NVMMADistributedLayout:
    """The layout of products, [columns, rows], in registers."""
    version, shape = ([3, 0], [16, rows, 16]) if is_wide else ([2, 0], [16, 8])
    return gl.NVMMADistributedLayout(version, warps_per_cta=[warps, 1], instr_shape=shape)


@gluon.constexpr_function
def _x_layout(is_wide: bool, half: int) -> gl.NVMMASharedLayout | gl.SwizzledSharedLayout:
    """The layout of rows of x in shared memory; an operand takes `half` columns of them."""
    if is_wide:
        return gl.NVMMASharedLayout(2 * half, 16, rank=2)
    return gl.SwizzledSharedLayout(8, 64 // half, half // 8, order=[1, 0])


@gluon.constexpr_function
def _words_layout(columns: int, words: int, warps: int) -> gl.DistributedLinearLayout:
    """The layout of a block's words, [columns, words]: each of a row's four threads has all its
    words.
    """
    rows = [[8, 0], *_powers(columns // 16 // warps, 2, 0, 16 * warps)]
    lanes = [[0, 0], [0, 0], *_powers(8, 2, 0)]
    return gl.DistributedLinearLayout(
        [*_powers(words, 2, 1), *rows], lanes, _powers(warps, 2, 0, 16), [], [columns, words]
    )


@gluon.constexpr_function
def _numbers_layout(columns: int, words: int, warps: int) -> gl.DistributedLinearLayout:
    """The layout of numbers, [columns, 16 bytes, word or number, thread of a row]."""
    rows = [[8, 0, 0, 0], *_powers(columns // 16 // warps, 4, 0, 16 * warps)]
    lanes = [*_powers(4, 4, 3), *_powers(8, 4, 0)]
    own = [*_powers(4, 4, 2), *_powers(words // 4, 4, 1), *rows]
    shape = [columns, words // 4, 4, 4]
    return gl.DistributedLinearLayout(own, lanes, _powers(warps, 4, 0, 16), [], shape)


@gluon.jit
def _operands(
    words: gl.tensor,
    select: gl.tensor,
    COLUMNS: gl.constexpr,
    HALF: gl.constexpr,
    by: gl.constexpr,
    layout: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Words [COLUMNS, HALF / 4] of a block as two operands, [COLUMNS, HALF] each, of numbers less
    8.
    """
    apart = gl.reshape(words, [COLUMNS, HALF // 16, 4])
    apart = gl.convert_layout(apart, gl.SliceLayout(3, by), assert_trivial=True)
    lower, upper = gl.inline_asm_elementwise(
        _PAIRS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [apart[:, :, :, None], select],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip
    return _operand(lower, COLUMNS, HALF, layout), _operand(upper, COLUMNS, HALF, layout)


@gluon.jit
def _operand(
    numbers: gl.tensor, COLUMNS: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr
) -> gl.tensor:
    # Column, 16 bytes, half of them, which of two numbers, thread.
    apart = gl.permute(gl.reshape(numbers, [COLUMNS, HALF // 16, 2, 2, 4]), (0, 1, 2, 4, 3))
    return gl.convert_layout(gl.reshape(apart, [COLUMNS, HALF]), layout, assert_trivial=True)


@gluon.jit
def _multiply(
    operand: gl.tensor,
    columns: gl.shared_memory_descriptor,
    part: gl.tensor,
    IS_FIRST: gl.constexpr,
    IS_WIDE: gl.constexpr,
    second_of: gl.constexpr,
) -> gl.tensor:
    """Adds an operand's product with its columns of x, [HALF, ROWS] in shared memory, to `part`.
    With IS_WIDE the product is only begun. IS_FIRST says that `part` is zeros.
    """
    if IS_WIDE:
        part = warpgroup_mma(operand, columns, part, use_acc=not IS_FIRST, is_async=True)
    else:
        part = mma_v2(operand, columns.load(second_of), part)
    return part


@gluon.jit
def _begun(
    operands: gl.tuple,
    columns: gl.tuple,
    zeros: gl.tensor,
    UNIT: gl.constexpr,
    IS_WIDE: gl.constexpr,
    second_of: gl.constexpr,
) -> gl.tuple:
    """Multiplies a block's operands by their columns of x, and returns a product for each group.
    With IS_WIDE the products are only begun, and `_finished` waits for those of each operand.
    """
    first = _multiply(operands[0], columns[0], zeros, True, IS_WIDE, second_of)
    if UNIT == 32:
        return first, _multiply(operands[1], columns[1], zeros, True, IS_WIDE, second_of)
    else:
        return (_multiply(operands[1], columns[1], first, False, IS_WIDE, second_of),)


@gluon.jit
def _finished(
    part: gl.tensor, operands: gl.tuple, LATER: gl.constexpr, IS_WIDE: gl.constexpr
) -> gl.tensor:
    """Waits until a product is complete and returns it. Its operands stay in registers until then;
    `LATER` products of later operands may still be running.
    """
    if IS_WIDE:
        part, _, _ = warpgroup_mma_wait(LATER, deps=[part, operands[0], operands[1]])
    return part


@gluon.jit
def _columns_of(
    ring: gl.shared_memory_descriptor, stage: int, block: gl.constexpr, HALF: gl.constexpr
) -> gl.tuple:
    """The columns of x for a block's two operands, [HALF, ROWS] each."""
    if HALF == 64:
        taken = ring.index(stage)
        first, second = taken.slice(0, 64, dim=1), taken.slice(64, 64, dim=1)
    else:
        first = ring.index(stage * 4 + 2 * block)
        second = ring.index(stage * 4 + 2 * block + 1)
    return first.permute((1, 0)), second.permute((1, 0))


@gluon.jit
def _copy_columns(
    ring: gl.shared_memory_descriptor,
    stage: int,
    from_x: gl.tensor,
    place: gl.tensor,
    is_row: gl.tensor,
    step: gl.tensor,
    end: gl.tensor,
    K: gl.constexpr,
    HALF: gl.constexpr,
) -> None:
    """Copies 128 columns of x; columns and rows that do not exist become zeros."""
    PIECES: gl.constexpr = 1 if HALF == 64 else 4
    for piece in gl.static_range(PIECES):
        begin = step * 128 + piece * HALF
        are_in = is_row & (place + begin < K)[None, :] & (step < end)
        _copy(ring.index(stage * PIECES + piece), from_x + begin, mask=are_in)


@gluon.jit
def _copy_words(
    bank: gl.shared_memory_descriptor,
    stage: int,
    from_data: gl.tensor,
    is_word: gl.tensor,
    step: gl.tensor,
    end: gl.tensor,
    WIDTH: gl.constexpr,
    HALF: gl.constexpr,
) -> None:
    """Copies the words of 128 columns, of the WIDTH words of a row of the weight."""
    BLOCKS: gl.constexpr = 64 // HALF
    for block in gl.static_range(BLOCKS):
        begin = step * 16 + block * (HALF // 4)
        exists = is_word & (begin < WIDTH) & (step < end)
        _copy(bank.index(stage * BLOCKS + block), from_data + begin, mask=exists)


@gluon.jit
def _given(
    scales: gl.tensor,
    offsets: gl.tensor,
    at: gl.tensor,
    step: gl.tensor,
    width: int,
    GROUPS: gl.constexpr,
    PER_STEP: gl.constexpr,
) -> gl.tuple:
    """Scales and offsets of 128 columns: those of the first group, then those of the next."""
    given = _given_of_group(scales, offsets, at, step * PER_STEP, width, GROUPS)
    for i in gl.static_range(1, PER_STEP):
        given += _given_of_group(scales, offsets, at, step * PER_STEP + i, width, GROUPS)
    return given


@gluon.jit
def _given_of_group(
    scales: gl.tensor,
    offsets: gl.tensor,
    at: gl.tensor,
    group: gl.tensor,
    width: int,
    GROUPS: gl.constexpr,
) -> gl.tuple:
    """A scale and an offset as they are stored. Without offsets the scale takes the offset's place,
    which is not read then. Groups that do not exist have those of the last group.
    """
    own = at + gl.minimum(group, GROUPS - 1) * width
    scale = gl.load(scales + own)
    offset = scale
    if offsets is not None:
        offset = gl.load(offsets + own)
    return scale, offset


@gluon.jit
def _scaled(
    part: gl.tensor,
    sums: gl.tensor,
    scale: gl.tensor,
    offset: gl.tensor,
    HAS_OFFSETS: gl.constexpr,
) -> gl.tensor:
    """A group's sums times their scales, plus offsets. An offset belongs to each number, which here
    is 8 less than it is stored.
    """
    scale = scale.to(gl.float32)
    total = part * scale[:, None]
    if HAS_OFFSETS:
        total += sums * (offset.to(gl.float32) + 8.0 * scale)[:, None]
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
    K: gl.constexpr,
    IS_GATED: gl.constexpr,
    IS_PAIRED: gl.constexpr,
    IS_WIDE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    UNIT: gl.constexpr,
    HALF: gl.constexpr,
) -> None:
    """Parts of a split product are written as they are, to [SPLITS, rows, columns] float32."""
    if on_sm90():
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    HAS_OFFSETS: gl.constexpr = offsets is not None
    # `up` is the second product: of a gated pair, or of a program's second tile.
    HAS_SECOND: gl.constexpr = IS_GATED or IS_PAIRED
    TOGETHER: gl.constexpr = 2 * COLUMNS if IS_PAIRED else COLUMNS
    BLOCKS: gl.constexpr = 64 // HALF
    PER_STEP: gl.constexpr = 128 // UNIT
    PER_BLOCK: gl.constexpr = PER_STEP // BLOCKS
    WORDS: gl.constexpr = HALF // 4
    STEPS: gl.constexpr = (K + 127) // 128
    WIDTH: gl.constexpr = (K + 2 * HALF - 1) // (2 * HALF) * WORDS
    GROUPS: gl.constexpr = WIDTH * 8 // UNIT
    OWN: gl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    sums_of: gl.constexpr = _sums_layout(IS_WIDE, ROWS, WARPS)
    first_of: gl.constexpr = gl.DotOperandLayout(0, sums_of, 2)
    second_of: gl.constexpr = gl.DotOperandLayout(1, sums_of, 2)
    by_column: gl.constexpr = gl.SliceLayout(1, sums_of)
    words_of: gl.constexpr = _words_layout(COLUMNS, WORDS, WARPS)
    numbers_of: gl.constexpr = _numbers_layout(COLUMNS, WORDS, WARPS)
    tile = gl.program_id(1)
    split = gl.program_id(2)
    begin = split * OWN
    end = gl.minimum(begin + OWN, STEPS)

    # Columns that do not exist read what belongs to the last.
    copied: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [WARPS, 1], [1, 0])
    column = tile * TOGETHER + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, copied))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, copied))
    at = data + (gl.minimum(column, columns - 1) * WIDTH)[:, None] + word[None, :]
    at_up = at + columns * WIDTH
    if IS_PAIRED:
        second = gl.minimum(column + COLUMNS, columns - 1)
        at_up = data + (second * WIDTH)[:, None] + word[None, :]
    is_word = (column >= 0)[:, None] & (word < WORDS)[None, :]
    words_shared: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // WORDS, WORDS // 4, order=[1, 0])
    bank = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS, COLUMNS, WORDS], words_shared)
    bank_up = bank
    if HAS_SECOND:
        bank_up = gl.allocate_shared_memory(
            gl.int32, [STAGES * BLOCKS, COLUMNS, WORDS], words_shared
        )
    for i in gl.static_range(STAGES - 1):
        _copy_words(bank, i, at, is_word, begin + i, end, WIDTH, HALF)
        if HAS_SECOND:
            _copy_words(bank_up, i, at_up, is_word, begin + i, end, WIDTH, HALF)
    first = tile * TOGETHER + gl.arange(0, COLUMNS, layout=by_column)
    own = gl.minimum(first, columns - 1)
    own_up = own + columns
    if IS_PAIRED:
        own_up = gl.minimum(first + COLUMNS, columns - 1)
    given = _given(scales, offsets, own, begin, width, GROUPS, PER_STEP)
    given_next = _given(scales, offsets, own, begin + 1, width, GROUPS, PER_STEP)
    given_up = given
    given_up_next = given_next
    if HAS_SECOND:
        given_up = _given(scales, offsets, own_up, begin, width, GROUPS, PER_STEP)
        given_up_next = _given(scales, offsets, own_up, begin + 1, width, GROUPS, PER_STEP)
    if on_sm90():
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

    PIECES: gl.constexpr = 1 if HALF == 64 else 4
    TAKEN: gl.constexpr = 128 // PIECES
    ring = gl.allocate_shared_memory(
        x.dtype.element_ty, [STAGES * PIECES, ROWS, TAKEN], _x_layout(IS_WIDE, HALF)
    )
    x_copied: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // TAKEN, TAKEN // 8], [WARPS, 1], [1, 0]
    )
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x_copied))
    place = gl.arange(0, TAKEN, layout=gl.SliceLayout(0, x_copied))
    from_x = x + (row * K)[:, None] + place[None, :]
    is_row = (row < rows)[:, None] & (place < TAKEN)[None, :]
    # The first words are committed in one group with the first columns of x.
    for i in gl.static_range(STAGES - 1):
        _copy_columns(ring, i, from_x, place, is_row, begin + i, end, K, HALF)
        async_copy.commit_group()

    thread = gl.arange(
        0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, numbers_of)))
    )
    select = (0x1100 + 0x2222 * thread)[None, None, None, :]
    zeros = gl.zeros([COLUMNS, ROWS], gl.float32, sums_of)
    ones = gl.full([COLUMNS, HALF], 1.0, gl.bfloat16, first_of)
    total = zeros
    up = zeros
    stage = 0
    for step in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        if IS_WIDE:
            fence_async_shared()
        _barrier()
        ahead = step + STAGES - 1
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        _copy_columns(ring, free, from_x, place, is_row, ahead, end, K, HALF)
        _copy_words(bank, free, at, is_word, ahead, end, WIDTH, HALF)
        if HAS_SECOND:
            _copy_words(bank_up, free, at_up, is_word, ahead, end, WIDTH, HALF)
        async_copy.commit_group()
        for block in gl.static_range(BLOCKS):
            taken = _columns_of(ring, stage, block, HALF)
            summed = (zeros, zeros)
            if HAS_OFFSETS:
                begun = _begun((ones, ones), taken, zeros, UNIT, IS_WIDE, second_of)
                of_rows = _finished(begun[0], (ones, ones), 0, IS_WIDE)
                summed = (of_rows, of_rows)
                if PER_BLOCK == 2:
                    summed = (of_rows, _finished(begun[1], (ones, ones), 0, IS_WIDE))
            words = bank.index(stage * BLOCKS + block).load(words_of)
            operands = _operands(words, select, COLUMNS, HALF, numbers_of, first_of)
            begun = _begun(operands, taken, zeros, UNIT, IS_WIDE, second_of)
            operands_up = operands
            begun_up = begun
            if HAS_SECOND:
                # The other operands are prepared while these are multiplied.
                words_up = bank_up.index(stage * BLOCKS + block).load(words_of)
                operands_up = _operands(words_up, select, COLUMNS, HALF, numbers_of, first_of)
                begun_up = _begun(operands_up, taken, zeros, UNIT, IS_WIDE, second_of)
            for i in gl.static_range(PER_BLOCK):
                # An index into a tuple is a constant only if it is written where it is used.
                part = _finished(
                    begun[i], operands, PER_BLOCK - 1 - i + (2 if HAS_SECOND else 0), IS_WIDE
                )
                total += _scaled(
                    part,
                    summed[i],
                    given[2 * (block * PER_BLOCK + i)],
                    given[2 * (block * PER_BLOCK + i) + 1],
                    HAS_OFFSETS,
                )
            if HAS_SECOND:
                for i in gl.static_range(PER_BLOCK):
                    part = _finished(begun_up[i], operands_up, PER_BLOCK - 1 - i, IS_WIDE)
                    up += _scaled(
                        part,
                        summed[i],
                        given_up[2 * (block * PER_BLOCK + i)],
                        given_up[2 * (block * PER_BLOCK + i) + 1],
                        HAS_OFFSETS,
                    )
        given = given_next
        given_next = _given(scales, offsets, own, step + 2, width, GROUPS, PER_STEP)
        if HAS_SECOND:
            given_up = given_up_next
            given_up_next = _given(scales, offsets, own_up, step + 2, width, GROUPS, PER_STEP)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    async_copy.wait_group(0)
    if bias is not None:
        total += gl.load(bias + own).to(gl.float32)[:, None]
        if HAS_SECOND:
            up += gl.load(bias + own_up).to(gl.float32)[:, None]
    if IS_GATED:
        total = gl.fdiv(total, 1.0 + gl.exp(-total)) * up
    to = out + split * rows * columns
    _store(to, total, residual, tile * TOGETHER, rows, columns, ROWS, COLUMNS, WARPS)
    if IS_PAIRED:
        after = tile * TOGETHER + COLUMNS
        _store(to, up, residual, after, rows, columns, ROWS, COLUMNS, WARPS)


@gluon.jit
def _store(
    out: gl.tensor,
    total: gl.tensor,
    residual: gl.tensor,
    first: gl.tensor,
    rows: int,
    columns: int,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """Adds the residual to a product, [COLUMNS, ROWS], and stores it from column `first` on."""
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, stored))
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, stored))
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    to = row[None, :] * columns + column[:, None]
    if residual is None:
        whole = gl.convert_layout(total.to(out.dtype.element_ty), stored)
    else:
        whole = gl.convert_layout(total, stored)
        whole += gl.load(residual + to, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + to, whole.to(out.dtype.element_ty), mask=mask)
