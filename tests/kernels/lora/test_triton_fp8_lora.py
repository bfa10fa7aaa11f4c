"""Adapters on products with FP8 weights, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gpu_fp8 as fp8_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.fp8_cases import draw_matrix
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import make_lora, poison_new_memory, segments_of

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("block_rows", [0, 16])
@pytest.mark.parametrize("is_gated", [False, True])
def test_few_rows_with_adapters(
    is_gated: bool, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    k, columns, slots = 72, 96, [2, 1]
    case = make_lora(k, columns, [0, 8, 20], torch.float16)
    lora = LoraAddition((case.weights,), 0, segments_of(slots))
    matrix, x = draw_matrix(columns, k, block_rows), torch.randn(2, k).half()
    w = LinearWeight(columns, k, torch.float16, is_gated, matrix, None)

    def peer(dtype: torch.dtype) -> torch.Tensor:
        wide = x.to(dtype)
        product = F.linear(wide, matrix.dequantised(torch.float32).to(dtype))
        # The product is rounded before what adapters add.
        product = product.half().to(dtype) if dtype != torch.float64 else product
        out = case.add(product, wide, slots, 0)
        if is_gated:
            gate, up = out.chunk(2, dim=1)
            out = F.silu(gate) * up
        return out

    with as_on_gpu():
        out = (
            fp8_linear.gate_up_silu(x, w, lora) if is_gated else fp8_linear.linear(x, w, lora=lora)
        )
    assert_as_exact(out, peer(torch.float32).half(), peer(torch.float64))
