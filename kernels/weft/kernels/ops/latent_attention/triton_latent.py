"""Attention over paged latents on a GPU.

A program takes some heads of one row and a part of the positions that the row sees. All heads read
the same vectors, whose first elements are values as well. Rows with long contexts have several
parts, which a second launch merges by their sums of exponentials (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention.library_flash_mla import flash_mla
from weft.kernels.ops.latent_attention.spec import NOTHING, LatentSpec
from weft.kernels.ops.pages.triton_entries import (
    FP8_MOST,
    INT8_MOST,
    LEAST_UNIT,
    SCALE_BYTES,
    bytes_of,
    query_in_units,
    weights_in_units,
    widened,
)
from weft.kernels.shared.dependent_launch import (
    launch_options,
    release_next,
    wait_for_last,
)
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2
from weft.kernels.shared.multiprocessors import num_multiprocessors


class LatentLaunchConfig(NamedTuple):
    heads: int
    positions: int
    """Positions of an iteration."""
    warps: int
    stages: int
    """Iterations whose data is being loaded."""


_MAX_PARTS = 32
_MIN_PART = 128
"""Least positions of a part."""
_MANY_ROWS = 8
"""Rows from which on a program takes more heads, which share its loads from the pool."""
_WIDE_POSITIONS = 64
"""Positions that a program of many rows reads in one iteration."""
_TRIED_PARTS, _TRIED_ROUNDS = 4, 3
"""Numbers of parts up to the first are compared in any case, others as long as all programs make at
most so many rounds.
"""
_MERGE_COST = 3e-4
"""What the merge of one part takes, as a share of the time in which a program attends to all of a
row's positions, some thousand.
"""
_REQUESTS_AT_ONCE = 256


def latent_attention(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, step: AttentionMetadata
) -> torch.Tensor:
    if step.latents is not None:
        return flash_mla(q, pool, layer, spec, step.latents.seen)[0]
    return _attend(q, pool, layer, spec, step, None)


def attention_before(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, step: AttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = step.latents and step.latents.before
    if plan is not None:
        out, sums = flash_mla(q, pool, layer, spec, plan)
        return out, torch.where((plan.lens > 0).unsqueeze(1), sums, NOTHING)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return _attend(q, pool, layer, spec, step, sums), sums


def write_scaled(
    latents: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, places: torch.Tensor
) -> None:
    """`write_latents` to a pool in 8 bits."""
    rows, dim = latents.shape
    if rows == 0:
        return
    rest = dim - spec.value_dim
    _write_scaled_kernel[(rows,)](
        latents, pool, places, latents.stride(0), layer, pool.stride(0),
        PAGE_SIZE=pool.shape[-2], WIDTH=spec.value_dim, DIM=dim,
        BLOCK_WIDTH=next_power_of_2(spec.value_dim), BLOCK_REST=next_power_of_2(max(1, rest)),
        num_warps=4, **launch_options(latents.device),
    )  # fmt: skip


def _attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: LatentSpec,
    step: AttentionMetadata,
    sums: torch.Tensor | None,
) -> torch.Tensor:
    """If `sums`, [T, H] float32, are given, it writes them, and rows attend only to the positions
    before the step.
    """
    rows, heads, dim = q.shape
    width, device = spec.value_dim, q.device
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=device)
    if rows == 0:
        return out
    launch = launch_config(q.dtype, rows, heads)
    blocks = cdiv(heads, launch.heads)
    most = max(1, min(_MAX_PARTS, cdiv(step.max_kv_len, _MIN_PART)))
    parts = num_parts(rows * blocks, most, num_multiprocessors(device), launch)
    rest = dim - width
    partial, lse = None, sums
    if parts > 1:
        partial = torch.empty((rows, heads, parts, width), dtype=torch.float32, device=device)
        lse = torch.empty((rows, heads, parts), dtype=torch.float32, device=device)
    options = launch_options(device)
    requests, _ = step.page_table.shape
    _latent_kernel[(rows, blocks, parts)](
        out, partial, lse, q, pool, step.page_table, step.cu_q_lens, step.kv_lens, step.ancestors,
        requests, step.page_table.stride(0), heads, layer, spec.scale, pool.stride(0), parts,
        FIRST=spec.first_position, PAGE_SIZE=pool.shape[-2], WIDTH=width, REST=rest, DIM=dim,
        BLOCK_WIDTH=max(16, next_power_of_2(width)),
        BLOCK_REST=max(16, next_power_of_2(rest)),
        HEADS=launch.heads, POSITIONS=launch.positions, IS_SPLIT=parts > 1,
        IS_BEFORE=sums is not None,
        REQUESTS=min(_REQUESTS_AT_ONCE, next_power_of_2(requests)),
        IS_EXACT=q.dtype == torch.float32, num_warps=launch.warps, num_stages=launch.stages,
        **options,
    )  # fmt: skip
    if parts > 1:
        _merge_latents_kernel[(rows, heads)](
            out, partial, lse, sums, heads, parts, BLOCK_PARTS=next_power_of_2(parts),
            WIDTH=width, BLOCK_WIDTH=next_power_of_2(width), num_warps=4, **options,
        )  # fmt: skip
    return out


def launch_config(dtype: torch.dtype, rows: int, heads: int) -> LatentLaunchConfig:
    """The launch for `rows` rows of `heads` heads."""
    most = max(16, next_power_of_2(heads))
    if dtype == torch.float32:
        return LatentLaunchConfig(16, 16, warps=4, stages=2)
    if rows >= _MANY_ROWS and most > 16:
        return LatentLaunchConfig(min(64, most), _WIDE_POSITIONS, warps=8, stages=2)
    return LatentLaunchConfig(16, 32, warps=4, stages=2)


def num_parts(programs: int, most: int, processors: int, launch: LatentLaunchConfig) -> int:
    """Parts of each row's positions, at most `most`, where one part of all rows takes so many
    programs.
    """
    if launch.positions < _WIDE_POSITIONS:
        return min(most, cdiv(2 * processors, programs))
    # A multiprocessor has shared memory for one such program, so programs run in rounds. Two at
    # least, since rows may have positions of very different number.
    least = min(most, max(1, 2 * processors // programs))
    most = min(most, max(_TRIED_PARTS, _TRIED_ROUNDS * processors // programs))

    def cost(parts: int) -> float:
        return cdiv(programs * parts, processors) / parts + _MERGE_COST * programs * parts

    return min(range(least, most + 1), key=cost)


@triton.jit(do_not_specialize=["layer"])
def _write_scaled_kernel(
    latents: tl.tensor,
    pool: tl.tensor,
    places: tl.tensor,
    row_stride: int,
    layer: int,
    page_stride: int,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """One row's vector."""
    release_next()
    wait_for_last()
    row = tl.program_id(0)
    place = tl.load(places + row)
    offset = (place % PAGE_SIZE).to(tl.int32)
    at = pool + place // PAGE_SIZE * page_stride + layer * PAGE_SIZE * (DIM + SCALE_BYTES)
    given = latents + row.to(tl.int64) * row_stride
    column = tl.arange(0, BLOCK_WIDTH)
    other = WIDTH + tl.arange(0, BLOCK_REST)
    IS_INT8: tl.constexpr = pool.dtype.element_ty == tl.int8
    value = tl.load(given + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    rest = tl.load(given + other, mask=other < DIM, other=0.0).to(tl.float32)
    value_bits, value_scale = _scale_above(value, IS_INT8)
    rest_bits, rest_scale = _scale_above(rest, IS_INT8)
    of_row = at + offset * DIM
    numbers = bytes_of(value[None, :], value_scale[None], IS_INT8)
    tl.store(of_row + column[None, :], numbers, mask=(column < WIDTH)[None, :])
    numbers = bytes_of(rest[None, :], rest_scale[None], IS_INT8)
    tl.store(of_row + other[None, :], numbers, mask=(other < DIM)[None, :])
    scale_at = (at + PAGE_SIZE * DIM + offset * SCALE_BYTES).to(tl.pointer_type(tl.int32))
    tl.store(scale_at, value_bits | (rest_bits << 16))


@triton.jit
def _scale_above(values: tl.tensor, IS_INT8: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The bits of a vector's scale in bfloat16, rounded up, and the largest magnitude that it
    allows.
    """
    LARGEST: tl.constexpr = INT8_MOST if IS_INT8 else FP8_MOST
    # 0, or NaN where a value is not finite, since the largest magnitude ignores NaN.
    strange = tl.sum(values - values, axis=0)
    # Divided exactly: a scale that is a little too large would be rounded up to the next one.
    scale = tl.div_rn(tl.max(tl.abs(values), axis=0), LARGEST) + strange
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(scale == scale, bits, 0x7FC0)
    return bits, (bits << 16).to(tl.float32, bitcast=True) * LARGEST


@triton.jit(do_not_specialize=["requests", "table_stride", "layer", "parts"])
def _latent_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    ancestors: tl.tensor,
    requests: int,
    table_stride: int,
    heads: int,
    layer: int,
    scale: float,
    page_stride: int,
    parts: int,
    FIRST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_BEFORE: tl.constexpr,
    REQUESTS: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """HEADS heads of one row, for one part of the positions that the row sees."""
    release_next()
    wait_for_last()
    row = tl.program_id(0)
    request = tl.zeros([], tl.int32)
    for start in range(0, requests, REQUESTS):
        number = start + tl.arange(0, REQUESTS)
        end_row = tl.load(cu_q_lens + 1 + number, mask=number < requests, other=0x7FFFFFFF)
        request += tl.sum((end_row <= row).to(tl.int32), axis=0)
    # Rows of no request read the last request's pages.
    request = tl.minimum(request, requests - 1)
    first_row = tl.load(cu_q_lens + request)
    kv_len = tl.load(kv_lens + request)
    root = kv_len - (tl.load(cu_q_lens + request + 1) - first_row)
    # Rows of no request have no positions of their own.
    seen = root if IS_BEFORE else tl.minimum(root + (row - first_row) + 1, kv_len)
    word = tl.full([], -1, tl.int64)
    if ancestors is not None:
        word = tl.load(ancestors + row)
    part_size = tl.cdiv(tl.cdiv(seen, parts), POSITIONS) * POSITIONS
    begin = tl.program_id(2) * part_size
    end = tl.minimum(seen, begin + part_size)

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < heads
    column = tl.arange(0, BLOCK_WIDTH)
    other = tl.arange(0, BLOCK_REST)
    at = q + (row.to(tl.int64) * heads + head)[:, None] * DIM
    is_value = column < WIDTH
    is_rest = other < REST
    asked = tl.load(at + column[None, :], mask=is_head[:, None] & is_value[None, :], other=0)
    asked_rest = tl.load(
        at + WIDTH + other[None, :], mask=is_head[:, None] & is_rest[None, :], other=0
    )

    IS_SCALED: tl.constexpr = pool.dtype.element_ty.is_int()
    KEPT: tl.constexpr = DIM + (SCALE_BYTES if IS_SCALED else 0)
    unit = LEAST_UNIT
    if IS_SCALED:
        asked, unit_of_asked = query_in_units(asked)
        asked_rest, unit_of_rest = query_in_units(asked_rest)

    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, BLOCK_WIDTH], tl.float32)
    table = page_table + request.to(tl.int64) * table_stride
    place = tl.arange(0, POSITIONS)
    for start in range(begin, end, POSITIONS):
        position = start + place
        exists = (position < end) & (position >= FIRST)
        page = tl.load(table + position // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        of_layer = pool + page * page_stride + layer * PAGE_SIZE * KEPT
        its = (of_layer + position % PAGE_SIZE * DIM)[:, None]
        in_values = exists[:, None] & is_value[None, :]
        values = tl.load(its + column[None, :], mask=in_values, other=0)
        in_rest = exists[:, None] & is_rest[None, :]
        rest = tl.load(its + WIDTH + other[None, :], mask=in_rest, other=0)
        if IS_SCALED:
            scale_at = of_layer + PAGE_SIZE * DIM + position % PAGE_SIZE * SCALE_BYTES
            both = tl.load(scale_at.to(tl.pointer_type(tl.int32)), mask=exists, other=0)
            value_scale = (both << 16).to(tl.float32, bitcast=True)
            rest_scale = ((both >> 16) << 16).to(tl.float32, bitcast=True)
            values = widened(values, asked.dtype, True)
            rest = widened(rest, asked.dtype)
            scores = tl.dot(asked, tl.trans(values), input_precision="ieee")
            scores *= (value_scale * unit_of_asked)[None, :]
            of_rest = tl.dot(asked_rest, tl.trans(rest), input_precision="ieee")
            scores += of_rest * (rest_scale * unit_of_rest)[None, :]
        elif IS_EXACT:
            scores = tl.dot(asked, tl.trans(values), input_precision="ieee")
            scores = tl.dot(asked_rest, tl.trans(rest), scores, input_precision="ieee")
        else:
            scores = tl.dot(asked, tl.trans(values))
            scores = tl.dot(asked_rest, tl.trans(rest), scores)
        is_seen = exists
        if ancestors is not None:
            own = position - root
            bit = (word >> tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)) & 1
            is_seen = exists & ((own < 0) | (bit == 1))
        scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, axis=1))
        # All positions of a part may be rows that this row does not see.
        level = tl.where(now == float("-inf"), 0.0, now)
        shrunk = tl.exp(highest - level)
        power = tl.exp(scores - level[:, None])
        total = total * shrunk + tl.sum(power, axis=1)
        if IS_SCALED:
            power, shrunk, unit = weights_in_units(power, value_scale, shrunk, unit)
        mixed = mixed * shrunk[:, None]
        if IS_EXACT:
            mixed = tl.dot(power, values, mixed, input_precision="ieee")
        else:
            mixed = tl.dot(power.to(values.dtype), values, mixed)
        highest = now
    mask = is_head[:, None] & is_value[None, :]
    if IS_SCALED:
        mixed = mixed * unit
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    of_row = row.to(tl.int64) * heads + head
    of_part = of_row * parts + tl.program_id(2)
    if not IS_SPLIT:
        at = out + of_row[:, None] * WIDTH + column[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + of_part[:, None] * WIDTH + column[None, :], mixed, mask=mask)
    if lse is not None:
        sums = tl.where(total > 0.0, highest + tl.log(tl.where(total > 0.0, total, 1.0)), -1e38)
        tl.store(lse + of_part, sums, mask=is_head)


@triton.jit(do_not_specialize=["parts"])
def _merge_latents_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    all_sums: tl.tensor,
    heads: int,
    parts: int,
    BLOCK_PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    """Merges the parts of one head of one row."""
    release_next()
    wait_for_last()
    at = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    part = tl.arange(0, BLOCK_PARTS)
    column = tl.arange(0, BLOCK_WIDTH)
    sums = tl.load(lse + at * parts + part, mask=part < parts, other=-1e38)
    highest = tl.max(sums, axis=0)
    share = tl.exp(sums - highest)
    share = tl.where(part < parts, share, 0.0)
    total_share = tl.sum(share, axis=0)
    if all_sums is not None:
        tl.store(all_sums + at, highest + tl.log(total_share))
    share = share / total_share
    mask = column < WIDTH
    of_parts = partial + (at * parts + part)[:, None] * WIDTH + column[None, :]
    given = tl.load(of_parts, mask=(part < parts)[:, None] & mask[None, :], other=0.0)
    total = tl.sum(given * share[:, None], axis=0)
    tl.store(out + at * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)
