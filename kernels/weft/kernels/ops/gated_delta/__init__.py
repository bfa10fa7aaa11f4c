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
from weft.kernels.ops.gated_delta.reference import gated_delta_reference
from weft.kernels.ops.recurrence.cpu import native_recurrence, native_recurrence_for
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.gated_delta import triton_gates as _triton_gates
    from weft.kernels.ops.recurrence import triton_steps as _triton_steps
else:
    _triton_gates = deferred(__name__, "weft.kernels.ops.gated_delta.triton_gates")
    _triton_steps = deferred(__name__, "weft.kernels.ops.recurrence.triton_steps")


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
        return _triton_gates.delta_gates(ba, rates, dt_bias, shared)
    b, a = (part.reshape(len(ba), -1) for part in ba.view(len(ba), -1, 2, shared).unbind(2))
    return rates * F.softplus(a.float() + dt_bias), b.sigmoid().float()


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
