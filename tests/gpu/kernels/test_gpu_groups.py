"""Products with weights of 4 bits on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.moe import moe
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import Routing
from weft.kernels.shared.formats.packed_groups import PackedGroups
from weft.kernels.shared.memory import WeightArena
from weft.testing.kernels.group_cases import Kind, draw_groups
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.moe_cases import moe_case

pytestmark = pytest.mark.needs("cuda")

KINDS: list[tuple[int, Kind]] = [
    (32, "plain"), (32, "offsets"), (64, "plain"), (64, "offsets"), (128, "plain"),
    (128, "offsets"), (32, "e2m1"), (16, "nvfp4"),
    (128, "wide"), (256, "plain"), (256, "offsets"),
]  # fmt: skip
BF16 = torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 5, 13, 24, 100, 200, 300])
@pytest.mark.parametrize(("group", "kind"), KINDS)
def test_products(rows: int, group: int, kind: Kind) -> None:
    fresh_seed()
    k, columns = 1120, 330
    down = draw_groups(columns, k, group, kind, "cuda")
    both = draw_groups(2 * columns, k, group, kind, "cuda")
    x = torch.randn(rows, k, device="cuda", dtype=BF16)
    bias = torch.randn(columns, device="cuda", dtype=BF16)
    residual = torch.randn(rows, columns, device="cuda", dtype=BF16)
    bias_of_both = torch.randn(2 * columns, device="cuda", dtype=BF16)
    w, pair = pack_linear(down, bias, None, BF16), pack_gate_up(both, bias_of_both, None, BF16)
    for each in (w, pair):
        assert isinstance(each.form, PackedGroups)
        if each.form.scales.is_floating_point():
            # Of rows that do not exist.
            each.form.scales[:, each.form.rows :] = float("nan")

    def product(dtype: torch.dtype) -> torch.Tensor:
        wide = down.dequantised(torch.float32).to(dtype)
        return F.linear(x.to(dtype), wide, bias.to(dtype)) + residual.to(dtype)

    def gated(dtype: torch.dtype) -> torch.Tensor:
        wide = both.dequantised(torch.float32).to(dtype)
        gate, up = F.linear(x.to(dtype), wide, bias_of_both.to(dtype)).chunk(2, dim=1)
        return F.silu(gate) * up

    exact = product(torch.float64)
    assert_as_exact(linear(x, w, residual), product(torch.float32).to(BF16), exact)
    peer = gated(torch.float32).to(BF16)
    assert_as_exact(gate_up_silu(x, pair), peer, gated(torch.float64))


@pytest.mark.parametrize("kind", ["plain", "offsets"])
def test_many_rows_of_a_wide_matrix(kind: Kind) -> None:
    fresh_seed()
    matrix = draw_groups(8224, 1120, 128, kind, "cuda")
    x, w = torch.randn(200, 1120, device="cuda", dtype=BF16), pack_linear(matrix, None, None, BF16)
    wide = matrix.dequantised(torch.float32)
    peer = F.linear(x.float(), wide).to(BF16)
    assert_as_exact(linear(x, w), peer, F.linear(x.double(), wide.double()))


@pytest.mark.parametrize(
    ("group", "kind"), [(128, "plain"), (32, "offsets"), (32, "e2m1"), (16, "nvfp4")]
)
def test_a_rows_result_does_not_depend_on_the_others(group: int, kind: Kind) -> None:
    fresh_seed()
    matrix, arena = draw_groups(330, 1120, group, kind, "cuda"), WeightArena(is_fixed=True)
    w = pack_linear(matrix, None, arena, BF16)
    x = torch.randn(300, 1120, device="cuda", dtype=BF16)
    whole = linear(x, w)
    for count in (1, 7, 17, 40, 100):
        assert torch.equal(linear(x[:count].contiguous(), w), whole[:count])


@pytest.mark.parametrize("rows", [1, 30, 500])
@pytest.mark.parametrize(
    ("group", "kind"), [(32, "e2m1"), (16, "nvfp4"), (128, "offsets"), (32, "plain")]
)
def test_experts(rows: int, group: int, kind: Kind) -> None:
    fresh_seed()
    hidden, inner, experts, top_k = 288, 352, 6, 3
    case = moe_case(rows, hidden, inner, experts, top_k)
    w13 = [draw_groups(2 * inner, hidden, group, kind, "cuda") for _ in range(experts)]
    w2 = [draw_groups(hidden, inner, group, kind, "cuda") for _ in range(experts)]
    packed = pack_experts(zip(w13, w2, strict=True), experts, None, BF16)
    case = replace(
        case,
        x=case.x.to(BF16),
        residual=case.residual.to(BF16),
        w13=torch.stack([one.dequantised(torch.float32) for one in w13]).cpu(),
        w2=torch.stack([one.dequantised(torch.float32) for one in w2]).cpu(),
    )
    routing = Routing(*(part.cuda() for part in case.routing))
    out = moe(case.x.cuda(), routing, packed, case.residual.cuda()).cpu()
    exact = case.compute(torch.float64)
    # Rounded between the two products, as in floats; up to 1.5 steps of bfloat16.
    peer = case.compute(torch.float32).to(BF16)
    assert_as_exact(out, peer, exact, factor=4.0, slack=2.0**-7 * exact.abs().max().item())
