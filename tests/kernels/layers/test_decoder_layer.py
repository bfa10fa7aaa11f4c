"""The fused layers against their single operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weft.engine.model.stack import Run, run_all, runs_of
from weft.kernels.ops.lora.spec import LoraStep, LoraWeights
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.step_rows import group_places
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import DTYPES, fresh_seed
from weft.testing.kernels.layer_cases import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    make_int8_run,
    make_layer,
    make_mlp,
    make_run,
    make_step,
    run_by_operation,
)
from weft.testing.kernels.lora_cases import make_lora, segments_of
from weft.testing.kernels.wide_pages import WidePages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qwen", [False, True])
@pytest.mark.parametrize(
    "lengths", [[(1, 1)], [(1, 90), (1, 17)], [(1, 60), (50, 70), (3, 3)], [(0, 4), (1, 5)]]
)
def test_equals_its_single_operations(
    lengths: list[tuple[int, int]], qwen: bool, dtype: torch.dtype
) -> None:
    """Bit for bit: fused or not, the arithmetic is the same."""
    fresh_seed()
    run = make_run(dtype, qwen)
    pool = torch.randn(12 * len(lengths), KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    other_pool = pool.clone()
    step = make_step(lengths, pool)
    hidden = torch.randn(sum(q for q, _ in lengths), HIDDEN).to(dtype)
    other = run_by_operation(run, hidden, step, other_pool)
    hidden = run_all([run], hidden, step, pool)
    assert torch.isfinite(other).all()
    assert torch.equal(hidden, other)
    assert torch.equal(pool, other_pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_may_lie_apart(dtype: torch.dtype) -> None:
    """As in a contiguous pool; nothing between pages is read or written."""
    fresh_seed()
    run, lengths = make_run(dtype, True), [(1, 60), (9, 70)]
    pool = torch.randn(24, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    hidden, wide = torch.randn(10, HIDDEN).to(dtype), WidePages(pool)
    outs = [
        run_all([run], hidden.clone(), make_step(lengths, pages), pages)
        for pages in (wide.pool, pool)
    ]
    assert torch.equal(*outs)
    wide.check(pool)


def make_lora_step(
    slots: list[int], dtype: torch.dtype, ranks: list[int] | None = None
) -> LoraStep:
    """Adapters of all projections, by slot of rank 0, 8, 3 and 24 in turn by layer."""

    def part(in_features: int, out_features: int, column: int = 0) -> LoraWeights:
        given = ranks or [0, 8, 3, 24]
        case = make_lora(in_features, out_features, given, dtype, column=column, layers=LAYERS)
        return case.packed().weights

    q, kv = HEADS * DIM, KV_HEADS * DIM
    return LoraStep(
        segments=segments_of(slots),
        qkv=(part(HIDDEN, q), part(HIDDEN, kv, q), part(HIDDEN, kv, q + kv)),
        o=(part(q, HIDDEN),),
        gate_up=(part(HIDDEN, INNER), part(HIDDEN, INNER, INNER)),
        down=(part(INNER, HIDDEN),),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 60), (50, 70), (3, 3), (1, 9)]])
@pytest.mark.parametrize("is_int8", [False, True])
def test_with_adapters_it_equals_its_single_operations(
    is_int8: bool, lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Bit for bit; and requests without an adapter equal those of a step without adapters."""
    fresh_seed()
    run = make_int8_run(dtype) if is_int8 else make_run(dtype, True)
    pool = torch.randn(12 * len(lengths), KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    of_request = [1, 0, 3, 2][: len(lengths)]
    slots = [s for (q, _), s in zip(lengths, of_request, strict=True) for _ in range(q)]
    lora = make_lora_step(slots, dtype)
    hidden = torch.randn(len(slots), HIDDEN).to(dtype)
    pools = [pool.clone() for _ in range(3)]
    step = make_step(lengths, pool, lora)
    out = run_all([run], hidden.clone(), step, pools[0])
    other = run_by_operation(run, hidden, step, pools[1])
    without = run_all([run], hidden.clone(), replace(step, lora=None), pools[2])
    assert torch.isfinite(other).all()
    assert torch.equal(out, other)
    assert torch.equal(pools[0], pools[1])
    is_plain = torch.tensor(slots) == 0
    assert torch.equal(out[is_plain], without[is_plain])
    assert (out != without)[~is_plain].any(dim=1).all()


def test_adapters_that_do_not_fit_the_layers_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    pool = torch.randn(12, KV_HEADS, LAYERS + 1, 2, PAGE_SIZE, DIM)
    lora = make_lora_step([1, 1], torch.float32)

    def run(first: int, length: tuple[int, int], lora: LoraStep | None) -> None:
        hidden, step = torch.randn(length[0], HIDDEN), make_step([length], pool, lora)
        run_all([make_run(torch.float32, False, first, 1)], hidden, step, pool)

    with pytest.raises(ValueError, match="does not fit the step"):
        run(LAYERS + 1, (2, 9), None)
    with pytest.raises(ValueError, match="of LoRA rows for"):
        run(LAYERS, (2, 9), lora)
    with pytest.raises(ValueError, match="2 tokens, 3 rows"):
        run(0, (3, 9), lora)
    with pytest.raises(ValueError, match="do not fit"):
        run(0, (2, 9), replace(lora, o=lora.down))
    lora.qkv[2].counts[1, 1] = 4
    with pytest.raises(IndexError, match="LoRA"):
        run(0, (2, 9), lora)


def test_without_native_operations_the_single_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    run, pool = make_run(torch.float32, True), torch.randn(24, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM)
    assert run._dense is None
    step, hidden = make_step([(1, 90), (4, 17)], pool), torch.randn(5, HIDDEN)
    out = run_all([run], hidden.clone(), step, pool)
    assert torch.equal(out, run_by_operation(run, hidden, step, pool))


def test_arguments_that_do_not_fit_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    pool = torch.randn(12, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM)
    step = make_step([(2, 9)], pool)
    for hidden, index in (
        (torch.randn(3, HIDDEN), 0),
        (torch.randn(2, HIDDEN).bfloat16(), 0),
        (torch.randn(2, HIDDEN), LAYERS),
        (torch.randn(2, HIDDEN), -1),
    ):
        with pytest.raises(ValueError, match="does not fit the step"):
            run_all([make_run(torch.float32, False, index, 1)], hidden, step, pool)
    run, hidden = make_run(torch.float32, False, count=1), torch.randn(2, HIDDEN)
    far = torch.randn(30, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM)
    with pytest.raises(IndexError, match="position"):
        run_all([run], hidden[:1], make_step([(1, 201)], far), far)
    with pytest.raises(ValueError, match="does not fit"):
        run_all([run], hidden, step, pool.bfloat16())
    layer = run.layers[0]
    with pytest.raises(ValueError, match="do not fit together"):
        Run([layer._replace(feed=make_mlp(0, torch.float32, inner=7))])
    with pytest.raises(ValueError, match="a norm"):
        Run([layer._replace(input_norm=Norm(torch.ones(3), 1e-5))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_several_kinds_are_cut_into_runs(dtype: torch.dtype) -> None:
    """What the native operation runs and what it does not, over one stream: bit for bit."""
    fresh_seed()
    kinds = [False, False, True, False, True, True]
    layers = [make_layer(index, dtype, True, sparse) for index, sparse in enumerate(kinds)]
    runs, lengths = runs_of(layers), [(1, 60), (9, 70)]
    assert [len(run.layers) for run in runs] == [2, 1, 1, 2]
    pool = torch.randn(24, KV_HEADS, len(kinds), 2, PAGE_SIZE, DIM).to(dtype)
    other_pool, hidden = pool.clone(), torch.randn(10, HIDDEN).to(dtype)
    step, other = make_step(lengths, pool), hidden
    for run in runs:
        other = run_by_operation(run, other, step, other_pool)
    assert torch.equal(run_all(runs, hidden, step, pool), other)
    assert torch.equal(pool, other_pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_two_page_groups_are_one_run(dtype: torch.dtype) -> None:
    """Wherever K and V of a layer lie, it computes the same bits."""
    fresh_seed()
    layers, lengths = (
        [make_layer(index, dtype, True) for index in range(LAYERS)],
        [(1, 60), (9, 70)],
    )
    pool = torch.randn(24, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    hidden = torch.randn(10, HIDDEN).to(dtype)
    step, order = make_step(lengths, pool), torch.randperm(24)
    first, of_second = pool[:, :, [0, 2]].contiguous(), pool[order][:, :, [1]].contiguous()
    (group,) = step.groups
    table = order.argsort()[group.page_table.long()].int()
    places = group_places(step.positions, group.cu_q_lens, table, PAGE_SIZE, group.places)
    second = group._replace(page_table=table, places=places, pool=of_second)
    expected = run_all(runs_of(layers), hidden.clone(), step, pool)
    for number, (of_group, in_pool) in enumerate(((0, 0), (1, 0), (0, 1))):
        layers[number].mixer.move(of_group, in_pool)
    (run,) = runs_of(layers)
    both = replace(step, groups=(group, second))
    assert torch.equal(run_all([run], hidden.clone(), both, first), expected)
    assert torch.equal(first, pool[:, :, [0, 2]])
    assert torch.equal(of_second, pool[order][:, :, [1]])
    assert torch.equal(run_by_operation(run, hidden, both, first), expected)
    if cpu.native_cpu() is None:
        return
    with pytest.raises(ValueError, match="does not fit the step"):
        run_all([run], hidden.clone(), step, first)
    outside = replace(step, groups=(group, second._replace(pool=of_second[:1])))
    with pytest.raises(IndexError):
        run_all([run], hidden.clone(), outside, first)


def test_places_in_a_page_group() -> None:
    fresh_seed()
    table = torch.randint(1, 50, (3, 6), dtype=torch.int32)
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # Two rows behind are padding.
    positions = torch.tensor([7, 8, 0, 1, 46, 0, 3])
    of_first = PAGE_SIZE + torch.randint(0, 300, (7,))
    of_first[2], of_first[5:] = positions[2] % PAGE_SIZE, positions[5:] % PAGE_SIZE
    found = group_places(positions, bounds, table, PAGE_SIZE, of_first).tolist()
    requests = [0, 0, 2, 2, 2]
    wanted = [
        int(table[request, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
        for request, position in zip(requests, positions.tolist(), strict=False)
    ]
    wanted[2] = 0  # A row that writes nothing.
    assert found == [*wanted, 0, 3]
