"""Additions that the product's own kernel makes, of few rows, by Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gpu
from weft.kernels.ops.linear import triton_small as small_linear
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.lora import triton_product as lora_product
from weft.kernels.ops.lora.spec import LoraAddition, LoraStep
from weft.kernels.ops.norm.reference import rms_norm_reference
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import (
    LoraCase,
    draw_slots,
    make_lora,
    poison_new_memory,
    segments_of,
)
from weft.testing.kernels.lora_layers import Sizes, make_layers

pytestmark = pytest.mark.needs("triton-interpreter")

RANKS, EPS = [0, 8, 16, 3, 0, 40], 1e-5
"""Ranks by slot; those of the last one are not taken at once."""
Product = tuple[list[LoraCase], LoraAddition, list[int]]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel writes must not matter."""
    poison_new_memory(monkeypatch)


def make_product(
    rows: int, k: int, columns: Sequence[tuple[int, int]], *, are_given: bool
) -> Product:
    """Adapters that change some columns (first and number) of a product, in the second layer."""
    cases = [
        make_lora(
            k, width, [0, *random.sample(RANKS[1:], 5)], torch.float16, column=begin, layers=2
        )
        for begin, width in columns
    ]
    slots = draw_slots(rows, len(RANKS))
    parts = tuple(case.weights for case in cases)
    return cases, LoraAddition(parts, 1, segments_of(slots), are_given), slots


def added_to(
    product: torch.Tensor, x: torch.Tensor, cases: list[LoraCase], slots: list[int]
) -> torch.Tensor:
    for case in cases:
        product = case.add(product, x, slots, 1)
    return product


@pytest.mark.parametrize(
    ("rows", "k", "are_given"),
    [(1, 1100, True), (2, 72, True), (2, 72, False), (3, 72, False), (8, 1100, True)],
)
def test_a_product_with_adapters(rows: int, k: int, are_given: bool) -> None:
    """Three parts, between which columns are left alone; a residual and a bias."""
    fresh_seed()
    columns = [(0, 48), (64, 16), (80, 32)]
    cases, lora, slots = make_product(rows, k, columns, are_given=are_given)
    x, weight = torch.randn(rows, k).half(), (torch.randn(120, k) / k**0.5).half()
    bias, residual = torch.randn(120).half(), torch.randn(rows, 120).half()
    assert gpu._adds_within(rows, weight, lora)
    w = LinearWeight(120, k, torch.float16, False, PlainForm(weight), bias)
    out = gpu.linear(x, w, residual, torch.float32, lora)
    exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    peer = F.linear(x, weight, bias) + residual
    exact = added_to(exact, x.double(), cases, slots)
    assert_as_exact(out.half(), added_to(peer, x, cases, slots), exact)
    assert out.dtype == torch.float32
    without = gpu.linear(x, w, residual, torch.float32)
    for slot, changed in zip(slots, out != without, strict=True):
        for case, (begin, width) in zip(cases, columns, strict=True):
            has_ranks = (1, slot) in case.plain
            assert changed[begin : begin + width].any() == has_ranks
        assert not changed[48:64].any()
        assert not changed[112:].any()


@pytest.mark.parametrize(("rows", "are_given"), [(1, True), (2, False), (6, True), (6, False)])
def test_a_gated_pair_with_adapters(rows: int, are_given: bool) -> None:
    fresh_seed()
    k, inner = 136, 64
    pair = [(0, inner), (inner, inner)]
    cases, lora, slots = make_product(rows, k, pair, are_given=are_given)
    x, weight = torch.randn(rows, k).half(), (torch.randn(2 * inner, k) / k**0.5).half()

    def activated(both: torch.Tensor) -> torch.Tensor:
        gate, up = added_to(both, x.to(both.dtype), cases, slots).chunk(2, dim=1)
        return F.silu(gate) * up

    w = LinearWeight(2 * inner, k, torch.float16, True, PlainForm(weight), None)
    out = gpu.gate_up_silu(x, w, lora)
    exact = activated(x.double() @ weight.double().T)
    assert_as_exact(out, activated(F.linear(x, weight)), exact)


@pytest.mark.parametrize(("rows", "are_given"), [(1, True), (2, False)])
def test_ranks_and_product_take_the_norm(rows: int, are_given: bool) -> None:
    fresh_seed()
    k = 200
    cases, lora, slots = make_product(rows, k, [(0, 32), (32, 64)], are_given=are_given)
    x, gain = torch.randn(rows, k).half(), (torch.rand(k) + 0.5).half()
    weight = (torch.randn(96, k) / k**0.5).half()
    norm = lora_product.NormOfRows(gain, EPS)
    added = lora_product.added_within(x, lora, norm)
    out = small_linear.small_linear(x, weight, None, None, x.dtype, norm=norm, added=added)
    normed = rms_norm_reference(x.double(), gain.double(), EPS)
    exact = added_to(normed @ weight.double().T, normed, cases, slots)
    peer_normed = rms_norm_reference(x, gain, EPS)
    peer = added_to(F.linear(peer_normed, weight), peer_normed, cases, slots)
    assert_as_exact(out, peer, exact)


def test_what_other_launches_add() -> None:
    """Columns that a program would share between parts, many rows, large weights, fixed bits."""
    fresh_seed()
    (case,), lora, _ = make_product(3, 64, [(0, 24)], are_given=False)
    weight = torch.randn(48, 64).half()
    assert not gpu._adds_within(3, weight, lora)
    assert gpu._adds_within(1, weight, lora)
    assert not gpu._adds_within(9, weight, lora)
    assert not gpu._adds_within(1, weight.float(), lora)
    large = torch.empty(1, dtype=torch.float16).expand(1 << 18, 64)
    assert not gpu._adds_within(1, large, lora)
    apart = replace(lora, parts=(replace(case.weights, b_table=case.weights.table.clone()),))
    assert not gpu._adds_within(1, weight, apart)
    added = lora_product.added_within(torch.randn(1, 64).half(), lora)
    x = torch.randn(1, 64).half()
    with pytest.raises(ValueError, match="fixed bits"):
        small_linear.small_linear(x, weight, None, None, x.dtype, is_fixed=True, added=added)


@pytest.mark.full_after(1)
@pytest.mark.parametrize(("rows", "are_given"), [(1, True), (2, False), (5, True)])
def test_layers_with_adapters(rows: int, are_given: bool) -> None:
    """All four products of a layer add within; of one or two rows the norms are theirs too."""
    fresh_seed()
    sizes = Sizes(hidden=32, inner=40, heads=2, kv_heads=1, dim=16)
    case = make_layers(sizes, rows, RANKS, torch.float16, "cpu")
    exact, peer = case.written_out(torch.float64), case.written_out(torch.float16)
    lora: LoraStep = replace(case.lora, are_given=are_given)
    with as_on_gpu():
        out, without = case.output(lora), case.output(None)
    assert_as_exact(out, peer, exact, slack=4e-3)
    has_adapter = torch.tensor(case.slots) > 0
    assert ((out - without)[has_adapter].abs() > 1e-2).any(dim=1).all()


@pytest.mark.parametrize(
    "change",
    [
        ("rank[None, :] < 8 * count[:, None]", "rank[None, :] < 8 * count[:, None] - 8"),
        ("at += 8 * before(part, SHAPE.max_rows[0], SHAPE.max_rows[1])", "at += 0 * part"),
        ("range(_AT_ONCE, 8 * tl.max(count, axis=0), _AT_ONCE)", "range(0, 0, 1)"),
        ("(column - begin)[None, None, :]", "column[None, None, :]"),
    ],
)
@pytest.mark.full
def test_a_mutated_addition_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    """Of two parts, the second of rank 40."""
    fresh_seed()
    k, x = 64, torch.randn(1, 64).half()
    cases = [make_lora(k, 32, [0, 40], torch.float16, column=begin) for begin in (0, 32)]
    lora = LoraAddition(tuple(c.weights for c in cases), 0, segments_of([1]))
    weight = torch.randn(64, k).half()
    exact, peer = x.double() @ weight.double().T, F.linear(x, weight)
    for case in cases:
        exact, peer = case.add(exact, x.double(), [1], 0), case.add(peer, x, [1], 0)
    with (
        kernel_module("lora.triton_product", tmp_path, change) as module,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("wait_for_ranks", "added_to_columns"):
            patch.setattr(small_linear, name, getattr(module, name))
        added = module.added_within(x, lora)
        out = small_linear.small_linear(x, weight, None, None, x.dtype, added=added)
    with pytest.raises(AssertionError):
        assert_as_exact(out, peer, exact)
