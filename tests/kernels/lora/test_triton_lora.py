"""The GPU's low-rank additions, by Triton's interpreter at small sizes, against float64."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops.lora import triton_shrink as lora_shrink
from weft.kernels.ops.lora import triton_tiles as lora_tiles
from weft.kernels.ops.lora.gpu import add_lora as gpu_add_lora
from weft.kernels.ops.lora.spec import LoraAddition
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import (
    LoraCase,
    add_by,
    draw_slots,
    make_lora,
    poison_new_memory,
    segments_of,
)

pytestmark = pytest.mark.needs("triton-interpreter")

RANKS = [0, 8, 16, 3, 0, 24]
"""By slot."""


def parts_of(widths: tuple[int, ...], k: int, dtype: torch.dtype) -> list[LoraCase]:
    return [
        make_lora(k, width, RANKS[:1] + random.sample(RANKS[1:], 5), dtype, column=sum(widths[:n]))
        for n, width in enumerate(widths)
    ]


def check(
    module: ModuleType, cases: list[LoraCase], slots: list[int], dtype: torch.dtype, spare: int = 0
) -> None:
    k = cases[0].weights.in_features
    width = max(c.weights.column + c.weights.out_features for c in cases) + 5
    x, out = torch.randn(len(slots), k).to(dtype), torch.randn(len(slots), width).to(dtype)
    before, exact, peer = out.clone(), out.double(), out.clone()
    segments = segments_of(slots, len(set(slots)) + spare)
    added = LoraAddition(tuple(c.weights for c in cases), 0, segments)
    if hasattr(module, "add_lora"):
        module.add_lora(out, x, added)
    else:
        add_by(module, out, x, added, {})
    for case in cases:
        exact = case.add(exact, x.double(), slots, 0)
        peer = case.add(peer, x, slots, 0)
    assert_as_exact(out, peer, exact)
    untouched = exact == before.double()
    assert torch.equal(out[untouched], before[untouched])
    assert untouched[:, -5:].all()


@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 40])
@pytest.mark.parametrize(("widths", "k"), [((37,), 72), ((300, 41), 33), ((48, 17, 17), 1040)])
def test_additions(
    tokens: int, widths: tuple[int, ...], k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    cases = parts_of(widths, k, torch.float32)
    poison_new_memory(monkeypatch)
    with kernel_module("lora.gpu", tmp_path) as module:
        check(module, cases, draw_slots(tokens, len(RANKS)), torch.float32, spare=3)


def test_in_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    with kernel_module("lora.gpu", tmp_path) as module:
        for tokens in (3, 21):
            cases = parts_of((40, 24), 72, torch.float16)
            check(module, cases, draw_slots(tokens, len(RANKS)), torch.float16)


@pytest.mark.parametrize("tokens", [3, 21])
def test_no_input_outlives_its_addition(tokens: int) -> None:
    """Garbage is not collected while a graph is captured: all layers' inputs would add up."""
    fresh_seed()
    cases, slots = parts_of((40, 24), 72, torch.float32), draw_slots(tokens, len(RANKS))
    added = LoraAddition(tuple(c.weights for c in cases), 0, segments_of(slots))
    x, out = torch.randn(tokens, 72), torch.zeros(tokens, 64)
    is_there = weakref.ref(x)
    gc.disable()
    try:
        gpu_add_lora(out, x, added)
        del x
        assert is_there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("slots", [[0] * 11, [3] * 35, [0, 5] * 9, list(range(6)) * 2, [4] * 12])
@pytest.mark.parametrize("tile", [16, 32])
def test_tiles_of_any_adapters(
    slots: list[int], tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    with kernel_module("lora.triton_tiles", tmp_path) as module:
        for changed in (module, lora_shrink):
            monkeypatch.setattr(changed, "tile_of", lambda tokens: tile)
        check(module, parts_of((24, 9), 40, torch.float32), slots, torch.float32)


@pytest.mark.parametrize("tokens", [1, 13])
def test_additions_to_an_embedding(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    vocabulary = 23
    case, slots = make_lora(vocabulary, 40, RANKS, torch.float32), draw_slots(tokens, len(RANKS))
    ids, before = torch.randint(vocabulary, (tokens,)), torch.randn(tokens, 40)
    out, one_hot = before.clone(), torch.nn.functional.one_hot(ids, vocabulary)
    addition = LoraAddition((case.weights,), 0, segments_of(slots))
    poison_new_memory(monkeypatch)
    with kernel_module("lora.triton_embedding", tmp_path) as module:
        module.add_embedding_lora(out, ids, addition)
    exact = case.add(before.double(), one_hot.double(), slots, 0)
    assert_as_exact(out, case.add(before, one_hot.float(), slots, 0), exact)


def test_sums_of_gate_and_up_before_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    inner, slots = 70, draw_slots(21, len(RANKS))
    cases = parts_of((inner, inner), 24, torch.float32)
    x, both = torch.randn(21, 24), torch.randn(21, 2 * inner)
    added = LoraAddition(tuple(c.weights for c in cases), 0, segments_of(slots))
    options = {}
    ranks = lora_shrink.shrink_tiles(x, added, options)
    out = lora_tiles.expand_tiles_silu(both, ranks, added, options).out
    exact, peer = both.double(), both.clone()
    for case in cases:
        exact = case.add(exact, x.double(), slots, 0)
        peer = case.add(peer, x, slots, 0)
    (gate, up), (peer_gate, peer_up) = exact.chunk(2, -1), peer.chunk(2, -1)
    silu = torch.nn.functional.silu
    assert_as_exact(out, silu(peer_gate) * peer_up, silu(gate) * up)


WALK = "range(split * PART, (split + 1) * PART, TILE)"
SHORT = WALK.replace("PART, TILE", "PART - TILE, TILE")


@pytest.mark.parametrize(
    ("name", "original", "replacement"),
    [
        ("lora.triton_rows", "range(TILE, PART, TILE)", "range(TILE, PART - TILE, TILE)"),
        ("lora.triton_rows", "for index in range(count):", "for index in range(count - 1):"),
        ("lora.triton_shrink", WALK, SHORT),
        (
            "lora.triton_shrink",
            "(job - 1) // SPLITS * GROUP",
            "(job - 1) // SPLITS * GROUP + RANKS",
        ),
        ("lora.triton_tiles", "_tile(b, row,", "_tile(b, row - 1,"),
    ],
)
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    name: str, original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    case = make_lora(1040, 40, [0, 24, 24], torch.float32)
    with (
        kernel_module(name, tmp_path, (original, replacement)) as module,
        monkeypatch.context() as patch,
    ):
        poison_new_memory(patch)
        changed = module
        if name == "lora.triton_shrink":
            patch.setattr(lora_shrink, "shrink_tiles", module.shrink_tiles)
            changed = lora_tiles
        if hasattr(module, "splits_of"):
            patch.setattr(module, "splits_of", lambda *sizes: 1)
        with pytest.raises(AssertionError):
            check(changed, [case], [1, 2] * 10, torch.float32)
