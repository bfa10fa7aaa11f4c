"""Products of up to 16 rows with weights in FP8 or bfloat16, on tensor cores of compute capability
9.0.

Each thread reads 16 bytes of a weight's row at a time straight into the registers from which
tensor cores take them: the weight is the first operand, and both operands have the numbers along K
in the same changed order. Rows are not rounded. Exponent and mantissa of e4m3 move to their places
in bfloat16, which makes a number 2^-120 of itself; factors of 2^64 on the rows and of 2^56 on the
scales correct this. All of it is exact.

A warp multiplies 16 rows of the weight. The kernels are written in Gluon, since Triton would pass
the weight through shared memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from weft.kernels.ops.linear.triton_fp8_few_rows import FewRows
from weft.kernels.ops.linear.triton_fp8_weights import WeightScales, data_of
from weft.kernels.ops.linear.triton_groups_tensor_cores import has_kernel
from weft.kernels.shared.dependent_launch import launch_options
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Blocks, Fp8Matrix
from weft.kernels.shared.sm90 import on_sm90

_FEW_COLUMNS, _LONG = 4096, 8192
"""Borders, in columns and in elements of K, between the ranges of rows and the launches below. They
were measured on an H200 with products of Llama-3.1-8B and Qwen3-30B-A3B.
"""
MAX_STREAMED_ROWS, _MAX_ROWS_OF_FEW_COLUMNS, _MAX_GATED_ROWS = 8, 16, 2
"""Most rows of a product, of one with at most _FEW_COLUMNS (and _LONG in blocks), and of a gated
pair in FP8. Beyond, FP8 takes less time with rows that are rounded first (`triton_fp8_tiles`), and
floats with cuBLAS.
"""
_LARGE = 1 << 24
"""Elements of a weight in blocks with few columns from which on one row takes less time than in
`triton_fp8_few_rows`.
"""
_MIN_FLOAT_ROWS, _MAX_FLOAT_COLUMNS, _MAX_FLOAT_K = 3, 8192, 4096
"""Fewer rows of floats go to `triton_small`. More columns go to cuBLAS, as do more than
_FEW_COLUMNS of longer rows, which were not measured.
"""
_VECTORS = 8
"""Columns of the instruction's second operand. More rows are two operands."""
_UNITS = 64
"""Units of 16 bits in a group: the numbers that a warp reads of each of its rows at a time."""
_WARPS = 8
"""Most warps that share K."""

Weight = Fp8Matrix | torch.Tensor
"""[N, K], in FP8 or in floats."""


class StreamedLaunchConfig(NamedTuple):
    """What a program computes."""

    columns: int
    """Rows of the weight, a multiple of 16; of a gated pair half of them are of up."""
    warps: int
    """Warps that share K, a divisor of its groups."""
    ahead: int
    """Most groups of its rows that a warp reads ahead."""


def streamed_rows(weight: Weight, dtype: torch.dtype, *, is_gated: bool) -> range:
    """Numbers of rows in `dtype` for which `multiply_streamed` is the fastest product with a weight
    on its device.
    """
    (columns, k), is_blocks = weight.shape, isinstance(weight, Fp8Blocks)
    are_few = columns <= _FEW_COLUMNS and not (is_blocks and k > _LONG)
    most = _MAX_ROWS_OF_FEW_COLUMNS if are_few else MAX_STREAMED_ROWS
    is_plain = dtype == torch.bfloat16 and columns % 32 == 0 and k % FP8_GROUP == 0
    if isinstance(weight, torch.Tensor):
        is_right = weight.dtype == dtype and weight.is_contiguous() and has_kernel(weight.device)
        is_wide = columns > (_FEW_COLUMNS if k > _MAX_FLOAT_K else _MAX_FLOAT_COLUMNS)
        if not (is_plain and is_right) or is_gated or is_wide:
            return range(0)
        return range(_MIN_FLOAT_ROWS, most + 1)
    if not is_plain or WeightScales.of(weight).rows % 16 or not has_kernel(weight.data.device):
        return range(0)
    if is_gated:
        return range(2, _MAX_GATED_ROWS + 1)
    is_large = is_blocks and columns <= _FEW_COLUMNS and columns * k >= _LARGE
    return range(1 if is_large else 2, most + 1)


def num_parts(groups: int) -> int:
    """Warps that share so many groups of K."""
    return math.gcd(groups, _WARPS)


def streamed_launch_config(rows: int, weight: Weight, *, is_gated: bool) -> StreamedLaunchConfig:
    """The launch of a product. Each program reads all of x."""
    (columns, k), few = weight.shape, rows <= _VECTORS
    if isinstance(weight, torch.Tensor):
        if columns > _FEW_COLUMNS:
            return StreamedLaunchConfig(16, math.gcd(k // _UNITS, 4), 4)
        of_program = 16 if few and k <= _LONG else 32
        return StreamedLaunchConfig(of_program, num_parts(k // _UNITS), 64 // of_program)
    is_short = columns <= _FEW_COLUMNS // 2
    is_narrow = not is_gated and (is_short or (few and isinstance(weight, Fp8Blocks)))
    of_program = 16 if is_narrow else 32
    return StreamedLaunchConfig(of_program, num_parts(k // FP8_GROUP), 64 // of_program)


def multiply_streamed(
    x: torch.Tensor,
    weight: Weight,
    out: torch.Tensor,
    given: FewRows,
    launch: StreamedLaunchConfig | None = None,
) -> None:
    """`weft.kernels.ops.linear.triton_fp8_few_rows.few_rows`, without a norm, for up to 16 rows of
    a weight that `streamed_rows` accepts.
    """
    (rows, k), columns, is_gated = x.shape, out.shape[1], given.is_gated
    launch = launch or streamed_launch_config(rows, weight, is_gated=is_gated)
    (data, scaling), units = data_of(weight), k
    if not isinstance(weight, torch.Tensor):
        x, data, units = x.view(torch.int32), data.view(torch.int16), k // 2
    _streamed_kernel[(weight.shape[0] // launch.columns,)](
        out,
        x,
        data,
        given.bias,
        given.residual,
        given.tap,
        0 if given.tap is None else given.tap.stride(0),
        rows,
        columns,
        UNITS=units,
        IS_GATED=is_gated,
        PARTS=launch.warps,
        COLUMNS=launch.columns,
        AT_ONCE=groups_at_once(units // _UNITS // launch.warps, launch.ahead),
        VECTORS=_VECTORS if rows <= _VECTORS else 2 * _VECTORS,
        num_warps=launch.warps,
        **scaling,
        **launch_options(x.device),
    )


_FLOATS = gl.constexpr(
    """
    {
    .reg .b32 sign, rest;
    shl.b32 sign, $2, 8;
    shl.b32 rest, $2, 4;
    and.b32 rest, rest, 0x07F007F0;
    lop3.b32 $0, sign, 0x80008000, rest, 0xEA;
    shr.u32 rest, $2, 4;
    and.b32 rest, rest, 0x07F007F0;
    lop3.b32 $1, $2, 0x80008000, rest, 0xEA;
    }
    """
)
"""Of each two bytes the first and the second, as floats that are smaller by 2^120."""
_PAIRS = gl.constexpr(
    """
    {
    .reg .b32 first, second, power;
    mov.b32 power, 0x5F805F80;
    prmt.b32 first, $2, $3, 0x5410;
    prmt.b32 second, $2, $3, 0x7632;
    mul.bf16x2 $0, first, power;
    mul.bf16x2 $1, second, power;
    }
    """
)
"""Of each two bfloat16 the first and the second, times 2^64."""
_POWER = gl.constexpr(2.0**56)


@gluon.constexpr_function
def _powers(count: int, dim: int) -> list[list[int]]:
    """Bases of `count` values of dimension `dim` of five, in doubling steps."""
    bases, step = [], 1
    while step < count:
        bases.append([step if place == dim else 0 for place in range(5)])
        step *= 2
    return bases


@gluon.constexpr_function
def sums_layout(parts: int) -> gl.NVMMADistributedLayout:
    """Of products, [warp, rows of the weight, 8 vectors]."""
    return gl.NVMMADistributedLayout([2, 0], warps_per_cta=[parts, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def numbers_layout(parts: int, rows: int) -> gl.DistributedLinearLayout:
    """Of a group of K of a warp's rows of the weight or of its 8 vectors: [warp, row, half of the
    group, thread of a row, two numbers].
    """
    own = [*_powers(8, 4), *_powers(2, 2), *_powers(rows, 1)[3:]]
    lanes = [*_powers(4, 3), *_powers(8, 1)]
    return gl.DistributedLinearLayout(own, lanes, _powers(parts, 0), [], [parts, rows, 2, 4, 8])


@gluon.constexpr_function
def _only(layout: gl.DistributedLinearLayout, dim: int) -> gl.SliceLayout:
    """The layout of one of five dimensions."""
    for other in reversed(range(5)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def of_warps(layout: gl.constexpr, PARTS: gl.constexpr) -> gl.tensor:
    """Numbers of warps along the first dimension of a `numbers_layout`."""
    return gl.arange(0, PARTS, layout=_only(layout, 0))[:, None, None, None, None]


@gluon.jit
def of_rows(layout: gl.constexpr, ROWS: gl.constexpr) -> gl.tensor:
    """Numbers of rows along the second dimension of a `numbers_layout`."""
    return gl.arange(0, ROWS, layout=_only(layout, 1))[None, :, None, None, None]


@gluon.jit
def in_group(layout: gl.constexpr) -> gl.tensor:
    """Positions of units, 16 bits of a weight (two numbers in FP8), within their group of 64."""
    of_half: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout)))
    )
    of_thread: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout)))
    )
    of_pair: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    )
    half = gl.arange(0, 2, layout=of_half)[None, None, :, None, None]
    thread = gl.arange(0, 4, layout=of_thread)[None, None, None, :, None]
    return half * 32 + thread * 8 + gl.arange(0, 8, layout=of_pair)[None, None, None, None, :]


@gluon.jit
def read_groups(at: gl.tensor, COUNT: gl.constexpr) -> gl.tuple:
    """Some groups of the weight. They are not read again and need not be cached."""
    found: gl.tuple = ()
    for group in gl.static_range(COUNT):
        found += (gl.load(at + group * 64, eviction_policy="evict_first"),)
    return found


@gluon.jit
def _operand(numbers: gl.tensor, IS_SECOND: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    PARTS: gl.constexpr = numbers.shape[0]
    ROWS: gl.constexpr = numbers.shape[1]
    # Dimensions: warp, row, half of a group of 64, thread, half of the thread's pairs, half of an
    # operand, number within a pair.
    apart = gl.reshape(numbers, [PARTS, ROWS, 2, 4, 2, 2, 2])
    if IS_SECOND:
        whole = gl.reshape(gl.permute(apart, (0, 2, 4, 5, 3, 6, 1)), [PARTS, 64, ROWS])
    else:
        whole = gl.reshape(gl.permute(apart, (0, 1, 2, 4, 5, 3, 6)), [PARTS, ROWS, 64])
    return gl.convert_layout(whole, layout, assert_trivial=True)


@gluon.constexpr_function
def groups_at_once(groups: int, most: int) -> int:
    """A divisor of the groups of a warp, whose weights a thread reads ahead."""
    return next(one for one in range(min(groups, most), 0, -1) if groups % one == 0)


@gluon.jit
def products(
    at: gl.tensor,
    weights: gl.tuple,
    at_vector: gl.tensor,
    at_scale: gl.tensor,
    GROUPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
) -> gl.tensor:
    """Each warp's rows of the weight times its 8 vectors: [PARTS, ROWS, 8] float32.

    Args:
        at: Where a warp's first group of its rows begins, in a `numbers_layout`; int16, of two
            numbers each.
        weights: Of the first AT_ONCE groups, a divisor of GROUPS.
        at_vector: As `at`, of the vectors; int32.
        at_scale: [PARTS, ROWS]: where the scales of a warp's first group are; None: weights and
            vectors are in bfloat16.
    """
    PARTS: gl.constexpr = at.shape[0]
    shape: gl.constexpr = [PARTS, at.shape[1], at_vector.shape[1]]
    total = gl.zeros(shape, gl.float32, sums_layout(PARTS))
    for first in range(0, GROUPS - AT_ONCE, AT_ONCE):
        later = read_groups(at + (first + AT_ONCE) * 64, AT_ONCE)
        total = _with_groups(total, weights, at_vector, at_scale, first, AT_ONCE, SCALE_ROWS)
        weights = later
    last: gl.constexpr = GROUPS - AT_ONCE
    total = _with_groups(total, weights, at_vector, at_scale, last, AT_ONCE, SCALE_ROWS)
    if at_scale is not None and SCALE_ROWS == 0:
        total *= (gl.load(at_scale) * _POWER)[:, :, None]
    return total


@gluon.jit
def _with_groups(
    total: gl.tensor,
    weights: gl.tuple,
    at_vector: gl.tensor,
    at_scale: gl.tensor,
    first: int,
    AT_ONCE: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
) -> gl.tensor:
    """Adds the products of the groups from `first` on."""
    sums_of: gl.constexpr = total.type.layout
    first_of: gl.constexpr = gl.DotOperandLayout(0, sums_of, 2)
    second_of: gl.constexpr = gl.DotOperandLayout(1, sums_of, 2)
    for group in gl.static_range(AT_ONCE):
        given = gl.load(at_vector + (first + group) * 64)
        if at_scale is None:
            own = _operand(weights[group], False, first_of)
            total = mma_v2(own, _operand(given, True, second_of), total)
        else:
            x_first, x_second = gl.inline_asm_elementwise(
                _PAIRS, "=r,=r,r,r", [given], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
            )
            w_first, w_second = gl.inline_asm_elementwise(
                _FLOATS, "=&r,=&r,r", [weights[group]], dtype=(gl.bfloat16, gl.bfloat16),
                is_pure=True, pack=2,
            )  # fmt: skip
            own, second = _operand(w_first, False, first_of), _operand(w_second, False, first_of)
            x_first = _operand(x_first, True, second_of)
            x_second = _operand(x_second, True, second_of)
            if SCALE_ROWS > 0:
                part = gl.zeros(total.shape, gl.float32, sums_of)
                part = mma_v2(second, x_second, mma_v2(own, x_first, part))
                scale = gl.load(at_scale + first + group)
                total += part * (scale * _POWER)[:, :, None]
            else:
                total = mma_v2(second, x_second, mma_v2(own, x_first, total))
    return total


@gluon.jit
def wait_for_last() -> None:
    """`weft.kernels.shared.dependent_launch.wait_for_last`."""
    if on_sm90():
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def release_next() -> None:
    """`weft.kernels.shared.dependent_launch.release_next`."""
    if on_sm90():
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def _streamed_kernel(
    out: gl.tensor,
    x: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    residual: gl.tensor,
    tap: gl.tensor,
    tap_stride: int,
    rows: int,
    columns: int,
    scales: gl.tensor,
    SCALE_ROWS: gl.constexpr,
    UNITS: gl.constexpr,
    IS_GATED: gl.constexpr,
    PARTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    VECTORS: gl.constexpr,
) -> None:
    """COLUMNS rows of the weight: columns of the product, or half of them of gate and half of up.
    Warps share K.
    """
    release_next()
    GROUPS: gl.constexpr = UNITS // 64 // PARTS
    OWN: gl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
    weights_of: gl.constexpr = numbers_layout(PARTS, COLUMNS)
    vectors_of: gl.constexpr = numbers_layout(PARTS, VECTORS)
    sums_of: gl.constexpr = sums_layout(PARTS)
    its = of_rows(weights_of, COLUMNS)
    begin = of_warps(weights_of, PARTS) * (GROUPS * 64)
    its = gl.program_id(0) * OWN + its % OWN + gl.where(its < OWN, 0, columns)
    at = weight + (its.to(gl.int64) * UNITS + begin + in_group(weights_of))
    weights = read_groups(at, AT_ONCE)
    warp = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, sums_of)))[:, None]
    its = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, sums_of)))[None, :]
    its = gl.program_id(0) * OWN + its % OWN + gl.where(its < OWN, 0, columns)
    at_scale = scales
    if SCALE_ROWS > 0:
        at_scale = scales + (its // SCALE_ROWS * (UNITS // 64) + warp * GROUPS)
    elif scales is not None:
        at_scale = scales + (its + warp * 0)
    wait_for_last()
    # Rows that do not exist are the last one again.
    row = gl.minimum(of_rows(vectors_of, VECTORS), rows - 1)
    at_vector = row * UNITS + of_warps(vectors_of, PARTS) * (GROUPS * 64)
    at_vector = x + (at_vector + in_group(vectors_of))
    found = products(at, weights, at_vector, at_scale, GROUPS, AT_ONCE, SCALE_ROWS)
    total = gl.sum(found, axis=0)
    up = total
    if IS_GATED:
        total, up = gl.split(gl.permute(gl.reshape(total, [2, OWN, VECTORS]), (1, 2, 0)))
    column = gl.program_id(0) * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, total.type.layout))
    row = gl.arange(0, VECTORS, layout=gl.SliceLayout(0, total.type.layout))
    if bias is not None:
        total += gl.load(bias + column).to(gl.float32)[:, None]
        if IS_GATED:
            up += gl.load(bias + columns + column).to(gl.float32)[:, None]
    if IS_GATED:
        total = gl.fdiv(total, 1.0 + gl.exp(-total)) * up
    mask = (row < rows)[None, :] & (column >= 0)[:, None]
    to = row[None, :] * columns + column[:, None]
    if residual is not None:
        total += gl.load(residual + to, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + to, total.to(out.dtype.element_ty), mask=mask)
    if tap is not None:
        to = row[None, :] * tap_stride + column[:, None]
        gl.store(tap + to, total.to(tap.dtype.element_ty), mask=mask)
