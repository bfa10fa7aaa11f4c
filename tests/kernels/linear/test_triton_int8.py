"""The GPU's products with int8 weights, by Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import triton_int8 as int8_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.shared.formats.quantised import Int8Channels, quantise_channels
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")


def test_rows_are_rounded_to_nearest() -> None:
    fresh_seed()
    x = torch.randn(5, 330).half()
    x[2] = 0
    data, scales = int8_linear.round_rows(x, 7)
    torch.testing.assert_close(scales[:5], x.float().abs().amax(1) / 127)
    assert not data[5:].any()
    assert ((data[:5] * scales[:5, None] - x.float()).abs() <= 0.501 * scales[:5, None]).all()


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_products(rows: int) -> None:
    fresh_seed()
    n, k = 64, 336
    matrix = quantise_channels(torch.randn(n, k))
    matrix = Int8Channels(matrix.data, matrix.scales / 8)
    x, bias, residual = torch.randn(rows, k).half(), torch.randn(n).half(), torch.randn(rows, n)
    w = LinearWeight(n, k, torch.float16, False, matrix, bias)
    out = int8_linear.linear(x, w, residual.half())
    taken = x.double()
    if rows > 2:
        data, scales = int8_linear.round_rows(x, rows)
        taken = data.double() * scales.double()[:, None]

    def product(dtype: torch.dtype) -> torch.Tensor:
        wide = matrix.data.to(dtype) * matrix.scales.to(dtype)[:, None]
        return F.linear(taken.to(dtype), wide, bias.to(dtype)) + residual.half().to(dtype)

    assert_as_exact(out, product(torch.float32).half(), product(torch.float64))
