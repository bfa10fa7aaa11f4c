"""Mixtures of experts on a CPU against float64, and what must not change a row's result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.kernels.ops import moe as moe_module
from weft.kernels.ops.moe import moe, route
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.reference import moe_reference
from weft.kernels.ops.moe.spec import ExpertWeights, Routing
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)
from weft.testing.kernels.moe_cases import MoECase, make_adapters, moe_case
from weft.testing.kernels.near_ties import clear_logits

SHAPES = [
    (1, 72, 40, 8, 3),
    (2, 33, 19, 5, 5),
    (17, 64, 48, 4, 1),
    (65, 40, 7, 16, 4),
    (200, 64, 32, 128, 8),
]


def pack(case: MoECase) -> ExpertWeights:
    return pack_experts(case.experts(), len(case.w13))


def rows_of(case: MoECase, rows: torch.Tensor) -> tuple[torch.Tensor, Routing, torch.Tensor]:
    ids, shares = case.routing
    return case.x[rows], Routing(ids[rows], shares[rows]), case.residual[rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_experts(
    shape: tuple[int, int, int, int, int], is_crowded: bool, dtype: torch.dtype
) -> None:
    fresh_seed()
    case = moe_case(*shape, dtype, is_crowded=is_crowded)
    weights, exact, eager = pack(case), case.compute(torch.float64), case.compute(dtype)
    before = case.residual.clone()
    assert_as_exact(moe(case.x, case.routing, weights, case.residual), eager, exact)
    assert torch.equal(case.residual, before)
    assert_as_exact(moe_reference(case.x, case.routing, weights, case.residual), eager, exact)
    case.residual.zero_()
    alone = moe(case.x, case.routing, weights)
    assert_as_exact(alone, case.compute(dtype), case.compute(torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    fresh_seed()
    case = moe_case(96, 72, 40, 12, 3, dtype)
    weights = pack(case)
    whole = moe(case.x, case.routing, weights, case.residual)
    for count in (1, 2, 15, 64):
        rows = torch.randperm(96)[:count]
        x, routing, residual = rows_of(case, rows)
        assert torch.equal(moe(x, routing, weights, residual), whole[rows])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    fresh_seed()
    case = moe_case(50, 64, 48, 6, 2)
    weights, found = pack(case), []
    known = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(moe(case.x, case.routing, weights, case.residual))
    finally:
        torch.set_num_threads(known)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_additions_to_experts(
    shape: tuple[int, int, int, int, int], is_shared: bool, dtype: torch.dtype
) -> None:
    fresh_seed()
    case = moe_case(*shape, dtype)
    adapters, weights = make_adapters(case, is_shared).packed(), pack(case)
    exact, eager = case.compute(torch.float64, adapters), case.compute(dtype, adapters)
    call = (case.x, case.routing, weights, case.residual)
    out = moe(*call, adapters.addition())
    assert_as_exact(out, eager, exact)
    assert_as_exact(moe_reference(*call, adapters.addition()), eager, exact)
    plain = [row for row, slot in enumerate(adapters.slots) if slot in (0, 3)]
    assert torch.equal(out[plain], moe(*call)[plain])
    one_of_two = replace(adapters.addition(), w13=())
    exact = case.compute(torch.float64, replace(adapters, w13=()))
    assert_as_exact(moe(*call, one_of_two), case.compute(dtype, replace(adapters, w13=())), exact)


def test_additions_to_experts_that_do_not_fit_are_refused() -> None:
    case = moe_case(3, 24, 16, 4, 2)
    call = (case.x, case.routing, pack(case), case.residual)
    adapters = replace(make_adapters(case, False).packed(), slots=[1, 2, 1])
    with pytest.raises(ValueError, match="of 3 rows"):
        moe(*call, replace(adapters, slots=[1, 1]).addition())
    with pytest.raises(ValueError, match="do not fit"):
        moe(*call, replace(adapters, w2=adapters.w13[:1]).addition())
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    adapters.w2[0].weights.rows_of_b.fill_(1 << 20)
    with pytest.raises(IndexError, match="LoRA"):
        moe(*call, adapters.addition())


def test_no_rows() -> None:
    case = moe_case(0, 24, 8, 4, 2)
    assert moe(case.x, case.routing, pack(case), case.residual).shape == (0, 24)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operation does not write is NaN, or a number that is no place."""

    def poisoned(*size: object, **options: object) -> torch.Tensor:
        made = torch.zeros(*size, **options)  # type: ignore[call-overload]
        return made.fill_(float("nan") if made.is_floating_point() else 1 << 40)

    monkeypatch.setattr(moe_module.torch, "empty", poisoned)
    monkeypatch.setattr(moe_module.torch, "empty_like", lambda t: torch.full_like(t, float("nan")))


@pytest.mark.needs("cc")
def test_every_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    case = moe_case(37, 40, 24, 9, 4)
    weights = pack(case)
    expected = moe(case.x, case.routing, weights, case.residual)
    with monkeypatch.context() as patch:
        poison(patch)
        out = moe(case.x, case.routing, weights, case.residual)
    assert torch.equal(out, expected)


@pytest.mark.full_after(1)
@pytest.mark.needs("cc")
@pytest.mark.parametrize(
    ("file", "original", "replacement"),
    [
        ("cpu.c", "units[2 * experts->experts + 1]", "units[2 * experts->experts + 1] - 1"),
        ("moe.h", "memcpy((char *)m->gathered", "if (r + j > 0) memcpy((char *)m->gathered"),
        ("moe.h", "vf_splat(m->weights[pair])", "vf_splat(m->weights[r * m->top_k])"),
    ],
)
def test_a_mutated_build_is_noticed(
    file: str,
    original: str,
    replacement: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = moe_case(20, 40, 24, 6, 3)
    weights = pack(case)
    mutated = mutated_native_cpu(tmp_path, file, original, replacement)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "native_cpu", lambda: mutated)
        poison(patch)
        out = moe(case.x, case.routing, weights, case.residual)
    with pytest.raises(AssertionError):
        assert_as_exact(out, case.compute(torch.float32), case.compute(torch.float64))


def test_experts_that_do_not_exist_are_refused() -> None:
    case = moe_case(3, 24, 8, 4, 2)
    weights = pack(case)
    for bad in (4, -1):
        ids = case.routing.ids.clone()
        ids[1, 1] = bad
        with pytest.raises(IndexError):
            moe(case.x, Routing(ids, case.routing.weights), weights)


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = moe_case(3, 24, 8, 4, 2)
    weights = pack(case)
    ids, shares = case.routing
    for x, routing, residual in (
        (case.x[:, :23], case.routing, None),
        (case.x.bfloat16(), case.routing, None),
        (case.x[:2], case.routing, None),
        (case.x, Routing(ids.long(), shares), None),
        (case.x, Routing(ids[:, :1], shares), None),
        (case.x, case.routing, case.residual[:2]),
    ):
        with pytest.raises(ValueError):
            moe(x, routing, weights, residual)
    with pytest.raises(ValueError, match="3 experts"):
        pack_experts(case.experts()[:3], 4)
    with pytest.raises(ValueError, match="do not fit"):
        pack_experts([(a, b[:, :7]) for a, b in case.experts()], 4)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(0, 4, 2), (1, 1, 1), (33, 60, 8), (5, 7, 7)]
)
def test_routing(rows: int, experts: int, top_k: int, renormalise: bool) -> None:
    fresh_seed()
    logits = clear_logits(rows, experts, top_k, spread=3.0)
    ids, shares = route(logits, top_k, renormalise=renormalise)
    assert (ids.dtype, shares.dtype) == (torch.int32, torch.float32)
    for row in range(rows):
        best = sorted(range(experts), key=lambda e: -float(logits[row, e]))[:top_k]
        assert ids[row].tolist() == sorted(best)
        power = logits[row].double().exp()
        total = power[sorted(best)].sum() if renormalise else power.sum()
        exact = power[sorted(best)] / total
        torch.testing.assert_close(shares[row].double(), exact, rtol=2e-6, atol=1e-9)
