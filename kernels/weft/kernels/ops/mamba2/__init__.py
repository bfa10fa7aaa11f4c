"""Mamba 2's state space: linear attention whose state forgets at a rate that rows choose.

A head's state S is a matrix [N, P], here in float32, of which a row's B is the key, its C the query
and its x, times the time step dt, the value (arXiv 2405.21060):

    S = exp(dt * A) * S + B (dt * x)^T;  y = C^T S + D * x

The native form takes rows one after another. In torch, pieces of many rows are computed by matrix
products (section 6 of the paper, there SSD).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.recurrence.cpu import native_recurrence, native_recurrence_for
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.segments import Segments, Wave
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.recurrence import triton_steps as _triton_steps
else:
    _triton_steps = deferred(__name__, "weft.kernels.ops.recurrence.triton_steps")


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the rows of ragged sequences through the state of each.

    Args:
        x: [T, H, P].
        dt: [T, H], positive.
        a: [H], negative.
        b: [T, G, N]; H / G consecutive heads share a group.
        c: [T, G, N].
        d: [H].
        states: [S, H, N, P] before the first rows; not changed. Their dtype, float32 or float64,
            is that of the computation.

    Returns:
        [T, H, P] of the dtype of `x`, and the states after the last rows, [S, H, N, P].
    """
    rows, heads, width = x.shape
    groups, size = b.shape[1:]
    num_rows, count = sequences.num_rows, sequences.num_sequences
    fits = (
        dt.shape == (rows, heads)
        and b.shape == c.shape == (rows, groups, size)
        and heads % groups == 0
        and a.shape == d.shape == (heads,)
        and states.shape == (count, heads, size, width)
        and rows == num_rows
    )
    if not fits:
        shapes = [tuple(t.shape) for t in (x, dt, a, b, c, d, states)]
        raise ValueError(
            f"x, dt, a, b, c, d, states {shapes} do not fit {num_rows} rows of {count} sequences"
        )
    of_heads = HeadRows(c, b, x, dt.float() * a.float(), sequences, steps=dt, skips=d)
    if x.is_cuda:
        return _triton_steps.fastest_recurrence(of_heads, states)
    native = native_recurrence_for(x, states, b, c)
    if native is None:
        return mamba2_reference(x, dt, a, b, c, d, states, sequences.cu_lens)
    return native_recurrence(native, of_heads, states)


def mamba2_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    cu_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    segments = Segments.of(cu_lens)
    dtype, shared = states.dtype, x.shape[1] // b.shape[1]
    rates, skips = a.to(dtype), d.to(dtype)[:, None, None]

    def piece(wave: Wave, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, steps, keys, queries = (
            wave.of(of_rows).to(dtype).transpose(1, 2) for of_rows in (x, dt, b, c)
        )
        decayed = (steps * rates[:, None]).cumsum(2)
        taken = values * steps[..., None]
        between = (decayed[..., :, None] - decayed[..., None, :]).clamp(max=0.0)
        alike = (queries @ keys.transpose(2, 3)).repeat_interleave(shared, dim=1)
        keys, queries = (part.repeat_interleave(shared, dim=1) for part in (keys, queries))
        out = (alike * between.exp()).tril() @ taken
        out += (queries * decayed[..., None].exp()) @ before + skips * values
        last = decayed[..., -1:]
        left = (keys * (last - decayed)[..., None].exp()).transpose(2, 3) @ taken
        return out.transpose(1, 2), before * last[..., None].exp() + left

    return segments.run(piece, states, torch.empty_like(x))
