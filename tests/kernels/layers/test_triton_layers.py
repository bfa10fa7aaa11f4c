"""Whole decoder layers of few rows as a GPU runs them, by Triton's interpreter."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.heads import LayerNorms, Rotation, WidthNorms
from weft.engine.model.layers.layer import Form, Layer
from weft.engine.model.layers.mlp import GatedMLP, PlainMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.layers.rotary import Rotary
from weft.engine.model.stack import Run, run_all, runs_of
from weft.kernels.ops.activation.spec import Activation
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.moe.spec import ExpertWeights, SparseMlpWeight
from weft.kernels.ops.norm import LayerNorm, Norm
from weft.kernels.ops.stream import gpu
from weft.kernels.ops.stream.taps import Taps
from weft.testing.kernels.as_on_gpu import as_on_gpu
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

LAYERS = 2


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    return LinearWeight(*weight.shape, weight.dtype, False, PlainForm(weight), bias)


def make_layer(index: int) -> Layer:
    """A layer in the form used on a GPU, in bfloat16."""
    dtype, width = torch.bfloat16, (HEADS + 2 * KV_HEADS) * DIM
    gate_up = replace(plain(draw(2 * INNER, HIDDEN, dtype=dtype)), gated=True)
    attention = Attention(
        AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),
        index,
        make_cos_sin(),
        qkv_proj=plain(draw(width, HIDDEN, dtype=dtype), draw(width, dtype=dtype)),
        o_proj=plain(draw(HIDDEN, HEADS * DIM, dtype=dtype)),
    )
    norms = (Norm(1 + draw(HIDDEN, dtype=dtype), 1e-5) for _ in range(2))
    mlp = GatedMLP(index, gate_up, plain(draw(HIDDEN, INNER, dtype=dtype)))
    return Layer(index, next(norms), attention, next(norms), mlp)


def widened(layer: Layer, dtype: torch.dtype = torch.float32) -> Layer:
    """The same layer in another dtype; in float32 no product takes a norm."""

    def wide(part: LinearWeight) -> LinearWeight:
        bias = None if part.bias is None else part.bias.to(dtype)
        return replace(part, dtype=dtype, form=PlainForm(part.data.to(dtype)), bias=bias)

    index, first, mixer, post, feed, _ = layer
    assert isinstance(mixer, Attention)
    assert isinstance(feed, GatedMLP)
    assert isinstance(first, Norm)
    assert isinstance(post, Norm)
    first, post = (Norm(norm.weight.to(dtype), norm.eps) for norm in (first, post))
    qkv_proj, o_proj = wide(mixer.qkv_proj), wide(mixer.o_proj)
    attention = Attention(mixer.spec, index, mixer.cos_sin, qkv_proj=qkv_proj, o_proj=o_proj)
    mlp = GatedMLP(index, wide(feed.gate_up_proj), wide(feed.down_proj))
    return Layer(index, first, attention, post, mlp)


class NotingFollower:
    """Notes what there is of the tapped states when it begins."""

    def __init__(self, tapped: torch.Tensor) -> None:
        self._tapped = tapped
        self.seen: list[torch.Tensor] = []

    def native(self) -> None:
        """See `DraftEntries.native`."""

    def done(self) -> None:
        """See `DraftEntries.done`."""

    def begin(self) -> None:
        """See `DraftEntries.begin`."""
        self.seen.append(self._tapped.clone())


@pytest.mark.full_after(1)
@pytest.mark.parametrize("rows", [1, 2])
def test_products_that_take_their_norms(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as with norms of their own, both in bfloat16; taps get what enters layers, and what
    follows begins once, when all of it is there.
    """
    fresh_seed()
    poison_new_memory(monkeypatch)
    layers = [make_layer(index) for index in range(LAYERS)]
    pool = torch.randn(6 * rows, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).bfloat16()
    hidden, lengths = torch.randn(rows, HIDDEN).bfloat16(), [(1, 40), (1, 7)][:rows]
    counts: list[int] = []
    kernel = gpu.add_product
    monkeypatch.setattr(gpu, "add_product", lambda *args: (counts.append(1), kernel(*args)))

    def run(layers: list[Layer], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The result beside the taps, [T, 3 * H]; and the pool behind the layers."""
        kv, tapped = (
            pool.to(dtype, copy=True),
            torch.full((rows, 2 * HIDDEN), float("nan")).to(dtype),
        )
        step = make_step(lengths, kv)
        follower = NotingFollower(tapped)
        taps = Taps([0, 1], tapped, follower)
        with as_on_gpu():
            out = run_all([Run(layers)], hidden.to(dtype, copy=True), step, kv, taps)
        (seen,) = follower.seen
        assert torch.equal(seen, tapped)
        assert not tapped.isnan().any()
        return torch.cat([out, tapped], dim=1), kv

    out, kv = run(layers, torch.bfloat16)
    assert len(counts) == 2 * LAYERS
    monkeypatch.setattr(gpu, "can_fold", lambda *_: False)
    peer, peer_kv = run(layers, torch.bfloat16)
    exact, exact_kv = run([widened(layer) for layer in layers], torch.float32)
    assert len(counts) == 2 * LAYERS
    assert_as_exact(out, peer, exact.double())
    assert_as_exact(kv, peer_kv, exact_kv.double())
    assert torch.equal(out[:, HIDDEN : 2 * HIDDEN], hidden)


def make_sparse(index: int, layer: Layer, *, is_stacked: bool, has_shared: bool) -> Layer:
    """The layer with two experts, of which each row takes both, in place of its MLP, or beside it
    and a gate on it.
    """
    assert isinstance(layer.feed, GatedMLP)
    gate_up, down = layer.feed.gate_up_proj, layer.feed.down_proj
    router = plain(gate_up.data[:2].contiguous())
    w13, w2 = ((w.data, w.data.flip(0)) for w in (gate_up, down))
    experts = ExpertWeights(
        HIDDEN,
        INNER,
        down.dtype,
        () if is_stacked else tuple(replace(plain(w), gated=True) for w in w13),
        () if is_stacked else tuple(plain(w) for w in w2),
        (torch.stack(w13), torch.stack(w2)) if is_stacked else None,
        None,
    )
    weight = SparseMlpWeight(router, experts, 2, True)
    if not has_shared:
        return layer._replace(feed=SparseMLP(index, weight))
    gate = plain(gate_up.data[3:4].contiguous())
    return layer._replace(feed=SparseMLP(index, weight, layer.feed, gate))


@pytest.mark.full_after(2)
@pytest.mark.parametrize(("rows", "has_shared"), [(1, False), (3, True), (3, False)])
def test_layers_of_several_kinds_share_a_stream(rows: int, has_shared: bool) -> None:
    """Of few rows dense layers take norms along and add by themselves, layers of experts do not;
    of more rows the norm of a layer of one kind adds what one of the other kind has left.
    """
    fresh_seed()
    kinds = [False, True, False]
    layers = [make_layer(index) for index in range(len(kinds))]
    pool = torch.randn(2 * rows, KV_HEADS, len(kinds), 2, PAGE_SIZE, DIM).half()
    hidden, lengths = torch.randn(rows, HIDDEN).half(), [(1, 9), (1, 7), (1, 4)][:rows]

    def run(dtype: torch.dtype, *, on_gpu: bool) -> torch.Tensor:
        """The result beside the taps, [T, 3 * H]."""
        tapped, kv = torch.empty(rows, 2 * HIDDEN, dtype=dtype), pool.to(dtype, copy=True)
        made = [widened(layer, dtype) for layer in layers]
        made = [
            make_sparse(index, layer, is_stacked=on_gpu, has_shared=has_shared)
            if is_sparse
            else layer
            for index, (layer, is_sparse) in enumerate(zip(made, kinds, strict=True))
        ]
        step, given = make_step(lengths, kv), hidden.to(dtype, copy=True)
        with as_on_gpu() if on_gpu else contextlib.nullcontext():
            out = run_all(runs_of(made), given, step, kv, Taps([1, 2], tapped))
        return torch.cat([out, tapped], dim=1)

    out, peer = (run(torch.float16, on_gpu=on_gpu) for on_gpu in (True, False))
    assert_as_exact(out, peer, run(torch.float32, on_gpu=False).double())


def attention_of(layer: Layer, **changes: Any) -> Attention:
    """The layer's attention with other parts."""
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    parts: dict[str, Any] = {
        "spec": mixer.spec,
        "cos_sin": mixer.cos_sin,
        "qkv_proj": mixer.qkv_proj,
    }
    return Attention(layer=layer.number, **{**parts, "o_proj": mixer.o_proj, **changes})


def make_unusual(dtype: torch.dtype) -> list[Layer]:
    """Layers that differ from the usual in each way that there is."""
    layers = [widened(make_layer(index), dtype) for index in range(5)]
    cos_sin, rms = make_cos_sin(), Norm(1 + draw(HIDDEN, dtype=torch.float32), 1e-5)
    layer_norm = LayerNorm(rms.weight.to(dtype), draw(HIDDEN, dtype=dtype), 1e-5)
    of_head = Norm(1 + draw(DIM, dtype=torch.float32), 1e-5)
    q_size, kv_size = HEADS * DIM, KV_HEADS * DIM
    changes = [
        WidthNorms(*(Norm(1 + draw(n, dtype=dtype), 1e-5) for n in (q_size, kv_size))),
        LayerNorms(1 + draw(HEADS + KV_HEADS, DIM, dtype=dtype), 1e-5),
        Rotation(Rotary(cos_sin, DIM // 4)),
    ]
    spec = AttentionSpec(
        *(HEADS, KV_HEADS, DIM, 0.2), sinks=torch.randn(HEADS), softcap=3.0, window=20
    )
    mixers = [
        attention_of(layers[0], changes=changes[0:1], num_adjacent=DIM // 2),
        attention_of(layers[1], changes=changes[1:2], spec=spec),
        attention_of(layers[2], changes=changes[2:3], cos_sin=cos_sin[:1], q_norm=of_head),
        attention_of(layers[3], num_adjacent=DIM // 4, q_norm=of_head, k_norm=of_head),
        attention_of(layers[4], q_scales=1 + torch.rand(len(cos_sin))),
    ]
    feeds = [
        layers[0].feed,
        plain_mlp(1, dtype, "gelu_tanh", is_gated=True),
        plain_mlp(2, dtype, "relu2", is_gated=False),
        plain_mlp(3, dtype, "gelu", is_gated=False),
        layers[4].feed,
    ]
    norms = [(None, None), (layer_norm, layer_norm), (layer_norm, rms), (rms, rms), (rms, None)]
    forms = [
        Form(rms, layer_norm),
        Form(is_parallel=True),
        Form(),
        Form(rms, rms, multiplier=0.3),
        Form(multiplier=0.5, is_parallel=True),
    ]
    return [
        Layer(index, first, mixer, second, feed, form)
        for index, ((first, second), mixer, feed, form) in enumerate(
            zip(norms, mixers, feeds, forms, strict=True)
        )
    ]


def plain_mlp(
    index: int, dtype: torch.dtype, activation: Activation, *, is_gated: bool
) -> PlainMLP:
    both = plain(draw(INNER * (2 if is_gated else 1), HIDDEN, dtype=dtype))
    down = plain(draw(HIDDEN, INNER, dtype=dtype))
    return PlainMLP(index, both, down, activation, is_gated=is_gated)


def test_layers_that_differ_from_the_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever norms and additions the stream is asked for: as without a GPU, with all taps."""
    fresh_seed()
    poison_new_memory(monkeypatch)
    layers, lengths = make_unusual(torch.float32), [(1, 40), (9, 17), (1, 3)]
    pool = torch.randn(21, KV_HEADS, len(layers), 2, PAGE_SIZE, DIM)
    hidden = torch.randn(11, HIDDEN)

    def run(dtype: torch.dtype, *, on_gpu: bool) -> tuple[torch.Tensor, torch.Tensor]:
        tapped, kv = torch.empty(11, 3 * HIDDEN, dtype=dtype), pool.to(dtype, copy=True)
        step, given = make_step(lengths, kv), hidden.to(dtype, copy=True)
        with as_on_gpu() if on_gpu else contextlib.nullcontext():
            out = run_all(runs_of(layers), given, step, kv, Taps([1, 2, 4], tapped))
        return torch.cat([out, tapped], dim=1), kv

    (out, kv), (peer, peer_kv) = (run(torch.float32, on_gpu=on_gpu) for on_gpu in (True, False))
    torch.testing.assert_close(out, peer, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv, peer_kv, rtol=1e-4, atol=1e-4)
