"""The gated delta rule: linear attention whose state forgets, and replaces what a key finds.

A head's state S is a matrix [Dk, Dv], here in float32. A row first decays it, then moves what its
key finds towards its value, then reads it:

    S = a * S;  S = S + k (beta * (v - k^T S))^T;  o = scale * q^T S

Gated DeltaNet (arXiv 2412.06464) has one decay a head, Kimi Delta Attention (arXiv 2510.26692) one
for each element of a key. The native form takes rows one after another. In torch, pieces of many
rows are computed by matrix products: the updates u of a piece solve a triangular system (section
3.3 of the first paper, there the UT transform).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.recurrence.cpu import native_recurrence, native_recurrence_for
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.segments import LONGEST, Segments, Wave
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.recurrence import triton_rows as _triton_rows
    from weft.kernels.ops.recurrence import triton_steps as _triton_steps
else:
    _triton_rows = deferred(__name__, "weft.kernels.ops.recurrence.triton_rows")
    _triton_steps = deferred(__name__, "weft.kernels.ops.recurrence.triton_steps")

_LONGEST, _LONGEST_BY_ELEMENT = LONGEST, 16
"""Rows of a piece. With a decay for each element, the products of a piece are its length times
larger.
"""


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the rows of ragged sequences through the state of each.

    Args:
        q: [T, Hk, Dk]; each head is normalised to length 1, then divided by the root of Dk.
        k: [T, Hk, Dk]; each head is normalised to length 1.
        v: [T, Hv, Dv]; Hv / Hk consecutive heads share a head of q and k.
        decay: [T, Hv], or [T, Hv, Dk] for one of each element: logarithms of a, at most 0.
        beta: [T, Hv], between 0 and 1, or 2.
        states: [S, Hv, Dk, Dv] before the first rows; not changed. Their dtype, float32 or
            float64, is that of the computation.

    Returns:
        [T, Hv, Dv] of the dtype of `v`, and the states after the last rows, [S, Hv, Dk, Dv].
    """
    _check(q, k, v, decay, beta, states, sequences)
    rows = HeadRows(*(q, k, v, decay, sequences), beta=beta, scale=q.shape[2] ** -0.5, is_unit=True)
    if v.is_cuda:
        return _triton_steps.fastest_recurrence(rows, states)
    native = native_recurrence_for(v, states, q, k)
    if native is None:
        return gated_delta_reference(q, k, v, decay, beta, states, sequences.cu_lens)
    return native_recurrence(native, rows, states)


def delta_gates(
    ba: torch.Tensor, rates: torch.Tensor, dt_bias: torch.Tensor, shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays, as logarithms, and betas of rows, from the product that computes both.

    Args:
        ba: [T, 2 * Hv]: for each group of `shared` heads, those of beta, then those of the decay.
        rates: [Hv] float32: negative rates of the decay.
        dt_bias: [Hv] float32.

    Returns:
        [T, Hv] float32 each.
    """
    if ba.is_cuda:
        return _triton_rows.delta_gates(ba, rates, dt_bias, shared)
    b, a = (part.reshape(len(ba), -1) for part in ba.view(len(ba), -1, 2, shared).unbind(2))
    return rates * F.softplus(a.float() + dt_bias), b.sigmoid().float()


def gated_delta_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    cu_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    segments = Segments.of(cu_lens, _LONGEST if decay.dim() == 2 else _LONGEST_BY_ELEMENT)
    dtype, shared = states.dtype, v.shape[1] // k.shape[1]

    def of_heads(wave: Wave, rows: torch.Tensor) -> torch.Tensor:
        """[n, Hv, L, ...]."""
        return wave.of(rows).to(dtype).transpose(1, 2)

    def piece(wave: Wave, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, queries = (
            unit_length(of_heads(wave, rows)).repeat_interleave(shared, dim=1) for rows in (k, q)
        )
        out, after = _piece(
            queries * q.shape[2] ** -0.5,
            keys,
            of_heads(wave, v),
            of_heads(wave, decay).cumsum(2),
            of_heads(wave, beta),
            before,
        )
        return out.transpose(1, 2), after

    return segments.run(piece, states, torch.empty_like(v))


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Normalises along the last axis, with an epsilon of 1e-6."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decayed: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece of all heads: [n, H, L, ...] each, with `decayed` as running sums; the states are
    [n, H, Dk, Dv]. Rows of zeros change nothing.
    """
    of_keys = decayed if decayed.dim() == 4 else decayed[..., None]
    grown = of_keys.exp()
    found = (k * grown) @ states
    u = beta[..., None] * (v - found)
    length = q.shape[2]
    if length > 1:
        system = (beta[..., None] * _products(k, k, decayed)).tril(-1)
        system.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    out = (q * grown) @ states + _products(q, k, decayed).tril() @ u
    last = of_keys[:, :, -1:]
    left = (k * (last - of_keys).exp()).transpose(2, 3) @ u
    return out, states * last.exp().transpose(2, 3) + left


def _products(left: torch.Tensor, k: torch.Tensor, decayed: torch.Tensor) -> torch.Tensor:
    """[n, H, L, L]: products of each row of `left` with each key, times the decay between the two.
    Entries for later keys mean nothing.
    """
    if decayed.dim() == 3:
        between = (decayed[..., :, None] - decayed[..., None, :]).clamp(max=0.0)
        return (left @ k.transpose(2, 3)) * between.exp()
    between = (decayed[..., :, None, :] - decayed[..., None, :, :]).clamp_(max=0.0)
    return torch.einsum("nhid,nhjd,nhijd->nhij", left, k, between.exp_())


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    given: Sequences,
) -> None:
    rows, heads, value = v.shape
    shared, dim = k.shape[1:]
    num_rows, sequences = given.num_rows, given.num_sequences
    fits = (
        q.shape == k.shape == (rows, shared, dim)
        and heads % shared == 0
        and decay.shape in ((rows, heads), (rows, heads, dim))
        and beta.shape == (rows, heads)
        and states.shape == (sequences, heads, dim, value)
        and rows == num_rows
    )
    if not fits:
        shapes = [tuple(t.shape) for t in (q, k, v, decay, beta, states)]
        raise ValueError(
            f"q, k, v, decay, beta, states {shapes} do not fit {num_rows} rows of {sequences} "
            "sequences"
        )
