"""The GPU's mixture of experts at sizes that fill its tiles, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear.triton_fp8_rows import empty_rows, quantise_rows
from weft.kernels.ops.moe import gpu as gpu_moe
from weft.kernels.ops.moe import moe, triton_rounded
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS, ExpertParts, Routing
from weft.kernels.ops.moe.tiles import Tile, Tiles
from weft.kernels.ops.moe.triton_combine import NormAfter
from weft.kernels.ops.moe.triton_direct import joins_shared
from weft.kernels.ops.moe.triton_direct_fp8 import can_multiply, direct_fp8_moe
from weft.kernels.ops.moe.triton_route import route
from weft.kernels.ops.moe.triton_sort import sort_pairs
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.stream.gpu import GpuStream
from weft.kernels.shared.formats.quantised import Fp8Experts
from weft.kernels.shared.side_stream import rehearsal
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import poison_new_memory
from weft.testing.kernels.moe_cases import (
    Adapters,
    MoECase,
    experts_of,
    make_adapters,
    moe_case,
    share_of,
    share_of_adapters,
    shared_case,
)

pytestmark = pytest.mark.needs("cuda")

CUDA = "cuda"


class Case(NamedTuple):
    """A mixture and its input, on the GPU."""

    x: torch.Tensor
    ids: torch.Tensor
    shares: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    residual: torch.Tensor


def make_case(
    rows: int, hidden: int, inner: int, experts: int, top_k: int, dtype: torch.dtype
) -> Case:
    """Random; the first experts are asked for more often, the last one by nobody."""
    crowd = torch.linspace(1, -1, experts, device=CUDA)
    crowd[-1] = -1e4
    ids, shares = route(torch.randn(rows, experts, device=CUDA) + crowd, top_k, True)
    drawn = [(rows, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), (rows, hidden)]
    x, w13, w2, residual = (torch.randn(size, device=CUDA) for size in drawn)
    scaled = (x, w13 / hidden**0.5, w2 / inner**0.5, residual)
    x, w13, w2, residual = (tensor.to(dtype) for tensor in scaled)
    return Case(x, ids, shares, w13, w2, residual)


def compute(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Expert by expert in `dtype`."""
    x, out = case.x.to(dtype), case.residual.to(dtype, copy=True)
    for expert, (w13, w2) in enumerate(zip(case.w13.to(dtype), case.w2.to(dtype), strict=True)):
        rows, places = (case.ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], w13).chunk(2, dim=1)
        share = case.shares[rows, places, None].to(dtype)
        out.index_add_(0, rows, F.linear(F.silu(gate) * up, w2) * share)
    return out


def run(case: Case) -> torch.Tensor:
    """The operation, in memory that held NaN before."""
    poison = torch.full((8 * case.ids.numel(), case.w2.shape[1]), float("nan"), device=CUDA)
    del poison
    out: torch.Tensor = gpu_moe.moe(*case)
    return out


# Rows of weights that the copy engine can fetch, and of a length that it cannot; blocks of few
# pairs, of 64 and of 128; columns and depths that fill no tile.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(60, 264, 136, 6, 3), (300, 264, 136, 6, 2), (900, 200, 72, 7, 3), (700, 260, 70, 5, 2)],
)
def test_sums_of_experts(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    fresh_seed()
    case = make_case(*shape, dtype)
    assert_as_exact(run(case), compute(case, dtype), compute(case, torch.float64))


@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        (
            "K, TILE):\n        at = (start + part)",
            "K - TILE, TILE):\n        at = (start + part)",
        ),
        ("end - begin <= HALF_ROWS", "end - begin <= 2 * HALF_ROWS"),
    ],
)
def test_a_dropped_tile_is_noticed(
    original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    case = make_case(800, 264, 136, 6, 3, torch.bfloat16)
    # 480 rows each: the last block has more than half of 128.
    case.ids.copy_((torch.arange(800, device=CUDA)[:, None] + torch.arange(3, device=CUDA)) % 5)
    with kernel_module("moe.triton_products", tmp_path, (original, replacement)) as module:
        monkeypatch.setattr(gpu_moe, "multiply_sorted", module.multiply_sorted)
        out = run(case)
    with pytest.raises(AssertionError):
        assert_as_exact(out, compute(case, torch.bfloat16), compute(case, torch.float64))


def compute_adapted(case: MoECase, adapters: Adapters, dtype: torch.dtype) -> torch.Tensor:
    """Expert by expert and adapter by adapter, in `dtype`."""
    out = case.residual.to(dtype)
    (ids, shares), slots = case.routing, torch.tensor(adapters.slots, device=CUDA)
    for expert, slot in itertools.product(range(len(case.w2)), set(adapters.slots)):
        rows, places = ((ids == expert) & (slots == slot)[:, None]).nonzero().T
        values = case.x[rows].to(dtype)
        for weight, cases in ((case.w13, adapters.w13), (case.w2, adapters.w2)):
            product = values @ weight[expert].to(dtype).T
            for added in cases:
                if (expert, slot) in added.plain:
                    a, b = (t.to(CUDA, dtype) for t in added.plain[expert, slot])
                    column = added.weights.column
                    product[:, column : column + len(b)] += (values @ a.T) @ b.T
            if weight is case.w13:
                gate, up = product.chunk(2, -1)
                values = torch.nn.functional.silu(gate) * up
        weighed = shares[rows, places].to(dtype)
        out.index_add_(0, rows, weighed[:, None] * product)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rows", [5, 40, 100, 1500])
def test_additions_to_experts(rows: int, is_shared: bool, dtype: torch.dtype) -> None:
    """Row by row, pair by pair, and in tiles of several sizes."""
    fresh_seed()
    case = moe_case(rows, 520, 264, 6, 3, dtype)
    adapters = make_adapters(case, is_shared, (0, 8, 16, 64, 3))
    routing = Routing(*(t.to(CUDA) for t in case.routing))
    moved = {name: getattr(case, name).to(CUDA) for name in ("x", "residual", "w13", "w2")}
    case = MoECase(routing=routing, **moved)
    out = gpu_moe.moe(case.x, *routing, case.w13, case.w2, case.residual, adapters.addition(CUDA))
    peer, exact = (compute_adapted(case, adapters, kind) for kind in (dtype, torch.float64))
    assert_as_exact(out, peer, exact)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rows", [5, 40, 1500])
def test_additions_to_shares_of_the_experts(
    rows: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    case = moe_case(rows, 520, 264, 6, 3)
    case.residual.zero_()
    adapters = make_adapters(case, is_shared, (0, 8, 16, 64, 3))
    routing = Routing(*(t.to(CUDA) for t in case.routing))
    moved = {name: getattr(case, name).to(CUDA) for name in ("x", "residual", "w13", "w2")}
    case = MoECase(routing=routing, **moved)
    total = torch.zeros_like(case.x)
    for own in torch.randperm(6, device=CUDA).split((2, 4)):
        placement = torch.full((6,), len(own), dtype=torch.int32, device=CUDA)
        placement[own] = torch.arange(len(own), dtype=torch.int32, device=CUDA)
        added = share_of_adapters(adapters.addition(CUDA), own, 6)
        ids, weights = placement[routing.ids], (case.w13[own], case.w2[own])
        more = ExpertParts(placement=placement)
        total += gpu_moe.moe(case.x, ids, routing.weights, *weights, None, added, more)
    peer, exact = (compute_adapted(case, adapters, kind) for kind in (torch.float32, torch.float64))
    assert_as_exact(total, peer, exact, 4)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rows", [16, 64, 200])
def test_additions_to_layers_in_a_graph(rows: int, is_shared: bool) -> None:
    """Launches that begin early, and beside others, are the same bits as one after the other."""
    fresh_seed()
    hidden, inner, experts, top_k = 1024, 768, 32, 4
    case = moe_case(rows, hidden, inner, experts, top_k, torch.bfloat16)
    adapters = make_adapters(case, is_shared, (0, 8, 16, 40)).addition(CUDA)
    x, w13, w2 = case.x.to(CUDA), case.w13.to(CUDA), case.w2.to(CUDA)
    router, gain = torch.randn(hidden, experts).bfloat16().to(CUDA), torch.ones(hidden).bfloat16()
    stream = torch.empty_like(x)
    after = NormAfter(stream, gain.to(CUDA), 1e-6)

    def run() -> torch.Tensor:
        stream.zero_()
        out = x
        for _ in range(4):
            ranks = gpu_moe.begin_ranks(out, adapters, experts, inner, is_fixed=False)
            logits = (out @ router).float()
            given = (out, logits, top_k, w13, w2, after, adapters, ranks)
            out = gpu_moe.routed_moe(*given, renormalise=True)
        return out

    with rehearsal():
        expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("rows", [1, 16, 100, 513, 3000, 9000])
def test_pairs_are_sorted_into_blocks_of_their_experts(rows: int) -> None:
    fresh_seed()
    experts, block = 37, 64
    ids = route(torch.randn(rows, experts, device=CUDA), 4, True)[0]
    order, expert, begin, end = sort_pairs(ids, experts, block)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    counts = ids.flatten().bincount(minlength=experts)
    ends = counts.cumsum(0)
    used = expert < experts
    assert torch.equal(expert[used].bincount(minlength=experts), (counts + block - 1) // block)
    assert torch.equal(end[used].long(), ends[expert[used].long()])
    number = torch.arange(int(used.sum()), device=CUDA)
    first = torch.searchsorted(expert[used], expert[used])
    expected = (ends - counts)[expert[used].long()] + (number - first) * block
    assert torch.equal(begin[used].long(), expected)


BIG = (2048, 768, 128, 8)
"""Hidden size, an expert's, experts, and experts a row of Qwen3-30B-A3B: `moe_tiles.json` has tiles
chosen for it."""


@pytest.fixture(scope="module")
def big_weights() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of all experts in bfloat16."""
    hidden, inner, experts, _ = BIG
    options: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16}
    w13 = torch.randn(experts, 2 * inner, hidden, **options) / hidden**0.5
    yield w13, torch.randn(experts, hidden, inner, **options) / inner**0.5
    del w13
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 4096])
def test_sums_of_experts_with_tiles_chosen_for_a_model(
    rows: int, big_weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    fresh_seed()
    hidden, _, experts, top_k = BIG
    crowd = torch.linspace(1, -1, experts, device=CUDA)
    ids, shares = route(torch.randn(rows, experts, device=CUDA) + crowd, top_k, True)
    x, residual = torch.randn(2, rows, hidden, device=CUDA).bfloat16()
    case = Case(x, ids, shares, *big_weights, residual)
    assert_as_exact(run(case), compute(case, torch.bfloat16), compute(case, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_and_none(dtype: torch.dtype) -> None:
    """Of as many rows as are not sorted, and one more, by the operation that models call."""
    fresh_seed()
    whole = make_case(9, 264, 136, 6, 3, dtype)
    experts = list(zip(whole.w13, whole.w2, strict=True))
    packed = pack_experts(experts, len(experts), None)
    for rows in range(10):
        parts = (whole.x, whole.ids, whole.shares)
        x, ids, shares = (part[:rows].contiguous() for part in parts)
        case = whole._replace(x=x, ids=ids, shares=shares, residual=whole.residual[:rows].clone())
        out = moe(x, Routing(ids, shares), packed, case.residual)
        assert_as_exact(out, compute(case, dtype), compute(case, torch.float64))


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_experts_that_are_too_large_to_be_loaded_at_once(is_fp8: bool, rows: int) -> None:
    """Whole, and the sum of two shares."""
    fresh_seed()
    case = make_case(rows, 1024, 1536, 16, 8, torch.bfloat16)
    weights: list[Any] = [case.w13, case.w2]
    if is_fp8:
        drawn = [experts_of("fp8", *each.shape) for each in weights]
        weights = [
            replace(each, data=each.data.to(CUDA), scales=each.scales.to(CUDA)) for each, _ in drawn
        ]
        w13, w2 = (wide.to(CUDA) for _, wide in drawn)
        case = case._replace(w13=w13, w2=w2)
    peer, exact = compute(case, torch.bfloat16), compute(case, torch.float64)
    whole = gpu_moe.moe(case.x, case.ids, case.shares, *weights, case.residual)
    assert_as_exact(whole, peer, exact)
    total = case.residual.float()
    for own in torch.randperm(16, device=CUDA).split((5, 11)):
        placement = torch.full((16,), len(own), dtype=torch.int32, device=CUDA)
        placement[own] = torch.arange(len(own), dtype=torch.int32, device=CUDA)
        parts = [share_of(each, own) for each in weights]
        ids, more = placement[case.ids], ExpertParts(placement=placement)
        total += gpu_moe.moe(case.x, ids, case.shares, *parts, None, None, more).float()
    assert_as_exact(total.bfloat16(), peer, exact, 4)


@pytest.mark.parametrize("rows", [4, 9, 20, 100, 900])
def test_rows_of_experts_are_rounded_to_fp8(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """About 2, 5, 10, 50 and 450 pairs of an expert, by weights in blocks of 128 rows."""
    fresh_seed()
    poison_new_memory(monkeypatch)
    case = make_case(rows, 1024, 768, 16, 8, torch.bfloat16)
    drawn = [experts_of("fp8 wide", *each.shape) for each in (case.w13, case.w2)]
    weights = [
        replace(each, data=each.data.to(CUDA), scales=each.scales.to(CUDA)) for each, _ in drawn
    ]
    out = gpu_moe.moe(case.x, case.ids, case.shares, *weights, case.residual)
    x = in_fp8(case.x.double())
    expected = case.residual.double()
    w13, w2 = (wide.to(CUDA) for _, wide in drawn)
    for expert, (gate_up, down) in enumerate(zip(w13, w2, strict=True)):
        row, place = (case.ids == expert).nonzero(as_tuple=True)
        gate, up = (x[row] @ gate_up.double().T).chunk(2, dim=1)
        inner = in_fp8(F.silu(gate) * up)
        products = inner @ down.double().T * case.shares[row, place].double()[:, None]
        expected.index_add_(0, row, products)
    error = (out.double() - expected).norm() / (expected - case.residual.double()).norm()
    # Numbers between two of FP8 may go to the other one.
    assert error < 0.02


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("are_copied", [False, True])
def test_each_launch_of_rounded_rows(
    are_copied: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bench/gpu_expert_launches.py times them, in a layer that is shared out to two ranks."""
    fresh_seed()
    poison_new_memory(monkeypatch)
    monkeypatch.setattr(triton_rounded, "IS_COPIED", (are_copied, are_copied))
    case = make_case(40, 1024, 768, 16, 8, torch.bfloat16)
    drawn = [experts_of("fp8 wide", *each.shape) for each in (case.w13, case.w2)]
    weights = [
        replace(each, data=each.data.to(CUDA), scales=each.scales.to(CUDA)) for each, _ in drawn
    ]
    case = case._replace(w13=drawn[0][1].to(CUDA), w2=drawn[1][1].to(CUDA))
    expected = (compute(case, torch.float64) - case.residual.double()).cpu()
    for rows, warps in itertools.product((16, 32, 64), (4, 8)):
        if columns == 64 and warps == 8:
            continue
        tile = Tile(columns, 128, warps, 3)
        tiles = Tiles(rows, tile, tile, is_rounded=True)
        total = torch.zeros_like(case.x, dtype=torch.float32)
        for own in torch.randperm(16, device=CUDA).split((5, 11)):
            placement = torch.full((16,), len(own), dtype=torch.int32, device=CUDA)
            placement[own] = torch.arange(len(own), dtype=torch.int32, device=CUDA)
            parts = [share_of(each, own) for each in weights]
            given = (case.x, placement[case.ids], case.shares, *parts, None, tiles)
            total += gpu_moe.sorted_moe(*given, more=ExpertParts(placement=placement)).float()
        error = (total.cpu().double() - expected).norm() / expected.norm()
        # Three bits of each number of x and of what is between the products.
        assert error < 0.08, (rows, warps)


@pytest.mark.parametrize("rows", [9, 64, 300])
def test_the_norm_after_experts_rounds_its_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    case = make_case(rows, 1024, 768, 16, 8, torch.bfloat16)
    drawn = [experts_of("fp8 wide", *each.shape)[0] for each in (case.w13, case.w2)]
    weights = [
        replace(each, data=each.data.to(CUDA), scales=each.scales.to(CUDA)) for each in drawn
    ]
    rounded = empty_rows(rows, 1024, case.x.device, has_groups=True)
    gain = torch.rand(1024, device=CUDA).bfloat16()
    after = NormAfter(case.residual, gain, 1e-6, rounded)
    logits = torch.randn(rows, 16, device=CUDA)
    found = gpu_moe.routed_moe(case.x, logits, 8, *weights, after, renormalise=True)
    expected = quantise_rows(found, has_groups=True)
    assert torch.equal(rounded.scales[:, :rows], expected.scales[:, :rows])
    assert torch.equal(*(each.data[:rows].view(torch.uint8) for each in (rounded, expected)))


def in_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Rows rounded to FP8 with a scale for 128 columns each."""
    groups = rows.unflatten(1, (-1, 128))
    scales = groups.abs().amax(2, keepdim=True).clamp(min=1e-30) / 448
    return ((groups / scales).float().to(torch.float8_e4m3fn).double() * scales).flatten(1)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_shared_expert_beside_the_others(rows: int) -> None:
    """In the launches of the others up to two rows; twice in a row, so that launches overlap."""
    fresh_seed()
    pending, compute = shared_case((rows, 2048, 512, 32, 10), torch.bfloat16, CUDA)
    assert joins_shared(pending.routed.x.value, 10, 512) == (rows < 3)
    value = torch.randn(rows, 2048).bfloat16()
    for _ in range(2):
        exact, eager = (compute(kind, value) for kind in (torch.float64, torch.bfloat16))
        stream = GpuStream(value.cuda(), None)
        stream.add(pending)
        normed = stream.normed(Norm(torch.ones(2048, device=CUDA).bfloat16(), 1e-5)).value
        value = stream.settle().cpu()
        assert_as_exact(value, eager, exact)
        wanted = (F.rms_norm(each, (2048,), eps=1e-5) for each in (eager, exact))
        assert_as_exact(normed.cpu(), *wanted)


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 2000])
def test_the_sum_of_shares(
    rows: int, big_weights: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts dealt out at random, by the operation that models call, as with ranks."""
    fresh_seed()
    poison_new_memory(monkeypatch)
    hidden, _, experts, top_k = BIG
    logits = torch.randn(rows, experts, device=CUDA) + torch.linspace(1, -1, experts, device=CUDA)
    x = torch.randn(rows, hidden, device=CUDA).bfloat16()
    case = Case(x, *route(logits, top_k, True), *big_weights, torch.zeros_like(x))
    total = torch.zeros(rows, hidden, device=CUDA)
    for own in torch.randperm(experts, device=CUDA).split((50, 78)):
        placement = torch.full((experts,), len(own), dtype=torch.int32, device=CUDA)
        placement[own] = torch.arange(len(own), dtype=torch.int32, device=CUDA)
        w13, w2 = (weight[own] for weight in big_weights)
        more = ExpertParts(placement=placement)
        total += gpu_moe.routed_moe(x, logits, top_k, w13, w2, None, renormalise=True, more=more)
    exact = compute(case, torch.float64)
    assert_as_exact(total.bfloat16(), compute(case, torch.bfloat16), exact, 4)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(
    ("hidden", "inner", "top_k", "is_share"),
    [(2048, 768, 8, False), (1024, 512, 6, True), (896, 2048, 8, False), (768, 128, 2, True)],
)
def test_few_rows_of_fp8_blocks_on_tensor_cores(
    hidden: int, inner: int, top_k: int, is_share: bool, rows: int
) -> None:
    """All numbers of FP8, small ones too, whose exponents the kernels move."""
    fresh_seed()
    experts, own = 16, 8 if is_share else 16
    x = torch.randn(rows, hidden, device=CUDA, dtype=torch.bfloat16)
    ids, shares = route(torch.randn(rows, experts, device=CUDA), top_k, True)
    ids = torch.where(ids < own, ids, own).to(torch.int32)

    def drawn(rows: int, columns: int) -> Fp8Experts:
        data = torch.randint(0, 256, (own, rows, columns), device=CUDA, dtype=torch.uint8)
        data[data & 0x7F == 0x7F] = 0  # no NaN
        scales = torch.rand(own, rows // 128, columns // 128, device=CUDA) / columns
        return Fp8Experts(data.view(torch.float8_e4m3fn), scales, 128)

    stacks = drawn(2 * inner, hidden), drawn(hidden, inner)
    more = PLAIN_EXPERTS._replace(placement=torch.zeros(1, device=CUDA) if is_share else None)
    assert can_multiply(x, top_k, *stacks, more)
    poison = torch.full((rows * top_k, inner), float("nan"), device=CUDA, dtype=x.dtype)
    del poison
    found = direct_fp8_moe(x, ids, shares, *stacks, x, more)
    w13, w2 = (
        one.data.double() * one.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        for one in stacks
    )
    expected = x.double()
    for row, place in itertools.product(range(rows), range(top_k)):
        if (expert := int(ids[row, place])) < own:
            gate, up = (w13[expert] @ x[row].double()).chunk(2)
            product = (F.silu(gate) * up).to(x.dtype).double()
            expected[row] += shares[row, place] * (w2[expert] @ product)
    largest = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=4e-3 * largest)
