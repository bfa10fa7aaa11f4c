"""Additions that the kernel reading a product takes along, by Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.lora import triton_fold as lora_fold
from weft.kernels.ops.lora.gpu import Ranks
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.norm.reference import add_rms_norm_reference
from weft.kernels.ops.norm.triton_rms import add_rms_norm
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import (
    LoraCase,
    draw_slots,
    make_lora,
    poison_new_memory,
    segments_of,
)

pytestmark = pytest.mark.needs("triton-interpreter")


RANKS = [0, 8, 16, 3, 0, 40]
"""By slot."""
MANY_RANKS = [0, 72, 40, 16, 88, 0]
"""More than are noted at once (`lora_units`), if a tile has them all."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel writes must not matter."""
    poison_new_memory(monkeypatch)


def parts_of(
    widths: tuple[int, ...], k: int, column: int = 0, ranks: Sequence[int] = RANKS
) -> list[LoraCase]:
    return [
        make_lora(
            k,
            width,
            [*ranks[:1], *random.sample(ranks[1:], 5)],
            torch.float32,
            column=column + sum(widths[:n]),
        )
        for n, width in enumerate(widths)
    ]


def add_all(out: torch.Tensor, cases: list[LoraCase], x: torch.Tensor, slots: list[int]) -> None:
    for case in cases:
        out.copy_(case.add(out, x.to(out.dtype), slots, 0))


@pytest.mark.parametrize("ranks", [RANKS, MANY_RANKS], ids=["few", "many"])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(3, 2100), (21, 72)])
def test_a_norm_adds_to_what_it_normalises(
    tokens: int, hidden: int, is_ahead: bool, ranks: list[int]
) -> None:
    fresh_seed()
    k, slots = 600, draw_slots(tokens, len(RANKS))
    cases = parts_of((hidden,), k, ranks=ranks)
    x, out = torch.randn(tokens, k), torch.randn(tokens, hidden)
    stream, weight = torch.randn(tokens, hidden), torch.randn(hidden)
    added = LoraAddition((cases[0].weights,), 0, segments_of(slots, len(RANKS)), is_ahead)
    to_add = Ranks(x, added, is_ahead=is_ahead, is_folded=True).folded()
    found = add_rms_norm(out, stream.clone(), weight, 1e-5, to_add)
    exact, peer = out.double(), out.clone()
    add_all(exact, cases, x, slots)
    add_all(peer, cases, x, slots)
    peers = add_rms_norm_reference(peer, stream.clone(), weight, 1e-5)
    exact += stream
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * weight
    for one, of_torch, right in zip(found, peers, (normed, exact), strict=True):
        assert_as_exact(one, of_torch, right, slack=1e-6)
    plain = [token for token, slot in enumerate(slots) if slot == 0]
    without = add_rms_norm(out, stream.clone(), weight, 1e-5)
    for one, other in zip(found, without, strict=True):
        assert torch.equal(one[plain], other[plain])


@pytest.mark.parametrize("ranks", [RANKS, MANY_RANKS], ids=["few", "many"])
def test_ranks_that_come_before_a_product_of_several_parts(ranks: list[int]) -> None:
    fresh_seed()
    tokens, k, slots = 37, 1040, draw_slots(37, len(RANKS))
    cases = parts_of((48, 24, 16), k, 0, ranks)
    x, before = torch.randn(tokens, k), torch.randn(tokens, 96)
    added = LoraAddition(tuple(c.weights for c in cases), 0, segments_of(slots, 8), True)
    out, exact, peer = before.clone(), before.double(), before.clone()
    Ranks(x, added, is_ahead=True).add_to(out)
    add_all(exact, cases, x, slots)
    add_all(peer, cases, x, slots)
    assert_as_exact(out, peer, exact)
    untouched = exact == before.double()
    assert torch.equal(out[untouched], before[untouched])


@pytest.mark.parametrize("ranks", [RANKS, MANY_RANKS], ids=["few", "many"])
def test_the_activation_brings_the_ranks_of_down(ranks: list[int]) -> None:
    fresh_seed()
    tokens, hidden, inner, k = 21, 24, 150, 16
    slots = draw_slots(tokens, len(RANKS))
    cases, to_down = parts_of((inner, inner), k, 0, ranks), parts_of((hidden,), inner, 0, ranks)
    x, both, out = torch.randn(tokens, k), torch.randn(tokens, 2 * inner), torch.zeros(21, hidden)
    segments = segments_of(slots)
    added = LoraAddition(tuple(c.weights for c in cases), 0, segments)
    down = LoraAddition((to_down[0].weights,), 0, segments)
    found = Ranks(x, added, down).silu_of(both)
    assert found is not None
    activation, folded = found
    assert folded is not None
    exact, peer = both.double(), both.clone()
    add_all(exact, cases, x, slots)
    add_all(peer, cases, x, slots)
    (gate, up), (peer_gate, peer_up) = exact.chunk(2, -1), peer.chunk(2, -1)
    silu = torch.nn.functional.silu
    assert_as_exact(activation, silu(peer_gate) * peer_up, silu(gate) * up)
    stream = torch.zeros(tokens, hidden)
    add_rms_norm(out, stream, torch.ones(hidden), 1e-5, folded)
    right, of_torch = stream.double().zero_(), torch.zeros_like(stream)
    add_all(right, to_down, activation, slots)
    add_all(of_torch, to_down, activation, slots)
    assert_as_exact(stream, of_torch, right)


@pytest.mark.parametrize(
    "change",
    [
        ("range(AT_ONCE, 8 * count, AT_ONCE)", "range(AT_ONCE, 8 * count - AT_ONCE, AT_ONCE)"),
        ("* 8 + rank % 8", "* 8 + (rank + 1) % 8"),
        ("(number < SUMS) & is_rank", "(number < SUMS - 1) & is_rank"),
    ],
)
@pytest.mark.full
def test_a_mutated_addition_is_noticed(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_kernels(monkeypatch, lora_fold, tmp_path, change)
    assert notices(lambda: test_a_norm_adds_to_what_it_normalises(21, 72, False, MANY_RANKS))
