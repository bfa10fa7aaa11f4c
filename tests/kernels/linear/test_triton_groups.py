"""Products with weights of 4 bits in groups, by Triton's interpreter, against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gpu_groups as groups_linear
from weft.kernels.ops.linear import triton_groups_product
from weft.kernels.ops.linear.gpu_groups import MAX_OWN_ROWS, in_floats
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.linear.triton_groups_product import GroupsLaunchConfig, multiply_groups
from weft.kernels.shared.dependent_launch import LaunchOptions
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups, pack_groups
from weft.testing.kernels.group_cases import Kind, draw_groups
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

KINDS: list[tuple[int, Kind]] = [
    (32, "plain"), (32, "offsets"), (64, "offsets"), (128, "wide"), (128, "offsets"),
    (256, "plain"), (32, "e2m1"), (16, "nvfp4"),
]  # fmt: skip
IN_EVERY_RUN = (
    ((32, "offsets"), False), ((128, "offsets"), False), ((128, "wide"), True),
    ((32, "e2m1"), False), ((16, "nvfp4"), True),
)  # fmt: skip
SHAPES = [
    GroupsLaunchConfig(8, 16, 2, 2, 2),
    GroupsLaunchConfig(16, 64, 0, 4, 2),
    GroupsLaunchConfig(32, 64, 0, 4, 2, splits=2, is_rounded=True),
    GroupsLaunchConfig(16, 16, 2, 2, 2, splits=2),
]


def with_poison(matrix: PackedGroups) -> PackedGroups:
    """The same matrix; scales of rows that it does not have are not numbers."""
    if matrix.is_e2m1:
        return matrix
    scales = matrix.scales.clone()
    scales[:, matrix.rows :] = float("nan")
    return replace(matrix, scales=scales)


@pytest.mark.parametrize(("group", "kind"), KINDS)
def test_packing_loses_nothing(group: int, kind: Kind) -> None:
    fresh_seed()
    matrix = draw_groups(70, 352, group, kind)
    packed = pack_groups(matrix)
    wanted = matrix.dequantised(torch.float32)
    assert torch.equal(packed.dequantised(torch.float32), wanted)
    rows = torch.randint(0, 70, (5,))
    assert torch.equal(packed.dequantised_rows(rows, torch.float32), wanted[rows])


@pytest.mark.parametrize(("group", "kind"), [(32, "offsets"), (128, "plain")])
def test_columns_in_another_order(group: int, kind: Kind) -> None:
    fresh_seed()
    n, k, rows = 70, 352, MAX_OWN_ROWS + 1
    plain, order = draw_groups(n, k, group, kind), torch.randperm(k)
    wide = torch.empty(n, k)
    wide[:, order] = plain.dequantised(torch.float32)
    packed = pack_groups(replace(plain, order=order.int()))
    assert torch.equal(packed.dequantised(torch.float32), wide)
    some = torch.randint(0, n, (5,))
    assert torch.equal(packed.dequantised_rows(some, torch.float32), wide[some])
    w = LinearWeight(n, k, torch.float16, gated=False, form=packed, bias=None)
    x = torch.randn(rows, k).half()
    exact = x.double() @ wide.double().T
    peer = F.linear(x.float(), wide.half().float()).half()
    assert_as_exact(groups_linear.linear(x, w), peer, exact, slack=1e-3 * exact.abs().max().item())


@pytest.mark.parametrize(
    ("group", "kind", "is_gated"),
    [
        pytest.param(*each, gated, marks=[] if (each, gated) in IN_EVERY_RUN else pytest.mark.full)
        for each in KINDS
        for gated in (False, True)
    ],
)
def test_products(group: int, kind: Kind, is_gated: bool) -> None:
    fresh_seed()
    rows, k, columns = random.choice([1, 19]), 352, 70
    n = 2 * columns if is_gated else columns
    matrix = draw_groups(n, k, group, kind)
    packed = with_poison(pack_groups(matrix))
    x, bias = torch.randn(rows, k).half(), torch.randn(n).half()
    residual = None if is_gated else torch.randn(rows, columns).half()

    def product(dtype: torch.dtype) -> torch.Tensor:
        out = F.linear(x.to(dtype), matrix.dequantised(torch.float32).to(dtype), bias.to(dtype))
        if is_gated:
            gate, up = out.chunk(2, dim=1)
            return F.silu(gate) * up
        assert residual is not None
        return out + residual.to(dtype)

    for shape in SHAPES:
        if is_gated and shape.splits > 1:
            continue
        out = torch.full((rows, columns), float("nan")).half()
        multiply_groups(out, x, packed, shape, bias=bias, residual=residual, is_gated=is_gated)
        assert_as_exact(out, product(torch.float32).half(), product(torch.float64))


def test_more_programs_than_blocks_share_k() -> None:
    fresh_seed()
    rows, k, columns = 17, 896, 40
    matrix = draw_groups(columns, k, 128, "offsets")
    packed = pack_groups(matrix)
    x = torch.randn(rows, k).half()

    def product(dtype: torch.dtype) -> torch.Tensor:
        return F.linear(x.to(dtype), matrix.dequantised(torch.float32).to(dtype))

    out = torch.full((rows, columns), float("nan")).half()
    multiply_groups(out, x, packed, GroupsLaunchConfig(32, 64, 0, 4, 2, splits=8))
    assert_as_exact(out, product(torch.float32).half(), product(torch.float64))


def test_a_launch_that_may_not_begin_early_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a launch has no options, which are not those that a launch has by default."""
    fresh_seed()
    packed, x = pack_groups(draw_groups(40, 128, 128, "plain")), torch.randn(3, 128).half()

    def default(device: torch.device) -> LaunchOptions:
        raise AssertionError(device)

    monkeypatch.setattr(triton_groups_product, "launch_options", default)
    out = torch.empty(3, 40).half()
    multiply_groups(out, x, packed, GroupsLaunchConfig(8, 16, 2, 2, 2), options={})
    exact = x.double() @ packed.dequantised(torch.float32).double().T
    torch.testing.assert_close(out.double(), exact, rtol=5e-3, atol=5e-3)
    with pytest.raises(AssertionError):
        multiply_groups(out, x, packed, GroupsLaunchConfig(8, 16, 2, 2, 2))


@pytest.mark.parametrize(("group", "kind"), KINDS)
def test_a_matrix_becomes_floats(group: int, kind: Kind) -> None:
    fresh_seed()
    matrix = draw_groups(21, 352, group, kind)
    out = in_floats(with_poison(pack_groups(matrix)), torch.float16)
    assert torch.equal(out, matrix.dequantised(torch.float16))


def test_experts_of_another_kind_are_refused_and_wider_scales_are_taken() -> None:
    fresh_seed()
    first, wide = (pack_groups(draw_groups(20, 96, 32, kind)) for kind in ("plain", "wide"))
    stacked = PackedExperts.empty(2, first).put(0, first).put(1, wide)
    assert stacked.scales.dtype == torch.float32
    assert torch.equal(stacked.scales[0], first.scales.float())
    assert torch.equal(stacked.scales[1], wide.scales)
    assert stacked.first.data.data_ptr() == stacked.data.data_ptr()
    wanted = first.dequantised(torch.float32)
    assert torch.equal(stacked.first.dequantised(torch.float32), wanted)
    with pytest.raises(ValueError, match="expert 1"):
        stacked.put(1, replace(first, order=torch.arange(96, dtype=torch.int32)))
    for other in (draw_groups(20, 96, 64, "plain"), draw_groups(20, 64, 32, "plain")):
        with pytest.raises(ValueError, match=r"expert 1: .* are not like the others"):
            stacked.put(1, pack_groups(other))
