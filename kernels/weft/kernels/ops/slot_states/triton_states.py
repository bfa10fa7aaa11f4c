"""`weft.kernels.ops.slot_states` on a GPU.

A row adds the product of its key and an update to a head's state; the ring keeps both (arXiv
2412.06464, equation 10 unrolled). So the product of a key or query with the state is its product
with the block, plus its products with the ring's keys times their updates. The state itself is
computed only where a block is written. One launch convolves rows and one computes the products with
the ring's keys. In the last launch a program has some values of one head of one request, and reads
its part of the block once for all rows. For gated delta nets `triton_delta` does the first two in
one launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.slot_states.spec import Channels, HeadForm, LayerMemory
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2
from weft.kernels.shared.strided import Strided

_TILES = {1: (32, 4, 128), 16: (64, 2, 32)}
"""Values of a program, its warps, and keys of a block that it multiplies at once, by the least
number of requests. For 256 requests on an H200 the last entry takes 222 us, (128, 4, 32) 258, (32,
2, 32) 280 and (64, 2, 64) 365 (bench/gpu_hybrid.py).
"""
SHARE_ROWS = 16
"""Rows of the ring whose products are taken at once."""
_STAGES = 3
"""Stages of the loop over keys: Triton loads the keys of later iterations ahead."""
_PRECISION = "tf32x3"
"""Blocks are in float32; rounding them to TF32 would lose more than models in bfloat16 do."""
_REGISTERS = 128
"""Registers of a thread; with more, fewer programs would load at the same time."""
_CHANNELS = 1024
"""Channels of a program."""


class StatesForm(NamedTuple):
    """What kernels know of a layer's heads when they are compiled."""

    ring_rows: int
    heads: int
    shared: int
    """Heads that share a head of keys."""
    key_dim: int
    """Dk."""
    value_dim: int
    """Dv. It is not called `values`, which tuples in Triton's kernels have already."""
    block_keys: int
    """Elements of a program for a key."""
    rows: int
    """Rows of the ring whose products are read at once."""
    is_unit: bool
    by_key: bool
    """Whether each element of a key has a decay."""

    @classmethod
    def of(cls, form: HeadForm, ring_rows: int, *, by_key: bool) -> StatesForm:
        return cls(
            ring_rows, form.heads, form.shared, form.key_dim, form.value_dim,
            max(16, next_power_of_2(form.key_dim)), SHARE_ROWS, form.is_unit, by_key,
        )  # fmt: skip


class Shares(NamedTuple):
    """What `_shares_kernel` computes for the launch that reads blocks."""

    shares: torch.Tensor
    """[R, ring rows, H, 2, ring rows in whole `SHARE_ROWS`] float32."""
    factors: torch.Tensor
    """[R, ring rows, H, 4] float32."""
    decays: torch.Tensor | None = None
    """[R, ring rows, H, Dk in a power of 2] float32; None: decays are not by key."""

    @classmethod
    def empty(cls, mixed: torch.Tensor, heads: int, block_keys: int = 0) -> Shares:
        """Memory for rows [R, ring rows, channels] of `heads` heads; with `block_keys` for decays
        by key.
        """
        sizes = *mixed.shape[:2], heads
        whole = cdiv(mixed.shape[1], SHARE_ROWS) * SHARE_ROWS
        shares = mixed.new_empty((*sizes, 2, whole), dtype=torch.float32)
        factors = mixed.new_empty((*sizes, 4), dtype=torch.float32)
        decays = mixed.new_empty((*sizes, block_keys), dtype=torch.float32) if block_keys else None
        return cls(shares, factors, decays)


def plan(
    slots: torch.Tensor,
    cu_q_lens: torch.Tensor,
    positions: torch.Tensor,
    borders: torch.Tensor,
    ends: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """The plan of `weft.kernels.ops.slot_states.plan_slots`, [R, 9]."""
    count = slots.shape[0]
    made = torch.empty((count, 9), dtype=torch.int64, device=slots.device)
    _plan_kernel[(count,)](
        *(slots, cu_q_lens, positions, borders, ends, blocks, made),
        PAGE_SIZE=page_size, num_warps=1,
    )  # fmt: skip
    return made


def step_heads(
    form: HeadForm, plan: torch.Tensor, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    new, gate, *beta = (part if part.stride(-1) == 1 else part.contiguous() for part in inputs)
    ring, ring_gate, *ring_beta = memory.rings
    keys, by_key = memory.found[0], gate.dim() == 3
    requests, rows, channels = plan.shape[0], ring.shape[1], new.shape[1]
    mixed, tails = new.new_empty((requests, rows, channels)), memory.blocks[1]
    _convolve(form.conv, form.bias, plan, (ring, tails), new, mixed, form.in_tails, for_heads=True)
    known = StatesForm.of(form, rows, by_key=by_key)
    found = Shares.empty(mixed, form.heads, known.block_keys if by_key else 0)
    _shares_kernel[(requests * form.heads,)](
        plan, mixed, gate, beta[0] if beta else None, Strided.of(ring_gate),
        Strided.of(ring_beta[0]) if beta else None, Strided.of(keys), form.rates, found, channels,
        gate.stride(0), beta[0].stride(0) if beta else 0, form.scale, form.queries, form.keys,
        FORM=known, num_warps=1, num_stages=1, **launch_options(new.device),
    )  # fmt: skip
    return read_blocks(form, plan, memory, mixed, found, len(new))


def read_blocks(
    form: HeadForm,
    plan: torch.Tensor,
    memory: LayerMemory,
    mixed: torch.Tensor,
    found: Shares,
    count: int,
) -> torch.Tensor:
    """What rows read in the states, [count, H, Dv]; writes updates and blocks.

    Args:
        plan: [R, 9].
        memory: Rings must have the new rows.
        mixed: [R, ring rows, channels]: convolved rows that heads have not taken.
        found: The rows' products with the ring's keys.
    """
    (states, _), (keys, updates) = memory.blocks, memory.found
    _, ring_gate, *ring_beta = memory.rings
    requests, rows, channels = mixed.shape
    out = mixed.new_empty((count, form.heads, form.value_dim))
    values, warps, tile = _TILES[max(least for least in _TILES if least <= max(1, requests))]
    values = min(values, max(16, next_power_of_2(form.value_dim)))
    known = StatesForm.of(form, rows, by_key=found.decays is not None)
    _heads_kernel[(requests * form.heads, cdiv(form.value_dim, values))](
        plan, mixed, Strided.of(ring_gate), Strided.of(ring_beta[0]) if ring_beta else None,
        Strided.of(keys), Strided.of(updates), states, form.rates, form.skips, found, out, count,
        channels, states.stride(0), form.queries, form.keys, form.values, FORM=known,
        BLOCK_VALUES=values, TILE=min(tile, known.block_keys),
        PRECISION="ieee" if mixed.dtype == torch.float32 else _PRECISION, STAGES=_STAGES,
        num_warps=warps, num_stages=1, maxnreg=_REGISTERS, **launch_options(mixed.device),
    )  # fmt: skip
    return out


def step_conv(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: torch.Tensor,
    memory: LayerMemory,
    x: torch.Tensor,
) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    (tails,), (ring,) = memory.blocks, memory.rings
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _convolve(weight, bias, plan, (ring, tails), x, out, None, for_heads=False)
    return out


def _convolve(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: torch.Tensor,
    memory: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    out: torch.Tensor,
    in_tails: torch.Tensor | None,
    *,
    for_heads: bool,
) -> None:
    (ring, tails), channels = memory, x.shape[1]
    _conv_kernel[(plan.shape[0], cdiv(channels, _CHANNELS))](
        plan, x, Strided.of(ring), tails, weight, bias, in_tails, out, x.stride(0), tails.stride(0),
        channels,
        RING_ROWS=ring.shape[1], TAPS=weight.shape[0], FOR_HEADS=for_heads, BLOCK=_CHANNELS,
        num_warps=4, **launch_options(x.device),
    )  # fmt: skip


@triton.jit
def _plan_kernel(
    slots: tl.tensor,
    cu_q_lens: tl.tensor,
    positions: tl.tensor,
    borders: tl.tensor,
    ends: tl.tensor,
    blocks: tl.tensor,
    made: tl.tensor,
    PAGE_SIZE: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    first = tl.load(cu_q_lens + request).to(tl.int64)
    count = tl.load(cu_q_lens + request + 1).to(tl.int64) - first
    is_real = count > 0
    start = tl.load(positions + first, mask=is_real, other=0)
    before = tl.load(borders + slot, mask=is_real, other=0)
    after = (start + 1) // PAGE_SIZE * PAGE_SIZE
    own = blocks + request * 3
    old = tl.load(own + before // PAGE_SIZE % 3, mask=before > 0, other=0)
    new = tl.load(own + after // PAGE_SIZE % 3)
    is_new = (after > before) & (new > 0)
    tl.store(borders + slot, after, mask=is_new)
    # Rows from the start on were drafts that were not accepted.
    found = tl.minimum(tl.load(ends + slot, mask=is_real, other=0), start)
    tl.store(ends + slot, start + count, mask=is_real)
    to = made + request * 9
    tl.store(to, slot)
    tl.store(to + 1, first)
    tl.store(to + 2, count)
    tl.store(to + 3, start)
    tl.store(to + 4, before)
    tl.store(to + 5, old)
    tl.store(to + 6, tl.where(is_new, after, -1))
    tl.store(to + 7, new)
    tl.store(to + 8, tl.maximum(found, before))


@triton.jit
def _input(
    inputs: tl.tuple,
    position: tl.tensor,
    channel: tl.tensor,
    in_tail: tl.tensor,
    mask: tl.tensor,
    RING_ROWS: tl.constexpr,
    BEFORE: tl.constexpr,
) -> tl.tensor:
    """The convolution's input at a position: from a new row, the ring, or the block.

    Args:
        inputs: The request's new rows, the slot's ring, the block's tail, the strides of the first
            two, the first new position, and the border.
    """
    new, ring, tail, new_row, ring_row, start, border = inputs
    at = position + channel * 0
    own = new + (at - start) * new_row + channel
    old = ring + at % RING_ROWS * ring_row + channel
    place = at - border + BEFORE
    found = tl.load(own, mask=mask & (at >= start), other=0.0).to(tl.float32)
    is_old = mask & (at >= border) & (at < start)
    found += tl.load(old, mask=is_old, other=0.0).to(tl.float32)
    is_before = mask & (at < border) & (place >= 0)
    before = tl.load(tail + in_tail * BEFORE + place, mask=is_before, other=0.0)
    return found + before.to(tl.float32)


@triton.jit
def _below(index: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """A constant where blocks fill `SIZE`, so that loads need no masks."""
    found = index < SIZE
    if SIZE % BLOCK == 0:
        found = tl.full((BLOCK,), 1, tl.int1)
    return found


@triton.jit
def _left(
    ring_gates: tl.tensor,
    ring_gate_row: int,
    begin: tl.tensor,
    end: tl.tensor,
    later: tl.tensor,
    rate: tl.tensor,
    gate_at: tl.tensor,
    is_key: tl.tensor,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Logarithms of the decay of the products of ROWS positions from `begin` on, [ROWS, 1] or
    [ROWS, Dk], and of a state before them. Positions from `end` on have no decay; `later` is the
    decay of all positions after these.
    """
    RING_ROWS: tl.constexpr = FORM.ring_rows
    ROWS: tl.constexpr = FORM.rows
    rows = tl.arange(0, ROWS)
    at = begin + rows
    if FORM.by_key:
        old_gates = ring_gates + gate_at[None]
        row_at, is_row = (at % RING_ROWS)[:, None], (at < end)[:, None] & is_key[None]
        gates = tl.load(old_gates + row_at * ring_gate_row, mask=is_row, other=0.0)
        is_next = ((at + 1 < end) & (rows + 1 < ROWS))[:, None] & is_key[None]
        next_at = ((at + 1) % RING_ROWS)[:, None] * ring_gate_row
        next_gates = tl.load(old_gates + next_at, mask=is_next, other=0.0)
        left = later[None] + tl.cumsum(next_gates, axis=0, reverse=True)
    else:
        old_gates = ring_gates + at % RING_ROWS * ring_gate_row + gate_at
        gates = tl.load(old_gates, mask=at < end, other=0.0) * rate
        is_later = rows[None] > rows[:, None]
        left = later + tl.sum(tl.where(is_later, gates[None], 0.0), axis=1)[:, None]
    return left, later + tl.sum(gates, axis=0)


@triton.jit
def _shares_kernel(
    plan: tl.tensor,
    mixed: tl.tensor,
    gates: tl.tensor,
    betas: tl.tensor,
    gate_ring: Strided,
    beta_ring: Strided,
    key_ring: Strided,
    rates: tl.tensor,
    found: Shares,
    channels: int,
    gate_row: int,
    beta_row: int,
    scale: float,
    queries: Channels,
    keys: Channels,
    FORM: tl.constexpr,
) -> None:
    """For each row that a head has not taken, writes three things. `shares`: products of its key
    and of its query with the keys since the border, decayed up to the row. `factors`: factors by
    which the key and the query read the block, and their product with each other. `decays`: the
    decay of the block for each key; if decays are not by key, factors include it. It also puts
    keys, gates and betas into the ring.
    """
    RING_ROWS: tl.constexpr = FORM.ring_rows
    HEADS: tl.constexpr = FORM.heads
    KEYS: tl.constexpr = FORM.key_dim
    BLOCK_KEYS: tl.constexpr = FORM.block_keys
    ROWS: tl.constexpr = FORM.rows
    release_next()
    wait_for_last()
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    given, of_keys = plan + request * 9, head // FORM.shared
    slot, first, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    start, border, known = tl.load(given + 3), tl.load(given + 4), tl.load(given + 8)
    end = tl.where(count > 0, start + count, border)
    element, rows = tl.arange(0, BLOCK_KEYS), tl.arange(0, ROWS)
    is_key = _below(element, KEYS, BLOCK_KEYS)
    WIDTH: tl.constexpr = (RING_ROWS + ROWS - 1) // ROWS * ROWS
    ring_keys = key_ring.data + (slot * key_ring.first + of_keys * KEYS + element)
    ring_gates = gate_ring.data + slot * gate_ring.first
    rate, gate_at, is_gate = 1.0, head, head >= 0
    if rates is not None:
        rate = tl.load(rates + head)
    if FORM.by_key:
        gate_at, is_gate = head * KEYS + element, is_key
    for position in range(known, end):
        behind, ring_at = position - start, position % RING_ROWS
        is_new = behind >= 0
        row = mixed + (request * RING_ROWS + ring_at) * channels
        key_at = row + keys.first + of_keys * keys.step + element
        query_at = row + queries.first + of_keys * queries.step + element
        key = tl.load(key_at, mask=is_key, other=0.0)
        query = tl.load(query_at, mask=is_key, other=0.0)
        key, query = key.to(tl.float32), query.to(tl.float32)
        of_key, of_query = 1.0, scale
        if FORM.is_unit:
            of_key = tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
            of_query = scale * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
        key, query = key * of_key, query * of_query
        # All heads of a key write the same values, since each head reads them in its next row.
        key_to = ring_keys + ring_at * key_ring.second
        tl.store(key_to, key.to(ring_keys.dtype.element_ty), mask=is_key)
        if is_new:
            gate = tl.load(gates + (first + behind) * gate_row + gate_at, mask=is_gate, other=0.0)
            tl.store(ring_gates + ring_at * gate_ring.second + gate_at, gate, mask=is_gate)
            if betas is not None:
                beta_to = (
                    beta_ring.data + slot * beta_ring.first + ring_at * beta_ring.second + head
                )
                tl.store(beta_to, tl.load(betas + (first + behind) * beta_row + head))
        tl.debug_barrier()
        gate = tl.load(ring_gates + ring_at * gate_ring.second + gate_at, mask=is_gate, other=0.0)
        left = gate * rate
        of_row = (request * RING_ROWS + ring_at) * HEADS + head
        for back in range(0, tl.cdiv(position - border, ROWS)):
            chunk = (tl.cdiv(position - border, ROWS) - 1 - back) * ROWS
            at = border + chunk + rows
            row_at, is_row = (at % RING_ROWS)[:, None], (at < position)[:, None] & is_key[None]
            old = tl.load(ring_keys[None] + row_at * key_ring.second, mask=is_row, other=0.0)
            later, left = _left(ring_gates, gate_ring.second, border + chunk, position, left, rate,
                                gate_at, is_key, FORM)  # fmt: skip
            old = old.to(tl.float32) * tl.exp(later)
            share_to = found.shares + of_row * 2 * WIDTH + chunk + rows
            tl.store(share_to, tl.sum(old * key[None], axis=1))
            tl.store(share_to + WIDTH, tl.sum(old * query[None], axis=1))
        if FORM.by_key:
            tl.store(found.decays + of_row * BLOCK_KEYS + element, tl.exp(left))
        else:
            of_key *= tl.exp(left)
            of_query *= tl.exp(left)
        factor_to = found.factors + of_row * 4
        tl.store(factor_to, of_key)
        tl.store(factor_to + 1, of_query)
        tl.store(factor_to + 2, tl.sum(key * query, axis=0))


@triton.jit(do_not_specialize=["count_out"])
def _heads_kernel(
    plan: tl.tensor,
    mixed: tl.tensor,
    gate_ring: Strided,
    beta_ring: Strided,
    key_ring: Strided,
    update_ring: Strided,
    states: tl.tensor,
    rates: tl.tensor,
    skips: tl.tensor,
    found_before: Shares,
    out: tl.tensor,
    count_out: int,
    channels: int,
    state_block: int,
    queries: Channels,
    keys: Channels,
    values: Channels,
    FORM: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    RING_ROWS: tl.constexpr = FORM.ring_rows
    HEADS: tl.constexpr = FORM.heads
    SHARED: tl.constexpr = FORM.shared
    KEYS: tl.constexpr = FORM.key_dim
    VALUES: tl.constexpr = FORM.value_dim
    ROWS: tl.constexpr = FORM.rows
    release_next()
    wait_for_last()
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    tile, of_keys = tl.program_id(1), head // SHARED
    given = plan + request * 9
    slot, first, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    start, border, block = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    border_to, block_to, known = tl.load(given + 6), tl.load(given + 7), tl.load(given + 8)
    requests = tl.num_programs(0) // HEADS
    last = plan + (requests - 1) * 9
    count_rows = tl.load(last + 1) + tl.load(last + 2)
    end = tl.where(count > 0, start + count, border)
    rows, of_tile = tl.arange(0, ROWS), tl.arange(0, TILE)
    value = tile * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_value = _below(value, VALUES, BLOCK_VALUES)
    states += head * KEYS * VALUES + value[None]
    WIDTH: tl.constexpr = (RING_ROWS + ROWS - 1) // ROWS * ROWS
    ring_updates = update_ring.data + (slot * update_ring.first + head * VALUES + value)
    ring_gates = gate_ring.data + slot * gate_ring.first
    for idle in range(count_rows + request, count_out, requests):
        nothing = tl.zeros((BLOCK_VALUES,), out.dtype.element_ty)
        tl.store(out + (idle * HEADS + head) * VALUES + value, nothing, mask=is_value)
    out += (first * HEADS + head) * VALUES + value
    # Keys and queries of some rows read the block at once.
    for begin in range(known, end, ROWS // 2):
        at, is_query = begin + rows // 2, rows % 2 == 1
        own = request * RING_ROWS + at % RING_ROWS
        asked_at = own * channels
        key_at, query_at = keys.first + of_keys * keys.step, queries.first + of_keys * queries.step
        asked_at += tl.where(is_query, query_at, key_at)
        products = tl.zeros((ROWS, BLOCK_VALUES), tl.float32)
        for first_key in tl.range(0, KEYS, TILE, num_stages=STAGES):
            element = first_key + of_tile
            is_key = _below(element, KEYS, TILE)
            both = is_key[:, None] & is_value[None]
            old = states + block * state_block + element[:, None] * VALUES
            state = tl.load(old, mask=both, other=0.0)
            is_row = (at < end)[:, None] & is_key[None]
            asked = tl.load(mixed + asked_at[:, None] + element[None], mask=is_row, other=0.0)
            asked = asked.to(tl.float32)
            if FORM.by_key:
                of_row = ((own * HEADS + head) * FORM.block_keys)[:, None] + element[None]
                asked *= tl.load(found_before.decays + of_row, mask=is_row, other=0.0)
            products = tl.dot(asked, state, products, input_precision=PRECISION)
        for position in range(begin, tl.minimum(begin + ROWS // 2, end)):
            ring_at = position % RING_ROWS
            row = mixed + (request * RING_ROWS + ring_at) * channels
            of_value = values.first + of_keys * values.step + head % SHARED * VALUES + value
            taken = tl.load(row + of_value, mask=is_value, other=0.0).to(tl.float32)
            of_row = (request * RING_ROWS + ring_at) * HEADS + head
            factor = found_before.factors + of_row * 4
            # The product with the state is that with the block plus those with all later rows.
            mine = rows - 2 * (position - begin)
            found = tl.sum(tl.where((mine == 0)[:, None], products, 0.0), axis=0)
            made = tl.sum(tl.where((mine == 1)[:, None], products, 0.0), axis=0)
            found *= tl.load(factor)
            made *= tl.load(factor + 1)
            for chunk in range(0, position - border, ROWS):
                old_at = border + chunk + rows
                is_row = (old_at < position)[:, None] & is_value[None]
                added = ring_updates[None] + (old_at % RING_ROWS)[:, None] * update_ring.second
                added = tl.load(added, mask=is_row, other=0.0).to(tl.float32)
                share = found_before.shares + of_row * 2 * WIDTH + chunk + rows
                found += tl.sum(tl.load(share)[:, None] * added, axis=0)
                made += tl.sum(tl.load(share + WIDTH)[:, None] * added, axis=0)
            update = taken
            if beta_ring is not None:
                beta_at = (
                    beta_ring.data + slot * beta_ring.first + ring_at * beta_ring.second + head
                )
                beta = tl.load(beta_at)
                update = (taken - found) * beta
            if rates is not None:
                update *= tl.load(ring_gates + ring_at * gate_ring.second + head)
            update_to = ring_updates + ring_at * update_ring.second
            tl.store(update_to, update.to(update_ring.data.dtype.element_ty), mask=is_value)
            if position >= start:
                made += tl.load(factor + 2) * update
                if skips is not None:
                    made += taken * tl.load(skips + head)
                out_to = out + (position - start) * HEADS * VALUES
                tl.store(out_to, made.to(out.dtype.element_ty), mask=is_value)
            # The next row reads what all threads have stored.
            tl.debug_barrier()
    if border_to >= 0:
        rate = 1.0
        if rates is not None:
            rate = tl.load(rates + head)
        for first_key in range(0, KEYS, TILE):
            element = first_key + of_tile
            is_key = _below(element, KEYS, TILE)
            both = is_key[:, None] & is_value[None]
            place = element[:, None] * VALUES
            state = tl.load(states + block * state_block + place, mask=both, other=0.0)
            gate_at, later = head, 0.0
            if FORM.by_key:
                gate_at, later = head * KEYS + element, element * 0.0
            for chunk in range(border, border_to, ROWS):
                old_at = chunk + rows
                row_at, is_row = (old_at % RING_ROWS)[:, None], (old_at < border_to)[:, None]
                key = key_ring.data + slot * key_ring.first + of_keys * KEYS + element[None]
                key = tl.load(key + row_at * key_ring.second, mask=is_row & is_key[None], other=0.0)
                added = ring_updates[None] + row_at * update_ring.second
                added = tl.load(added, mask=is_row & is_value[None], other=0.0).to(tl.float32)
                left, total = _left(ring_gates, gate_ring.second, chunk, border_to, later, rate,
                                    gate_at, is_key, FORM)  # fmt: skip
                key = tl.trans(key.to(tl.float32) * tl.exp(left))
                decay = tl.exp(total)
                if FORM.by_key:
                    state *= decay[:, None]
                else:
                    state *= decay
                state = tl.dot(key, added, state, input_precision=PRECISION)
            tl.store(states + block_to * state_block + place, state, mask=both)


@triton.jit
def _conv_kernel(
    plan: tl.tensor,
    new: tl.tensor,
    own_ring: Strided,
    tails: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    in_tails: tl.tensor,
    out: tl.tensor,
    new_row: int,
    tail_block: int,
    channels: int,
    RING_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    FOR_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Convolves new rows; with `FOR_HEADS` all rows that heads have not taken, with SiLU, into
    their rows of the ring.
    """
    release_next()
    wait_for_last()
    request = tl.program_id(0)
    given = plan + request * 9
    slot, first, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    start, border, block = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    border_to, block_to, begin = tl.load(given + 6), tl.load(given + 7), start
    if FOR_HEADS:
        begin = tl.where(count > 0, tl.load(given + 8), start)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    in_tail = channel
    if in_tails is not None:
        in_tail = tl.load(in_tails + channel, mask=mask, other=0)
    new += first * new_row
    ring, ring_row = own_ring.data + slot * own_ring.first, own_ring.second
    tail = tails + block * tail_block
    inputs = new, ring, tail, new_row, ring_row, start, border
    BEFORE: tl.constexpr = TAPS - 1
    for position in range(begin, start + count):
        total = tl.zeros((BLOCK,), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=mask, other=0.0)
        for back in tl.static_range(TAPS):
            raw = _input(inputs, position - back, channel, in_tail, mask, RING_ROWS, BEFORE)
            factor = weight + (TAPS - 1 - back) * channels + channel
            total += raw * tl.load(factor, mask=mask, other=0.0)
        behind = position - start
        row = first + behind
        if FOR_HEADS:
            total *= tl.sigmoid(total)
            row = request * RING_ROWS + position % RING_ROWS
        tl.store(out + row * channels + channel, total.to(out.dtype.element_ty), mask=mask)
        is_new = mask & (channel * 0 + behind >= 0)
        raw = tl.load(new + behind * new_row + channel, mask=is_new, other=0.0)
        kept = ring + position % RING_ROWS * ring_row + channel
        tl.store(kept, raw.to(ring.dtype.element_ty), mask=is_new)
    if border_to >= 0:
        for index in tl.static_range(BEFORE):
            position = border_to - BEFORE + index
            raw = _input(inputs, position, channel, in_tail, mask, RING_ROWS, BEFORE)
            to = tails + block_to * tail_block + in_tail * BEFORE + index
            tl.store(to, raw.to(tails.dtype.element_ty), mask=mask)
