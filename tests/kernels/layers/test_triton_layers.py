"""Whole decoder layers of few rows as a GPU runs them, by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weft.kernels.decoder_layer import (
    DecoderLayerWeight,
    GatedMlpWeight,
    Taps,
    pack_decoder_layer,
)
from weft.kernels.gpu import decoder_layers as gpu
from weft.kernels.linear import LinearWeight, PlainForm
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.layer_cases import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PAGE_SIZE,
    draw,
    make_step,
)
from weft.testing.kernels.lora_cases import poison_new_memory

pytestmark = pytest.mark.needs("triton-interpreter")

LAYERS = 2


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    return LinearWeight(*weight.shape, weight.dtype, False, PlainForm(weight), bias)


def make_layer() -> DecoderLayerWeight:
    """A layer in the form used on a GPU, in bfloat16."""
    dtype, width = torch.bfloat16, (HEADS + 2 * KV_HEADS) * DIM
    gate_up = replace(plain(draw(2 * INNER, HIDDEN, dtype=dtype)), gated=True)
    return pack_decoder_layer(
        input_norm=1 + draw(HIDDEN, dtype=dtype),
        qkv=plain(draw(width, HIDDEN, dtype=dtype), draw(width, dtype=dtype)),
        o=plain(draw(HIDDEN, HEADS * DIM, dtype=dtype)),
        post_norm=1 + draw(HIDDEN, dtype=dtype),
        mlp=GatedMlpWeight(gate_up, plain(draw(HIDDEN, INNER, dtype=dtype))),
        eps=1e-5,
    )


def widened(w: DecoderLayerWeight) -> DecoderLayerWeight:
    """The same layer in float32, for which no product takes a norm."""

    def wide(part: LinearWeight) -> LinearWeight:
        bias = None if part.bias is None else part.bias.float()
        return replace(part, dtype=torch.float32, form=PlainForm(part.data.float()), bias=bias)

    assert isinstance(w.mlp, GatedMlpWeight)
    return replace(
        w,
        input_norm=w.input_norm.float(),
        qkv=wide(w.qkv),
        o=wide(w.o),
        post_norm=w.post_norm.float(),
        mlp=GatedMlpWeight(wide(w.mlp.gate_up), wide(w.mlp.down)),
    )


class NotingFollower:
    """Notes what there is of the tapped states when it begins."""

    def __init__(self, tapped: torch.Tensor) -> None:
        self._tapped = tapped
        self.seen: list[torch.Tensor] = []

    def native(self) -> None:
        """See `Follower.native`."""

    def done(self) -> None:
        """See `Follower.done`."""

    def begin(self) -> None:
        """See `Follower.begin`."""
        self.seen.append(self._tapped.clone())


@pytest.mark.parametrize("rows", [1, 2])
def test_products_that_take_their_norms(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as with norms of their own, both in bfloat16; taps get what enters layers, and what
    follows begins once, when all of it is there.
    """
    fresh_seed()
    poison_new_memory(monkeypatch)
    layers = [make_layer() for _ in range(LAYERS)]
    pool = torch.randn(6 * rows, KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).bfloat16()
    hidden, lengths = torch.randn(rows, HIDDEN).bfloat16(), [(1, 40), (1, 7)][:rows]
    counts: list[int] = []
    kernel = gpu.add_product
    monkeypatch.setattr(gpu, "add_product", lambda *args: (counts.append(1), kernel(*args)))

    def run(
        layers: list[DecoderLayerWeight], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result beside the taps, [T, 3 * H]; and the pool behind the layers."""
        kv, tapped = (
            pool.to(dtype, copy=True),
            torch.full((rows, 2 * HIDDEN), float("nan")).to(dtype),
        )
        step = make_step(layers[0], lengths, kv)
        follower = NotingFollower(tapped)
        taps = Taps([0, 1], tapped, follower)
        out = gpu.decoder_layers(hidden.to(dtype, copy=True), layers, step, 0, taps)
        (seen,) = follower.seen
        assert torch.equal(seen, tapped)
        assert not tapped.isnan().any()
        return torch.cat([out, tapped], dim=1), kv

    out, kv = run(layers, torch.bfloat16)
    assert len(counts) == 2 * LAYERS
    monkeypatch.setattr(gpu, "_take_norms", lambda *_: False)
    peer, peer_kv = run(layers, torch.bfloat16)
    exact, exact_kv = run([widened(layer) for layer in layers], torch.float32)
    assert len(counts) == 2 * LAYERS
    assert_as_exact(out, peer, exact.double())
    assert_as_exact(kv, peer_kv, exact_kv.double())
    assert torch.equal(out[:, HIDDEN : 2 * HIDDEN], hidden)
