"""The gated delta rule in torch, on any device: pieces of many rows by matrix products."""

from __future__ import annotations

import torch
from weft.kernels.ops.recurrence.segments import LONGEST, Segments, Wave

_LONGEST, _LONGEST_BY_ELEMENT = LONGEST, 16
"""Rows of a piece. With a decay for each element, the products of a piece are its length times
larger.
"""


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
