"""The GPU's experts with FP8 weights, by Triton's interpreter, against float64 on their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weft.kernels.gpu import moe as gpu
from weft.kernels.quantised import Fp8Experts
from weft.testing.kernels.fp8_cases import draw_matrix
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import poison_new_memory
from weft.testing.kernels.moe_cases import make_adapters, moe_case

pytestmark = pytest.mark.needs("triton-interpreter")

# Rows, hidden, inner, experts, experts a row: direct, and sorted.
SHAPES = [(2, 140, 48, 4, 2), (9, 48, 144, 3, 2)]


def stack(count: int, rows: int, k: int, block_rows: int) -> tuple[Fp8Experts, torch.Tensor]:
    """Experts in FP8, and in float32."""
    matrices = [draw_matrix(rows, k, block_rows) for _ in range(count)]
    stacked = Fp8Experts.empty(count, matrices[0])
    for index, matrix in enumerate(matrices):
        stacked.put(index, matrix)
    return stacked, torch.stack([matrix.dequantised(torch.float32) for matrix in matrices])


@pytest.mark.parametrize(("block_rows", "has_adapters"), [(0, False), (16, False), (16, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_experts(
    shape: tuple[int, int, int, int, int],
    block_rows: int,
    has_adapters: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    _, hidden, inner, experts, _ = shape
    case = moe_case(*shape)
    w13, wide13 = stack(experts, 2 * inner, hidden, block_rows)
    w2, wide2 = stack(experts, hidden, inner, block_rows)
    case = replace(case, w13=wide13, w2=wide2)
    adapters = make_adapters(case, is_shared=False) if has_adapters else None
    lora = None if adapters is None else adapters.addition()
    out = gpu.moe(case.x, *case.routing, w13, w2, case.residual, lora)
    more = () if adapters is None else (adapters,)
    assert_as_exact(out, case.compute(torch.float32, *more), case.compute(torch.float64, *more))


def test_experts_of_another_kind_are_refused() -> None:
    stacked = Fp8Experts.empty(2, draw_matrix(32, 40, 0))
    for matrix in (draw_matrix(32, 40, 16), draw_matrix(32, 44, 0)):
        with pytest.raises(ValueError, match=r"expert 1: .* is not like the others"):
            stacked.put(1, matrix)
