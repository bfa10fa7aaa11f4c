"""The GPU's experts with weights of 4 bits, by Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weft.kernels.ops.moe import gpu
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.shared.formats.packed_groups import PackedExperts, pack_groups
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.group_cases import Kind, draw_groups
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import poison_new_memory
from weft.testing.kernels.moe_cases import make_adapters, moe_case

pytestmark = pytest.mark.needs("triton-interpreter")


def stack(
    count: int, rows: int, k: int, group: int, kind: Kind
) -> tuple[PackedExperts, torch.Tensor]:
    """Experts packed, and in float32."""
    matrices = [draw_groups(rows, k, group, kind) for _ in range(count)]
    stacked = PackedExperts.empty(count, pack_groups(matrices[0]))
    for index, matrix in enumerate(matrices):
        stacked = stacked.put(index, pack_groups(matrix))
    return stacked, torch.stack([matrix.dequantised(torch.float32) for matrix in matrices])


@pytest.mark.parametrize("floats", [0, 1])
def test_a_single_matrix_of_4_bits_becomes_floats(floats: int) -> None:
    fresh_seed()
    groups = draw_groups(128, 96, 32, "plain"), draw_groups(96, 64, 32, "plain")
    pair = [
        matrix.dequantised(torch.float16) if index == floats else matrix
        for index, matrix in enumerate(groups)
    ]
    with as_on_gpu():
        found = pack_experts([(pair[0], pair[1])] * 2, 2, dtype=torch.float16).stacked
    assert found is not None
    for stack, matrix in zip(found, groups, strict=True):
        assert torch.equal(stack, matrix.dequantised(torch.float16).expand(2, -1, -1))


# Rows, hidden, inner, experts, experts a row.
FEW, MANY = (1, 160, 64, 4, 2), (40, 64, 160, 3, 2)


@pytest.mark.parametrize(
    ("shape", "group", "kind", "has_adapters"),
    [
        (FEW, 128, "offsets", False),
        (MANY, 32, "e2m1", False),
        (MANY, 16, "nvfp4", False),
        pytest.param(FEW, 32, "e2m1", False, marks=pytest.mark.full),
        pytest.param(FEW, 16, "nvfp4", False, marks=pytest.mark.full),
        pytest.param(MANY, 128, "offsets", False, marks=pytest.mark.full),
        pytest.param(FEW, 32, "plain", True, marks=pytest.mark.full),
        pytest.param(MANY, 32, "plain", True, marks=pytest.mark.full),
    ],
)
def test_sums_of_experts(
    shape: tuple[int, int, int, int, int],
    group: int,
    kind: Kind,
    has_adapters: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    _, hidden, inner, experts, _ = shape
    # Only values of 16 bits are multiplied by the products of few rows.
    dtype = torch.float16 if shape == FEW else torch.float32
    case = moe_case(*shape, dtype)
    w13, wide13 = stack(experts, 2 * inner, hidden, group, kind)
    w2, wide2 = stack(experts, hidden, inner, group, kind)
    case = replace(case, w13=wide13, w2=wide2)
    adapters = make_adapters(case, is_shared=False) if has_adapters else None
    lora = None if adapters is None else adapters.addition()
    more = () if adapters is None else (adapters,)
    exact = case.compute(torch.float64, *more)
    for is_fixed in (False, True):
        out = gpu.moe(case.x, *case.routing, w13, w2, case.residual, lora, is_fixed=is_fixed)
        assert_as_exact(out, case.compute(dtype, *more), exact)
