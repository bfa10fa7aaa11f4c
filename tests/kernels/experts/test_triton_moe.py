"""The GPU's mixture of experts, by Triton's interpreter at small sizes, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.moe import triton_lora as moe_lora
from weft.kernels.ops.moe.reference import route_reference
from weft.kernels.ops.moe.triton_direct import joins_shared
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.stream.gpu import GpuStream
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import poison_new_memory
from weft.testing.kernels.moe_cases import MoECase, make_adapters, moe_case, shared_case
from weft.testing.kernels.near_ties import clear_logits

pytestmark = pytest.mark.needs("triton-interpreter")

# Rows, hidden, inner, experts, experts a row: direct up to eight rows, sorted above.
SHAPES = [
    (1, 40, 24, 6, 3),
    (3, 33, 17, 4, 1),
    (8, 24, 9, 5, 2),
    (9, 40, 24, 6, 3),
    (40, 33, 70, 3, 2),
]


def run(module: ModuleType, case: MoECase, residual: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = module.moe(case.x, *case.routing, case.w13, case.w2, residual)
    return out


@contextmanager
def moe_copies(
    folder: Path, name: str = "", change: tuple[str, str] | None = None
) -> Iterator[dict[str, ModuleType]]:
    """Private copies of `moe` and of what it calls, of which module `name` is changed."""
    with ExitStack() as stack:
        copies = {
            each: stack.enter_context(kernel_module(each, folder, change if each == name else None))
            for each in (
                "moe.triton_listed",
                "moe.triton_direct",
                "moe.triton_products",
                "moe.triton_combine",
                "moe.gpu",
            )
        }
        copies["moe.triton_direct"].listed_down = copies["moe.triton_listed"].listed_down
        for operation in ("direct_moe", "multiply_sorted", "combine"):
            made = next(c for c in copies.values() if operation in vars(c))
            setattr(copies["moe.gpu"], operation, getattr(made, operation))
        yield copies


@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_experts(
    shape: tuple[int, int, int, int, int], is_crowded: bool, tmp_path: Path
) -> None:
    fresh_seed()
    case = moe_case(*shape, is_crowded=is_crowded)
    exact, eager = case.compute(torch.float64), case.compute(torch.float32)
    with moe_copies(tmp_path) as copies:
        out = run(copies["moe.gpu"], case, case.residual)
    assert_as_exact(out, eager, exact)


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_that_no_program_takes_whole(rows: int, tmp_path: Path) -> None:
    fresh_seed()
    case = moe_case(rows, 70, 24, 6, 3)
    with moe_copies(tmp_path) as copies:
        copies["moe.triton_direct"]._MAX_TILE = copies["moe.triton_direct"]._PART = 32
        out = run(copies["moe.gpu"], case, case.residual)
    assert_as_exact(out, case.compute(torch.float32), case.compute(torch.float64))


HALVED = "end - begin <= HALF_ROWS"


@pytest.mark.parametrize("is_right", [True, False])
def test_blocks_that_are_multiplied_as_half_of_one(is_right: bool, tmp_path: Path) -> None:
    fresh_seed()
    # 24 pairs of each expert: one block of 16 and half of one. Changed, half of each.
    case = moe_case(48, 33, 70, 6, 3)
    case = replace(case, routing=case.routing._replace(ids=torch.arange(144).view(48, 3).int() % 6))
    change = None if is_right else (HALVED, "end - begin <= 2 * HALF_ROWS + 8")
    with moe_copies(tmp_path, "moe.triton_products", change) as copies:
        copies["moe.triton_products"].MIN_HALVED_ROWS = 16
        tiles = copies["moe.gpu"].tiles_for
        copies["moe.gpu"].tiles_for = lambda *sizes: tiles(*sizes)._replace(rows=16)
        out = run(copies["moe.gpu"], case, case.residual)
    expected = (case.compute(torch.float32), case.compute(torch.float64))
    if is_right:
        assert_as_exact(out, *expected)
        return
    with pytest.raises(AssertionError):
        assert_as_exact(out, *expected)


@pytest.mark.parametrize("rows", [1, 9])
def test_in_an_order_that_does_not_depend_on_other_rows(rows: int, tmp_path: Path) -> None:
    """Few rows are sorted too, and the sum of experts is rounded before the residual is added."""
    fresh_seed()
    case = moe_case(rows, 40, 24, 6, 3, torch.float16)
    with kernel_module("moe.gpu", tmp_path) as module:
        weights = (case.w13, case.w2)
        out = module.moe(case.x, *case.routing, *weights, case.residual, is_fixed=True)
        apart = module.moe(case.x, *case.routing, *weights, None, is_fixed=True)
    assert torch.equal(out, case.residual + apart)
    assert_as_exact(out, case.compute(torch.float16), case.compute(torch.float64))


def test_without_a_residual_and_in_half_precision(tmp_path: Path) -> None:
    fresh_seed()
    for rows in (2, 9):
        case = moe_case(rows, 24, 17, 4, 2, torch.float16)
        case.residual.zero_()
        with kernel_module("moe.gpu", tmp_path) as module:
            out = run(module, case, None)
        assert_as_exact(out, case.compute(torch.float16), case.compute(torch.float64))


@pytest.mark.each_of("shape", "is_shared")
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    ("shape", "is_paired"),
    [
        ((2, 33, 17, 4, 2), False),
        ((9, 24, 9, 3, 2), True),
        ((9, 24, 9, 3, 2), False),
        ((12, 40, 300, 4, 1), True),
        ((40, 33, 9, 3, 2), True),
        ((40, 33, 9, 3, 2), False),
    ],
)
def test_additions_to_experts(
    shape: tuple[int, int, int, int, int],
    is_paired: bool,
    is_shared: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the products and in tiles; by several programs a pair."""
    fresh_seed()
    case = moe_case(*shape)
    adapters = make_adapters(case, is_shared)
    poison_new_memory(monkeypatch)
    with kernel_module("moe.gpu", tmp_path) as module, monkeypatch.context() as patch:
        patch.setattr(module, "MAX_PAIRED_ROWS", 256 if is_paired else 0)
        routed = (case.x, *case.routing, case.w13, case.w2, case.residual)
        out, plain = module.moe(*routed, adapters.addition()), module.moe(*routed)
    exact, eager = case.compute(torch.float64, adapters), case.compute(torch.float32, adapters)
    assert_as_exact(out, eager, exact)
    rows = [row for row, slot in enumerate(adapters.slots) if slot in (0, 3)]
    assert torch.equal(out[rows], plain[rows])


@pytest.mark.parametrize("left_out", ["gate", "up", "down", "all but down"])
def test_additions_to_some_of_the_projections(
    left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    case = moe_case(12, 24, 9, 3, 2)
    adapters = make_adapters(case, True)
    parts = {"gate": adapters.w13[1:], "up": adapters.w13[:1], "all but down": ()}
    adapters = replace(
        adapters,
        w13=parts.get(left_out, adapters.w13),
        w2=() if left_out == "down" else adapters.w2,
    )
    poison_new_memory(monkeypatch)
    with kernel_module("moe.gpu", tmp_path) as module:
        routed = (case.x, *case.routing, case.w13, case.w2, case.residual)
        out = module.moe(*routed, adapters.addition())
    exact, eager = case.compute(torch.float64, adapters), case.compute(torch.float32, adapters)
    assert_as_exact(out, eager, exact)


@pytest.mark.full_after(2)
@pytest.mark.parametrize(("rows", "is_shared"), [(12, False), (12, True), (70, True)])
def test_additions_to_a_layer_with_the_norm_behind_it(
    rows: int, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ranks that are begun before the router, where there are some."""
    fresh_seed()
    case = moe_case(rows, 40, 24, 6, 3)
    logits = clear_logits(rows, 6, 3)
    case = replace(case, routing=route_reference(logits, 3, renormalise=True))
    adapters = make_adapters(case, is_shared, (0, 8, 24))
    gain, stream = torch.randn(40), case.residual.clone()
    poison_new_memory(monkeypatch)
    with kernel_module("moe.gpu", tmp_path) as module:
        after, lora = module.NormAfter(stream, gain, 1e-5), adapters.addition()
        ranks = module.begin_ranks(case.x, lora, 6, 24, is_fixed=False)
        assert (ranks is not None) == is_shared
        given = (case.x, logits, 3, case.w13, case.w2, after, lora, ranks)
        normed = module.routed_moe(*given, renormalise=True)
    exact, eager = case.compute(torch.float64, adapters), case.compute(torch.float32, adapters)
    # Shares are rounded otherwise here than there.
    slack = 1e-5
    assert_as_exact(stream, eager, exact, slack=slack)
    exact_norm = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    assert_as_exact(normed, F.rms_norm(eager, (40,), gain, 1e-5), exact_norm, slack=slack)


@pytest.mark.full_after(2)
@pytest.mark.parametrize(
    ("name", "original", "replacement"),
    [
        ("moe.triton_lora_pairs", "range(UNIT, 8 * tl.maximum", "range(UNIT, tl.maximum"),
        ("moe.triton_lora_pairs", "range(UNIT, 8 * count2", "range(UNIT, count2"),
        ("moe.triton_lora_pairs", "(pair // RANKS_TOP_K)", "((pair + 1) // RANKS_TOP_K)"),
        ("moe.triton_lora_pairs", "to(tl.float32) * share", "to(tl.float32)"),
        ("moe.triton_lora_pairs", "tl.where(rank < 8, low, high)", "tl.where(rank < 9, low, high)"),
        ("moe.triton_combine", "range(UNIT, 8 * count", "range(UNIT, count"),
        ("moe.triton_combine", "row * SUMS * rank_width", "row * rank_width"),
    ],
)
def test_a_mutated_addition_between_products_is_noticed(
    name: str, original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    case = moe_case(12, 24, 9, 3, 2)
    adapters = make_adapters(case, True, (0, 20))
    adapters = replace(adapters, slots=[1] * len(case.x))
    with (
        kernel_module(name, tmp_path, (original, replacement)) as changed,
        kernel_module("moe.gpu", tmp_path) as module,
        monkeypatch.context() as patch,
    ):
        operation = "combine" if name == "moe.triton_combine" else "activate_pairs"
        patch.setattr(module, operation, getattr(changed, operation))
        routed = (case.x, *case.routing, case.w13, case.w2, case.residual)
        out = module.moe(*routed, adapters.addition())
    with pytest.raises(AssertionError):
        assert_as_exact(
            out, case.compute(torch.float32, adapters), case.compute(torch.float64, adapters)
        )


def test_additions_of_large_ranks_are_computed_pair_by_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program could hold so many ranks of B at once."""
    fresh_seed()
    case = moe_case(9, 24, 9, 3, 2)
    adapters = make_adapters(case, False, (0, 132, 8))
    with kernel_module("moe.gpu", tmp_path) as module, monkeypatch.context() as patch:
        patch.delattr(module, "pairs_of")
        routed = (case.x, *case.routing, case.w13, case.w2, case.residual)
        out = module.moe(*routed, adapters.addition())
    assert_as_exact(
        out, case.compute(torch.float32, adapters), case.compute(torch.float64, adapters)
    )


@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("range(0, TOP_K, STEP)", "range(STEP, TOP_K, STEP)"),
        ("static_range(STEP)", "static_range(STEP - 1)"),
        ("added, ranks, parts, layer, slots,", "added, ranks, parts[:1], layer, slots,"),
    ],
)
def test_a_mutated_addition_is_noticed(original: str, replacement: str, tmp_path: Path) -> None:
    fresh_seed()
    case = moe_case(8, 24, 9, 3, 2)
    adapters = make_adapters(case, True, (0, 8))
    adapters = replace(adapters, slots=[1] * len(case.x))
    with (
        kernel_module("moe.triton_lora", tmp_path, (original, replacement)) as added,
        moe_copies(tmp_path) as copies,
    ):
        copies["moe.triton_direct"].gate_up_additions = added.gate_up_additions
        copies["moe.triton_direct"].down_additions = added.down_additions
        routed = (case.x, *case.routing, case.w13, case.w2, case.residual)
        out = copies["moe.gpu"].moe(*routed, adapters.addition())
    with pytest.raises(AssertionError):
        assert_as_exact(
            out, case.compute(torch.float32, adapters), case.compute(torch.float64, adapters)
        )


@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("range(0, K, TILE)", "range(0, K - TILE, TILE)"),
        ("range(SUMMED)", "range(SUMMED - 1)"),
        ("item // RANKS_TOP_K", "(item + 1) // RANKS_TOP_K"),
        ("slot > last,", "(slot > last) & (last == 0),"),
    ],
)
def test_a_mutated_tile_of_additions_is_noticed(
    original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    case = moe_case(24, 130, 9, 3, 2)
    adapters = make_adapters(case, True, (0, 8, 24))
    adapters = replace(adapters, slots=[1 + row % 2 for row in range(24)])
    with (
        kernel_module("moe.triton_lora_tiles", tmp_path, (original, replacement)) as tiles,
        kernel_module("moe.gpu", tmp_path) as module,
        monkeypatch.context() as patch,
    ):
        patch.setattr(moe_lora, "shrink_items", tiles.shrink_items)
        patch.setattr(moe_lora, "expand_items", tiles.expand_items)
        patch.setattr(module, "MAX_PAIRED_ROWS", 0)
        routed = (case.x, *case.routing, case.w13, case.w2, case.residual)
        out = module.moe(*routed, adapters.addition())
    with pytest.raises(AssertionError):
        assert_as_exact(
            out, case.compute(torch.float32, adapters), case.compute(torch.float64, adapters)
        )


LOOP = "for number in range(TOP_K):\n        "
SHORT = "for number in range(TOP_K - 1):\n        "
WALK = "for start in range(0, K, TILE):\n        at = (start"


@pytest.mark.parametrize(
    ("shape", "name", "original", "replacement"),
    [
        ((2, 40, 24, 6, 3), "moe.triton_listed",
         "for step in range(end):", "for step in range(end - 1):"),
        ((2, 40, 24, 6, 3), "moe.triton_direct", "later = column + step", "later = column + 1"),
        ((2, 40, 24, 6, 3), "moe.triton_direct", "range(begin, width, step):\n            gate_sum",
         "range(begin, width - 1, step):\n            gate_sum"),
        ((12, 40, 24, 6, 3), "moe.triton_combine", f"{LOOP}at", f"{SHORT}at"),
        ((40, 40, 300, 3, 2), "moe.triton_products", WALK, WALK.replace("0, K,", "0, K - TILE,")),
    ],
)  # fmt: skip
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    shape: tuple[int, int, int, int, int],
    name: str,
    original: str,
    replacement: str,
    tmp_path: Path,
) -> None:
    case = moe_case(*shape, is_crowded=True)
    exact, eager = case.compute(torch.float64), case.compute(torch.float32)
    with moe_copies(tmp_path, name, (original, replacement)) as copies:
        out = run(copies["moe.gpu"], case, case.residual)
    with pytest.raises(AssertionError):
        assert_as_exact(out, eager, exact)


@pytest.mark.parametrize(
    "change",
    [
        ("tl.load(shares + pair, mask=number < TOP_K,", "tl.load(shares + pair, mask=number < 2,"),
        ("(is_pair[:, None] & (part < K)", "(is_pair[:, None] & (part < 16)"),
    ],
)  # fmt: skip
@pytest.mark.full
def test_a_mutated_kernel_that_takes_all_experts_at_once_is_noticed(
    change: tuple[str, str], tmp_path: Path
) -> None:
    case = moe_case(2, 40, 24, 6, 3, dtype=torch.float16)
    exact, eager = case.compute(torch.float64), case.compute(torch.float16)
    with moe_copies(tmp_path) as copies:
        assert_as_exact(run(copies["moe.gpu"], case, case.residual), eager, exact)
    with moe_copies(tmp_path, "moe.triton_direct", change) as copies:
        out = run(copies["moe.gpu"], case, case.residual)
    with pytest.raises(AssertionError):
        assert_as_exact(out, eager, exact)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_shared_expert_beside_the_others(rows: int) -> None:
    """In the launches of the others up to two rows; with the norm behind it, and without."""
    fresh_seed()
    pending, compute = shared_case((rows, 40, 24, 6, 3), torch.float16, "cpu")
    assert joins_shared(pending.routed.x.value, 3, 24) == (rows < 3)
    before, gain = torch.randn(rows, 40).half(), torch.ones(40).half()
    exact, eager = (compute(kind, before) for kind in (torch.float64, torch.float16))
    stream = GpuStream(before.clone(), None)
    stream.add(pending)
    normed = stream.normed(Norm(gain, 1e-5)).value
    assert_as_exact(stream.settle(), eager, exact)
    assert_as_exact(normed, *(F.rms_norm(each, (40,), eps=1e-5) for each in (eager, exact)))
    stream = GpuStream(before.clone(), None)
    stream.add(pending)
    assert_as_exact(stream.settle(), eager, exact)


def test_blocks_hold_every_pair_once(tmp_path: Path) -> None:
    fresh_seed()
    cases = ((9, 4, 2, 16), (50, 3, 1, 16), (33, 16, 5, 32), (1, 7, 1, 16), (700, 31, 6, 64))
    with kernel_module("moe.triton_sort", tmp_path) as module:
        for rows, experts, top_k, block in cases:
            ids = moe_case(rows, 8, 8, experts, top_k).routing.ids
            check_blocks(module.sort_pairs(ids, experts, block), ids, experts, block)
        # More counts than one pass over them takes.
        module._SCANNED_CHUNKS = 16
        ids = moe_case(700, 8, 8, 31, 6).routing.ids
        check_blocks(module.sort_pairs(ids, 31, 64), ids, 31, 64)
    # All pairs at one expert, the first or the last.
    for expert in (0, 4):
        ids = torch.full((70, 1), expert, dtype=torch.int32)
        check_blocks(module.sort_pairs(ids, 5, 16), ids, 5, 16)


# Changes that keep what is written within bounds, or one beyond, where there is room.
@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (33, ("] < part_at", "] <= part_at")),
        (33, ("(block - 1)) // block", "0) // block")),
        (900, ("number, before, mask", "number, before // 2, mask")),
    ],
)
@pytest.mark.full
def test_the_check_sees_wrong_blocks(rows: int, change: tuple[str, str], tmp_path: Path) -> None:
    fresh_seed()
    ids = moe_case(rows, 8, 8, 16, 5).routing.ids
    with kernel_module("moe.triton_sort", tmp_path, change) as module:
        blocks = module.sort_pairs(ids, 16, 32)
    with pytest.raises(AssertionError):
        check_blocks(blocks, ids, 16, 32)


def check_blocks(blocks: Any, ids: torch.Tensor, experts: int, block: int) -> None:
    """Each pair is in one block of its expert, and those of an expert stand in their order."""
    order, expert, begin, end = blocks
    assert order.tolist() == ids.view(-1).argsort(stable=True).tolist()
    seen: list[int] = []
    for b in range(len(expert)):
        assert 0 <= expert[b] <= experts
        if expert[b] < experts:
            places = range(int(begin[b]), min(int(begin[b]) + block, int(end[b])))
            found = [int(order[place]) for place in places]
            assert found
            assert all(int(ids.view(-1)[pair]) == int(expert[b]) for pair in found)
            seen += found
    assert sorted(seen) == list(range(ids.numel()))


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "block"),
    [(1, 1, 1, 16), (9, 60, 8, 16), (16, 128, 8, 16), (64, 7, 3, 16), (50, 31, 6, 32)],
)
def test_routing_with_sorting(
    rows: int, experts: int, top_k: int, block: int, renormalise: bool, tmp_path: Path
) -> None:
    fresh_seed()
    shift = torch.linspace(4, 0, experts)
    logits = clear_logits(rows, experts, top_k, spread=3.0, shift=shift)
    with kernel_module("moe.triton_route", tmp_path) as module:
        assert module.is_sorted_at_once(rows, experts)
        ids, shares, blocks = module.route_and_sort(logits, top_k, block, renormalise=renormalise)
    expected = route_reference(logits, top_k, renormalise=renormalise)
    assert torch.equal(ids, expected.ids)
    torch.testing.assert_close(shares, expected.weights)
    check_blocks(blocks, ids, experts, block)


@pytest.mark.parametrize("rows", [2, 9, 70])
def test_a_layer_with_the_norm_behind_it(rows: int, tmp_path: Path) -> None:
    fresh_seed()
    case = moe_case(rows, 40, 24, 120, 3)
    logits = clear_logits(rows, 120, 3)
    # Shares are rounded otherwise here than there.
    case = replace(case, routing=route_reference(logits, 3, renormalise=True))
    slack = 1e-5
    gain, stream = torch.randn(40), case.residual.clone()
    with kernel_module("moe.gpu", tmp_path) as module:
        after = module.NormAfter(stream, gain, 1e-5)
        normed = module.routed_moe(case.x, logits, 3, case.w13, case.w2, after, renormalise=True)
    exact, eager = case.compute(torch.float64), case.compute(torch.float32)
    assert_as_exact(stream, eager, exact, slack=slack)
    exact_norm = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    assert_as_exact(normed, F.rms_norm(eager, (40,), gain, 1e-5), exact_norm, slack=slack)


def test_a_logit_that_is_no_number_is_not_hidden(tmp_path: Path) -> None:
    """Each expert is chosen once all the same, and a row's shares are none."""
    fresh_seed()
    logits = torch.randn(4, 21)
    logits[0, 3], logits[1, :], logits[2, 20] = float("nan"), float("nan"), float("inf")
    logits[0, 4] = -torch.tensor(float("nan"))
    with kernel_module("moe.triton_route", tmp_path) as module:
        for renormalise in (False, True):
            alone = module.route(logits, 4, renormalise)
            ids, shares, _ = module.route_and_sort(logits, 4, 16, renormalise=renormalise)
            for found in (alone, (ids, shares)):
                assert all(len(set(row)) == 4 for row in found[0].tolist())
                assert found[1][:3].isnan().all()
                expected = route_reference(logits[3:], 4, renormalise=renormalise)
                torch.testing.assert_close(found[1][3:], expected.weights)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(0, 4, 2), (1, 1, 1), (7, 60, 8), (3, 7, 7)]
)
def test_routing(rows: int, experts: int, top_k: int, renormalise: bool, tmp_path: Path) -> None:
    fresh_seed()
    logits = clear_logits(rows, experts, top_k, spread=3.0)
    with kernel_module("moe.triton_route", tmp_path) as module:
        ids, shares = module.route(logits, top_k, renormalise)
    expected = route_reference(logits, top_k, renormalise=renormalise)
    assert torch.equal(ids, expected.ids)
    torch.testing.assert_close(shares, expected.weights)


def test_rows_that_are_not_finite_still_name_experts(tmp_path: Path) -> None:
    logits = torch.tensor([[float("nan"), 1.0, 2.0], [float("inf"), float("inf"), 0.0]])
    with kernel_module("moe.triton_route", tmp_path) as module:
        ids, _ = module.route(logits, 2, True)
        again, _, blocks = module.route_and_sort(logits, 2, 16, renormalise=True)
    assert torch.equal(again, ids)
    check_blocks(blocks, ids, 3, 16)
    for row in ids.tolist():
        assert len(set(row)) == 2
        assert all(0 <= expert < 3 for expert in row)
