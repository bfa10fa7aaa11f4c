"""Products whose rows do not depend on each other, by Triton's interpreter, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = [pytest.mark.needs("triton-interpreter"), pytest.mark.usefixtures("even_products")]


@pytest.mark.parametrize(
    "shape", [(1, 40, 70), (16, 70, 300), (70, 33, 200), (99, 130, 65), (0, 8, 8)]
)
def test_products(shape: tuple[int, int, int], tmp_path: Path) -> None:
    fresh_seed()
    rows, columns, depth = shape
    dtype = torch.float16
    x = torch.randn(rows, depth).to(dtype)
    weight = (torch.randn(columns, depth) / depth**0.5).to(dtype)
    bias, residual = torch.randn(columns).to(dtype), torch.randn(rows, columns).to(dtype)
    with kernel_module("linear.triton_fixed", tmp_path) as module:
        plain = module.fixed_linear(x, weight, None, None, torch.float32)
        whole = module.fixed_linear(x, weight, bias, residual, dtype)
    product = x.double() @ weight.double().T
    assert plain.dtype == torch.float32
    torch.testing.assert_close(plain.double(), product, rtol=1e-4, atol=1e-4)
    # The product with its bias is rounded before the residual is added.
    eager = (product + bias).to(dtype) + residual
    assert_as_exact(whole, eager, product + bias + residual)


@pytest.mark.full
def test_a_dropped_tile_is_noticed(tmp_path: Path) -> None:
    fresh_seed()
    x, weight = torch.randn(17, 300).half(), torch.randn(20, 300).half()
    change = ("range(0, depth, TILE)", "range(TILE, depth, TILE)")
    with kernel_module("linear.triton_fixed", tmp_path, change) as module:
        out = module.fixed_linear(x, weight, None, None, torch.float32)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out, x.float() @ weight.float().T, rtol=1e-2, atol=1e-2)
