"""Decoders that were trained to attend in both directions, such as EmbeddingGemma and gte-Qwen2.
They differ from decoders only in their attention.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.checkpoint.architectures import load_class
from weft.checkpoint.config import ModelConfig
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.encoder import Encoder
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.encoder import Ragged
from weft.engine.model.layers.layer import Layer, Query
from weft.engine.model.step import Step
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.encoder_attention import encoder_attention
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.rope.reference import rotated
from weft.kernels.ops.stream.additions import Normed, Sum

_NO_POOL = torch.empty(0)


class BidirectionalAttention:
    """Attention of each token to all of its prompt, or to the tokens near it. Uses the projections,
    norms and rotations of `causal`.
    """

    def __init__(self, causal: Attention) -> None:
        assert causal.spec.softcap is None, "configurations with both are refused"
        self._causal = causal

    @property
    def has_own_kv(self) -> bool:
        return True

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        """Does nothing: there are no pages."""

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        return step

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        """Writes nothing. The query has all heads, [T, Hq + 2 * Hkv, D]."""
        own, spec = self._causal, self._causal.spec
        qkv = x.linear(own.qkv_proj, step.added("qkv", own.layer))
        for change in own.changes:
            qkv = change(qkv, step.positions, spec.heads * spec.dim)
        heads = [spec.heads, spec.kv_heads, spec.kv_heads]
        q, k, v = torch.split(qkv.view(len(qkv), -1, spec.dim), heads, dim=1)
        if own.q_norm is not None:
            q = own.q_norm(q.reshape(-1, spec.dim)).view(q.shape)
        if own.k_norm is not None:
            k = own.k_norm(k.reshape(-1, spec.dim)).view(k.shape)
        if own.cos_sin.shape[0] > 1:
            turns = own.cos_sin[step.positions]
            q, k = rotated(q, turns, own.num_adjacent), rotated(k, turns, own.num_adjacent)
        return Query(torch.cat((q, k, v), dim=1))

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Sum:
        own, spec = self._causal, self._causal.spec
        q, k, v = torch.split(query.q, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        reach = None if spec.window is None else spec.window - 1
        assert step.bounds is not None
        mixed = encoder_attention(q, k, v, step.bounds, reach, scale=spec.scale)
        return Sum(mixed.flatten(1), own.o_proj, step.added("o", own.layer))

    def folds(self, rows: int, step: Step) -> bool:
        return self._causal.folds(rows, step)

    def shape_key(self) -> object:
        return BidirectionalAttention, self._causal.shape_key()


class BidirectionalDecoder(Encoder):
    """A decoder whose tokens also attend to later ones."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights.dtype)
        decoder: DecoderOnlyLM = load_class(config.architecture)(config, weights)
        layers = []
        for layer in decoder.model.layers:
            assert isinstance(layer, Layer)
            assert isinstance(layer.mixer, Attention)
            layers.append(layer._replace(mixer=BidirectionalAttention(layer.mixer)))
        self._stack = decoder.model.with_layers(layers)
        self.classes = decoder.classes

    def encode(self, step: Step, batch: Ragged) -> torch.Tensor:
        return self._stack.of_all_rows(replace(step, bounds=batch.bounds), _NO_POOL)
