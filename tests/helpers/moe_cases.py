"""Random mixtures of experts and what they compute exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from weft.kernels.moe import Routing


@dataclass(frozen=True)
class MoECase:
    """One mixture and its input."""

    x: torch.Tensor
    residual: torch.Tensor
    routing: Routing
    w13: torch.Tensor
    """[E, 2 * I, H]."""
    w2: torch.Tensor
    """[E, H, I]."""

    def experts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As `pack_experts` takes them."""
        return list(zip(self.w13, self.w2, strict=True))

    def compute(self, dtype: torch.dtype) -> torch.Tensor:
        """Row by row and expert by expert in `dtype`."""
        out = self.residual.to(dtype, copy=True)
        x, w13, w2 = (t.to(dtype) for t in (self.x, self.w13, self.w2))
        for row, (ids, shares) in enumerate(zip(*self.routing, strict=True)):
            for expert, share in zip(ids.tolist(), shares.to(dtype), strict=True):
                gate, up = (w13[expert] @ x[row]).chunk(2)
                out[row] += share * (w2[expert] @ (F.silu(gate) * up))
        return out


def moe_case(
    rows: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    *,
    is_crowded: bool = False,
) -> MoECase:
    """Rows that choose experts at random, or all the same ones."""
    crowd = random.sample(range(experts), top_k)
    chosen = [crowd if is_crowded else random.sample(range(experts), top_k) for _ in range(rows)]
    ids = torch.tensor([sorted(row) for row in chosen], dtype=torch.int32).reshape(rows, top_k)
    return MoECase(
        torch.randn(rows, hidden).to(dtype),
        torch.randn(rows, hidden).to(dtype),
        Routing(ids, torch.rand(rows, top_k) + 0.05),
        (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype),
    )
