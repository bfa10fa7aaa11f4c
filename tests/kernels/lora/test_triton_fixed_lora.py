"""Low-rank additions whose rows do not depend on each other, by Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.linear.gpu import linear
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.lora.gpu import add_fixed_lora
from weft.kernels.ops.lora.spec import ExpertAddition, LoraAddition
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import (
    LoraCase,
    Shared,
    draw_slots,
    make_expert_lora,
    make_lora,
    poison_new_memory,
    segments_of,
)

pytestmark = [pytest.mark.needs("triton-interpreter"), pytest.mark.usefixtures("even_products")]

RANKS = [0, 8, 16, 3, 24, 40, 1]
"""By slot."""
PIECES = ((0, 1), (12, 29), (3, 40))
"""Of the rows, taken by themselves: one, more than a tile, most of them."""


def drawn_rows(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)


def check_pieces(
    cases: list[LoraCase],
    slots: list[int],
    run: Callable[[LoraAddition, slice], torch.Tensor],
) -> torch.Tensor:
    """All rows together, each piece of which is the same bits by itself, and in another order."""

    def added(of: list[int]) -> LoraAddition:
        return LoraAddition(tuple(c.weights for c in cases), 0, segments_of(of))

    whole = run(added(slots), slice(None))
    for begin, end in PIECES:
        piece = run(added(slots[begin:end]), slice(begin, end))
        assert torch.equal(piece, whole[begin:end]), (begin, end)
    return whole


@pytest.mark.parametrize(
    ("widths", "k", "dtype"),
    [((90, 33, 33), 72, torch.float16), ((48,), 2100, torch.float32), ((64,), 1024, torch.float16)],
)
def test_rows_are_the_same_bits_in_any_company(
    widths: tuple[int, ...], k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several parts, depths of one part of K and of more, ranks of one unit and of more."""
    fresh_seed()
    cases = [
        make_lora(k, n, [0, *random.sample(RANKS[1:], 6)], dtype, column=sum(widths[:part]))
        for part, n in enumerate(widths)
    ]
    x, before = drawn_rows(40, k, sum(widths) + 5, dtype)
    slots = draw_slots(40, len(RANKS))
    poison_new_memory(monkeypatch)

    def run(addition: LoraAddition, rows: slice) -> torch.Tensor:
        out = before[rows].clone()
        add_fixed_lora(out, x[rows].clone(), addition)
        return out

    whole = check_pieces(cases, slots, run)
    exact, peer = before.double(), before.clone()
    for case in cases:
        exact, peer = (case.add(out, x.to(out.dtype), slots, 0) for out in (exact, peer))
    assert_as_exact(whole, peer, exact)
    untouched = exact == before.double()
    assert torch.equal(whole[untouched], before[untouched])


def test_a_row_is_the_same_bits_beside_any_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one adapter, at any place, among others of the same and of others."""
    fresh_seed()
    case = make_lora(1300, 40, RANKS, torch.float16)
    x, before = drawn_rows(34, 1300, 40, torch.float16)
    poison_new_memory(monkeypatch)
    for slot in (2, 5):
        found = []
        for count in (1, 16, 33):
            slots = [random.randrange(len(RANKS)) for _ in range(count)]
            place = random.randrange(count)
            slots[place] = slot
            given, out = x[:count].clone(), before[:count].clone()
            given[place], out[place] = x[-1], before[-1]
            add_fixed_lora(out, given, LoraAddition((case.weights,), 0, segments_of(slots)))
            found.append(out[place])
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert not torch.equal(found[0], before[-1])


def test_products_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without adapters beside others, and a product that takes its residual along, as of the
    last layer."""
    fresh_seed()
    rows, k, n, dtype = 40, 72, 40, torch.float16
    # Whole numbers: the interpreter's products without adapters are exact, in any order.
    weight, slots = torch.randint(-4, 5, (n, k)).to(dtype), draw_slots(rows, len(RANKS))
    x, residual = torch.randint(-4, 5, (rows, k)).to(dtype), torch.randn(rows, n).to(dtype)
    case = make_lora(k, n, RANKS, dtype)
    w = LinearWeight(n, k, dtype, False, PlainForm(weight), None, is_fixed=True)
    poison_new_memory(monkeypatch)

    def run(addition: LoraAddition | None, rows: slice) -> torch.Tensor:
        return linear(x[rows], w, lora=addition)

    whole, plain = check_pieces([case], slots, run), run(None, slice(None))
    base = [row for row, slot in enumerate(slots) if slot == 0]
    assert torch.equal(whole[base], plain[base])
    added = LoraAddition((case.weights,), 0, segments_of(slots))
    onto = linear(x, w, residual, lora=added)
    assert torch.equal(onto, whole + residual)
    exact = case.add(x.double() @ weight.double().T, x.double(), slots, 0)
    assert_as_exact(whole, case.add(plain, x, slots, 0), exact)


@pytest.mark.parametrize("shared", [("a", "b"), (None, None)])
def test_experts_with_adapters(
    shared: tuple[Shared, Shared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the residual taken along as where a norm adds it, and beside rows without adapters."""
    fresh_seed()
    rows, experts, top_k, hidden, inner, dtype = 13, 3, 2, 24, 16, torch.float16
    ranks, (of_up, of_down) = [0, 8, 3], shared
    gate, up = (
        make_expert_lora(hidden, inner, ranks, experts, dtype, shared=of_up, column=column)
        for column in (0, inner)
    )
    down = make_expert_lora(inner, hidden, ranks, experts, dtype, shared=of_down)
    x, residual = drawn_rows(rows, hidden, hidden, dtype)
    slots = draw_slots(rows, len(ranks))
    ids = torch.rand(rows, experts).topk(top_k, sorted=False).indices.sort(dim=1).values.int()
    shares = torch.rand(rows, top_k).softmax(dim=-1)
    w13 = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
    w2 = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)

    poison_new_memory(monkeypatch)
    with kernel_module("moe.gpu", tmp_path) as module:
        # numpy's products of blocks of other sizes are other bits.
        tiles = module.tiles_for(1, top_k, experts, hidden, inner)
        monkeypatch.setattr(module, "tiles_for", lambda *sizes: tiles)

        def run(rows: slice, slots: list[int] | None, stream: bool = False) -> torch.Tensor:
            added = None
            if slots is not None:
                named = torch.tensor(slots, dtype=torch.int32)[rows]
                both = (gate.weights, up.weights)
                added = ExpertAddition(both, (down.weights,), 0, named)
            of_rows = (given[rows].contiguous() for given in (x, ids, shares))
            onto = residual[rows].contiguous() if stream else None
            out: torch.Tensor = module.moe(*of_rows, w13, w2, onto, added, is_fixed=True)
            return out

        whole, plain = run(slice(None), slots), run(slice(None), None)
        for begin, end in ((0, 1), (2, 12)):
            assert torch.equal(run(slice(begin, end), slots), whole[begin:end]), (begin, end)
        assert torch.equal(run(slice(None), slots, stream=True), whole + residual)
    base = [row for row, slot in enumerate(slots) if slot == 0]
    assert torch.equal(whole[base], plain[base])

    def eager(dtype: torch.dtype) -> torch.Tensor:
        results = []
        for row, slot in enumerate(slots):
            total = torch.zeros(hidden, dtype=torch.double)
            for expert, share in zip(ids[row].tolist(), shares[row].tolist(), strict=True):
                given = x[row : row + 1].to(dtype)
                both = given @ w13[expert].to(dtype).T
                both = up.add(gate.add(both, given, [slot], expert), given, [slot], expert)
                (to_gate, to_up) = both.chunk(2, dim=-1)
                middle = torch.nn.functional.silu(to_gate) * to_up
                result = down.add(middle @ w2[expert].to(dtype).T, middle, [slot], expert)
                total += share * result[0].double()
            results.append(total.to(dtype))
        return torch.stack(results)

    assert_as_exact(whole, eager(dtype), eager(torch.double))
