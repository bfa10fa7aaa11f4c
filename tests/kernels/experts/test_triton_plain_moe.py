"""Experts without gates on a GPU: sums over experts in float64."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.ops.plain_experts import stack_experts
from weft.kernels.ops.plain_experts.gpu import plain_moe
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("is_share", [False, pytest.param(True, marks=pytest.mark.full)])
def test_experts_without_gates(is_share: bool) -> None:
    """Rows that fill no block; of a share of the experts too, where others have no products."""
    fresh_seed()
    rows, top_k, experts, hidden, inner = 19, 2, 5, 40, 24
    up, down = stack_experts(
        ((torch.randn(inner, hidden) / 8, torch.randn(hidden, inner) / 8) for _ in range(experts)),
        experts,
    )
    x, shares = torch.randn(rows, hidden), torch.rand(rows, top_k)
    placement, all_experts = None, experts
    if is_share:
        all_experts = 2 * experts
        placement = torch.full((all_experts,), experts, dtype=torch.int32)
        placement[torch.randperm(all_experts)[:experts]] = torch.arange(experts).int()
    ids = torch.stack([torch.randperm(all_experts)[:top_k] for _ in range(rows)]).int()
    if placement is not None:
        ids = placement[ids.long()]
    exact = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        for expert, share in zip(ids[row].tolist(), shares[row].double(), strict=True):
            if expert < experts:
                found = (up[expert].double() @ x[row].double()).relu() ** 2
                exact[row] += share * (down[expert].double() @ found)
    made = plain_moe(x, ids, shares, up, down, "relu2", placement)
    torch.testing.assert_close(made.double(), exact, rtol=1e-4, atol=1e-4)
