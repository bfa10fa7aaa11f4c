"""The fused layers against their single operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weft.kernels import cpu
from weft.kernels.decoder_layer import (
    decoder_layer,
    decoder_layer_reference,
    decoder_layers,
    stack_layers,
)
from weft.kernels.lora import LoraStep, LoraWeights
from weft.testing.kernels.kernel_checks import DTYPES, fresh_seed
from weft.testing.kernels.layer_cases import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    make_int8_layer,
    make_layer,
    make_step,
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
    stack = stack_layers([make_layer(dtype, qwen) for _ in range(LAYERS)])
    pool = torch.randn(12 * len(lengths), KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    other_pool = pool.clone()
    step, other_step = (make_step(stack.layers[0], lengths, p) for p in (pool, other_pool))
    hidden = torch.randn(sum(q for q, _ in lengths), HIDDEN).to(dtype)
    other = hidden.clone()
    hidden = decoder_layers(hidden, stack, step)
    for i, layer in enumerate(stack.layers):
        other = decoder_layer_reference(other, layer, other_step, i)
    assert torch.isfinite(other).all()
    assert torch.equal(hidden, other)
    assert torch.equal(pool, other_pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_may_lie_apart(dtype: torch.dtype) -> None:
    """As in a contiguous pool; nothing between pages is read or written."""
    fresh_seed()
    stack, lengths = (
        stack_layers([make_layer(dtype, True) for _ in range(LAYERS)]),
        [(1, 60), (9, 70)],
    )
    pool = torch.randn(24, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    hidden, wide = torch.randn(10, HIDDEN).to(dtype), WidePages(pool)
    outs = [
        decoder_layers(hidden.clone(), stack, make_step(stack.layers[0], lengths, pages))
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
    layers = [make_int8_layer(dtype) if is_int8 else make_layer(dtype, True) for _ in range(LAYERS)]
    stack = stack_layers(layers)
    pool = torch.randn(12 * len(lengths), KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    of_request = [1, 0, 3, 2][: len(lengths)]
    slots = [s for (q, _), s in zip(lengths, of_request, strict=True) for _ in range(q)]
    lora = make_lora_step(slots, dtype)
    hidden = torch.randn(len(slots), HIDDEN).to(dtype)
    pools = [pool.clone() for _ in range(3)]
    steps = [
        make_step(stack.layers[0], lengths, p, given)
        for p, given in zip(pools, (lora, lora, None), strict=True)
    ]
    out, other, without = (hidden.clone() for _ in range(3))
    out = decoder_layers(out, stack, steps[0])
    for i, layer in enumerate(stack.layers):
        other = decoder_layer_reference(other, layer, steps[1], i)
    without = decoder_layers(without, stack, steps[2])
    assert torch.isfinite(other).all()
    assert torch.equal(out, other)
    assert torch.equal(pools[0], pools[1])
    is_plain = torch.tensor(slots) == 0
    assert torch.equal(out[is_plain], without[is_plain])
    assert (out != without)[~is_plain].any(dim=1).all()


def test_adapters_that_do_not_fit_the_layers_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    stack = stack_layers([make_layer(torch.float32, False)])
    pool = torch.randn(12, KV_HEADS, LAYERS + 1, 2, PAGE_SIZE, DIM)
    lora = make_lora_step([1, 1], torch.float32)
    step = make_step(stack.layers[0], [(2, 9)], pool, lora)
    with pytest.raises(ValueError, match="does not fit the step"):
        decoder_layers(torch.randn(2, HIDDEN), stack, step, LAYERS)
    with pytest.raises(ValueError, match="2 tokens, 3 rows"):
        make_step(stack.layers[0], [(3, 9)], pool, lora)
    with pytest.raises(ValueError, match="do not fit"):
        make_step(stack.layers[0], [(2, 9)], pool, replace(lora, o=lora.down))
    lora.qkv[2].counts[1, 1] = 4
    with pytest.raises(IndexError, match="LoRA"):
        make_step(stack.layers[0], [(2, 9)], pool, lora)


def test_without_native_operations_the_single_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    layer = make_layer(torch.float32, True)
    pool = torch.randn(24, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM)
    stack = stack_layers([layer])
    step = make_step(stack.layers[0], [(1, 90), (4, 17)], pool)
    assert step.native is None
    hidden = torch.randn(5, HIDDEN)
    out = decoder_layers(hidden.clone(), stack, step, 1)
    assert torch.equal(out, decoder_layer(hidden.clone(), layer, step, 1))
    assert torch.equal(out, decoder_layer_reference(hidden, layer, step, 1))


def test_arguments_that_do_not_fit_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    stack = stack_layers([make_layer(torch.float32, False)])
    pool = torch.randn(12, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM)
    step = make_step(stack.layers[0], [(2, 9)], pool)
    for hidden, index in (
        (torch.randn(3, HIDDEN), 0),
        (torch.randn(2, HIDDEN).bfloat16(), 0),
        (torch.randn(2, HIDDEN), LAYERS),
        (torch.randn(2, HIDDEN), -1),
    ):
        with pytest.raises(ValueError, match="does not fit the step"):
            decoder_layers(hidden, stack, step, index)
    with pytest.raises(IndexError, match="position"):
        make_step(stack.layers[0], [(1, 201)], torch.randn(30, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM))
    with pytest.raises(ValueError, match="does not fit"):
        make_step(stack.layers[0], [(2, 9)], pool.bfloat16())
    with pytest.raises(ValueError, match="same shapes"):
        stack_layers([])
