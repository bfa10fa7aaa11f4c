"""Products with weights of 4 bits on a GPU, against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.gpu import linear as gpu_linear
from weft.kernels.gpu.groups_product import GroupsShape, multiply_groups
from weft.kernels.linear import gate_up_silu, linear, normed_linear, pack_gate_up, pack_linear
from weft.kernels.memory import WeightArena
from weft.kernels.moe import Routing, moe, pack_experts
from weft.kernels.packed_groups import PackedGroups, pack_groups
from weft.testing.kernels.group_cases import Kind, draw_groups
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.moe_cases import moe_case

pytestmark = pytest.mark.needs("cuda")

KINDS: list[tuple[int, Kind]] = [
    (32, "plain"), (32, "offsets"), (64, "plain"), (128, "plain"), (128, "offsets"), (32, "e2m1"),
]  # fmt: skip
BF16 = torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 13, 24, 100, 200, 300])
@pytest.mark.parametrize(("group", "kind"), KINDS)
def test_products(rows: int, group: int, kind: Kind) -> None:
    fresh_seed()
    k, columns = 1120, 330
    down = draw_groups(columns, k, group, kind, "cuda")
    both = draw_groups(2 * columns, k, group, kind, "cuda")
    x = torch.randn(rows, k, device="cuda", dtype=BF16)
    bias = torch.randn(columns, device="cuda", dtype=BF16)
    residual = torch.randn(rows, columns, device="cuda", dtype=BF16)
    w, pair = pack_linear(down, bias, None, BF16), pack_gate_up(both, None, None, BF16)
    assert isinstance(w.form, PackedGroups)

    def product(dtype: torch.dtype) -> torch.Tensor:
        wide = down.dequantised(torch.float32).to(dtype)
        return F.linear(x.to(dtype), wide, bias.to(dtype)) + residual.to(dtype)

    def gated(dtype: torch.dtype) -> torch.Tensor:
        wide = both.dequantised(torch.float32).to(dtype)
        gate, up = F.linear(x.to(dtype), wide).chunk(2, dim=1)
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


@pytest.mark.parametrize(("group", "kind"), [(128, "plain"), (32, "offsets"), (32, "e2m1")])
def test_products_of_a_row_take_the_norm_before(group: int, kind: Kind) -> None:
    """In one launch, and of two rows in two; adding to a stream, of which a copy is left."""
    fresh_seed()
    k, columns = random.choice([1120, 4096]), 330
    down, both = (draw_groups(n, k, group, kind, "cuda") for n in (columns, 2 * columns))
    w, pair = pack_linear(down, None, None, BF16), pack_gate_up(both, None, None, BF16)
    gain = torch.randn(k, device="cuda", dtype=BF16)
    for rows in (1, 2):
        x = torch.randn(rows, k, device="cuda", dtype=BF16) * 10 ** random.uniform(-2, 2)
        assert gpu_linear.takes_norm(rows, w) == (rows == 1)
        normed = F.rms_norm(x.double(), (k,), gain.double(), 1e-5)
        exact = F.linear(normed, down.dequantised(torch.float32).double())
        assert_as_exact(normed_linear(x, gain, 1e-5, w), exact.to(BF16), exact, factor=4.0)
        gate, up = F.linear(normed, both.dequantised(torch.float32).double()).chunk(2, dim=1)
        exact = F.silu(gate) * up
        assert_as_exact(normed_linear(x, gain, 1e-5, pair), exact.to(BF16), exact, factor=4.0)
    x = torch.randn(1, k, device="cuda", dtype=BF16)
    stream = torch.randn(1, columns, device="cuda", dtype=BF16)
    taps = torch.zeros(1, 2 * columns, device="cuda", dtype=BF16)
    exact = stream.double() + F.linear(x.double(), down.dequantised(torch.float32).double())
    gpu_linear.add_product(stream, x, w, tap=taps[:, columns:])
    assert_as_exact(stream, exact.to(BF16), exact)
    assert torch.equal(taps[:, columns:], stream)
    assert not taps[:, :columns].any()


SHAPES = [
    GroupsShape(64, 64, 0, 4, 3, is_copied=True),
    GroupsShape(64, 128, 0, 8, 4, 4, is_copied=True),
    GroupsShape(128, 128, 0, 8, 4, 2, is_rounded=True, is_copied=True),
    GroupsShape(128, 256, 0, 8, 3, is_rounded=True, is_copied=True),
    GroupsShape(256, 128, 0, 8, 2, is_rounded=True, is_copied=True),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("group", "kind"), [(128, "plain"), (128, "offsets"), (32, "e2m1")])
def test_tiles_of_the_copy_engine(shape: GroupsShape, group: int, kind: Kind) -> None:
    fresh_seed()
    rows, k, columns = random.randrange(1, 700), 1120, 330
    matrix, both = (draw_groups(n, k, group, kind, "cuda") for n in (columns, 2 * columns))
    x, out = (torch.randn(rows, n, device="cuda", dtype=BF16) for n in (k, columns))
    multiply_groups(out, x, pack_groups(matrix), shape)
    wide = matrix.dequantised(torch.float32)
    assert_as_exact(out, F.linear(x.float(), wide).to(BF16), F.linear(x.double(), wide.double()))
    if shape.splits > 1 or shape.columns > 64:
        return
    multiply_groups(out, x, pack_groups(both), shape, is_gated=True)
    pair = F.linear(x.double(), both.dequantised(torch.float32).double()).chunk(2, dim=1)
    exact = F.silu(pair[0]) * pair[1]
    assert_as_exact(out, exact.to(BF16), exact)


@pytest.mark.parametrize(("group", "kind"), [(128, "plain"), (32, "offsets"), (32, "e2m1")])
def test_a_rows_result_does_not_depend_on_the_others(group: int, kind: Kind) -> None:
    fresh_seed()
    matrix, arena = draw_groups(330, 1120, group, kind, "cuda"), WeightArena(is_fixed=True)
    w = pack_linear(matrix, None, arena, BF16)
    x = torch.randn(300, 1120, device="cuda", dtype=BF16)
    whole = linear(x, w)
    for count in (1, 7, 17, 40, 100):
        assert torch.equal(linear(x[:count].contiguous(), w), whole[:count])


@pytest.mark.parametrize("rows", [1, 30, 500])
@pytest.mark.parametrize(("group", "kind"), [(32, "e2m1"), (128, "offsets"), (32, "plain")])
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
