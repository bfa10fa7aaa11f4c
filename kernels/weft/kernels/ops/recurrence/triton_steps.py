"""Recurrent operations on a GPU that take rows one after another, for steps of few rows a sequence.

A program has some values of one head of one sequence, whose part of the state it keeps in
registers. Convolutions are computed row by row, each row from those before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.recurrence.triton_chunks import chunked_recurrence, supports_chunks
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2
from weft.kernels.shared.strided import Strided

_VALUES = 32
"""Values of a program."""
_CHANNELS = 256
"""Channels of a program."""
_CONV_ROWS, _CONV_CHANNELS = 16, 256
"""Rows and channels of a program that convolves: it reads the taps once for all its rows."""


def fastest_recurrence(rows: HeadRows, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`recurrence`, or by chunks where that is faster."""
    run = chunked_recurrence if supports_chunks(rows) else recurrence
    return run(rows, states)


def recurrence(rows: HeadRows, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes rows through states one after another.

    Args:
        rows: Of S sequences.
        states: [S, H, Dk, Dv] float32; not changed.

    Returns:
        [T, H, Dv] of the dtype of `v`, and the states after the last rows.
    """
    q, k, v, decay, sequences, *gates, scale, is_unit = rows.packed()
    heads, values = v.shape[1:]
    keys = k.shape[2]
    states, after = states.contiguous(), torch.empty_like(states, dtype=torch.float32)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    grid = (sequences.num_sequences * heads, cdiv(values, _VALUES))
    _recurrence_kernel[grid](
        Strided.of(q), Strided.of(k), Strided.of(v), decay, *gates, states, after, out,
        sequences.cu_lens, heads, rows.shared, scale,
        KEYS=keys, VALUES=values, BLOCK_KEYS=next_power_of_2(keys), BLOCK_VALUES=_VALUES,
        IS_UNIT=is_unit, BY_KEY=decay.dim() == 3, num_warps=4,
    )  # fmt: skip
    return out, after


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    sequences: Sequences,
    *,
    has_silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, channels), taps = x.shape, weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    weight, tails = weight.contiguous(), tails.contiguous()
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    left, cu_lens = torch.empty_like(tails), sequences.cu_lens
    sizes = (x.stride(0), channels)
    _conv_kernel[(cdiv(rows, _CONV_ROWS), cdiv(channels, _CONV_CHANNELS))](
        *(x, weight, bias, tails, out, sequences.owners, cu_lens, rows, *sizes),
        TAPS=taps, HAS_SILU=has_silu, ROWS=_CONV_ROWS, BLOCK=_CONV_CHANNELS,
    )  # fmt: skip
    _tails_kernel[(sequences.num_sequences * (taps - 1), cdiv(channels, _CHANNELS))](
        *(x, tails, left, cu_lens, *sizes), BEFORE=taps - 1, BLOCK=_CHANNELS
    )
    return out, left


@triton.jit
def _key(
    x: Strided,
    row: tl.tensor,
    head: tl.tensor,
    element: tl.tensor,
    mask: tl.tensor,
    IS_UNIT: tl.constexpr,
) -> tl.tensor:
    at = x.data + (row * x.first + head * x.second) + element
    found = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if IS_UNIT:
        found *= tl.rsqrt(tl.sum(found * found, axis=0) + 1e-6)
    return found


@triton.jit
def _recurrence_kernel(
    q: Strided,
    k: Strided,
    v: Strided,
    decay: tl.tensor,
    beta: tl.tensor,
    steps: tl.tensor,
    skips: tl.tensor,
    states: tl.tensor,
    after: tl.tensor,
    out: tl.tensor,
    cu_lens: tl.tensor,
    heads: int,
    shared: int,
    scale: float,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    IS_UNIT: tl.constexpr,
    BY_KEY: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    element = tl.arange(0, BLOCK_KEYS)
    value = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key, is_value = element < KEYS, value < VALUES
    place = tl.program_id(0).to(tl.int64) * KEYS * VALUES + element[:, None] * VALUES + value[None]
    both = is_key[:, None] & is_value[None]
    state = tl.load(states + place, mask=both, other=0.0)
    begin, end = tl.load(cu_lens + sequence), tl.load(cu_lens + sequence + 1)
    for row in range(begin, end):
        query = _key(q, row, head // shared, element, is_key, IS_UNIT) * scale
        key = _key(k, row, head // shared, element, is_key, IS_UNIT)
        given_at = v.data + row * v.first + head * v.second + value
        given = tl.load(given_at, mask=is_value, other=0.0)
        given = given.to(tl.float32)
        gate = row * heads + head
        if BY_KEY:
            left = tl.exp(tl.load(decay + gate * KEYS + element, mask=is_key, other=0.0))
            state *= left[:, None]
        else:
            state *= tl.exp(tl.load(decay + gate))
        update = given
        if beta is not None:
            found = tl.sum(state * key[:, None], axis=0)
            update = (given - found) * tl.load(beta + gate)
        if steps is not None:
            update *= tl.load(steps + gate)
        state += key[:, None] * update[None]
        made = tl.sum(state * query[:, None], axis=0)
        if skips is not None:
            made += given * tl.load(skips + head)
        tl.store(out + gate * VALUES + value, made.to(out.dtype.element_ty), mask=is_value)
    tl.store(after + place, state, mask=both)


@triton.jit(do_not_specialize=["rows"])
def _conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    tails: tl.tensor,
    out: tl.tensor,
    owners: tl.tensor,
    cu_lens: tl.tensor,
    rows: int,
    x_row: int,
    channels: int,
    TAPS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_channel = row < rows, channel < channels
    mask = is_row[:, None] & is_channel[None]
    sequence = tl.load(owners + row, mask=is_row, other=0)
    begin = tl.load(cu_lens + sequence, mask=is_row, other=0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None]
    # Few programs have rows near the beginning of a sequence. The first taps read what lies before
    # it.
    if tl.min(tl.where(is_row, row - begin, TAPS), axis=0) < TAPS - 1:
        for tap in tl.static_range(TAPS - 1):
            source = row - (TAPS - 1 - tap)
            is_old = is_row & (source < begin)
            first = sequence * channels * (TAPS - 1) + (source - begin + TAPS - 1)
            before = tails + first[:, None] + (channel * (TAPS - 1))[None]
            old = tl.load(before, mask=is_old[:, None] & is_channel[None], other=0.0)
            factor = tl.load(weight + tap * channels + channel, mask=is_channel, other=0.0)
            total += factor.to(tl.float32)[None] * old.to(tl.float32)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1 - tap)
        is_own = is_row & (source >= begin)
        at = x + (source * x_row)[:, None] + channel[None]
        found = tl.load(at, mask=is_own[:, None] & is_channel[None], other=0.0).to(tl.float32)
        factor = tl.load(weight + tap * channels + channel, mask=is_channel, other=0.0)
        total += factor.to(tl.float32)[None] * found
    if HAS_SILU:
        total *= tl.sigmoid(total)
    to = out + (row * channels)[:, None] + channel[None]
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _tails_kernel(
    x: tl.tensor,
    tails: tl.tensor,
    left: tl.tensor,
    cu_lens: tl.tensor,
    x_row: int,
    channels: int,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence, index = tl.program_id(0) // BEFORE, tl.program_id(0) % BEFORE
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    begin, end = tl.load(cu_lens + sequence), tl.load(cu_lens + sequence + 1)
    source = end - BEFORE + index
    at = (sequence * channels + channel).to(tl.int64) * BEFORE
    num_own = tl.where(source >= begin, channels, 0)
    own = tl.load(x + source * x_row + channel, mask=channel < num_own, other=0.0)
    before = tails + at + (source - begin + BEFORE)
    old = tl.load(before, mask=channel < channels - num_own, other=0.0)
    kept = own.to(tl.float32) + old.to(tl.float32)
    tl.store(left + at + index, kept.to(left.dtype.element_ty), mask=mask)
