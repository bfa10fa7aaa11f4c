"""The GPU's experts with FP8 weights, by Triton's interpreter, against float64 on their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gpu_fp8
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, quantise_rows
from weft.kernels.ops.moe import gpu
from weft.kernels.ops.moe import triton_products as moe_products
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS, ExpertParts, ExpertWeights, SparseMlpWeight
from weft.kernels.ops.moe.tiles import Tile, Tiles, rounded_tiles
from weft.kernels.ops.moe.triton_rounded import down_rounded, gate_up_rounded
from weft.kernels.ops.moe.triton_sort import sort_pairs
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.stream.additions import Combine, Normed, Sum
from weft.kernels.ops.stream.gpu import GpuStream
from weft.kernels.shared.dependent_launch import launch_options
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Experts
from weft.testing.kernels.as_on_gpu import add_in_one_order
from weft.testing.kernels.fp8_cases import draw_matrix
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import poison_new_memory
from weft.testing.kernels.moe_cases import make_adapters, moe_case, share_of

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


@pytest.mark.parametrize("block_rows", [0, 16])
def test_rows_of_fixed_sums_are_the_same_bits(
    block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert with many rows does not round them, since it does not round few."""
    fresh_seed()
    add_in_one_order(monkeypatch)
    poison_new_memory(monkeypatch)
    case = moe_case(130, 140, 48, 3, 2, torch.float16)
    w13, wide13 = stack(3, 96, 140, block_rows)
    w2, wide2 = stack(3, 140, 48, block_rows)
    case = replace(case, w13=wide13, w2=wide2)

    def run(begin: int, end: int) -> torch.Tensor:
        x, residual, *routing = (
            part[begin:end].clone() for part in (case.x, case.residual, *case.routing)
        )
        return gpu.moe(x, *routing, w13, w2, residual, is_fixed=True)

    whole = run(0, 130)
    for begin, end in ((0, 1), (129, 130), (5, 8), (20, 60)):
        assert torch.equal(run(begin, end), whole[begin:end])
    assert_as_exact(whole, case.compute(torch.float16), case.compute(torch.float64))


def test_experts_of_another_kind_are_refused() -> None:
    stacked = Fp8Experts.empty(2, draw_matrix(32, 40, 0))
    for matrix in (draw_matrix(32, 40, 16), draw_matrix(32, 44, 0)):
        with pytest.raises(ValueError, match=r"expert 1: .* is not like the others"):
            stacked.put(1, matrix)


def draw_rows(rows: int, k: int) -> torch.Tensor:
    """Rows that FP8 has, up to 384 of their columns: the interpreter rounds others wrongly."""
    x = torch.randn(rows, k).mul_(20).to(FP8).float()
    x[:, ::FP8_GROUP] = 448  # Of each group.
    return x * torch.tensor([2.0**-9, 2.0**-7, 2.0**-8]).repeat_interleave(FP8_GROUP)[:k]


@pytest.mark.parametrize("is_gated", [False, True])
def test_blocks_of_many_pairs_round_their_rows(
    is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    monkeypatch.setattr(moe_products, "MIN_ROUNDED_ROWS", 16)
    (rows, k, columns, experts), top_k = (21, 300, 48, 3), 2
    x = draw_rows(rows, k)
    weight, wide = stack(experts, 2 * columns if is_gated else columns, k, 16)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).int()
    shares = torch.rand(rows, top_k)
    tile = Tile(16, FP8_GROUP, 4, 2)
    out = torch.full((rows * top_k, columns), float("nan"), dtype=torch.float16)
    moe_products.multiply_sorted(
        out, x.half(), weight, shares, sort_pairs(ids, experts, 16), None, Tiles(16, tile, tile),
        top_k, launch_options(x.device), is_gated=is_gated,
    )  # fmt: skip

    def compute(dtype: torch.dtype) -> torch.Tensor:
        of_pairs = wide.to(dtype)[ids.flatten().long()]
        both = torch.einsum("pnk,pk->pn", of_pairs, x.to(dtype).repeat_interleave(top_k, 0))
        if is_gated:
            gate, up = both.chunk(2, dim=1)
            return F.silu(gate) * up
        return both * shares.to(dtype).flatten()[:, None]

    assert_as_exact(out, compute(torch.float32).half(), compute(torch.float64))


@pytest.mark.parametrize(("rows", "columns", "block"), [(21, 64, 16), (70, 128, 32)])
def test_blocks_of_few_pairs_of_rounded_rows(
    rows: int, columns: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are not full, and experts of several blocks; gate and up round their result where
    a program has whole groups of it.
    """
    fresh_seed()
    poison_new_memory(monkeypatch)
    (hidden, inner, experts), top_k, dtype = (384, 256, 4), 2, torch.float16
    x, between = draw_rows(rows, hidden), draw_rows(rows * top_k, inner)
    w13, wide13 = stack(experts, 2 * inner, hidden, FP8_GROUP)
    w2, wide2 = stack(experts, hidden, inner, FP8_GROUP)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).int()
    ids[0] = experts  # As other ranks' experts.
    shares, tile = torch.rand(rows, top_k), Tile(columns, FP8_GROUP, 4, 2)
    blocks, options = sort_pairs(ids, experts, block), launch_options(x.device)
    found = gate_up_rounded(
        quantise_rows(x.half(), has_groups=True), w13, blocks, block, tile, top_k, options, dtype,
        PLAIN_EXPERTS,
    )  # fmt: skip
    out = down_rounded(
        quantise_rows(between.half(), has_groups=True), w2, shares, blocks, block, tile, options,
        dtype, PLAIN_EXPERTS,
    )  # fmt: skip
    of_pairs, here = ids.flatten().long()[top_k:], slice(top_k, None)

    def first(dtype: torch.dtype) -> torch.Tensor:
        rows_of_pairs = x.to(dtype).repeat_interleave(top_k, 0)[here]
        gate, up = torch.einsum("pnk,pk->pn", wide13.to(dtype)[of_pairs], rows_of_pairs).chunk(2, 1)
        return F.silu(gate) * up

    def second(dtype: torch.dtype) -> torch.Tensor:
        products = torch.einsum("pnk,pk->pn", wide2.to(dtype)[of_pairs], between.to(dtype)[here])
        return products * shares.to(dtype).flatten()[here, None]

    assert_as_exact(out[here], second(torch.float32).half(), second(torch.float64))
    if isinstance(found, torch.Tensor):
        assert_as_exact(found[here], first(torch.float32).half(), first(torch.float64))
        return
    groups = first(torch.float64).unflatten(1, (-1, FP8_GROUP))
    scales = found.scales[:, here].t()[: len(groups), :, None].double()
    torch.testing.assert_close(scales, groups.abs().amax(2, True) / 448, rtol=1e-3, atol=0)
    numbers = found.data[here][: len(groups)].double().unflatten(1, (-1, FP8_GROUP)) * scales
    # At worst the interpreter halves a number.
    assert ((numbers - groups).abs() <= groups.abs() / 1.9 + scales / 100).all()


@pytest.mark.parametrize("rows", [9, 40])
def test_a_whole_layer_of_few_pairs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are those of two ranks, whose sums are added."""
    fresh_seed()
    poison_new_memory(monkeypatch)
    (hidden, inner, experts), top_k = (256, 128, 4), 2
    shape = (rows, hidden, inner, experts, top_k)
    case = moe_case(*shape, torch.float16)
    stacks = [stack(experts, *size, FP8_GROUP) for size in ((2 * inner, hidden), (hidden, inner))]
    case = replace(case, w13=stacks[0][1], w2=stacks[1][1])
    tiles = rounded_tiles(rows * top_k, experts)
    assert tiles is not None
    assert tiles.rows == (16 if rows == 9 else 32)
    total = torch.zeros(rows, hidden)
    for own in torch.randperm(experts).split(experts // 2):
        placement = torch.full((experts,), len(own), dtype=torch.int32)
        placement[own] = torch.arange(len(own), dtype=torch.int32)
        more = ExpertParts(placement=placement)
        parts = [share_of(each, own) for each, _ in stacks]
        ids, shares = case.routing
        total += gpu.moe(case.x, placement[ids.long()], shares, *parts, None, None, more).float()
    expected = case.compute(torch.float64) - case.residual.double()
    # FP8 has three bits, and the interpreter halves some numbers.
    assert (total - expected).norm() < 0.2 * expected.norm()


def draw_mixture(hidden: int, inner: int, experts: int, top_k: int) -> SparseMlpWeight:
    dtype = torch.float16
    stacks = stack(experts, 2 * inner, hidden, 16)[0], stack(experts, hidden, inner, 16)[0]
    packed = ExpertWeights(hidden, inner, dtype, (), (), stacks, None)
    form = PlainForm(torch.randn(experts, hidden).to(dtype))
    router = LinearWeight(experts, hidden, dtype, False, form, None)
    return SparseMlpWeight(router, packed, top_k, True)


@pytest.mark.parametrize("rows", [8, 21])
def test_the_norm_after_experts_rounds_rows_for_the_next_product(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 9 rows on; fewer may be multiplied as they are."""
    fresh_seed()
    poison_new_memory(monkeypatch)
    (hidden, inner, experts, top_k), dtype = (160, 48, 3, 2), torch.float16
    w, next_w = (
        draw_mixture(hidden, inner, experts, top_k),
        LinearWeight(64, hidden, dtype, False, draw_matrix(64, hidden, 16), None),
    )
    stream = GpuStream(torch.randn(rows, hidden).to(dtype), None)
    norm = Norm(torch.rand(hidden).to(dtype), 1e-5)
    stream.add(Combine(Normed(torch.randn(rows, hidden).to(dtype)), w, None, 0))
    normed = stream.normed(norm)
    assert_as_exact(
        normed.value,
        norm(stream.settle()),
        F.rms_norm(stream.settle().double(), (hidden,), norm.weight.double(), 1e-5),
    )
    if rows <= 8:
        assert type(normed) is Normed
        return
    expected = gpu_fp8.linear(normed.value, next_w)
    monkeypatch.setattr(gpu_fp8, "quantise_rows", None)  # No further launch rounds them.
    assert torch.equal(normed.linear(next_w, None), expected)


def test_rows_that_the_norm_has_rounded_are_not_rounded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    (rows, hidden, inner, experts, top_k), dtype = (21, 160, 48, 3, 2), torch.float16
    widths: list[int] = []
    kernel = moe_products.quantise_rows

    def counted(x: torch.Tensor, *, has_groups: bool) -> Fp8Rows:
        widths.append(x.shape[1])
        return kernel(x, has_groups=has_groups)

    monkeypatch.setattr(moe_products, "quantise_rows", counted)
    w = draw_mixture(hidden, inner, experts, top_k)
    before = LinearWeight(hidden, 128, dtype, False, draw_matrix(hidden, 128, 16), None)
    stream = GpuStream(torch.randn(rows, hidden).to(dtype), None)
    stream.add(Sum(torch.randn(rows, 128).to(dtype), before, None))
    normed = stream.normed(Norm(torch.ones(hidden, dtype=dtype), 1e-5))
    found = stream.computed(Combine(normed, w, None, 0))
    assert widths == [inner]
    expected = stream.computed(Combine(Normed(normed.value), w, None, 0))
    assert widths == [inner, hidden, inner]
    assert torch.equal(found, expected)
