"""The fused layers against their single operations."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DTYPES, fresh_seed
from layer_cases import DIM, HIDDEN, KV_HEADS, LAYERS, PAGE_SIZE, make_layer, make_step
from weft.kernels import cpu
from weft.kernels.decoder_layer import (
    decoder_layer,
    decoder_layer_reference,
    decoder_layers,
    stack_layers,
)


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
