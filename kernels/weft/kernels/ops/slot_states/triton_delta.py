"""Gated delta nets in steps of few rows a request, on a GPU: all that precedes the reading of
blocks, in one launch.

`triton_states` has one launch that convolves and one that computes products with the ring's keys.
Here a program does both for some heads of one key head, and computes their gates. Each such program
convolves the channels of keys and queries again, which costs less than another launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.slot_states.spec import Channels, DeltaGates, HeadForm, LayerMemory
from weft.kernels.ops.slot_states.triton_states import Shares, StatesForm, read_blocks
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import next_power_of_2
from weft.kernels.shared.strided import Strided


class _LaunchConfig(NamedTuple):
    warps: int
    rows: int
    """Rows of the ring whose keys a program takes at once."""


_LAUNCH_CONFIGS = {1: _LaunchConfig(4, 16), 64: _LaunchConfig(2, 8)}
"""Launches by the least number of requests for which each is used. On an H100 a layer of
Qwen3-Next's sizes takes 15.5 and 16.3 us for one request, and 281 and 263 us for 256.
"""
_HEADS = 2
"""Heads that a program takes, of the heads that share a key."""
_REGISTERS = 128
"""Registers of a thread; with 255, 256 requests take 294 us."""


def step_delta(
    form: HeadForm,
    gates: DeltaGates,
    plan: torch.Tensor,
    memory: LayerMemory,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    new, ba = inputs
    ba = ba if ba.stride(1) == 1 else ba.contiguous()
    (ring, ring_gate, ring_beta), keys = memory.rings, memory.found[0]
    tails, requests, (rows, channels) = memory.blocks[1], plan.shape[0], ring.shape[1:]
    between = new.stride(1) - new.shape[2] if new.dim() == 3 else 0
    mixed = new.new_empty((requests, rows, channels))
    found = Shares.empty(mixed, form.heads)
    launch = _LAUNCH_CONFIGS[max(least for least in _LAUNCH_CONFIGS if least <= max(1, requests))]
    at_once = _HEADS if form.shared % _HEADS == 0 else 1
    _prepare_kernel[(requests * form.heads // at_once,)](
        plan, new, ba, Strided.of(ring), tails, form.conv, form.in_tails, gates.rates,
        gates.dt_bias, Strided.of(ring_gate), Strided.of(ring_beta), Strided.of(keys), mixed,
        found, channels, new.stride(0), between, ba.stride(0), tails.stride(0), form.scale,
        form.queries, form.keys, form.values, FORM=StatesForm.of(form, rows, by_key=False),
        TAPS=form.conv.shape[0],
        AT_ONCE=at_once, BLOCK_KEYS=next_power_of_2(form.key_dim),
        BLOCK_VALUES=next_power_of_2(at_once * form.value_dim),
        AT_A_TIME=launch.rows, GATES_SHARED=gates.shared, num_warps=launch.warps,
        maxnreg=_REGISTERS, **launch_options(new.device),
    )  # fmt: skip
    return read_blocks(form, plan, memory, mixed, found, len(new))


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
    """The convolution's input at a position, by one load: from a new row, the ring, or the block.

    Args:
        inputs: The request's new rows, the slot's ring, the block's tail, the strides of the first
            two, the first new position, the border, and by how much further the channels of new
            rows are.
    """
    new, ring, tail, new_row, ring_row, start, border, between = inputs
    own = new + (position - start) * new_row + between
    base = tl.where(position >= start, own, ring + position % RING_ROWS * ring_row)
    base = tl.where(position >= border, base, tail)
    place = in_tail * BEFORE + (position - border + BEFORE)
    at = tl.where(channel * 0 + position >= border, channel, place)
    return tl.load(base + at, mask=mask, other=0.0)


@triton.jit
def _places_in_tails(in_tails: tl.tensor, channel: tl.tensor, mask: tl.tensor) -> tl.tensor:
    found = channel
    if in_tails is not None:
        found = tl.load(in_tails + channel, mask=mask, other=0).to(tl.int32)
    return found


@triton.jit
def _convolved(
    inputs: tl.tuple,
    conv: tl.tensor,
    in_tails: tl.tensor,
    to: tl.tensor,
    channels: int,
    position: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    RING_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Some channels of a position after the convolution and SiLU, rounded as they are stored at
    `to`. The ring receives the channels of a new row.
    """
    _, ring, _, _, ring_row, start, _, _ = inputs
    in_tail = _places_in_tails(in_tails, channel, mask)
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(TAPS):
        raw = _input(inputs, position - back, channel, in_tail, mask, RING_ROWS, TAPS - 1)
        factor = conv + (TAPS - 1 - back) * channels + channel
        total += raw.to(tl.float32) * tl.load(factor, mask=mask, other=0.0)
        if back == 0:
            kept = ring + position % RING_ROWS * ring_row + channel
            tl.store(kept, raw, mask=mask & (channel * 0 + position >= start))
    narrow = (total * tl.sigmoid(total)).to(to.dtype.element_ty)
    tl.store(to + channel, narrow, mask=mask)
    return narrow.to(tl.float32)


@triton.jit
def _store_tail(
    inputs: tl.tuple,
    in_tails: tl.tensor,
    border_to: tl.tensor,
    tail_to: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    RING_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    BEFORE: tl.constexpr = TAPS - 1
    in_tail = _places_in_tails(in_tails, channel, mask)
    for index in tl.static_range(BEFORE):
        position = border_to - BEFORE + index
        raw = _input(inputs, position, channel, in_tail, mask, RING_ROWS, BEFORE)
        tl.store(tail_to + in_tail * BEFORE + index, raw, mask=mask)


@triton.jit
def _prepare_kernel(
    plan: tl.tensor,
    new: tl.tensor,
    ba: tl.tensor,
    own_ring: Strided,
    tails: tl.tensor,
    conv: tl.tensor,
    in_tails: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    gate_ring: Strided,
    beta_ring: Strided,
    key_ring: Strided,
    mixed: tl.tensor,
    found: Shares,
    channels: int,
    new_row: int,
    new_between: int,
    ba_row: int,
    tail_block: int,
    scale: float,
    queries: Channels,
    keys: Channels,
    values: Channels,
    FORM: tl.constexpr,
    TAPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    GATES_SHARED: tl.constexpr,
) -> None:
    """Does the work of `slot_states._conv_kernel` and `slot_states._shares_kernel` for `AT_ONCE`
    heads of one key head, and computes the gates of `delta_gates` first.
    """
    RING_ROWS: tl.constexpr = FORM.ring_rows
    HEADS: tl.constexpr = FORM.heads
    SHARED: tl.constexpr = FORM.shared
    KEYS: tl.constexpr = FORM.key_dim
    VALUES: tl.constexpr = FORM.value_dim
    ROWS: tl.constexpr = FORM.rows
    release_next()
    wait_for_last()
    GROUPS: tl.constexpr = HEADS // AT_ONCE
    WIDTH: tl.constexpr = (RING_ROWS + ROWS - 1) // ROWS * ROWS
    request = tl.program_id(0) // GROUPS
    head = tl.program_id(0) % GROUPS * AT_ONCE
    of_keys = head // SHARED
    heads = head + tl.arange(0, AT_ONCE)
    given = plan + request * 9
    slot, first, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    start, border, block = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    border_to, block_to, known = tl.load(given + 6), tl.load(given + 7), tl.load(given + 8)
    # Positions of 64 bits would take most of the registers.
    start, border, known = start.to(tl.int32), border.to(tl.int32), known.to(tl.int32)
    border_to, count = border_to.to(tl.int32), count.to(tl.int32)
    end = tl.where(count > 0, start + count, border)
    element, rows = tl.arange(0, BLOCK_KEYS), tl.arange(0, AT_A_TIME)
    value = tl.arange(0, BLOCK_VALUES)
    is_key, is_value = element < KEYS, value < AT_ONCE * VALUES
    new += first * new_row
    ba += first * ba_row + heads // GATES_SHARED * 2 * GATES_SHARED + heads % GATES_SHARED
    ring, ring_row = own_ring.data + slot * own_ring.first, own_ring.second
    tail, tail_to = tails + block * tail_block, tails + block_to * tail_block
    ring_keys = key_ring.data + (slot * key_ring.first + of_keys * KEYS + element)
    ring_gates = gate_ring.data + (slot * gate_ring.first + heads)
    ring_betas = beta_ring.data + (slot * beta_ring.first + heads)
    v_channel = values.first + of_keys * values.step + head % SHARED * VALUES + value
    k_channel = keys.first + of_keys * keys.step + element
    q_channel = queries.first + of_keys * queries.step + element
    inputs = new, ring, tail, new_row, ring_row, start, border, of_keys * new_between
    for position in tl.range(known, end, disable_licm=True):
        behind, ring_at = position - start, position % RING_ROWS
        row = mixed + (request * RING_ROWS + ring_at) * channels
        _convolved(
            inputs, conv, in_tails, row, channels, position, v_channel, is_value, RING_ROWS, TAPS
        )
        key = _convolved(
            inputs, conv, in_tails, row, channels, position, k_channel, is_key, RING_ROWS, TAPS
        )
        query = _convolved(
            inputs, conv, in_tails, row, channels, position, q_channel, is_key, RING_ROWS, TAPS
        )
        of_key = tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        of_query = scale * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
        key, query = key * of_key, query * of_query
        # All programs of a key head write the same values, since each program reads them in its
        # next row.
        tl.store(
            ring_keys + ring_at * key_ring.second, key.to(ring_keys.dtype.element_ty), mask=is_key
        )
        if behind >= 0:
            b_at = ba + behind * ba_row
            a = tl.load(b_at + GATES_SHARED).to(tl.float32) + tl.load(dt_bias + heads)
            soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            gate = tl.load(rates + heads) * soft
            beta = tl.sigmoid(tl.load(b_at).to(tl.float32)).to(ba.dtype.element_ty)
            tl.store(ring_gates + ring_at * gate_ring.second, gate)
            tl.store(ring_betas + ring_at * beta_ring.second, beta.to(tl.float32))
        else:
            gate = tl.load(ring_gates + ring_at * gate_ring.second)
        # The next row reads what all threads have stored.
        tl.debug_barrier()
        left = gate
        of_row = (request * RING_ROWS + ring_at) * HEADS + heads
        # All shares of a whole `ROWS` are written, since they are read at once.
        chunks = tl.cdiv(position - border, ROWS) * (ROWS // AT_A_TIME)
        for back in range(0, chunks):
            chunk = (chunks - 1 - back) * AT_A_TIME
            at = border + chunk + rows
            is_row, row_at = at < position, at % RING_ROWS
            both = is_row[:, None] & is_key[None]
            old = tl.load(ring_keys[None] + row_at[:, None] * key_ring.second, mask=both, other=0.0)
            old = old.to(tl.float32)
            gates_at = ring_gates[:, None] + row_at[None] * gate_ring.second
            gates = tl.load(gates_at, mask=is_row[None], other=0.0)
            is_later = rows[None] > rows[:, None]
            since = tl.sum(tl.where(is_later[None], gates[:, None], 0.0), axis=2)
            later = tl.exp(left[:, None] + since)
            left += tl.sum(gates, axis=1)
            share_to = found.shares + of_row[:, None] * 2 * WIDTH + chunk + rows[None]
            tl.store(share_to, tl.sum(old * key[None], axis=1)[None] * later)
            tl.store(share_to + WIDTH, tl.sum(old * query[None], axis=1)[None] * later)
        factor_to, own = found.factors + of_row * 4, tl.sum(key * query, axis=0)
        tl.store(factor_to, of_key * tl.exp(left))
        tl.store(factor_to + 1, of_query * tl.exp(left))
        tl.store(factor_to + 2, own + tl.zeros((AT_ONCE,), tl.float32))
    if border_to >= 0:
        _store_tail(inputs, in_tails, border_to, tail_to, v_channel, is_value, RING_ROWS, TAPS)
        _store_tail(inputs, in_tails, border_to, tail_to, k_channel, is_key, RING_ROWS, TAPS)
        _store_tail(inputs, in_tails, border_to, tail_to, q_channel, is_key, RING_ROWS, TAPS)
