"""Decoder layers with FP8 weights on a GPU's way, by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.stack import Run, run_all
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.ops.linear import gpu_fp8 as fp8_linear
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.linear.triton_fp8_few_rows import FewRows, few_rows
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.stream import gpu as stream
from weft.kernels.shared.formats.quantised import Fp8Matrix
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.fp8_cases import draw_matrix
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.layer_cases import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PAGE_SIZE,
    draw,
    make_cos_sin,
    make_step,
)
from weft.testing.kernels.lora_cases import poison_new_memory

pytestmark = pytest.mark.needs("triton-interpreter")

LAYERS, DTYPE = 2, torch.float16


def make_layer(index: int, block_rows: int, *, is_fixed: bool) -> Layer:
    def fp8(rows: int, k: int, *, bias: bool = False, gated: bool = False) -> LinearWeight:
        added = draw(rows, dtype=DTYPE) if bias else None
        matrix = draw_matrix(rows, k, block_rows)
        return LinearWeight(rows, k, DTYPE, gated, matrix, added, is_fixed)

    attention = Attention(
        AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),
        index,
        make_cos_sin(),
        qkv_proj=fp8((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, bias=True),
        o_proj=fp8(HIDDEN, HEADS * DIM),
    )
    norms = (Norm(1 + draw(HIDDEN, dtype=DTYPE), 1e-5) for _ in range(2))
    mlp = GatedMLP(index, fp8(2 * INNER, HIDDEN, gated=True), fp8(HIDDEN, INNER))
    return Layer(index, next(norms), attention, next(norms), mlp)


def in_floats(layer: Layer, dtype: torch.dtype) -> Layer:
    """The same numbers in floats."""

    def wide(part: LinearWeight) -> LinearWeight:
        bias = None if part.bias is None else part.bias.to(dtype)
        form = PlainForm(fp8_linear.matrix_of(part).dequantised(torch.float32).to(dtype))
        return replace(part, dtype=dtype, form=form, bias=bias)

    index, first, mixer, post, feed, _ = layer
    assert isinstance(mixer, Attention)
    assert isinstance(feed, GatedMLP)
    assert isinstance(first, Norm)
    assert isinstance(post, Norm)
    first, post = (Norm(norm.weight.to(dtype), norm.eps) for norm in (first, post))
    products = {name: wide(getattr(mixer, name)) for name in ("qkv_proj", "o_proj")}
    attention = Attention(mixer.spec, index, mixer.cos_sin, **products)
    mlp = GatedMLP(index, wide(feed.gate_up_proj), wide(feed.down_proj))
    return Layer(index, first, attention, post, mlp)


@pytest.mark.each_of("block_rows", "rows")
@pytest.mark.parametrize("block_rows", [0, 8])
@pytest.mark.parametrize(
    ("rows", "is_fixed"),
    [(1, False), (20, False), (1, True), pytest.param(2, False, marks=pytest.mark.full)],
)
def test_layers(
    rows: int, block_rows: int, is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    layers = [make_layer(index, block_rows, is_fixed=is_fixed) for index in range(LAYERS)]
    pool = torch.randn(6, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(DTYPE)
    hidden = torch.randn(rows, HIDDEN).to(DTYPE)
    folded: list[int] = []
    kernel = stream.add_product
    monkeypatch.setattr(stream, "add_product", lambda *args: (folded.append(1), kernel(*args)))

    def run(layers: list[Layer], dtype: torch.dtype) -> torch.Tensor:
        kv = pool.to(dtype, copy=True)
        step = make_step([(rows, 40)], kv)
        with as_on_gpu():
            return run_all([Run(layers)], hidden.to(dtype, copy=True), step, kv)

    out = run(layers, DTYPE)
    # Of few rows the products take the norms before them and add to the stream.
    assert len(folded) == (2 * LAYERS if rows <= 2 and not is_fixed else 0)
    exact = run([in_floats(layer, torch.float32) for layer in layers], torch.float32).double()
    if rows <= fp8_linear.MAX_ROWS and not is_fixed:
        assert_as_exact(out, run([in_floats(one, DTYPE) for one in layers], DTYPE), exact)
    else:
        # Rows are rounded, and by the interpreter wrongly at times.
        error = (out.double() - exact).norm() / exact.norm()
        assert 1e-3 < error < 0.2


def test_rows_between_few_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that have `triton_streamed`, for which a stand-in multiplies row by row.
    Gate and up round rows, other products do not.
    """
    fresh_seed()
    poison_new_memory(monkeypatch)
    streamed: list[Fp8Matrix] = []

    def multiply(x: torch.Tensor, matrix: Fp8Matrix, out: torch.Tensor, given: FewRows) -> None:
        streamed.append(matrix)
        for row in range(x.shape[0]):
            at = slice(row, row + 1)
            residual = None if given.residual is None else given.residual[at]
            few_rows(x[at], matrix, out[at], given._replace(residual=residual))

    def numbers(matrix: Fp8Matrix, dtype: torch.dtype, *, is_gated: bool) -> range:
        return range(0) if is_gated else range(3, 9)

    monkeypatch.setattr(fp8_linear, "multiply_streamed", multiply)
    monkeypatch.setattr(fp8_linear, "streamed_rows", numbers)
    rows, layers = 5, [make_layer(index, 8, is_fixed=False) for index in range(LAYERS)]
    pool = torch.randn(6, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(DTYPE)
    hidden = torch.randn(rows, HIDDEN).to(DTYPE)

    def run(layers: list[Layer], dtype: torch.dtype) -> torch.Tensor:
        kv = pool.to(dtype, copy=True)
        step = make_step([(rows, 40)], kv)
        with as_on_gpu():
            return run_all([Run(layers)], hidden.to(dtype, copy=True), step, kv)

    out = run(layers, DTYPE)
    assert len(streamed) == 3 * LAYERS
    exact = run([in_floats(layer, torch.float32) for layer in layers], torch.float32).double()
    assert (out.double() - exact).norm() / exact.norm() < 0.2
