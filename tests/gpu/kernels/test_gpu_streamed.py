"""Products of few rows with weights in FP8 and bfloat16 on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.gpu_fp8 import add_product, matrix_of
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.linear.triton_fp8_few_rows import FewRows
from weft.kernels.ops.linear.triton_streamed import multiply_streamed, streamed_rows
from weft.testing.kernels.fp8_cases import draw_matrix
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("cuda")

BF16 = torch.bfloat16
SHAPES = [(4096, 4096), (6144, 896), (1024, 14336)]
"""Columns and K."""


def draw_weight(columns: int, k: int, block_rows: int, *, gated: bool) -> LinearWeight:
    with torch.device("cuda"):
        bias = torch.randn(columns, dtype=BF16)
        return LinearWeight(columns, k, BF16, gated, draw_matrix(columns, k, block_rows), bias)


def exact_product(x: torch.Tensor, w: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    assert w.bias is not None
    wide = matrix_of(w).dequantised(torch.float32).to(dtype)
    return F.linear(x.to(dtype), wide, w.bias.to(dtype))


@pytest.mark.parametrize("block_rows", [0, 64, 128])
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_products_of_rows_that_are_not_rounded(columns: int, k: int, block_rows: int) -> None:
    fresh_seed()
    w = draw_weight(columns, k, block_rows, gated=False)
    numbers = streamed_rows(matrix_of(w), BF16, is_gated=False)
    assert {2, 3, 8} <= set(numbers)
    for rows in (1, *numbers):
        x = torch.randn(rows, k, device="cuda", dtype=BF16)
        residual = torch.randn(rows, columns, device="cuda", dtype=BF16)
        exact, peer = (
            exact_product(x, w, dtype) + residual.to(dtype)
            for dtype in (torch.float64, torch.float32)
        )
        assert_as_exact(linear(x, w, residual), peer.to(BF16), exact)
        tap = torch.full((rows, columns + 8), float("nan"), device="cuda", dtype=BF16)
        add_product(residual, x, w, tap[:, :columns])
        assert_as_exact(residual, peer.to(BF16), exact)
        assert torch.equal(tap[:, :columns], residual)
        assert tap[:, columns:].isnan().all()


@pytest.mark.parametrize(("columns", "k"), [*SHAPES[:2], (4096, 14336), (8192, 1152)])
def test_products_with_floats(columns: int, k: int) -> None:
    fresh_seed()
    with torch.device("cuda"):
        weight = torch.randn(columns, k, dtype=BF16)
        bias = torch.randn(columns, dtype=BF16)
    w = LinearWeight(columns, k, BF16, False, PlainForm(weight), bias)
    numbers = streamed_rows(weight, BF16, is_gated=False)
    assert {3, 8} <= set(numbers)
    for rows in numbers:
        x = torch.randn(rows, k, device="cuda", dtype=BF16)
        residual = torch.randn(rows, columns, device="cuda", dtype=BF16)
        out = torch.full_like(residual, float("nan"))
        multiply_streamed(x, weight, out, FewRows(bias, residual))
        exact, peer = (
            F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)) + residual.to(dtype)
            for dtype in (torch.float64, torch.float32)
        )
        assert_as_exact(out, peer.to(BF16), exact)
        assert_as_exact(linear(x, w, residual), peer.to(BF16), exact)


@pytest.mark.parametrize("block_rows", [0, 128])
@pytest.mark.parametrize("rows", [1, 2])
def test_gated_products_of_few_rows(rows: int, block_rows: int) -> None:
    fresh_seed()
    w = draw_weight(2 * 1536, 2048, block_rows, gated=True)
    x = torch.randn(rows, 2048, device="cuda", dtype=BF16)

    def gated(dtype: torch.dtype) -> torch.Tensor:
        gate, up = exact_product(x, w, dtype).chunk(2, dim=1)
        return F.silu(gate) * up

    peer, exact = gated(torch.float32).to(BF16), gated(torch.float64)
    assert_as_exact(gate_up_silu(x, w, None), peer, exact)
