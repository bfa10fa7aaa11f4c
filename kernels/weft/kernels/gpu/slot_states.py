"""`weft.kernels.slot_states` on a GPU.

A launch convolves rows. Then a program has some values of one head of one request, whose part of
the state it keeps in registers. A row adds the product of its key and an update to the state; both
are kept in the ring, so that later steps add them without computing them again (arXiv 2412.06464,
equation 10 unrolled). Where a request brings one row and writes no block, the state is not made:
what a vector finds in it is what it finds in the block, and its products with the ring's keys times
their updates. A launch before finds these products for all values of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from weft.kernels.slot_states import HeadForm, LayerMemory

_TILES = {1: (32, 4), 16: (16, 1), 64: (32, 2)}
"""Values of a program and its warps, from so many requests on. For 256 requests on an H100 one warp
takes 353 us, two take 319 and four 375 (bench/gpu_hybrid.py).
"""
_ROWS = 16
"""Most rows of a ring through which a row finds its state without making it."""
_CHANNELS = 256
"""Channels of a program."""


def plan(
    slots: torch.Tensor,
    cu_q_lens: torch.Tensor,
    positions: torch.Tensor,
    borders: torch.Tensor,
    ends: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """The plan of `weft.kernels.slot_states.plan_slots`, [R, 9]."""
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
    """`weft.kernels.slot_states.step_heads` for CUDA tensors."""
    new, gate, *beta = (part if part.stride(-1) == 1 else part.contiguous() for part in inputs)
    states, tails = memory.blocks
    ring, ring_gate, *ring_beta = memory.rings
    keys, updates = memory.found
    requests, channels = plan.shape[0], new.shape[1]
    mixed = new.new_empty((requests, ring.shape[1], channels))
    _convolve(form.conv, form.bias, plan, (ring, tails), new, mixed, form.in_tails, for_heads=True)
    out = new.new_zeros((new.shape[0], form.heads, form.value_dim))
    values, warps = _TILES[max(count for count in _TILES if count <= max(1, requests))]
    values = min(values, triton.next_power_of_2(form.value_dim))
    sizes = requests, form.heads
    block_keys = triton.next_power_of_2(form.key_dim)
    asked = new.new_empty((*sizes, 2, block_keys), dtype=torch.float32)
    shares = new.new_empty((*sizes, 3, _ROWS), dtype=torch.float32)
    _shares_kernel[(requests * form.heads,)](
        *(plan, mixed, gate, ring_gate, keys, form.rates, asked, shares),
        *(channels, gate.stride(0), ring_gate.stride(0), ring_gate.stride(1)),
        *(keys.stride(0), keys.stride(1), form.scale, *form.queries, *form.keys),
        RING_ROWS=ring.shape[1], HEADS=form.heads, SHARED=form.shared, KEYS=form.key_dim,
        BLOCK_KEYS=block_keys, ROWS=_ROWS, IS_UNIT=form.is_unit, BY_KEY=gate.dim() == 3,
        num_warps=1,
    )  # fmt: skip
    grid = (requests * form.heads, triton.cdiv(form.value_dim, values))
    _heads_kernel[grid](
        *(plan, mixed, gate, beta[0] if beta else None),
        *(ring_gate, ring_beta[0] if ring_beta else None),
        *(keys, updates, states, form.rates, form.skips, asked, shares, out),
        *(channels, gate.stride(0), beta[0].stride(0) if beta else 0),
        *(ring_gate.stride(0), ring_gate.stride(1)),
        *((ring_beta[0].stride(0), ring_beta[0].stride(1)) if ring_beta else (0, 0)),
        *(keys.stride(0), keys.stride(1), updates.stride(0), updates.stride(1)),
        *(states.stride(0), form.scale, *form.queries, *form.keys, *form.values),
        RING_ROWS=ring.shape[1], HEADS=form.heads, SHARED=form.shared, KEYS=form.key_dim,
        VALUES=form.value_dim, BLOCK_KEYS=block_keys,
        BLOCK_VALUES=values, ROWS=_ROWS, IS_UNIT=form.is_unit, BY_KEY=gate.dim() == 3,
        num_warps=warps,
    )  # fmt: skip
    return out


def step_conv(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: torch.Tensor,
    memory: LayerMemory,
    x: torch.Tensor,
) -> torch.Tensor:
    """`weft.kernels.slot_states.step_conv` for CUDA tensors."""
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
    _conv_kernel[(plan.shape[0], triton.cdiv(channels, _CHANNELS))](
        *(plan, x, ring, tails, weight, bias, in_tails, out),
        *(x.stride(0), ring.stride(0), ring.stride(1), tails.stride(0), channels),
        RING_ROWS=ring.shape[1], TAPS=weight.shape[0], FOR_HEADS=for_heads, BLOCK=_CHANNELS,
        num_warps=4,
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
    # Rows behind the start were drafts that were not accepted.
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
    new: tl.tensor,
    ring: tl.tensor,
    tail: tl.tensor,
    new_row: int,
    ring_row: int,
    position: tl.tensor,
    start: tl.tensor,
    border: tl.tensor,
    channel: tl.tensor,
    in_tail: tl.tensor,
    mask: tl.tensor,
    RING_ROWS: tl.constexpr,
    BEFORE: tl.constexpr,
) -> tl.tensor:
    """What the convolution reads of a position: of a new row, of the ring, or of the block."""
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
def _decay(
    gates: tl.tensor,
    row: int,
    rate: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    RING_ROWS: tl.constexpr,
    BY_KEY: tl.constexpr,
) -> tl.tensor:
    """The logarithm of the decay of a position in the ring; 0 from `end` on."""
    own = gates + position % RING_ROWS * row
    if BY_KEY:
        found = tl.load(own + at, mask=mask & (at * 0 + position < end), other=0.0)
    else:
        found = tl.load(own + at, mask=position < end, other=0.0) * rate
    return found


@triton.jit
def _added(
    keys: tl.tensor,
    updates: tl.tensor,
    key_row: int,
    update_row: int,
    element: tl.tensor,
    value: tl.tensor,
    is_key: tl.tensor,
    is_value: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    left: tl.tensor,
    RING_ROWS: tl.constexpr,
) -> tl.tensor:
    """What a position in the ring adds to the state, of which the share `left` is left."""
    ring_at = position % RING_ROWS
    is_old = is_key & (element * 0 + position < end)
    key = tl.load(keys + ring_at * key_row + element, mask=is_old, other=0.0).to(tl.float32)
    of_value = is_value & (value * 0 + position < end)
    update = tl.load(updates + ring_at * update_row + value, mask=of_value, other=0.0)
    return (key * left)[:, None] * update.to(tl.float32)[None]


@triton.jit
def _below(index: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Whether indices are below `SIZE`; a constant where blocks fill it, so that loads need no
    masks.
    """
    found = index < SIZE
    if SIZE % BLOCK == 0:
        found = tl.full((BLOCK,), 1, tl.int1)
    return found


@triton.jit
def _is_short(
    count: tl.tensor,
    start: tl.tensor,
    border: tl.tensor,
    border_to: tl.tensor,
    known: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Whether a request brings one row and needs no state but for it, as most do: what the row
    finds in the state is then the sum of what it finds in the block and in the ring's products.
    """
    return (count == 1) & (known == start) & (border_to < 0) & (start - border <= ROWS)


@triton.jit
def _shares_kernel(
    plan: tl.tensor,
    mixed: tl.tensor,
    gates: tl.tensor,
    ring_gates: tl.tensor,
    ring_keys: tl.tensor,
    rates: tl.tensor,
    asked: tl.tensor,
    shares: tl.tensor,
    channels: int,
    gate_row: int,
    gate_slot: int,
    ring_gate_row: int,
    keys_slot: int,
    keys_row: int,
    scale: float,
    q_first: int,
    q_step: int,
    k_first: int,
    k_step: int,
    RING_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_UNIT: tl.constexpr,
    BY_KEY: tl.constexpr,
) -> None:
    """For requests that are short: by which vectors a head's key and query read the block, their
    products with the ring's keys, decayed, and their product with one another (in an element of
    `ROWS`). Puts the row's key and its decays by key into the ring.
    """
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    given, of_keys = plan + request * 9, head // SHARED
    slot, first, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    start, border, known = tl.load(given + 3), tl.load(given + 4), tl.load(given + 8)
    if not _is_short(count, start, border, tl.load(given + 6), known, ROWS):
        return
    element, rows = tl.arange(0, BLOCK_KEYS), tl.arange(0, ROWS)
    is_key = _below(element, KEYS, BLOCK_KEYS)
    own, at = start % RING_ROWS, border + rows
    row = mixed + (request * RING_ROWS + own) * channels
    key = tl.load(row + k_first + of_keys * k_step + element, mask=is_key, other=0.0)
    key = key.to(tl.float32)
    query = tl.load(row + q_first + of_keys * q_step + element, mask=is_key, other=0.0)
    query = query.to(tl.float32)
    ring_keys += slot * keys_slot + of_keys * KEYS + element
    ring_at, is_row = (at % RING_ROWS)[:, None], (at < start)[:, None] & is_key[None]
    old = tl.load(ring_keys[None] + ring_at * keys_row, mask=is_row, other=0.0).to(tl.float32)
    gates += first * gate_row
    ring_gates += slot * gate_slot
    if IS_UNIT:
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
    query *= scale
    alike = tl.sum(query * key, axis=0)
    is_all = is_key & (element * 0 + head % SHARED == 0)
    to = ring_keys + own * keys_row
    tl.store(to, key.to(ring_keys.dtype.element_ty), mask=is_all)
    # A product has decayed by all rows behind its own, up to the new one.
    if BY_KEY:
        gates += head * KEYS + element
        ring_gates += head * KEYS + element
        gate = tl.load(gates, mask=is_key, other=0.0)
        tl.store(ring_gates + own * ring_gate_row, gate, mask=is_key)
        decays = ring_gates[None] + ring_at * ring_gate_row
        total = gate + tl.sum(tl.load(decays, mask=is_row, other=0.0), axis=0)
        is_next = (at + 1 < start)[:, None] & is_key[None]
        decays = ring_gates[None] + ((at + 1) % RING_ROWS)[:, None] * ring_gate_row
        behind = tl.load(decays, mask=is_next, other=0.0)
        left = tl.exp(tl.cumsum(behind, axis=0, reverse=True) + gate[None])
    else:
        rate = 1.0
        if rates is not None:
            rate = tl.load(rates + head)
        gate = tl.load(gates + head) * rate
        decays = ring_gates + head + at % RING_ROWS * ring_gate_row
        behind = tl.load(decays, mask=at < start, other=0.0) * rate
        total = gate + tl.sum(behind, axis=0)
        is_behind = rows[None] > rows[:, None]
        left = tl.exp(tl.sum(tl.where(is_behind, behind[None], 0.0), axis=1) + gate)[:, None]
    old *= left
    asked += tl.program_id(0) * 2 * BLOCK_KEYS + element
    tl.store(asked, key * tl.exp(total))
    tl.store(asked + BLOCK_KEYS, query * tl.exp(total))
    shares += tl.program_id(0) * 3 * ROWS + rows
    tl.store(shares, tl.sum(old * key[None], axis=1))
    tl.store(shares + ROWS, tl.sum(old * query[None], axis=1))
    tl.store(shares + 2 * ROWS, tl.where(rows == 0, alike, 0.0))


@triton.jit
def _heads_kernel(
    plan: tl.tensor,
    mixed: tl.tensor,
    gates: tl.tensor,
    betas: tl.tensor,
    ring_gates: tl.tensor,
    ring_betas: tl.tensor,
    ring_keys: tl.tensor,
    ring_updates: tl.tensor,
    states: tl.tensor,
    rates: tl.tensor,
    skips: tl.tensor,
    asked: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    channels: int,
    gate_row: int,
    beta_row: int,
    gate_slot: int,
    ring_gate_row: int,
    beta_slot: int,
    ring_beta_row: int,
    keys_slot: int,
    keys_row: int,
    updates_slot: int,
    updates_row: int,
    state_block: int,
    scale: float,
    q_first: int,
    q_step: int,
    k_first: int,
    k_step: int,
    v_first: int,
    v_step: int,
    RING_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    IS_UNIT: tl.constexpr,
    BY_KEY: tl.constexpr,
) -> None:
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    tile, of_keys = tl.program_id(1), head // SHARED
    given = plan + request * 9
    slot, first, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    start, border, block = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    border_to, block_to, known = tl.load(given + 6), tl.load(given + 7), tl.load(given + 8)
    end = tl.where(count > 0, start + count, border)
    element = tl.arange(0, BLOCK_KEYS)
    value = tile * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key, is_value = _below(element, KEYS, BLOCK_KEYS), _below(value, VALUES, BLOCK_VALUES)
    both = is_key[:, None] & is_value[None]
    place = head * KEYS * VALUES + element[:, None] * VALUES + value[None]
    state = tl.load(states + block * state_block + place, mask=both, other=0.0)
    # One program of each head of keys stores what all of them have computed.
    is_all = is_key & (element * 0 + tile * SHARED + head % SHARED == 0)
    gates += first * gate_row
    ring_gates += slot * gate_slot
    ring_keys += slot * keys_slot + of_keys * KEYS
    ring_updates += slot * updates_slot + head * VALUES
    mixed += request * RING_ROWS * channels
    rate = 1.0
    if rates is not None:
        rate = tl.load(rates + head)
    if _is_short(count, start, border, border_to, known, ROWS):
        of_head, row_of_ring = request * HEADS + head, start % RING_ROWS
        vectors = asked + of_head * 2 * BLOCK_KEYS + element
        rows = tl.arange(0, ROWS)
        parts, at = shares + of_head * 3 * ROWS + rows, border + rows
        ring_at = ring_updates + (at % RING_ROWS)[:, None] * updates_row + value[None]
        is_row = (at < start)[:, None] & is_value[None]
        added = tl.load(ring_at, mask=is_row, other=0.0).to(tl.float32)
        of_value = v_first + of_keys * v_step + head % SHARED * VALUES + value
        taken = tl.load(mixed + row_of_ring * channels + of_value, mask=is_value, other=0.0)
        taken = taken.to(tl.float32)
        update = taken
        if betas is not None:
            beta = tl.load(betas + first * beta_row + head)
            to = ring_betas + slot * beta_slot + row_of_ring * ring_beta_row + head
            tl.store(to, beta, mask=tile == 0)
            found = tl.sum(state * tl.load(vectors)[:, None], axis=0)
            found += tl.sum(tl.load(parts)[:, None] * added, axis=0)
            update = (taken - found) * beta
        if BY_KEY == 0:
            gate = tl.load(gates + head)
            tl.store(ring_gates + row_of_ring * ring_gate_row + head, gate, mask=tile == 0)
            if rates is not None:
                update *= gate
        made = tl.sum(state * tl.load(vectors + BLOCK_KEYS)[:, None], axis=0)
        made += tl.sum(tl.load(parts + ROWS)[:, None] * added, axis=0)
        made += tl.sum(tl.load(parts + 2 * ROWS), axis=0) * update
        if skips is not None:
            made += taken * tl.load(skips + head)
        to = ring_updates + row_of_ring * updates_row + value
        tl.store(to, update.to(ring_updates.dtype.element_ty), mask=is_value)
        to = out + (first * HEADS + head) * VALUES + value
        tl.store(to, made.to(out.dtype.element_ty), mask=is_value)
        return
    of_gate = head
    if BY_KEY:
        of_gate = head * KEYS + element
    # Keys and updates that earlier steps have found, cut where a block is written.
    is_written = (border_to >= 0) & (border_to <= known)
    begin = border
    for part in range(2):
        stop = tl.where(is_written & (part == 0), border_to, known)
        for at in range(begin, stop, 4):
            gate0 = _decay(ring_gates, ring_gate_row, rate, of_gate, is_key, at, stop,
                           RING_ROWS, BY_KEY)  # fmt: skip
            gate1 = _decay(ring_gates, ring_gate_row, rate, of_gate, is_key, at + 1, stop,
                           RING_ROWS, BY_KEY)  # fmt: skip
            gate2 = _decay(ring_gates, ring_gate_row, rate, of_gate, is_key, at + 2, stop,
                           RING_ROWS, BY_KEY)  # fmt: skip
            gate3 = _decay(ring_gates, ring_gate_row, rate, of_gate, is_key, at + 3, stop,
                           RING_ROWS, BY_KEY)  # fmt: skip
            left2 = gate3
            left1 = gate2 + left2
            left0 = gate1 + left1
            if BY_KEY:
                state *= tl.exp(gate0 + left0)[:, None]
            else:
                state *= tl.exp(gate0 + left0)
            state += _added(ring_keys, ring_updates, keys_row, updates_row, element, value, is_key,
                            is_value, at, stop, tl.exp(left0), RING_ROWS)  # fmt: skip
            state += _added(ring_keys, ring_updates, keys_row, updates_row, element, value, is_key,
                            is_value, at + 1, stop, tl.exp(left1), RING_ROWS)  # fmt: skip
            state += _added(ring_keys, ring_updates, keys_row, updates_row, element, value, is_key,
                            is_value, at + 2, stop, tl.exp(left2), RING_ROWS)  # fmt: skip
            state += _added(ring_keys, ring_updates, keys_row, updates_row, element, value, is_key,
                            is_value, at + 3, stop, 1.0, RING_ROWS)  # fmt: skip
        if is_written & (part == 0):
            tl.store(states + block_to * state_block + place, state, mask=both)
        begin = stop
    for position in range(known, end):
        behind = position - start
        ring_at = position % RING_ROWS
        row = mixed + ring_at * channels
        key = tl.load(row + k_first + of_keys * k_step + element, mask=is_key, other=0.0)
        key = key.to(tl.float32)
        query = tl.load(row + q_first + of_keys * q_step + element, mask=is_key, other=0.0)
        query = query.to(tl.float32)
        of_value = v_first + of_keys * v_step + head % SHARED * VALUES + value
        taken = tl.load(row + of_value, mask=is_value, other=0.0).to(tl.float32)
        if IS_UNIT:
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
        if BY_KEY:
            is_new = is_key & (element * 0 + behind >= 0)
            gate = tl.load(gates + behind * gate_row + of_gate, mask=is_new, other=0.0)
            old = ring_gates + ring_at * ring_gate_row + of_gate
            gate += tl.load(old, mask=is_key & (element * 0 + behind < 0), other=0.0)
            state *= tl.exp(gate)[:, None]
            tl.store(old, gate, mask=is_new & (element * 0 + tile == 0))
        else:
            gate = tl.load(gates + behind * gate_row + head, mask=behind >= 0, other=0.0)
            old = ring_gates + ring_at * ring_gate_row + head
            gate += tl.load(old, mask=behind < 0, other=0.0)
            state *= tl.exp(gate * rate)
            tl.store(old, gate, mask=(behind >= 0) & (tile == 0))
        update = taken
        if betas is not None:
            beta = tl.load(betas + (first + behind) * beta_row + head, mask=behind >= 0, other=0.0)
            old = ring_betas + slot * beta_slot + ring_at * ring_beta_row + head
            beta += tl.load(old, mask=behind < 0, other=0.0)
            tl.store(old, beta, mask=(behind >= 0) & (tile == 0))
            update = (taken - tl.sum(state * key[:, None], axis=0)) * beta
        if rates is not None:
            update *= gate
        to = ring_keys + ring_at * keys_row + element
        tl.store(to, key.to(ring_keys.dtype.element_ty), mask=is_all)
        to = ring_updates + ring_at * updates_row + value
        tl.store(to, update.to(ring_updates.dtype.element_ty), mask=is_value)
        state += key[:, None] * update[None]
        if behind >= 0:
            made = tl.sum(state * (query * scale)[:, None], axis=0)
            if skips is not None:
                made += taken * tl.load(skips + head)
            to = out + ((first + behind) * HEADS + head) * VALUES + value
            tl.store(to, made.to(out.dtype.element_ty), mask=is_value)
        if position + 1 == border_to:
            tl.store(states + block_to * state_block + place, state, mask=both)


@triton.jit
def _conv_kernel(
    plan: tl.tensor,
    new: tl.tensor,
    ring: tl.tensor,
    tails: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    in_tails: tl.tensor,
    out: tl.tensor,
    new_row: int,
    ring_slot: int,
    ring_row: int,
    tail_block: int,
    channels: int,
    RING_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    FOR_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Convolves new rows; `FOR_HEADS` all rows that heads have not taken, with SiLU, into the rows
    that they have in the ring.
    """
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
    ring += slot * ring_slot
    tail = tails + block * tail_block
    BEFORE: tl.constexpr = TAPS - 1
    for position in range(begin, start + count):
        total = tl.zeros((BLOCK,), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=mask, other=0.0)
        for back in tl.static_range(TAPS):
            raw = _input(new, ring, tail, new_row, ring_row, position - back, start, border,
                         channel, in_tail, mask, RING_ROWS, BEFORE)  # fmt: skip
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
            raw = _input(new, ring, tail, new_row, ring_row, border_to - BEFORE + index, start,
                         border, channel, in_tail, mask, RING_ROWS, BEFORE)  # fmt: skip
            to = tails + block_to * tail_block + in_tail * BEFORE + index
            tl.store(to, raw.to(tails.dtype.element_ty), mask=mask)
