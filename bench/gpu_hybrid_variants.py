"""Variants of the launches of recurrent layers and of few rows' experts, timed on a GPU.

    python bench/gpu_hybrid_variants.py [--parts steps experts products prompt] [--out DIR]

Steps: a gated delta layer between its first and its last product, as it is, and with one launch
that convolves rows, makes gates and finds the products with the ring's keys, and one that reads the
blocks by plain multiplication, with the norm behind it or not. Experts: few rows of Qwen3-Next's
experts, the shared one in the same launches. Products: large products by their number of rows.
Prompt: launch shapes of the chunked kernels. Each variant is compared with the product's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from gpu_setup import describe_gpu
from weft.kernels.gated_delta import delta_gates
from weft.kernels.gated_norm import gated_norm
from weft.kernels.gpu import chunked_recurrence, slot_states
from weft.kernels.gpu.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.gpu.launch_sizes import cdiv, next_power_of_2
from weft.kernels.gpu.moe_direct import _once, _store_inner, direct_moe
from weft.kernels.gpu.moe_route import route
from weft.kernels.gpu.multiprocessors import num_multiprocessors
from weft.kernels.gpu.norm import add_rms_norm
from weft.kernels.gpu.slot_states import _below, _left
from weft.kernels.head_rows import HeadRows
from weft.kernels.linear import gate_up_silu, linear, pack_gate_up, pack_linear
from weft.kernels.sequences import Sequences
from weft.kernels.slot_states import Channels, HeadForm, LayerMemory

BF16 = torch.bfloat16
PAGE, RING = 16, 18


class Sizes(NamedTuple):
    """Of a gated delta layer."""

    keys: int = 16
    heads: int = 32
    dim: int = 128


class Tile(NamedTuple):
    """Launch shape of the kernel of plain multiplication."""

    values: int
    warps: int
    keys: int
    stages: int
    registers: int | None = None
    norm: bool = False
    """Whether it computes the norm behind it too; `values` are all of a head."""
    apart: bool = False
    """Whether blocks are written by a launch of their own."""


# Steps.


@triton.jit
def _raw(
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
    between: tl.tensor,
    mask: tl.tensor,
    RING_ROWS: tl.constexpr,
    BEFORE: tl.constexpr,
) -> tl.tensor:
    """What the convolution reads of a position, by one load. New rows have their channels
    `between` further.
    """
    base = tl.where(position >= start, new + (position - start) * new_row + between,
                    ring + position % RING_ROWS * ring_row)  # fmt: skip
    base = tl.where(position >= border, base, tail)
    place = in_tail * BEFORE + (position - border + BEFORE)
    at = tl.where(channel * 0 + position >= border, channel, place)
    return tl.load(base + at, mask=mask, other=0.0)


@triton.jit
def _mixed(
    new: tl.tensor,
    ring: tl.tensor,
    tail: tl.tensor,
    conv: tl.tensor,
    in_tails: tl.tensor,
    new_row: int,
    ring_row: int,
    channels: int,
    position: tl.tensor,
    start: tl.tensor,
    border: tl.tensor,
    channel: tl.tensor,
    between: tl.tensor,
    mask: tl.tensor,
    RING_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """A position's convolved channels, rounded; keeps its input."""
    BEFORE: tl.constexpr = TAPS - 1
    in_tail = channel
    if in_tails is not None:
        in_tail = tl.load(in_tails + channel, mask=mask, other=0).to(tl.int32)
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(TAPS):
        raw = _raw(new, ring, tail, new_row, ring_row, position - back, start, border, channel,
                   in_tail, between, mask, RING_ROWS, BEFORE)  # fmt: skip
        factor = conv + (TAPS - 1 - back) * channels + channel
        total += raw.to(tl.float32) * tl.load(factor, mask=mask, other=0.0)
        if back == 0:
            kept = ring + position % RING_ROWS * ring_row + channel
            tl.store(kept, raw, mask=mask & (channel * 0 + position >= start))
    total *= tl.sigmoid(total)
    return total.to(new.dtype.element_ty).to(tl.float32)


@triton.jit
def _store_tail(
    new: tl.tensor,
    ring: tl.tensor,
    tail: tl.tensor,
    in_tails: tl.tensor,
    new_row: int,
    ring_row: int,
    start: tl.tensor,
    border: tl.tensor,
    border_to: tl.tensor,
    tail_to: tl.tensor,
    channel: tl.tensor,
    between: tl.tensor,
    mask: tl.tensor,
    RING_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """Keeps the last inputs before the next border."""
    BEFORE: tl.constexpr = TAPS - 1
    in_tail = channel
    if in_tails is not None:
        in_tail = tl.load(in_tails + channel, mask=mask, other=0).to(tl.int32)
    for index in tl.static_range(BEFORE):
        raw = _raw(new, ring, tail, new_row, ring_row, border_to - BEFORE + index, start, border,
                   channel, in_tail, between, mask, RING_ROWS, BEFORE)  # fmt: skip
        tl.store(tail_to + in_tail * BEFORE + index, raw, mask=mask)


@triton.jit
def _prepare_kernel(
    plan: tl.tensor,
    new: tl.tensor,
    ba: tl.tensor,
    ring: tl.tensor,
    tails: tl.tensor,
    conv: tl.tensor,
    in_tails: tl.tensor,
    decay_rates: tl.tensor,
    dt_bias: tl.tensor,
    ring_gates: tl.tensor,
    ring_betas: tl.tensor,
    ring_keys: tl.tensor,
    mixed: tl.tensor,
    shares: tl.tensor,
    factors: tl.tensor,
    channels: int,
    new_row: int,
    new_step: int,
    ba_row: int,
    ring_slot: int,
    ring_row: int,
    tail_block: int,
    gate_slot: int,
    ring_gate_row: int,
    beta_slot: int,
    ring_beta_row: int,
    keys_slot: int,
    keys_row: int,
    scale: float,
    q_first: int,
    q_step: int,
    k_first: int,
    k_step: int,
    v_first: int,
    v_step: int,
    RING_ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    BA_SHARED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Convolves the rows of some heads of one key head, makes their gates, and finds the products
    with the ring's keys.
    """
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    GROUPS: tl.constexpr = HEADS // AT_ONCE
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
    border_to, first, count = border_to.to(tl.int32), first.to(tl.int32), count.to(tl.int32)
    end = tl.where(count > 0, start + count, border)
    element, rows = tl.arange(0, BLOCK_KEYS), tl.arange(0, AT_A_TIME)
    value = tl.arange(0, BLOCK_VALUES)
    is_key, is_value = element < KEYS, value < AT_ONCE * VALUES
    WIDTH: tl.constexpr = (RING_ROWS + ROWS - 1) // ROWS * ROWS
    new += first * new_row
    ring += slot * ring_slot
    tail, tail_to = tails + block * tail_block, tails + block_to * tail_block
    ring_keys += slot * keys_slot + of_keys * KEYS + element
    ring_gates += slot * gate_slot + heads
    ring_betas += slot * beta_slot + heads
    v_channel = v_first + of_keys * v_step + head % SHARED * VALUES + value
    k_channel = k_first + of_keys * k_step + element
    q_channel = q_first + of_keys * q_step + element
    between = of_keys * new_step
    for position in tl.range(known, end, disable_licm=True):
        behind, ring_at = position - start, position % RING_ROWS
        row = mixed + (request * RING_ROWS + ring_at) * channels
        taken = _mixed(new, ring, tail, conv, in_tails, new_row, ring_row, channels, position,
                       start, border, v_channel, between, is_value, RING_ROWS, TAPS)  # fmt: skip
        tl.store(row + v_channel, taken.to(mixed.dtype.element_ty), mask=is_value)
        key = _mixed(new, ring, tail, conv, in_tails, new_row, ring_row, channels, position,
                       start, border, k_channel, between, is_key, RING_ROWS, TAPS)  # fmt: skip
        tl.store(row + k_channel, key.to(mixed.dtype.element_ty), mask=is_key)
        query = _mixed(new, ring, tail, conv, in_tails, new_row, ring_row, channels, position,
                       start, border, q_channel, between, is_key, RING_ROWS, TAPS)  # fmt: skip
        tl.store(row + q_channel, query.to(mixed.dtype.element_ty), mask=is_key)
        of_key = tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        of_query = scale * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
        key, query = key * of_key, query * of_query
        key_to = ring_keys + ring_at * keys_row
        tl.store(key_to, key.to(ring_keys.dtype.element_ty), mask=is_key)
        if behind >= 0:
            b_at = ba + (first + behind) * ba_row
            b_at += heads // BA_SHARED * 2 * BA_SHARED + heads % BA_SHARED
            a = tl.load(b_at + BA_SHARED).to(tl.float32) + tl.load(dt_bias + heads)
            soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            gate = tl.load(decay_rates + heads) * soft
            beta = tl.sigmoid(tl.load(b_at).to(tl.float32)).to(ba.dtype.element_ty).to(tl.float32)
            tl.store(ring_gates + ring_at * ring_gate_row, gate)
            tl.store(ring_betas + ring_at * ring_beta_row, beta)
        else:
            gate = tl.load(ring_gates + ring_at * ring_gate_row)
        # The next row reads what all threads have stored.
        tl.debug_barrier()
        left = gate
        of_row = (request * RING_ROWS + ring_at) * HEADS + heads
        # All shares of a whole `ROWS` are written, since they are read at once.
        chunks = tl.cdiv(position - border, ROWS) * (ROWS // AT_A_TIME)
        for back in range(0, chunks):
            chunk = (chunks - 1 - back) * AT_A_TIME
            at = border + chunk + rows
            is_row = at < position
            both = is_row[:, None] & is_key[None]
            old = ring_keys[None] + (at % RING_ROWS)[:, None] * keys_row
            old = tl.load(old, mask=both, other=0.0).to(tl.float32)
            gates = tl.load(ring_gates[:, None] + (at % RING_ROWS)[None] * ring_gate_row,
                            mask=is_row[None], other=0.0)  # fmt: skip
            is_later = rows[None] > rows[:, None]
            since = tl.sum(tl.where(is_later[None], gates[:, None], 0.0), axis=2)
            later = tl.exp(left[:, None] + since)
            left += tl.sum(gates, axis=1)
            share_to = shares + of_row[:, None] * 2 * WIDTH + chunk + rows[None]
            tl.store(share_to, tl.sum(old * key[None], axis=1)[None] * later)
            tl.store(share_to + WIDTH, tl.sum(old * query[None], axis=1)[None] * later)
        factor_to = factors + of_row * 4
        tl.store(factor_to, of_key * tl.exp(left))
        tl.store(factor_to + 1, of_query * tl.exp(left))
        tl.store(factor_to + 2, tl.sum(key * query, axis=0) + left * 0.0)
    if border_to >= 0:
        _store_tail(new, ring, tail, in_tails, new_row, ring_row, start, border, border_to, tail_to,
                    v_channel, between, is_value, RING_ROWS, TAPS)  # fmt: skip
        _store_tail(new, ring, tail, in_tails, new_row, ring_row, start, border, border_to, tail_to,
                    k_channel, between, is_key, RING_ROWS, TAPS)  # fmt: skip
        _store_tail(new, ring, tail, in_tails, new_row, ring_row, start, border, border_to, tail_to,
                    q_channel, between, is_key, RING_ROWS, TAPS)  # fmt: skip


@triton.jit(do_not_specialize=["count_out"])
def _plain_kernel(
    plan: tl.tensor,
    mixed: tl.tensor,
    ring_gates: tl.tensor,
    ring_betas: tl.tensor,
    ring_keys: tl.tensor,
    ring_updates: tl.tensor,
    states: tl.tensor,
    shares: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    gate: tl.tensor,
    gain: tl.tensor,
    eps: float,
    gate_row: int,
    gate_first: int,
    gate_step: int,
    count_out: int,
    channels: int,
    gate_slot: int,
    ring_gate_row: int,
    beta_slot: int,
    ring_beta_row: int,
    keys_slot: int,
    keys_row: int,
    updates_slot: int,
    updates_row: int,
    state_block: int,
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
    BLOCK_VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WRITES: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """What rows find in blocks, by plain multiplication: each row reads its block."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    tile, of_keys = tl.program_id(1), head // SHARED
    given = plan + request * 9
    slot, first, count = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    start, border, block = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    border_to, block_to, known = tl.load(given + 6), tl.load(given + 7), tl.load(given + 8)
    requests = tl.num_programs(0) // HEADS
    last = plan + (requests - 1) * 9
    count_rows = tl.load(last + 1) + tl.load(last + 2)
    # Positions of 64 bits would take most of the registers.
    start, border, known = start.to(tl.int32), border.to(tl.int32), known.to(tl.int32)
    border_to, first, count = border_to.to(tl.int32), first.to(tl.int32), count.to(tl.int32)
    end = tl.where(count > 0, start + count, border)
    rows, of_tile = tl.arange(0, ROWS), tl.arange(0, TILE)
    value = tile * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_value = _below(value, VALUES, BLOCK_VALUES)
    states += head * KEYS * VALUES + value[None]
    WIDTH: tl.constexpr = (RING_ROWS + ROWS - 1) // ROWS * ROWS
    ring_updates += slot * updates_slot + head * VALUES + value
    ring_gates += slot * gate_slot
    for idle in range(count_rows + request, count_out, requests):
        nothing = tl.zeros((BLOCK_VALUES,), out.dtype.element_ty)
        tl.store(out + (idle * HEADS + head) * VALUES + value, nothing, mask=is_value)
    out += (first * HEADS + head) * VALUES + value
    for position in tl.range(known, end, disable_licm=True):
        ring_at = position % RING_ROWS
        row = mixed + (request * RING_ROWS + ring_at) * channels
        found_all = tl.zeros((TILE, BLOCK_VALUES), tl.float32)
        made_all = tl.zeros((TILE, BLOCK_VALUES), tl.float32)
        if STAGES > 1:
            for first_key in tl.range(0, KEYS, TILE, num_stages=STAGES):
                element = first_key + of_tile
                is_key = _below(element, KEYS, TILE)
                both = is_key[:, None] & is_value[None]
                old = states + block * state_block + element[:, None] * VALUES
                state = tl.load(old, mask=both, other=0.0)
                key = tl.load(row + k_first + of_keys * k_step + element, mask=is_key, other=0.0)
                query = tl.load(row + q_first + of_keys * q_step + element, mask=is_key, other=0.0)
                found_all += state * key.to(tl.float32)[:, None]
                made_all += state * query.to(tl.float32)[:, None]
        else:
            for first_key in tl.static_range(0, KEYS, TILE):
                element = first_key + of_tile
                is_key = _below(element, KEYS, TILE)
                both = is_key[:, None] & is_value[None]
                old = states + block * state_block + element[:, None] * VALUES
                state = tl.load(old, mask=both, other=0.0)
                key = tl.load(row + k_first + of_keys * k_step + element, mask=is_key, other=0.0)
                query = tl.load(row + q_first + of_keys * q_step + element, mask=is_key, other=0.0)
                found_all += state * key.to(tl.float32)[:, None]
                made_all += state * query.to(tl.float32)[:, None]
        of_row = (request * RING_ROWS + ring_at) * HEADS + head
        factor = factors + of_row * 4
        found = tl.sum(found_all, axis=0) * tl.load(factor)
        made = tl.sum(made_all, axis=0) * tl.load(factor + 1)
        of_value = v_first + of_keys * v_step + head % SHARED * VALUES + value
        taken = tl.load(row + of_value, mask=is_value, other=0.0).to(tl.float32)
        for chunk in range(0, position - border, ROWS):
            old_at = border + chunk + rows
            is_row = (old_at < position)[:, None] & is_value[None]
            added = ring_updates[None] + (old_at % RING_ROWS)[:, None] * updates_row
            added = tl.load(added, mask=is_row, other=0.0).to(tl.float32)
            share = shares + of_row * 2 * WIDTH + chunk + rows
            found += tl.sum(tl.load(share)[:, None] * added, axis=0)
            made += tl.sum(tl.load(share + WIDTH)[:, None] * added, axis=0)
        beta = tl.load(ring_betas + slot * beta_slot + ring_at * ring_beta_row + head)
        update = (taken - found) * beta
        update_to = ring_updates + ring_at * updates_row
        tl.store(update_to, update.to(ring_updates.dtype.element_ty), mask=is_value)
        if position >= start:
            made += tl.load(factor + 2) * update
            if gain is not None:
                made = made.to(out.dtype.element_ty).to(tl.float32)
                made *= tl.rsqrt(tl.sum(made * made, axis=0) / VALUES + eps)
                made *= tl.load(gain + value).to(tl.float32)
                at = gate + (first + position - start) * gate_row + gate_first
                at += of_keys * gate_step + head % SHARED * VALUES + value
                asked = tl.load(at).to(tl.float32)
                made *= asked * tl.sigmoid(asked)
            out_to = out + (position - start) * HEADS * VALUES
            tl.store(out_to, made.to(out.dtype.element_ty), mask=is_value)
        tl.debug_barrier()
    if WRITES:  # noqa: SIM102 - known when compiled, unlike the other
        if border_to >= 0:
            for first_key in range(0, KEYS, TILE):
                _write(ring_keys, ring_updates, ring_gates, states, slot, head, of_keys, border,
                       border_to, block, block_to, first_key + of_tile, value, is_value, keys_slot,
                       keys_row, updates_row, ring_gate_row, state_block, RING_ROWS, KEYS, VALUES,
                       ROWS, TILE, PRECISION)  # fmt: skip


@triton.jit
def _write(
    ring_keys: tl.tensor,
    ring_updates: tl.tensor,
    ring_gates: tl.tensor,
    states: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    of_keys: tl.tensor,
    border: tl.tensor,
    border_to: tl.tensor,
    block: tl.tensor,
    block_to: tl.tensor,
    element: tl.tensor,
    value: tl.tensor,
    is_value: tl.tensor,
    keys_slot: int,
    keys_row: int,
    updates_row: int,
    ring_gate_row: int,
    state_block: int,
    RING_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some keys of the block at the next border."""
    rows = tl.arange(0, ROWS)
    is_key = _below(element, KEYS, TILE)
    both = is_key[:, None] & is_value[None]
    place = element[:, None] * VALUES
    state = tl.load(states + block * state_block + place, mask=both, other=0.0)
    for chunk in range(border, border_to, ROWS):
        old_at = chunk + rows
        row_at, is_row = (old_at % RING_ROWS)[:, None], (old_at < border_to)[:, None]
        key = ring_keys + slot * keys_slot + of_keys * KEYS + element[None]
        key = tl.load(key + row_at * keys_row, mask=is_row & is_key[None], other=0.0)
        added = ring_updates[None] + row_at * updates_row
        added = tl.load(added, mask=is_row & is_value[None], other=0.0).to(tl.float32)
        left, total = _left(ring_gates, ring_gate_row, chunk, border_to, 0.0, 1.0, head, is_key,
                            RING_ROWS, False, ROWS)  # fmt: skip
        key = tl.trans(key.to(tl.float32) * tl.exp(left))
        state *= tl.exp(total)
        state = tl.dot(key, added, state, input_precision=PRECISION)
    tl.store(states + block_to * state_block + place, state, mask=both)


@triton.jit
def _write_kernel(
    plan: tl.tensor,
    ring_gates: tl.tensor,
    ring_keys: tl.tensor,
    ring_updates: tl.tensor,
    states: tl.tensor,
    gate_slot: int,
    ring_gate_row: int,
    keys_slot: int,
    keys_row: int,
    updates_slot: int,
    updates_row: int,
    state_block: int,
    RING_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Writes blocks at borders, by a launch of its own."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    given = plan + request * 9
    slot, border, block = tl.load(given), tl.load(given + 4), tl.load(given + 5)
    border_to, block_to = tl.load(given + 6), tl.load(given + 7)
    if border_to >= 0:
        value = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
        is_value = _below(value, VALUES, BLOCK_VALUES)
        updates_of = ring_updates + slot * updates_slot + head * VALUES + value
        states_of = states + head * KEYS * VALUES + value[None]
        for first_key in range(0, KEYS, TILE):
            _write(ring_keys, updates_of, ring_gates + slot * gate_slot, states_of, slot, head,
                   head // SHARED, border, border_to, block, block_to,
                   first_key + tl.arange(0, TILE), value, is_value, keys_slot, keys_row,
                   updates_row, ring_gate_row, state_block, RING_ROWS, KEYS, VALUES, ROWS, TILE,
                   PRECISION)  # fmt: skip


class Layer:
    """A gated delta layer between its products, with memory of some requests.

    Args:
        sizes: Of heads.
        batch: Requests.
        is_fused: Whether one product has q, k, v and z of each key head, as in Qwen3-Next.
        device: Where it lies.
    """

    def __init__(self, sizes: Sizes, batch: int, is_fused: bool, device: str) -> None:
        self.sizes, self.batch, self.is_fused = sizes, batch, is_fused
        keys, heads, dim = sizes
        self.shared = heads // keys
        values = self.shared * dim
        self.step = 2 * dim + values
        self.channels = channels = keys * self.step
        make = {"device": device}
        self.conv = torch.randn(4, channels, **make) / 2
        in_tails = None
        if is_fused:
            places = tuple(Channels(at, self.step) for at in (0, dim, 2 * dim))
        else:
            all_keys = keys * dim
            places = (Channels(0, dim), Channels(all_keys, dim), Channels(2 * all_keys, values))
            numbers = torch.arange(channels, device=device).view(keys, self.step)
            kinds = torch.split(numbers, [dim, dim, values], dim=1)
            in_tails = torch.cat([kind.flatten() for kind in kinds])
        self.form = HeadForm(
            self.conv, None, *places, heads, self.shared, dim, dim, dim**-0.5, is_unit=True,
            in_tails=in_tails,
        )  # fmt: skip
        self.rates, self.dt_bias = -torch.rand(heads, **make), torch.randn(heads, **make)
        self.norm = torch.rand(dim, **make).to(BF16)
        self.memory = LayerMemory(
            (
                torch.randn(2 * batch + 1, heads, dim, dim, **make) / 8,
                torch.randn(2 * batch + 1, channels, 3, **make, dtype=BF16),
            ),
            (
                torch.randn(batch + 1, RING, channels, **make, dtype=BF16),
                -torch.rand(batch + 1, RING, heads, **make) / 4,
                torch.rand(batch + 1, RING, heads, **make),
            ),
            (
                torch.randn(batch + 1, RING, keys, dim, **make, dtype=BF16) / dim**0.5,
                torch.randn(batch + 1, RING, heads, dim, **make, dtype=BF16),
            ),
        )

    def clone(self) -> Layer:
        """A layer of its own memory with the same content."""
        made = object.__new__(Layer)
        made.__dict__ |= self.__dict__
        made.memory = LayerMemory(*(tuple(p.clone() for p in parts) for parts in self.memory))
        return made

    def products(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the products give of so many rows: q, k, v and z, and b and a."""
        device = self.conv.device
        width = self.channels + self.sizes.heads * self.sizes.dim
        wide = torch.randn(rows, width, device=device, dtype=BF16)
        return wide, torch.randn(rows, 2 * self.sizes.heads, device=device, dtype=BF16)

    def plan(self, behind: int, count: int, pending: int = 0) -> torch.Tensor:
        """The plan of a step; `pending` rows before it are not in the ring."""
        device, batch = self.conv.device, self.batch
        slots = torch.arange(batch, device=device)
        start = torch.full_like(slots, 4 * PAGE + behind)
        after = (start + 1) // PAGE * PAGE
        is_new = after > 4 * PAGE
        columns = [
            slots, slots * count, torch.full_like(slots, count), start,
            torch.full_like(slots, 4 * PAGE), slots + 1, torch.where(is_new, after, -1),
            batch + slots + 1, start - pending,
        ]  # fmt: skip
        return torch.stack(columns, dim=1)

    def parts(
        self, wide: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int], int]:
        """Views: q, k and v, with the step from one row to the next, and z, with its first place,
        row and step; in the fused layout channels are a key head's, then its z.
        """
        dim = self.sizes.dim
        values = self.shared * dim
        if self.is_fused:
            return wide, wide, (wide.stride(0), self.step, self.step + values), wide.stride(0)
        return (
            wide[:, : self.channels],
            wide[:, self.channels :],
            (wide.stride(0), 0, values),
            wide.stride(0),
        )


def as_now(layer: Layer, plan: torch.Tensor, wide: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
    """The layer as the product computes it."""
    keys, heads, dim = layer.sizes
    rows = len(wide)
    if layer.is_fused:
        both = wide.view(rows, keys, -1)
        qkv, z = torch.split(both, [layer.step, layer.shared * dim], dim=2)
        qkv = qkv.flatten(1)
    else:
        # Products of their own.
        qkv, z = wide[:, : layer.channels], wide[:, layer.channels :]
    shared = layer.shared if layer.is_fused else heads
    decay, beta = delta_gates(ba, layer.rates, layer.dt_bias, shared)
    gate = z.reshape(rows, heads, dim)
    out = slot_states.step_heads(layer.form, plan, layer.memory, (qkv, decay, beta))
    return gated_norm(out, gate, layer.norm, 1e-6).flatten(1)


def by_parts(
    layer: Layer,
    plan: torch.Tensor,
    wide: torch.Tensor,
    ba: torch.Tensor,
    tile: Tile | None,
    *,
    at_once: int = 2,
    warps: int = 4,
    registers: int = 255,
    rows_at_once: int = 8,
) -> torch.Tensor:
    """The layer with one launch for convolutions, gates and products with the ring's keys.

    Args:
        layer: The layer.
        plan: Of the step.
        wide: Of the products.
        ba: The same.
        tile: Of the kernel of plain multiplication; None: the product's own kernel.
        at_once: Heads of a program of the first launch.
        warps: Of such a program.
        registers: Of a thread of it, at most.
        rows_at_once: Rows of the ring that it takes at once.
    """
    keys, heads, dim = layer.sizes
    memory, form = layer.memory, layer.form
    states, tails = memory.blocks
    ring, ring_gate, ring_beta = memory.rings
    kept, updates = memory.found
    requests, rows, channels = len(plan), RING, layer.channels
    q, k, v = form.queries, form.keys, form.values
    new, z, (z_row, z_first, z_step), new_row = layer.parts(wide)
    mixed = wide.new_empty((requests, rows, channels))
    shares = wide.new_empty((requests, rows, heads, 2, cdiv(rows, 16) * 16), dtype=torch.float32)
    factors = wide.new_empty((requests, rows, heads, 4), dtype=torch.float32)
    options = launch_options(wide.device)
    of_ring = ring_gate.stride(0), ring_gate.stride(1), ring_beta.stride(0), ring_beta.stride(1)
    _prepare_kernel[(requests * heads // at_once,)](
        *(plan, new, ba, ring, tails, layer.conv, form.in_tails, layer.rates, layer.dt_bias),
        *(ring_gate, ring_beta, kept, mixed, shares, factors, channels, new_row),
        *(layer.shared * dim if layer.is_fused else 0, ba.stride(0)),
        *(ring.stride(0), ring.stride(1), tails.stride(0), *of_ring),
        *(kept.stride(0), kept.stride(1), form.scale, *q, *k, *v),
        RING_ROWS=rows, TAPS=4, HEADS=heads, SHARED=layer.shared, AT_ONCE=at_once, KEYS=dim,
        VALUES=dim, BLOCK_KEYS=next_power_of_2(dim), BLOCK_VALUES=next_power_of_2(at_once * dim),
        ROWS=16, AT_A_TIME=rows_at_once, num_warps=warps,
        BA_SHARED=layer.shared if layer.is_fused else heads, maxnreg=registers, **options,
    )  # fmt: skip
    out = wide.new_empty((len(wide), heads, dim))
    gate = (
        torch.as_strided(z, (len(wide), keys, layer.shared * dim), (z_row, z_step, 1),
                         z.storage_offset() + z_first)
    )  # fmt: skip
    if tile is None:
        found = shares, factors, None
        slot_states._heads_kernel[(requests * heads, cdiv(dim, 64 if requests >= 16 else 32))](
            *(plan, mixed, ring_gate, ring_beta, kept, updates, states),
            *(None, None, *found, out, len(out), channels, *of_ring),
            *(kept.stride(0), kept.stride(1), updates.stride(0), updates.stride(1)),
            *(states.stride(0), *q, *k, *v),
            RING_ROWS=rows, HEADS=heads, SHARED=layer.shared, KEYS=dim, BLOCK_KEYS=dim, ROWS=16,
            BY_KEY=False, VALUES=dim, BLOCK_VALUES=64 if requests >= 16 else 32,
            TILE=32 if requests >= 16 else 128, PRECISION="tf32x3", STAGES=3,
            num_warps=2 if requests >= 16 else 4, num_stages=1, maxnreg=128, **options,
        )  # fmt: skip
    else:
        more = {} if tile.registers is None else {"maxnreg": tile.registers}
        with_norm = (gate, layer.norm, 1e-6, z_row, 0, z_step) if tile.norm else ()
        _plain_kernel[(requests * heads, cdiv(dim, tile.values))](
            *(plan, mixed, ring_gate, ring_beta, kept, updates, states, shares, factors, out),
            *(with_norm or (None, None, 0.0, 0, 0, 0)),
            *(len(out), channels, *of_ring, kept.stride(0), kept.stride(1)),
            *(updates.stride(0), updates.stride(1), states.stride(0), *q, *k, *v),
            RING_ROWS=rows, HEADS=heads, SHARED=layer.shared, KEYS=dim, VALUES=dim,
            BLOCK_VALUES=tile.values, ROWS=16, TILE=tile.keys, STAGES=tile.stages,
            WRITES=not tile.apart, PRECISION="tf32x3", num_warps=tile.warps, num_stages=1,
            **more, **options,
        )  # fmt: skip
        if tile.apart:
            _write_kernel[(requests * heads, cdiv(dim, 64))](
                *(plan, ring_gate, kept, updates, states, *of_ring[:2], kept.stride(0)),
                *(kept.stride(1), updates.stride(0), updates.stride(1), states.stride(0)),
                RING_ROWS=rows, HEADS=heads, SHARED=layer.shared, KEYS=dim, VALUES=dim,
                BLOCK_VALUES=64, ROWS=16, TILE=32, PRECISION="tf32x3", num_warps=2, num_stages=1,
                **options,
            )  # fmt: skip
        if tile.norm:
            return out.flatten(1)
    view = gate.unflatten(2, (layer.shared, dim)).flatten(1, 2)
    return gated_norm(out, view, layer.norm, 1e-6).flatten(1)


# Experts.


@triton.jit
def _inner_kernel(
    inner: tl.tensor,
    x: tl.tensor,
    w13: tl.tensor,
    shared: tl.tensor,
    ids: tl.tensor,
    width: int,
    pairs: int,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """`moe_direct`'s first kernel, with the shared expert's pairs behind the others."""
    wait_for_last(IS_DEPENDENT)
    release_next(IS_DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILE)
    is_shared = pair >= pairs
    expert = tl.load(ids + pair, mask=pair < pairs, other=0).to(tl.int64)
    gate_at = tl.where(is_shared, shared, w13 + expert * 2 * width * K)
    up_at = gate_at + tl.cast(width, tl.int64) * K
    row = x + tl.where(is_shared, pair - pairs, pair // TOP_K) * K
    begin, step = tl.program_id(1), tl.num_programs(1)
    values = tl.load(row + part, mask=part < K, other=0.0).to(tl.float32)
    gate = _once(gate_at + begin * K + part, part < K)
    up = _once(up_at + begin * K + part, part < K)
    for column in range(begin, width, step):
        gate_sum = tl.sum(gate.to(tl.float32) * values, axis=0)
        up_sum = tl.sum(up.to(tl.float32) * values, axis=0)
        later = column + step
        is_next = part < tl.minimum(K, (width - later) * K)
        gate = _once(gate_at + later * K + part, is_next)
        up = _once(up_at + later * K + part, is_next)
        _store_inner(inner, gate_sum, up_sum, None, None, pair, column, width, 1.0, 0.0, 0.0, 0.0,
                     0.0)  # fmt: skip


@triton.jit
def _out_kernel(
    out: tl.tensor,
    inner: tl.tensor,
    x: tl.tensor,
    w2: tl.tensor,
    shared: tl.tensor,
    shared_gate: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    hidden: int,
    pairs: int,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """`moe_direct`'s second kernel, with the shared expert, whose share is its gate's sigmoid."""
    release_next(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last = tl.minimum(column, hidden - 1)
    part, number = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    is_shared, is_routed = number == TOP_K, number < TOP_K
    pair = tl.where(is_shared, pairs + row, row * TOP_K + number)
    expert = tl.load(ids + pair, mask=is_routed, other=0).to(tl.int64)
    share = tl.load(shares + pair, mask=is_routed, other=0.0)
    mask = ((number <= TOP_K)[:, None] & (part < K)[None, :])[:, None, :]
    begin = w2 + (expert[:, None] * hidden + last[None, :]) * K
    of_shared = shared + last[None, :] * K + expert[:, None] * 0
    begin = tl.where(is_shared[:, None], of_shared, begin)
    tiles = _once(begin[:, :, None] + part[None, None, :], mask)
    # Written before the launch before, which began behind its own wait.
    element = tl.arange(0, HIDDEN)
    given = tl.load(x + row * hidden + element, mask=element < hidden, other=0.0).to(tl.float32)
    of_gate = tl.load(shared_gate + element, mask=element < hidden, other=0.0).to(tl.float32)
    share = tl.where(is_shared, tl.sigmoid(tl.sum(given * of_gate, axis=0)), share)
    wait_for_last(IS_DEPENDENT)
    at = (pair[:, None] * K + part[None, :])[:, None, :]
    values = tl.load(inner + at, mask=mask, other=0.0).to(tl.float32)
    products = tiles.to(tl.float32) * (values * share[:, None, None])
    result = tl.sum(tl.sum(products, axis=0), axis=1)
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=column < hidden)


class Experts:
    """The experts of a layer of Qwen3-Next, or of fewer and smaller ones."""

    def __init__(self, device: str, count: int, hidden: int, width: int, top_k: int) -> None:
        self.top_k = top_k

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=BF16) / shape[-1] ** 0.5

        self.w13, self.w2 = made(count, 2 * width, hidden), made(count, hidden, width)
        self.router = pack_linear(made(count, hidden))
        self.up, self.down, self.of_gate = (
            made(2 * width, hidden),
            made(hidden, width),
            made(1, hidden),
        )
        self.shared_up = pack_gate_up(self.up.clone())
        self.shared_down = pack_linear(self.down.clone())
        self.gate = pack_linear(self.of_gate.clone())
        self.gain = torch.ones(hidden, device=device, dtype=BF16)

    def as_now(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """As the product computes it, without the norm behind."""
        inner = gate_up_silu(x, self.shared_up)
        weight = linear(x, self.gate, out_dtype=torch.float32).sigmoid_()
        inner = torch.mul(inner, weight, out=torch.empty_like(inner))
        stream = linear(inner, self.shared_down, stream)
        logits = linear(x, self.router, out_dtype=torch.float32)
        ids, shares = route(logits, self.top_k, True)
        routed = direct_moe(x, ids, shares, self.w13, self.w2, None, None)
        return add_rms_norm(routed, stream, self.gain, 1e-6)[0]

    def together(self, x: torch.Tensor, stream: torch.Tensor, columns: int = 2) -> torch.Tensor:
        """With the shared expert in the launches of the others."""
        (rows, hidden), width, top_k = x.shape, self.w2.shape[2], self.top_k
        logits = linear(x, self.router, out_dtype=torch.float32)
        ids, shares = route(logits, top_k, True)
        pairs, options = ids.numel(), launch_options(x.device)
        inner = torch.empty((pairs + rows, width), dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        tile = next_power_of_2(hidden)
        warps = max(2, tile // 1024)
        number = num_multiprocessors(x.device) if x.is_cuda else 4
        parts = min(width, max(1, 16 // warps * number // (pairs + rows)))
        _inner_kernel[(pairs + rows, parts)](
            *(inner, x, self.w13, self.up, ids, width, pairs),
            K=hidden, TOP_K=top_k, TILE=tile, num_warps=warps, **options,
        )  # fmt: skip
        _out_kernel[(rows, cdiv(hidden, columns))](
            *(out, inner, x, self.w2, self.down, self.of_gate, ids, shares, hidden),
            pairs, K=width, HIDDEN=tile, TOP_K=top_k, BLOCK_K=next_power_of_2(top_k + 1),
            COLUMNS=columns, TILE=next_power_of_2(width), num_warps=4, **options,
        )  # fmt: skip
        return add_rms_norm(out, stream, self.gain, 1e-6)[0]


# Timing.


def graph_us(calls: list[Callable[[], object]], repeats: int = 12) -> float:
    """Median time of one of the calls on the device, of graphs that run all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return 1e3 * statistics.median(times[2:])


def agreement(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of what is wanted; infinite where numbers are missing."""
    made, wanted = made.float(), wanted.float()
    found = float((made - wanted).norm() / wanted.norm())
    return found if found == found else float("inf")


TILES = (
    Tile(64, 2, 32, 1),
    Tile(64, 2, 32, 3),
    Tile(64, 2, 16, 3),
    Tile(128, 4, 16, 3, norm=True),
    Tile(128, 4, 32, 3, norm=True),
    Tile(128, 8, 32, 1, norm=True),
    Tile(128, 8, 32, 3, norm=True),
    Tile(128, 4, 16, 1, 128, norm=True, apart=True),
    Tile(128, 4, 16, 3, 64, norm=True, apart=True),
    Tile(64, 2, 16, 3, 96, apart=True),
)

PREPARED = ((2, 4, 16, 128), (2, 4, 8, 96), (2, 4, 16, 255), (2, 2, 8, 128), (1, 2, 8, 128))
"""Of the launch before: heads and warps of a program, rows of the ring that it takes at once, and
registers.
"""


def step_variants() -> dict[str, Callable[..., torch.Tensor]]:
    """The layer between its products, by name."""
    made: dict[str, Callable[..., torch.Tensor]] = {"now": as_now}
    for at_once, warps, rows, most in PREPARED:
        made[f"prepared {at_once}, {warps}, {rows}, {most}"] = partial(
            by_parts, tile=None, at_once=at_once, warps=warps, rows_at_once=rows, registers=most
        )
    for tile in TILES:
        name = f"plain {tuple(tile[:5])}{' norm' * tile.norm}{' apart' * tile.apart}"
        made[name] = partial(by_parts, tile=tile)
    return made


def bench_steps(rows: list[dict[str, Any]], save: Callable[[], None], device: str) -> None:
    """Times all variants and compares each with what is."""
    is_tiny = device == "cpu"
    sizes = Sizes(2, 4, 32) if is_tiny else Sizes()
    batches = (1, 2) if is_tiny else (1, 256, 64, 16)
    cases = ((14, 1, 0), (15, 1, 0), (10, 3, 0))
    for batch, is_fused in itertools.product(batches, (True, False)):
        layer = Layer(sizes, batch, is_fused, device)
        copies = [layer] if is_tiny else [layer.clone() for _ in range(max(1, 32 // batch))]
        for name, call in step_variants().items():
            if is_tiny and "64" in name:
                continue
            if batch in (16, 64) and is_fused:
                continue
            for behind, count, pending in cases:
                if count > 1 and name.startswith("plain"):
                    continue
                plan = layer.plan(behind, count, pending)
                wide, ba = layer.products(batch * count)
                first, second = layer.clone(), layer.clone()
                row = {"batch": batch, "fused": is_fused, "variant": name, "behind": behind}
                row["rows"] = count
                try:
                    wanted = as_now(first, plan, wide, ba)
                    row["off"] = agreement(call(second, plan, wide, ba), wanted)
                    parts = zip(
                        itertools.chain(*first.memory), itertools.chain(*second.memory), strict=True
                    )
                    row["memory_off"] = max(agreement(b, a) for a, b in parts)
                    if not is_tiny:
                        calls = [
                            lambda c=c, call=call, plan=plan, wide=wide, ba=ba: call(
                                c, plan, wide, ba
                            )
                            for c in copies
                        ] * max(1, 8 // len(copies))
                        row["us"] = graph_us(calls)
                except Exception as error:
                    row["error"] = repr(error)[:300]
                rows.append(row)
                print(row, flush=True)
            save()


def bench_experts(rows: list[dict[str, Any]], save: Callable[[], None], device: str) -> None:
    """Times few rows of all experts."""
    sizes = (8, 64, 32, 3) if device == "cpu" else (512, 2048, 512, 10)
    experts = Experts(device, *sizes)
    for count in (1, 2, 4, 8):
        inputs = [
            torch.randn(2, count, sizes[1], device=device, dtype=BF16).unbind() for _ in range(12)
        ]
        variants: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
            "now": experts.as_now,
            "together": experts.together,
            "together, 4 columns": lambda x, stream: experts.together(x, stream, 4),
            "together, 1 column": lambda x, stream: experts.together(x, stream, 1),
        }
        for name, call in variants.items():
            row: dict[str, Any] = {"rows": count, "variant": name}
            try:
                x, stream = inputs[0]
                row["off"] = agreement(call(x, stream.clone()), experts.as_now(x, stream.clone()))
                if device != "cpu":
                    row["us"] = graph_us([lambda g=g, call=call: call(*g) for g in inputs])
            except Exception as error:
                row["error"] = repr(error)[:300]
            rows.append(row)
            print(row, flush=True)
        save()


PRODUCTS = {
    "qkv": (8192, 4096),
    "z, out": (4096, 4096),
    "qkvz together": (12288, 4096),
    "gate up": (24576, 4096),
    "down": (4096, 12288),
    "attention in": (10240, 4096),
}


def bench_products(rows: list[dict[str, Any]], save: Callable[[], None], device: str) -> None:
    """Rates of Qwen3.5-9B's products by their rows: where waves of tiles fill the card."""
    counts = (1792, 1920, 2048, 2176, 2240, 2304, 2560, 3072, 4096, 4224, 4352, 6144, 8192)
    for name, (n, k) in PRODUCTS.items():
        weight = torch.randn(n, k, device=device, dtype=BF16) / k**0.5
        for count in counts:
            x = torch.randn(count, k, device=device, dtype=BF16)
            took = graph_us([lambda x=x, weight=weight: F.linear(x, weight)] * 6, 8)
            rows.append({"product": name, "rows": count, "us": took,
                         "tflop_per_s": 2e-6 * count * n * k / took})  # fmt: skip
        told = " ".join(f"{row['rows']}:{row['tflop_per_s']:.0f}" for row in rows[-len(counts) :])
        print(f"{name}: TFLOP/s by rows {told}", flush=True)
        save()


class Launched:
    """A kernel that is launched with other options.

    Args:
        kernel: The kernel.
        axis: Of its grid, along which programs have `TILE` of 128 values each.
        options: In place of those that it is given.
    """

    def __init__(self, kernel: Any, axis: int, options: dict[str, int]) -> None:
        self._kernel, self._axis, self._options = kernel, axis, options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The kernel, to be called with its arguments."""
        sizes = list(grid)
        if "TILE" in self._options and self._axis:
            sizes[self._axis] = 128 // self._options["TILE"]
        return lambda *given, **named: self._kernel[tuple(sizes)](*given, **(named | self._options))


PROMPT_LAUNCHES = {
    "_solve_kernel": (
        0,
        [(None, 4, 1), (None, 8, 2), (None, 2, 2)],
    ),
    "_states_kernel": (1, [(32, 4, 3), (64, 4, 2), (64, 8, 2), (32, 2, 2), (16, 2, 3)]),
    "_outputs_kernel": (2, [(64, 4, 3), (64, 8, 2), (128, 8, 2), (128, 4, 2), (32, 4, 2)]),
}
"""Values of a program, its warps and stages."""


def bench_prompt(rows: list[dict[str, Any]], save: Callable[[], None], device: str) -> None:
    """A layer's prompts of 8 times 1,024 rows, with other launches of one kernel at a time."""
    count, keys, heads = (64, 1, 2) if device == "cpu" else (1024, 16, 32)
    sequences = Sequences.of(count * torch.arange(9, device=device))
    q, k = torch.randn(2, 8 * count, keys, 128, device=device, dtype=BF16)
    v = torch.randn(8 * count, heads, 128, device=device, dtype=BF16)
    decay = -torch.rand(8 * count, heads, device=device) / 8
    beta = torch.rand(8 * count, heads, device=device)
    states = torch.randn(8, heads, 128, 128, device=device)

    def run() -> torch.Tensor:
        given = HeadRows(q, k, v, decay, sequences, beta=beta, scale=128**-0.5, is_unit=True)
        return chunked_recurrence.chunked_recurrence(given, states)[0]

    wanted = run()
    if device != "cpu":
        rows.append({"kernel": "as it is", "us": graph_us([run] * 4)})
        print(rows[-1], flush=True)
    for name, (axis, shapes) in PROMPT_LAUNCHES.items():
        kernel = getattr(chunked_recurrence, name)
        for tile, warps, stages in shapes:
            options = {"num_warps": warps, "num_stages": stages}
            options |= {} if tile is None else {"TILE": tile}
            row: dict[str, Any] = {"kernel": name, "tile": tile, "warps": warps, "stages": stages}
            setattr(chunked_recurrence, name, Launched(kernel, axis, options))
            try:
                row["off"] = agreement(run(), wanted)
                if device != "cpu":
                    row["us"] = graph_us([run] * 4)
            except Exception as error:
                row["error"] = repr(error)[:300]
            finally:
                setattr(chunked_recurrence, name, kernel)
            rows.append(row)
            print(row, flush=True)
        save()


def main() -> None:
    """Runs the parts; what fails is told, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["products", "experts", "steps", "prompt"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    found: dict[str, Any] = dict(describe_gpu(arguments.commit))

    def save() -> None:
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "hybrid_variants.json").write_text(json.dumps(found, indent=1))

    parts = {
        "steps": bench_steps,
        "experts": bench_experts,
        "products": bench_products,
        "prompt": bench_prompt,
    }
    for name in arguments.parts:
        rows = found.setdefault(name, [])
        try:
            parts[name](rows, save, arguments.device)
        except RuntimeError as error:
            print(f"{name}: {error!r}"[:1500], flush=True)
        save()


if __name__ == "__main__":
    main()
