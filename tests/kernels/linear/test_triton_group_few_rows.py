"""Products of one or two rows with weights of 4 bits, by Triton's interpreter, against float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear.triton_groups_few_rows import (
    FewRowsLaunchConfig,
    PairExperts,
    multiply_few,
)
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS
from weft.kernels.shared.formats.packed_groups import PackedExperts, pack_groups
from weft.testing.kernels.group_cases import Kind, draw_groups
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

KINDS: list[tuple[int, Kind]] = [
    (32, "e2m1"), (128, "offsets"), (16, "nvfp4"), (32, "offsets"), (64, "offsets"),
    (128, "wide"), (256, "plain"),
]  # fmt: skip
CASES = [
    pytest.param(*kind, gated, marks=[] if place < 3 and gated == bool(place) else pytest.mark.full)
    for place, kind in enumerate(KINDS)
    for gated in (False, True)
]
SHAPES = [
    FewRowsLaunchConfig(8, 2, 2),
    FewRowsLaunchConfig(4, 8, 2),
    FewRowsLaunchConfig(8, 2, 2, is_ahead=True),
]


@pytest.mark.parametrize(("group", "kind", "is_gated"), CASES)
def test_products(group: int, kind: Kind, is_gated: bool) -> None:
    fresh_seed()
    k, columns = 32 * random.randint(5, 9), random.randint(20, 40)
    n = 2 * columns if is_gated else columns
    matrix = draw_groups(n, k, group, kind)
    packed = pack_groups(matrix)
    for rows, shape in zip((1, 2, 1), SHAPES, strict=True):
        # Values of different sizes, beside which a thread's others are small.
        x = (torch.randn(rows, k) * 10 ** (2 * torch.rand(rows, k) - 1)).half()
        bias = torch.randn(n).half()
        residual = None if is_gated else torch.randn(rows, columns).half()

        def product(dtype: torch.dtype, x=x, bias=bias, residual=residual) -> torch.Tensor:
            wide = matrix.dequantised(torch.float32).to(dtype)
            out = F.linear(x.to(dtype), wide, bias.to(dtype))
            if residual is None:
                gate, up = out.chunk(2, dim=1)
                return F.silu(gate) * up
            return out + residual.to(dtype)

        out = torch.full((rows, columns), float("nan")).half()
        multiply_few(out, x, packed, bias=bias, residual=residual, is_gated=is_gated, launch=shape)
        assert_as_exact(out, product(torch.float32).half(), product(torch.float64))


@pytest.mark.full
@pytest.mark.parametrize(("group", "kind"), [(32, "e2m1"), (128, "plain"), (16, "nvfp4")])
def test_pairs_of_a_row_and_an_expert(group: int, kind: Kind) -> None:
    fresh_seed()
    rows, k, columns, count, top_k = 3, 160, 40, 5, 2
    matrices = [draw_groups(columns, k, group, kind) for _ in range(count)]
    packed = PackedExperts.empty(count, pack_groups(matrices[0]))
    for index, matrix in enumerate(matrices):
        packed = packed.put(index, pack_groups(matrix))
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).int()
    shares, bias = torch.rand(rows, top_k), torch.randn(count, columns).half()
    x = torch.randn(rows, k).half()

    def product(dtype: torch.dtype) -> torch.Tensor:
        wide = torch.stack([matrix.dequantised(torch.float32) for matrix in matrices]).to(dtype)
        of_pairs = wide[ids.long()] @ x.to(dtype)[:, None, :, None]
        found = of_pairs.squeeze(-1) + bias.to(dtype)[ids.long()]
        return (found * shares.to(dtype)[:, :, None]).flatten(0, 1)

    out = torch.full((rows * top_k, columns), float("nan")).half()
    multiply_few(out, x, packed, bias=bias, experts=PairExperts(ids, shares, top_k, PLAIN_EXPERTS))
    assert_as_exact(out, product(torch.float32).half(), product(torch.float64))


def test_values_that_are_not_finite_are_not_hidden() -> None:
    fresh_seed()
    packed = pack_groups(draw_groups(16, 128, 32, "plain"))
    x = torch.randn(2, 128).half()
    x[1, random.randrange(128)] = random.choice([float("inf"), float("nan")])
    out = torch.zeros(2, 16).half()
    multiply_few(out, x, packed)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()
