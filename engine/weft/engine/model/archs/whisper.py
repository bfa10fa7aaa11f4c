"""Whisper (arXiv 2212.04356): a decoder whose layers also attend to the rows of a clip.

A prompt begins with the clip's placeholders. In each layer their pages hold the keys and values
that the layer makes of the clip's rows, so that cross attention reads the first pages of a request
and self-attention the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.whisper_config import WhisperConfig
from weft.contract.layout import CacheLayout, PagedPlane
from weft.engine.model.audio.parts import mlp, norm, product
from weft.engine.model.decoder_only import LMHead
from weft.engine.model.layers.encoder import EncoderMLP, LayerNorm, Ragged
from weft.engine.model.step import AlignedRows, Step
from weft.engine.model.weights.computed_format import dtype_name
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.attention import joined_requests, paged_attention
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraStep
from weft.kernels.ops.pages.scaled_kv import dequantised
from weft.kernels.ops.rope import rope_and_cache


class _Texts(NamedTuple):
    """The rows of a step that are tokens of the decoder, N of them."""

    rows: torch.Tensor | None
    """[N] int64: their numbers in the step; None: all rows."""
    own: AttentionMetadata
    """The decoder's tokens by request."""
    clips: AttentionMetadata
    """The clips by request, all of which each row sees."""
    aligned: Sequence[_Aligned] = ()


class _Aligned(NamedTuple):
    """Tokens of one request whose attention to its clip is wanted."""

    rows: torch.Tensor
    """[A] int64: their numbers among the decoder's tokens."""
    pages: torch.Tensor
    """[pages] int64: those of the clip."""
    wanted: AlignedRows

    def note(self, q: torch.Tensor, keys: torch.Tensor, num_positions: int, scale: float) -> None:
        """Adds the attention of a layer's heads that follow the speech, H of them: `q` is [N, H, D]
        of all tokens, `keys` [pages, H, P, D] of the clip.
        """
        own = q.index_select(0, self.rows).transpose(0, 1).float()
        of_clip = keys.transpose(0, 1).flatten(1, 2)[:, :num_positions].float()
        weights = (own * scale @ of_clip.transpose(1, 2)).softmax(-1)
        self.wanted.weights.append(weights[..., : self.wanted.num_frames])


class _Layer(NamedTuple):
    number: int
    own_norm: LayerNorm
    own_qkv: LinearWeight
    own_out: LinearWeight
    cross_norm: LayerNorm
    cross_q: LinearWeight
    cross_kv: LinearWeight
    cross_out: LinearWeight
    mlp_norm: LayerNorm
    mlp: EncoderMLP

    @classmethod
    def read(cls, config: WhisperConfig, number: int, weights: Weights) -> _Layer:
        size, inner = config.hidden_size, config.intermediate_size
        own, cross = weights.at("self_attn"), weights.at("encoder_attn")
        return cls(
            number,
            norm(weights, "self_attn_layer_norm", size),
            product(own, ("q_proj", "k_proj", "v_proj"), size, size),
            product(own, ("out_proj",), size, size),
            norm(weights, "encoder_attn_layer_norm", size),
            product(cross, ("q_proj",), size, size),
            product(cross, ("k_proj", "v_proj"), size, size),
            product(cross, ("out_proj",), size, size),
            norm(weights, "final_layer_norm", size),
            mlp(weights, number, (size, inner)),
        )


class WhisperForConditionalGeneration:
    """A `Model` over prompts that begin with a clip, whose rows a step brings."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert isinstance(config, WhisperConfig), "its configuration is read as such"
        assert config.audio is not None, "as above"
        self.config: ModelConfig = config
        self.dtype = weights.dtype
        self._num_rows, self._num_positions = config.audio.num_rows, config.audio.num_positions
        body, size = weights.at(config.names.bodies[0]), config.hidden_size
        self._embed_tokens = body.vocabulary("embed_tokens", config.vocab_size, size)
        table = TensorSlice("embed_positions.weight", (config.max_target_positions, size))
        self._positions = body.read([table])
        self._scale = math.sqrt(size) if config.scales_embedding else 1.0
        layers = body.at("layers")
        self._layers = [_Layer.read(config, n, layers.at(n)) for n in range(config.num_layers)]
        self._norm = norm(body, "layer_norm", size)
        head = self._embed_tokens
        if not config.tie_word_embeddings:
            head = weights.vocabulary(config.names.heads[0], config.vocab_size, size)
        self._head = LMHead(weights.packed(head))
        self._spec = AttentionSpec(
            heads=config.num_heads,
            kv_heads=config.num_heads,
            dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self._aligned_heads: dict[int, list[int]] = {}
        for depth, number in config.alignment.heads:
            self._aligned_heads.setdefault(depth, []).append(number)
        # Heads are not rotated: one row of cosines 1 and sines 0.
        cosines, sines = torch.ones(config.head_dim // 2), torch.zeros(config.head_dim // 2)
        self._cos_sin = torch.cat((cosines, sines))[None].to(weights.device)

    def kv_layout(self, page_size: int) -> CacheLayout:
        config = self.config
        plane = PagedPlane(
            layers=config.num_layers,
            heads=config.num_heads,
            dim=config.head_dim,
            dtype=dtype_name(self.dtype),
        )
        return CacheLayout.of_plane(plane, page_size)

    def forward(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        if step.inserted is not None:
            self._store_clips(step.inserted.rows, step.inserted.embeddings, step, pool)
        texts = self._texts(step, pool.shape[-2])
        hidden = self._embed(step, texts.rows)
        for layer in self._layers if len(hidden) else ():
            hidden = self._run(layer, hidden, texts, pool)
        hidden = self._norm(hidden)
        if texts.rows is not None:
            # A clip's rows have no result.
            whole = hidden.new_zeros((len(step.token_ids), hidden.shape[1]))
            hidden = whole.index_copy_(0, texts.rows, hidden)
        return hidden if step.wants_all else hidden.index_select(0, step.logits_rows)

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        return self._head(hidden)

    def _store_clips(
        self, rows: torch.Tensor, encoded: torch.Tensor, step: Step, pool: torch.Tensor
    ) -> None:
        places = step.groups[0].places.index_select(0, rows)
        for layer in self._layers:
            self._store(linear(encoded, layer.cross_kv), places, 0, layer.number, pool)

    def _store(
        self, qkv: torch.Tensor, places: torch.Tensor, heads: int, layer: int, pool: torch.Tensor
    ) -> torch.Tensor:
        first = torch.zeros_like(places)
        given = (qkv, first, self._cos_sin, pool, layer, places, heads, self._spec.kv_heads)
        return rope_and_cache(*given)

    def _embed(self, step: Step, rows: torch.Tensor | None) -> torch.Tensor:
        tokens, positions = step.token_ids, step.positions
        if rows is not None:
            tokens, positions = tokens.index_select(0, rows), positions.index_select(0, rows)
        hidden = self._embed_tokens.index_select(0, tokens)
        hidden = hidden if self._scale == 1.0 else hidden * self._scale
        # Steps that no request has, which measure memory and time, may have no clip.
        own = (positions - self._num_rows).clamp(0, len(self._positions) - 1)
        return hidden + self._positions.index_select(0, own)

    def _run(
        self, layer: _Layer, x: torch.Tensor, texts: _Texts, pool: torch.Tensor
    ) -> torch.Tensor:
        spec, batch = self._spec, Ragged(Bounds(texts.own.cu_q_lens))
        qkv = linear(layer.own_norm(x), layer.own_qkv)
        q = self._store(qkv, texts.own.places, spec.heads, layer.number, pool)
        mixed = paged_attention(q, pool, layer.number, spec, texts.own)
        x = linear(mixed, layer.own_out, residual=x)
        q = linear(layer.cross_norm(x), layer.cross_q).view(len(x), spec.heads, spec.dim)
        if texts.aligned and (heads := self._aligned_heads.get(layer.number)):
            for one in texts.aligned:
                keys = dequantised(pool[one.pages][:, heads, layer.number, 0], q.dtype)
                one.note(q[:, heads], keys, self._num_positions, spec.scale)
        mixed = paged_attention(q, pool, layer.number, spec, texts.clips)
        x = linear(mixed, layer.cross_out, residual=x)
        return layer.mlp(layer.mlp_norm(x), batch).added_to(x)

    def _texts(self, step: Step, page_size: int) -> _Texts:
        group, rows = step.groups[0], None
        table, kv_lens, cu_q_lens, places = (
            group.page_table,
            group.kv_lens,
            group.cu_q_lens,
            group.places,
        )
        if step.inserted is not None:
            is_text = torch.ones(len(step.token_ids), dtype=torch.int32, device=table.device)
            is_text[step.inserted.rows] = 0
            before = torch.nn.functional.pad(is_text.cumsum(0), (1, 0))
            q_lens = before.index_select(0, cu_q_lens.long()).diff()
            requests = q_lens.nonzero().flatten()
            rows = is_text.nonzero().flatten()
            table, kv_lens = table.index_select(0, requests), kv_lens.index_select(0, requests)
            ends = q_lens.index_select(0, requests).cumsum(0)
            cu_q_lens = torch.nn.functional.pad(ends, (1, 0)).int()
            places = places.index_select(0, rows)
        of_clip, num_rows, length = self._num_rows // page_size, self._num_rows, len(places)
        if len(kv_lens) and int(kv_lens.min()) <= num_rows:
            # Such a step is no request's, as above.
            return _Texts(rows, group, group)
        own = AttentionMetadata(
            page_table=table[:, of_clip:],
            places=places,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens - num_rows,
            max_q_len=group.max_q_len,
            max_kv_len=group.max_kv_len - num_rows,
        )
        of_clips, max_q_len = table[:, :of_clip], group.max_q_len
        # Such as the texts of a beam search.
        of_clips, cu_q_lens = joined_requests(of_clips, cu_q_lens)
        if len(of_clips) < len(table):
            max_q_len = int(cu_q_lens.diff().max())
        ends = torch.full((length,), self._num_positions, dtype=torch.int32, device=table.device)
        clips = AttentionMetadata(
            page_table=of_clips,
            places=places,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens.new_full((len(of_clips),), self._num_positions),
            max_q_len=max_q_len,
            max_kv_len=self._num_positions,
            key_ends=ends if max_q_len > 1 else None,
        )
        return _Texts(rows, own, clips, _aligned(step, rows, of_clip))


def _aligned(step: Step, rows: torch.Tensor | None, num_pages: int) -> list[_Aligned]:
    found = []
    for wanted in step.aligned:
        own = wanted.rows if rows is None else torch.searchsorted(rows, wanted.rows)
        pages = step.groups[0].page_table[wanted.request, :num_pages].long()
        found.append(_Aligned(own, pages, wanted))
    return found
