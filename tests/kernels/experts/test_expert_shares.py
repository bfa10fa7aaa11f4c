"""Shares of a mixture's experts, on CPUs and by Triton's interpreter: their sum is the whole."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from weft.kernels.ops.activation.spec import SILU
from weft.kernels.ops.moe import gpu, moe, route, triton_listed
from weft.kernels.ops.moe import triton_direct as moe_direct
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.reference import moe_reference, route_reference
from weft.kernels.ops.moe.spec import ExpertParts, Routing
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import DTYPES, assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import poison_new_memory
from weft.testing.kernels.moe_cases import (
    MoECase,
    experts_of,
    make_adapters,
    moe_case,
    share_of,
    share_of_adapters,
)
from weft.testing.kernels.near_ties import clear_logits

SHARES = 2


def random_placements(experts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each share the experts in it, and the place of every expert there."""
    shuffled = torch.randperm(experts)
    found = []
    for own in shuffled.chunk(SHARES):
        placement = torch.full((experts,), len(own), dtype=torch.int32)
        placement[own] = torch.arange(len(own), dtype=torch.int32)
        found.append((own, placement))
    return found


def routed_case(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[MoECase, torch.Tensor]:
    """A case without a residual whose routing is that of logits, and the logits."""
    rows, _, _, experts, top_k = shape
    case = moe_case(*shape, dtype)
    case.residual.zero_()
    logits = clear_logits(rows, experts, top_k)
    return replace(case, routing=route_reference(logits, top_k, renormalise=True)), logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "adapted"), [(1, False), (30, True)])
def test_the_sum_of_shares_on_a_cpu(
    rows: int, adapted: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    case, logits = routed_case(rows, 40, 24, 6, 3, dtype=dtype)
    adapters = make_adapters(case, random.random() < 0.5) if adapted else None
    for compute in (moe, moe_reference):
        total = torch.zeros(case.x.shape)
        for own, placement in random_placements(6):
            experts = [(case.w13[at], case.w2[at]) for at in own.tolist()]
            packed = pack_experts(experts, len(own), placement=placement)
            routing = route(logits, 3, renormalise=True, placement=placement)
            lora = None
            if adapters is not None:
                lora = share_of_adapters(adapters.packed().addition(), own, 6)
            total += compute(case.x, routing, packed, None, lora).float()
        eager, exact = (case.compute(into, adapters) for into in (dtype, torch.float64))
        assert_as_exact(total.to(dtype), eager, exact, 4)


def test_a_share_refuses_numbers_beyond_its_experts() -> None:
    case = moe_case(3, 24, 8, 4, 2)
    placement = torch.tensor([0, 2, 1, 2], dtype=torch.int32)
    packed = pack_experts(case.experts()[:2], 2, placement=placement)
    ids = torch.full_like(case.routing.ids, 3)
    with pytest.raises(IndexError):
        moe(case.x, Routing(ids, case.routing.weights), packed)


# Rows, hidden, inner, experts, experts a row: direct (all of a row's experts at once, and one by
# one), sorted with the router, and sorted in several chunks.
DIRECT, LONG, AT_ONCE, CHUNKS = (
    (2, 40, 24, 6, 3), (1, 40, 1100, 4, 4), (12, 40, 24, 6, 3), (150, 24, 16, 6, 2),
)  # fmt: skip


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (DIRECT, "floats"),
        (AT_ONCE, "floats"),
        (LONG, "floats"),
        pytest.param(DIRECT, "float16", marks=pytest.mark.full),
        pytest.param(CHUNKS, "floats", marks=pytest.mark.full),
        ((2, 48, 144, 4, 2), "fp8"),
        pytest.param((1, 40, 1104, 4, 2), "fp8", marks=pytest.mark.full),
        pytest.param((12, 48, 144, 4, 2), "fp8", marks=pytest.mark.full),
        pytest.param((2, 160, 64, 4, 2), "mxfp4", marks=pytest.mark.full),
    ],
)
def test_the_sum_of_shares_on_a_gpu(
    shape: tuple[int, int, int, int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    _, hidden, inner, experts, top_k = shape
    dtype = torch.float16 if name in ("float16", "mxfp4") else torch.float32
    case, logits = routed_case(*shape, dtype=dtype)
    if name in ("fp8", "mxfp4"):
        (w13, wide13), (w2, wide2) = (
            experts_of(name, experts, 2 * inner, hidden),
            experts_of(name, experts, hidden, inner),
        )
        case = replace(case, w13=wide13, w2=wide2)
    else:
        w13, w2 = case.w13, case.w2
    biases = (torch.zeros(experts, 2 * inner), torch.randn(experts, hidden))
    is_fixed = random.random() < 0.2
    total = torch.zeros(case.x.shape)
    for own, placement in random_placements(experts):
        more = ExpertParts(SILU, tuple(part[own].to(dtype) for part in biases), placement)
        total += gpu.routed_moe(
            case.x, logits, top_k, share_of(w13, own), share_of(w2, own), None,
            renormalise=True, more=more, is_fixed=is_fixed,
        ).float()  # fmt: skip
    ids, shares = case.routing
    added = (biases[1].to(dtype).double()[ids] * shares.unsqueeze(2)).sum(1)
    exact = case.compute(torch.float64) + added
    assert_as_exact(total.to(dtype), (case.compute(dtype) + added).to(dtype), exact, 4)


@pytest.fixture(scope="module")
def second_product() -> tuple[MoECase, tuple[Any, ...]]:
    """A case, and what its second product is given, which is right unchanged: each of the two takes
    the interpreter seconds.
    """
    case, _ = routed_case(3, 24, 600, 6, 3)
    more = ExpertParts(placement=torch.arange(6, dtype=torch.int32))
    with mock.patch.object(moe_direct, "listed_down") as second:
        moe_direct.direct_moe(case.x, *case.routing, case.w13, case.w2, None, None, more)
    out, *others = second.call_args.args
    triton_listed.listed_down(out, *others)
    assert_as_exact(out, case.compute(torch.float32), case.compute(torch.float64))
    return case, second.call_args.args


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize(
    "change",
    [
        ("is_here = is_here & (expert_of < experts)", "is_here = is_here & (number < 2)"),
        ("place == step // STEPS, share_of", "place == 0, share_of"),
        ("later % STEPS * TILE + part", "0 * later + part"),
    ],
)
@pytest.mark.full
def test_a_mutated_list_of_experts_is_noticed(
    change: tuple[str, str], second_product: tuple[MoECase, tuple[Any, ...]], tmp_path: Path
) -> None:
    case, second = second_product
    exact, eager = case.compute(torch.float64), case.compute(torch.float32)
    out, *others = second[0].clone(), *second[1:]
    with kernel_module("moe.triton_listed", tmp_path, change) as changed:
        changed.listed_down(out, *others)
        with pytest.raises(AssertionError):
            assert_as_exact(out, eager, exact)


@pytest.mark.needs("triton-interpreter")
@pytest.mark.full_after(2)
@pytest.mark.parametrize("way", ["direct", "paired", "tiles", "rows"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_sum_of_adapted_shares_on_a_gpu(
    way: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pair by pair in and beside the products, and in tiles; also with adapters whose experts share
    a side.
    """
    fresh_seed()
    poison_new_memory(monkeypatch)
    case, logits = routed_case(5 if way == "direct" else 20, 40, 24, 6, 3)
    adapters = make_adapters(case, is_shared, (0, 8, 3, 0, 20))
    if way != "paired":
        monkeypatch.setattr(gpu, "MAX_PAIRED_ROWS", 0)
    total = torch.zeros(case.x.shape)
    for own, placement in random_placements(6):
        more, lora = (
            ExpertParts(placement=placement),
            share_of_adapters(adapters.addition(), own, 6),
        )
        sizes, is_fixed = (len(own) + 1, 24), way == "rows"
        ranks = gpu.begin_ranks(case.x, lora, *sizes, is_fixed=is_fixed)
        assert (ranks is not None) == (way == "paired" and is_shared)
        total += gpu.routed_moe(
            case.x, logits, 3, share_of(case.w13, own), share_of(case.w2, own), None, lora, ranks,
            renormalise=True, more=more, is_fixed=is_fixed,
        )  # fmt: skip
    eager, exact = (case.compute(into, adapters) for into in (torch.float32, torch.float64))
    assert_as_exact(total, eager, exact, 4, slack=1e-5)
