"""The gated delta rule over whole texts, in plain torch that can be differentiated."""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK = 64
"""Positions that are computed at once, with one triangular matrix."""
_BLOCK = 16


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Runs S = decay * S (I - beta k k^T) + beta k v^T and reads q S at each position.

    Chunks are computed as in Gated Delta Networks (arXiv 2412.06464, section 3.3).

    Args:
        q: float32 [B, T, H, Dk], of length 1 / sqrt(Dk); T a multiple of `CHUNK`.
        k: float32 [B, T, H, Dk], of length 1.
        v: float32 [B, T, H, Dv].
        log_decay: float32 [B, T, H], at most 0.
        beta: float32 [B, T, H].

    Returns:
        float32 [B, T, H, Dv]; states begin as zeros.
    """
    batch, length, heads, width = v.shape

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[B, T, H, ...] -> [B, H, chunks, CHUNK, ...]."""
        return x.transpose(1, 2).unflatten(2, (-1, CHUNK))

    q, k, v, log_decay, beta = (chunked(x) for x in (q, k, v, log_decay, beta))
    since = log_decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = since[..., :, None] - since[..., None, :]
    between = between.masked_fill(later, float("-inf")).exp()
    scaled = beta[..., None] * k
    system = (scaled @ k.mT) * between
    wanted = torch.cat([beta[..., None] * v, scaled * since.exp()[..., None]], dim=-1)
    new, reads = (_inverse(system) @ wanted).split([width, k.shape[-1]], dim=-1)
    inside = (q @ k.mT) * between
    from_state = q * since.exp()[..., None]
    to_state = k * (since[..., -1:] - since).exp()[..., None]
    kept = since[..., -1].exp()[..., None, None]
    state = v.new_zeros(batch, heads, k.shape[-1], width)
    outputs = []
    for chunk in range(length // CHUNK):
        added = new[:, :, chunk] - reads[:, :, chunk] @ state
        outputs.append(from_state[:, :, chunk] @ state + inside[:, :, chunk] @ added)
        state = state * kept[:, :, chunk] + to_state[:, :, chunk].mT @ added
    return torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2)


def _inverse(system: torch.Tensor) -> torch.Tensor:
    """Inverse of 1 plus the part of matrices [..., CHUNK, CHUNK] below the diagonal.

    Products alone, which can be compiled; blocks are put together as a triangular solve would.
    """
    power = -_diagonal(system, _BLOCK).tril(-1)
    found = torch.eye(_BLOCK, device=system.device) + power
    size = 2
    while size < _BLOCK:
        power = power @ power
        found = found + found @ power
        size *= 2
    while size < CHUNK:
        first, last = found[..., ::2, :, :], found[..., 1::2, :, :]
        corner = -(last @ _diagonal(system, 2 * size)[..., size:, :size] @ first)
        above = torch.cat([first, torch.zeros_like(corner)], dim=-1)
        found = torch.cat([above, torch.cat([corner, last], dim=-1)], dim=-2)
        size *= 2
    return found[..., 0, :, :]


def _diagonal(x: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks on the diagonal: [..., C, C] -> [..., C / size, size, size]."""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def short_conv(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """SiLU of each channel's causal convolution: [B, T, C], taps [C, 1, K] -> [B, T, C]."""
    count = taps.shape[-1]
    padded = torch.cat([x.new_zeros(x.shape[0], count - 1, x.shape[2]), x], dim=1)
    parts = [padded[:, tap : tap + x.shape[1]] * taps[:, 0, tap] for tap in range(count)]
    return functional.silu(torch.stack(parts).sum(0))
