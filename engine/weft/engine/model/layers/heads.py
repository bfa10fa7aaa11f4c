"""Changes of the heads of q and k that the rotation's kernel does not support, as single
operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from weft.engine.model.layers.rotary import Rotary
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.rope.reference import rotated


class HeadChange(Protocol):
    """A change of q and k before they are rotated and stored."""

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, q_size: int) -> torch.Tensor:
        """Changes q and k, and leaves V unchanged.

        Args:
            qkv: [T, (Hq + 2 * Hkv) * D], contiguous; not changed.
            positions: [T] int64.
            q_size: Hq * D.

        Returns:
            Like `qkv`, contiguous.
        """


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds all numbers of q, k and v, as in OLMo and DBRX."""

    limit: float
    """Largest magnitude."""

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, q_size: int) -> torch.Tensor:
        return qkv.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class WidthNorms:
    """RMS norms of q and of k, each over all of its heads together, as in OLMo 2."""

    q: Norm
    """Weight [Hq * D]."""
    k: Norm
    """Weight [Hkv * D]."""

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, q_size: int) -> torch.Tensor:
        kv_size = (qkv.shape[1] - q_size) // 2
        q, k, v = torch.split(qkv, [q_size, kv_size, kv_size], dim=1)
        return torch.cat((self.q(q.contiguous()), self.k(k.contiguous()), v), dim=1)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Layer norms of each head of q and k by a separate weight, without bias, as in Cohere's models
    and StableLM.
    """

    weight: torch.Tensor
    """[Hq + Hkv, D]."""
    eps: float

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, q_size: int) -> torch.Tensor:
        heads, dim = self.weight.shape
        both, v = qkv[:, : heads * dim], qkv[:, heads * dim :]
        wide = both.reshape(-1, heads, dim).float()
        variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
        normed = (wide - mean) * torch.rsqrt(variance + self.eps) * self.weight.float()
        return torch.cat((normed.flatten(1).to(qkv.dtype), v), dim=1)


@dataclass(frozen=True, slots=True)
class PlainNorms:
    """RMS norms of each head of q and k, without weights."""

    dim: int
    eps: float

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, q_size: int) -> torch.Tensor:
        kv_size = (qkv.shape[1] - q_size) // 2
        both, v = qkv[:, : q_size + kv_size], qkv[:, q_size + kv_size :]
        return torch.cat((_plain_rms(both, self.dim, self.eps), v), dim=1)


@dataclass(frozen=True, slots=True)
class Values:
    """A factor on V, a norm of its heads without weight, and zeros up to the width of K's heads."""

    dim: int
    """Elements of a head of q and K."""
    value_dim: int
    factor: float = 1.0
    eps: float | None = None
    """Epsilon of the norm; None: no norm."""

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, q_size: int) -> torch.Tensor:
        kv_heads = (qkv.shape[1] - q_size) // (self.dim + self.value_dim)
        begin = q_size + kv_heads * self.dim
        before, v = qkv[:, :begin], qkv[:, begin:]
        if self.eps is not None:
            v = _plain_rms(v, self.value_dim, self.eps)
        if self.factor != 1.0:
            v = v * self.factor
        rest = self.dim - self.value_dim
        if rest:
            v = F.pad(v.reshape(-1, kv_heads, self.value_dim), (0, rest)).flatten(1)
        return torch.cat((before, v), dim=1)


def _plain_rms(x: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    heads = x.reshape(x.shape[0], -1, dim).float()
    return F.rms_norm(heads, (dim,), eps=eps).flatten(1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation itself, for layers that normalise heads after it, as in Hunyuan."""

    rotary: Rotary

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, q_size: int) -> torch.Tensor:
        dim, kv_size = self.rotary.cos_sin.shape[1], (qkv.shape[1] - q_size) // 2
        both, v = qkv[:, : q_size + kv_size], qkv[:, q_size + kv_size :]
        turns = self.rotary.cos_sin[positions]
        heads = both.reshape(qkv.shape[0], both.shape[1] // dim, dim)
        turned = rotated(heads, turns, self.rotary.num_adjacent)
        return torch.cat((turned.flatten(1), v), dim=1)
