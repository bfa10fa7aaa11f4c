"""Mamba's state space: each channel has a state of its own, which decays at rates of its own.

A channel's state s is a vector [N], here in float32 (arXiv 2312.00752, algorithm 2):

    s = exp(dt * A) * s + dt * x * B;  y = C . s + D * x
"""

from __future__ import annotations

import ctypes

import torch
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.shared import cpu


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the rows of ragged sequences through the states of each, one row after another.

    Args:
        x: [T, C].
        dt: [T, C], positive.
        a: [N, C], negative.
        b: [T, N], shared by all channels.
        c: [T, N].
        d: [C].
        states: [S, N, C] before the first rows; not changed. Their dtype, float32 or float64, is
            that of the computation.

    Returns:
        [T, C] of the dtype of `x`, and the states after the last rows, [S, N, C].
    """
    (rows, channels), (size, _) = x.shape, a.shape
    fits = (
        dt.shape == x.shape
        and b.shape == c.shape == (rows, size)
        and a.shape == (size, channels)
        and d.shape == (channels,)
        and states.shape == (sequences.num_sequences, size, channels)
        and rows == sequences.num_rows
    )
    if not fits:
        shapes = [tuple(t.shape) for t in (x, dt, a, b, c, d, states)]
        raise ValueError(
            f"x, dt, a, b, c, d, states {shapes} do not fit {sequences.cu_lens.tolist()}"
        )
    native = cpu.native_cpu_for(x)
    is_native = native is not None and size <= native.max_keys and states.dtype == torch.float32
    if native is None or not is_native or not b.dtype == c.dtype == x.dtype:
        return selective_scan_reference(x, dt, a, b, c, d, states, sequences.cu_lens)
    typed = [each.contiguous() for each in (x, b, c)]
    wide = [each.to(torch.float32).contiguous() for each in (dt, a, d)]
    after, out = states.clone(memory_format=torch.contiguous_format), torch.empty_like(typed[0])
    bounds = sequences.cu_lens.contiguous()
    described = cpu.SelectionStruct(
        *(each.data_ptr() for each in (*typed, *wide, after, out, bounds)),
        *(sequences.num_sequences, channels, size, x.dtype == torch.bfloat16),
    )
    native.selective_scan(ctypes.byref(described))
    return out, after


def selective_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    cu_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, lengths, after = states.dtype, cu_lens.diff(), states.clone()
    rates, skips, out = a.to(dtype), d.to(dtype), torch.empty_like(x)
    for index in range(int(lengths.max())):
        live = (lengths > index).nonzero()[:, 0]
        rows = cu_lens[live] + index
        value, step, key, query = (each[rows].to(dtype) for each in (x, dt, b, c))
        state = after[live] * torch.exp(step[:, None] * rates)
        state += (step * value)[:, None] * key[..., None]
        after[live] = state
        out[rows] = ((state * query[..., None]).sum(1) + skips * value).to(out.dtype)
    return out, after
