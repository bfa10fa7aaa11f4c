"""Additions that the kernel reading a product takes along, by Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_checks import assert_as_exact, fresh_seed
from lora_cases import LoraCase, draw_slots, make_lora, segments_of
from weft.kernels.gpu.lora import Ranks
from weft.kernels.gpu.norm import add_rms_norm
from weft.kernels.lora import LoraAddition
from weft.kernels.norm import add_rms_norm_reference

pytestmark = pytest.mark.needs("triton-interpreter")

RANKS = [0, 8, 16, 3, 0, 40]
"""By slot."""


def parts_of(widths: tuple[int, ...], k: int, column: int = 0) -> list[LoraCase]:
    return [
        make_lora(
            k,
            width,
            RANKS[:1] + random.sample(RANKS[1:], 5),
            torch.float32,
            column=column + sum(widths[:n]),
        )
        for n, width in enumerate(widths)
    ]


def add_all(out: torch.Tensor, cases: list[LoraCase], x: torch.Tensor, slots: list[int]) -> None:
    for case in cases:
        out.copy_(case.add(out, x.to(out.dtype), slots, 0))


@pytest.mark.parametrize("tokens", [3, 21])
def test_a_norm_adds_to_what_it_normalises(tokens: int) -> None:
    fresh_seed()
    hidden, k, slots = 72, 600, draw_slots(tokens, len(RANKS))
    cases = parts_of((hidden,), k)
    x, out = torch.randn(tokens, k), torch.randn(tokens, hidden)
    stream, weight = torch.randn(tokens, hidden), torch.randn(hidden)
    added = LoraAddition((cases[0].weights,), 0, segments_of(slots, len(RANKS)))
    found = add_rms_norm(out, stream.clone(), weight, 1e-5, Ranks(x, added).folded())
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


def test_the_activation_brings_the_ranks_of_down() -> None:
    fresh_seed()
    tokens, hidden, inner, k = 21, 24, 150, 16
    slots = draw_slots(tokens, len(RANKS))
    cases, to_down = parts_of((inner, inner), k), parts_of((hidden,), inner)
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
