"""Products of few rows with weights of 4 bits in groups, on a GPU, where reading the weight is the
limit.

A program streams whole rows of the weight, 16 bytes a thread. Values of x become integers of 16
bits, with one scale for a thread's 32 columns (16 of each half of a block), and are multiplied by
the weight's numbers two at a time (`dp2a`); sums of a group are exact. The largest value of a block
has 15 bits, so that rounding errors are below 2^-15 of it; a result in 16-bit floats is rounded to
2^-9 or 2^-12 of itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_groups_unpack import (
    GroupsTensors,
    begin_of_expert,
    byte_scale,
    groups_arguments,
    power_of_two,
    stored_scales,
)
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS, ExpertParts
from weft.kernels.ops.moe.triton_parts import gated
from weft.kernels.shared.dependent_launch import (
    launch_options,
    release_next,
    wait_for_last,
)
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups
from weft.kernels.shared.sm90 import on_sm90

MAX_ROWS = 2
"""Most rows; tensor cores are faster from three on."""


class FewRowsLaunchConfig(NamedTuple):
    """How a program covers its part of the weight."""

    columns: int
    """Output columns, of a gated pair columns of each; a power of two."""
    blocks: int
    """Blocks of K that are taken at once, a power of two."""
    warps: int
    is_ahead: bool = False
    """Whether the next blocks are loaded while some are multiplied."""


class PairExperts(NamedTuple):
    """The expert by whose weights each pair is multiplied."""

    ids: torch.Tensor
    """[T, k] int32."""
    shares: torch.Tensor | None
    """[T, k] float32: factors on products; None for gate and up."""
    top_k: int
    """Pairs of each row of the input."""
    more: ExpertParts
    is_settled: bool = False
    """Whether the preceding launch is `multiply_few` of the same ids, without this flag."""


def few_rows_launch_config(rows: int, k: int, half: int, *, is_gated: bool) -> FewRowsLaunchConfig:
    """The launch of a product of K columns in blocks of 2 * half (measured on an H100, K of 2,880,
    4,096 and 14,336).
    """
    blocks = min(16, triton.next_power_of_2(triton.cdiv(k, 2 * half)))
    if rows == 1:
        return FewRowsLaunchConfig(8, blocks, 4, is_ahead=2 * blocks * 2 * half < k)
    return FewRowsLaunchConfig(8, blocks, 2) if is_gated else FewRowsLaunchConfig(16, blocks, 4)


def can_take(x: torch.Tensor) -> bool:
    """Whether `multiply_few` takes x, [M, K], with a single matrix."""
    return 0 < x.shape[0] <= MAX_ROWS and is_in_fours(x.shape[1], x.dtype)


def is_in_fours(k: int, dtype: torch.dtype) -> bool:
    """Whether `multiply_few` can read rows of K values, which it does four at a time."""
    return k % 4 == 0 and dtype.itemsize == 2


def multiply_few(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: PackedGroups | PackedExperts,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
    experts: PairExperts | None = None,
    launch: FewRowsLaunchConfig | None = None,
) -> None:
    """x @ weight^T + bias + residual, or the gated product of a pair of matrices.

    Args:
        out: [M, N], where gated [M, N / 2], contiguous: receives the result, rounded once; may be
            the residual. Of experts [P, ...], a row for each pair, times its share if there are
            shares.
        x: [M, K], contiguous, 16-bit floats, K a multiple of 4; M at most MAX_ROWS unless of
            experts.
        weight: Where gated the rows of gate come first.
        bias: [N], of experts [E, N], or None.
        residual: [M, N] or None; of a gated pair of experts [P, N], added before the activation.
        experts: The expert of each pair; None: the weight is a single matrix. If the weights are a
            rank's share of the experts, nothing is written for pairs of other ranks' experts.
    """
    first = weight.first if isinstance(weight, PackedExperts) else weight
    columns, k = out.shape[1], first.columns
    programs, more = 1, PLAIN_EXPERTS
    given: dict[str, Any] = {"ids": None, "shares": None, "TOP_K": 1, "ROWS": x.shape[0]}
    given["IS_SETTLED"], own = True, None
    if experts is not None:
        programs, more = out.shape[0], experts.more
        given = {"ids": experts.ids, "shares": experts.shares, "TOP_K": experts.top_k, "ROWS": 1}
        given["IS_SETTLED"] = experts.is_settled
        own = None if more.placement is None else weight.data.shape[0]
    launch = launch or few_rows_launch_config(given["ROWS"], k, first.half, is_gated=is_gated)
    _few_kernel[(triton.cdiv(columns, launch.columns), programs)](
        out,
        x,
        bias=bias,
        residual=residual,
        columns=columns,
        own=own,
        K=k,
        IS_GATED=is_gated,
        **groups_arguments(weight),
        COLUMNS=launch.columns,
        STEP=launch.blocks,
        IS_AHEAD=launch.is_ahead,
        num_warps=launch.warps,
        **given,
        GATING=more.gating.in_kernels,
        **launch_options(x.device),
    )


@triton.jit
def _few_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: GroupsTensors,
    bias: tl.tensor,
    residual: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    columns: int,
    own: int | None,
    width: int,
    GATING: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    FORM: tl.constexpr,
    IS_SETTLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_AHEAD: tl.constexpr,
) -> None:
    """A program computes COLUMNS columns of all rows; of experts, of one row and one of its
    experts.

    IS_SETTLED: the ids that choose the weights were written before the preceding kernel began, so
    that weights can be loaded while it still runs.
    """
    if not IS_SETTLED:
        wait_for_last()
    # Released only now, since a settled kernel reads the ids before its own wait.
    release_next()
    BLOCKS: tl.constexpr = (K + 2 * FORM.half - 1) // (2 * FORM.half)
    WORDS: tl.constexpr = FORM.half // 4
    weight_rows = columns * 2 if IS_GATED else columns
    pair = tl.program_id(1)
    row_at = x
    first_row = 0
    data, scales, offsets = weight.data, weight.scales, weight.offsets
    if ids is not None:
        expert = tl.load(ids + pair)
        if own is not None:  # noqa: SIM102 - known when compiled, unlike the other
            if expert >= own:
                if IS_SETTLED:
                    wait_for_last()
                return
        first_row = expert * weight_rows
        at_data, at_scale = begin_of_expert(expert, weight_rows, width, BLOCKS, FORM)
        data += at_data
        scales += at_scale
        if offsets is not None:
            offsets += at_scale
        row_at += (pair // TOP_K).to(tl.int64) * K
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns that do not exist read those of the last: cheaper than a mask on each load.
    last = tl.minimum(column, columns - 1)
    block = tl.arange(0, STEP)
    word = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    begin = data.to(tl.pointer_type(tl.int32)) + last.to(tl.int64)[:, None, None] * (BLOCKS * WORDS)
    begin_up = begin + tl.cast(columns, tl.int64) * (BLOCKS * WORDS)
    matrix = begin, begin_up, scales, offsets, last, columns, width
    # The first tiles of the weight are loaded while the preceding kernel ends.
    tile, given, tile_up, given_up = _tiles(matrix, word, block, 0, BLOCKS, STEP, FORM, IS_GATED)
    if IS_SETTLED:
        wait_for_last()
    product = tl.zeros([COLUMNS, STEP, WORDS // 4], tl.float32)
    product_second, up, up_second = product, product, product
    for first in tl.static_range(0, BLOCKS, STEP):
        # The next tiles are loaded while these are multiplied, or after that.
        if first > 0 and not IS_AHEAD:
            tile, given, tile_up, given_up = _tiles(
                matrix, word, block, first, BLOCKS, STEP, FORM, IS_GATED
            )
        next_tile, next_given, next_up, next_given_up = tile, given, tile_up, given_up
        if first + STEP < BLOCKS and IS_AHEAD:
            next_tile, next_given, next_up, next_given_up = _tiles(
                matrix, word, block, first + STEP, BLOCKS, STEP, FORM, IS_GATED
            )
        numbers = _numbers(tile, FORM)
        values = _integers(row_at, first + block, K, STEP, FORM)
        product += _sums(numbers, values, given, offsets is not None, FORM)
        numbers_up = numbers
        if IS_GATED:
            numbers_up = _numbers(tile_up, FORM)
            up += _sums(numbers_up, values, given_up, offsets is not None, FORM)
        if ROWS > 1:
            values = _integers(row_at + K, first + block, K, STEP, FORM)
            product_second += _sums(numbers, values, given, offsets is not None, FORM)
            if IS_GATED:
                up_second += _sums(numbers_up, values, given_up, offsets is not None, FORM)
        tile, given, tile_up, given_up = next_tile, next_given, next_up, next_given_up
    for row in tl.static_range(ROWS):
        if row == 0:
            total, total_up = _summed(product), _summed(up)
        else:
            total, total_up = _summed(product_second), _summed(up_second)
        mask = column < columns
        if weight.factors is not None:
            total *= tl.load(weight.factors + first_row + last)
            if IS_GATED:
                total_up *= tl.load(weight.factors + first_row + columns + last)
        if bias is not None:
            total += tl.load(bias + first_row + last).to(tl.float32)
            if IS_GATED:
                total_up += tl.load(bias + first_row + columns + last).to(tl.float32)
        of_row = (pair + row).to(tl.int64)
        at = of_row * columns + column
        if IS_GATED:
            if residual is not None:
                beside = residual + of_row * (2 * columns) + column
                total += tl.load(beside, mask=mask, other=0.0).to(tl.float32)
                total_up += tl.load(beside + columns, mask=mask, other=0.0).to(tl.float32)
            total = gated(total, total_up, GATING)
        elif shares is not None:
            total *= tl.load(shares + pair)
        elif residual is not None:
            total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _summed(product: tl.tensor) -> tl.tensor:
    """[COLUMNS]."""
    return tl.sum(tl.sum(product, axis=2), axis=1)


@triton.jit
def _tiles(
    matrix: tl.tuple,
    word: tl.tensor,
    block: tl.tensor,
    first: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tuple, tl.tensor, tl.tuple]:
    """Numbers and scales of STEP blocks from `first` on, also those of the second matrix of a gated
    pair.
    """
    begin, begin_up, scales, offsets, column, columns, width = matrix
    WORDS: tl.constexpr = FORM.half // 4
    tile = _words(begin, word, first, BLOCKS, WORDS, STEP)
    at = ((first + block) * (2 * FORM.half // FORM.unit) * width)[None, :] + column[:, None]
    exists = (first + block < BLOCKS)[None, :]
    given = stored_scales(scales, offsets, at, exists, width, FORM)
    tile_up, given_up = tile, given
    if IS_GATED:
        tile_up = _words(begin_up, word, first, BLOCKS, WORDS, STEP)
        given_up = stored_scales(scales, offsets, at + columns, exists, width, FORM)
    return tile, given, tile_up, given_up


@triton.jit
def _words(
    begin: tl.tensor,
    word: tl.tensor,
    first: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """[COLUMNS, STEP, WORDS] int32 of the weight, zero beyond K."""
    at = begin + (first * WORDS + word)[None, :, :]
    if first + STEP <= BLOCKS:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        is_in = (word < (BLOCKS - first) * WORDS)[None, :, :]
        tile = tl.load(at, mask=is_in, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _numbers(tile: tl.tensor, FORM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The lower and the upper numbers of four bytes, as four bytes each. Numbers of e2m1 are
    returned as twice the number plus 64.
    """
    if not FORM.is_e2m1:
        return tile & 0x0F0F0F0F, (tile >> 4) & 0x0F0F0F0F
    if on_sm90():
        lower, upper = tl.inline_asm_elementwise(
            _E2M1_BYTES, "=&r,=&r,r", [tile], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        return lower, upper
    low, high = tl.zeros_like(tile), tl.zeros_like(tile)
    for byte in tl.static_range(4):
        low |= _doubled(tile >> 8 * byte) << 8 * byte
        high |= _doubled(tile >> 8 * byte + 4) << 8 * byte
    return low, high


@triton.jit
def _doubled(number: tl.tensor) -> tl.tensor:
    """Twice the e2m1 number in the last 4 bits, plus 64."""
    bits = number & 7
    size = tl.where(bits < 2, bits, 2 + (bits & 1) << tl.maximum(bits >> 1, 1) - 1)
    return 64 + tl.where((number & 8) != 0, -size, size)


_E2M1_BYTES = tl.constexpr(
    """
    {
    .reg .b32 upper, other, first, second, add;
    shr.u32 upper, $2, 16;
    prmt.b32 first, 0x43424140, 0x4C484644, $2;
    prmt.b32 second, 0x43424140, 0x4C484644, upper;
    xor.b32 other, $2, 0x88888888;
    shr.u32 upper, other, 16;
    prmt.b32 add, 0x3D3E3F40, 0x34383A3C, other;
    or.b32 first, first, add;
    prmt.b32 add, 0x3D3E3F40, 0x34383A3C, upper;
    or.b32 second, second, add;
    prmt.b32 $0, first, second, 0x6420;
    prmt.b32 $1, first, second, 0x7531;
    }
    """
)
"""Two tables of eight bytes, for positive and for negative numbers. If the sign bit is set, `prmt`
repeats a byte's first bit, which is 0 in both tables, so that each table yields 0 for numbers of
the other.
"""


@triton.jit
def _integers(
    row_at: tl.tensor,
    block: tl.tensor,
    K: tl.constexpr,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Values of a row's blocks as integers: pairs of the first and of the second half in words,
    [STEP, WORDS] each; then the scale and the sums of both halves, [STEP, WORDS / 4].
    """
    HALF: tl.constexpr = FORM.half
    WORDS: tl.constexpr = HALF // 4
    word = block[:, None] * (2 * WORDS) + tl.arange(0, WORDS)[None, :]
    BLOCKS: tl.constexpr = (K + 2 * HALF - 1) // (2 * HALF)
    at = row_at.to(tl.pointer_type(tl.int64)) + word
    # Of the last block columns may be missing, in fours.
    if K % (2 * HALF) == 0 and BLOCKS % STEP == 0:
        low, high = tl.load(at), tl.load(at + WORDS)
    else:
        low = tl.load(at, mask=word < K // 4, other=0)
        high = tl.load(at + WORDS, mask=word + WORDS < K // 4, other=0)
    dtype: tl.constexpr = row_at.dtype.element_ty
    l0, l1, l2, l3 = _four(low, dtype)
    h0, h1, h2, h3 = _four(high, dtype)
    most_low = _larger(_larger(tl.abs(l0), tl.abs(l1)), _larger(tl.abs(l2), tl.abs(l3)))
    most_high = _larger(_larger(tl.abs(h0), tl.abs(h1)), _larger(tl.abs(h2), tl.abs(h3)))
    # The largest value is below 2^(power - 126); it becomes an integer below 2^15.
    most = tl.reduce(_by_thread(_larger(most_low, most_high)), 2, _larger)
    power = most.to(tl.int32, bitcast=True) >> 23
    is_finite = power < 255
    power = tl.maximum(power, 15)
    up = ((268 - power) << 23).to(tl.float32, bitcast=True)[:, :, None]
    up = tl.broadcast_to(up, [STEP, WORDS // 4, 4]).reshape([STEP, WORDS])
    down = ((power - 14) << 23).to(tl.float32, bitcast=True)
    down = tl.where(is_finite, down, float("nan"))
    l0, l1, l2, l3 = _rounded(l0 * up), _rounded(l1 * up), _rounded(l2 * up), _rounded(l3 * up)
    h0, h1, h2, h3 = _rounded(h0 * up), _rounded(h1 * up), _rounded(h2 * up), _rounded(h3 * up)
    l0, l1, h0, h1 = _pair(l0, l1), _pair(l2, l3), _pair(h0, h1), _pair(h2, h3)
    ones = tl.full(l0.shape, 0x01010101, tl.int32)
    sum_low = tl.sum(_by_thread(_dot(ones, l0, l1, 0)), axis=2).to(tl.float32)
    sum_high = tl.sum(_by_thread(_dot(ones, h0, h1, 0)), axis=2).to(tl.float32)
    return l0, l1, h0, h1, down, sum_low, sum_high


@triton.jit
def _by_thread(words: tl.tensor) -> tl.tensor:
    """[STEP, WORDS] as [STEP, WORDS / 4, 4]: the words of one thread are the last axis."""
    return words.reshape([words.shape[0], words.shape[1] // 4, 4])


@triton.jit
def _four(word: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The four 16-bit floats of a word of 64 bits, in float32."""
    first, second = word.to(tl.int32), (word >> 32).to(tl.int32)
    if dtype == tl.bfloat16:
        high: tl.constexpr = -65536
        return (
            (first << 16).to(tl.float32, bitcast=True), (first & high).to(tl.float32, bitcast=True),
            (second << 16).to(tl.float32, bitcast=True),
            (second & high).to(tl.float32, bitcast=True),
        )  # fmt: skip
    return (
        _plain(first, dtype),
        _plain(first >> 16, dtype),
        _plain(second, dtype),
        _plain(second >> 16, dtype),
    )


@triton.jit
def _plain(word: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _larger(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """NaN if one of them is."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded(scaled: tl.tensor) -> tl.tensor:
    """The nearest integer of a float32 below 2^15, added to 1.5 * 2^23, in which the last bit is
    worth 1.
    """
    return scaled + 12582912.0


@triton.jit
def _pair(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The last 16 bits of two results of `_rounded`, in one word."""
    low = first.to(tl.int32, bitcast=True) & 0xFFFF
    return low | (second.to(tl.int32, bitcast=True) << 16)


@triton.jit
def _sums(
    numbers: tl.tuple,
    values: tl.tuple,
    given: tl.tuple,
    HAS_OFFSETS: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Products of blocks, [COLUMNS, STEP, WORDS / 4] float32.

    `numbers` are from `_numbers`, `values` from `_integers`, `given` from `stored_scales`.
    """
    IS_E2M1: tl.constexpr = FORM.is_e2m1
    low, high = numbers
    l0, l1, h0, h1, x_scale, sum_low, sum_high = values
    scale, offset, scale_high, offset_high = given
    l0, l1, h0, h1 = l0[None, :, :], l1[None, :, :], h0[None, :, :], h1[None, :, :]
    sums = _dot(low, l0, l1, 0)
    if IS_E2M1 and scale.dtype == tl.int32:
        upper = _dot(high, h0, h1, 0)
        # The four scales of a word are those of two threads' lower and upper numbers.
        words = scale[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :]
        total = _shifted(sums, sum_low) * (0.5 * byte_scale(words))
        total += _shifted(upper, sum_high) * (0.5 * byte_scale(words >> 8))
    elif FORM.unit != FORM.half:
        sums = _dot(high, h0, h1, sums)
        total = _finished(sums, sum_low + sum_high, scale, offset, HAS_OFFSETS, IS_E2M1)
    else:
        upper = _dot(high, h0, h1, 0)
        total = _finished(sums, sum_low, scale, offset, HAS_OFFSETS, IS_E2M1)
        total += _finished(upper, sum_high, scale_high, offset_high, HAS_OFFSETS, IS_E2M1)
    return total * x_scale[None, :, :]


@triton.jit
def _dot(
    numbers: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    total: tl.tensor,
) -> tl.tensor:
    """total + the four bytes of each of `numbers` times the integers of two pairs."""
    if on_sm90():
        return tl.inline_asm_elementwise(
            "dp2a.lo.s32.s32 $0, $2, $1, $4; dp2a.hi.s32.s32 $0, $3, $1, $0;", "=&r,r,r,r,r",
            [numbers, first, second, total], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    total += (numbers & 255) * (first << 16 >> 16) + (numbers >> 8 & 255) * (first >> 16)
    return total + (numbers >> 16 & 255) * (second << 16 >> 16) + (numbers >> 24) * (second >> 16)


@triton.jit
def _finished(
    sums: tl.tensor,
    sum_of_x: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    HAS_OFFSETS: tl.constexpr,
    IS_E2M1: tl.constexpr,
) -> tl.tensor:
    """[COLUMNS, STEP, WORDS / 4]: sums of stored numbers times integers, with scales and offsets
    applied.
    """
    if IS_E2M1:
        return _shifted(sums, sum_of_x) * (0.5 * power_of_two(scale))[:, :, None]
    total, of_x = _by_threads(sums), sum_of_x[None, :, :]
    if HAS_OFFSETS:
        total *= scale.to(tl.float32)[:, :, None]
        return total + of_x * offset.to(tl.float32)[:, :, None]
    return (total - 8 * of_x) * scale.to(tl.float32)[:, :, None]


@triton.jit
def _by_threads(sums: tl.tensor) -> tl.tensor:
    """[COLUMNS, STEP, WORDS / 4] float32 of [COLUMNS, STEP, WORDS]."""
    size: tl.constexpr = [sums.shape[0], sums.shape[1], sums.shape[2] // 4, 4]
    return tl.sum(sums.reshape(size), axis=3).to(tl.float32)


@triton.jit
def _shifted(sums: tl.tensor, sum_of_x: tl.tensor) -> tl.tensor:
    """Sums of twice the numbers of e2m1, which were stored with 64 added."""
    return _by_threads(sums) - 64 * sum_of_x[None, :, :]
