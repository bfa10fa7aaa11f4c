"""A stack of pre-norm decoder layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from weft.engine.model.batch import ForwardBatch
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.layers.norm import RMSNorm
from weft.kernels.decoder_layer import (
    DecoderLayerWeight,
    DecoderStep,
    Taps,
    decoder_layers,
    pack_decoder_layer,
    prepare_step,
    stack_layers,
)
from weft.kernels.lora import add_embedding_lora, addition_to
from weft.kernels.replaced import replace_embeddings


class DecoderLayer:
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(
        self,
        input_layernorm: RMSNorm,
        self_attn: Attention,
        post_attention_layernorm: RMSNorm,
        mlp: GatedMLP | SparseMLP,
    ) -> None:
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.packed: DecoderLayerWeight = pack_decoder_layer(
            input_norm=input_layernorm.weight,
            qkv=self_attn.qkv_proj.weight,
            o=self_attn.o_proj.weight,
            post_norm=post_attention_layernorm.weight,
            mlp=mlp.weight,
            eps=input_layernorm.eps,
            q_norm=None if self_attn.q_norm is None else self_attn.q_norm.weight,
            k_norm=None if self_attn.k_norm is None else self_attn.k_norm.weight,
            window=self_attn.window,
        )
        """The layer's weights in the form that runs many layers as one operation."""

    def __call__(
        self, hidden: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor
    ) -> torch.Tensor:
        """Runs the layer as separate operations: [T, hidden] -> [T, hidden]."""
        q = self.self_attn.write(self.input_layernorm(hidden), batch, pool)
        return self._finish(q, hidden, batch, pool)

    def prepare(self, batch: ForwardBatch, pool: torch.Tensor) -> DecoderStep:
        """Prepares a step, once for all layers of the same shape."""
        return prepare_step(
            self.packed,
            pool=pool,
            positions=batch.positions,
            slots=batch.slots,
            cos_sin=self.self_attn.cos_sin,
            page_table=batch.page_table,
            cu_q_lens=batch.cu_q_lens,
            kv_lens=batch.kv_lens,
            num_heads=self.self_attn.num_heads,
            scale=self.self_attn.scale,
            max_q_len=batch.max_q_len,
            max_kv_len=batch.max_kv_len,
            lora=batch.lora,
            ancestors=batch.ancestors,
            is_cold=batch.is_cold,
        )

    def write_only(self, hidden: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor) -> None:
        """Writes K and V of all rows and computes nothing else."""
        self.self_attn.write(self.input_layernorm(hidden), batch, pool)

    def of_rows(
        self, hidden: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor
    ) -> torch.Tensor:
        """Writes K and V of all rows; computes the rest for `batch.logits_rows` alone.

        Returns:
            [L, hidden].
        """
        rows = batch.logits_rows
        q = self.self_attn.write(self.input_layernorm(hidden), batch, pool).index_select(0, rows)
        return self._finish(q, hidden.index_select(0, rows), one_row_requests(batch), pool)

    def _finish(
        self, q: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor
    ) -> torch.Tensor:
        """The rest of the layer once K and V are written: [T, hidden] -> [T, hidden]."""
        hidden = self.self_attn.attend(q, hidden, batch, pool)
        normed = self.post_attention_layernorm(hidden)
        return self.mlp(normed, hidden, batch.lora, self.self_attn.layer)


class DecoderStack:
    """Embedding, layers and final norm."""

    def __init__(
        self, embed_tokens: torch.Tensor, layers: Sequence[DecoderLayer], norm: RMSNorm
    ) -> None:
        """Assembles the parts; `embed_tokens` is [vocab, hidden]."""
        self.embed_tokens = embed_tokens
        self.layers = tuple(layers)
        self.norm = norm
        packed = [layer.packed for layer in layers]
        is_uniform = len({layer.shapes() for layer in packed}) == 1
        self._whole = stack_layers(packed) if is_uniform else None
        self._but_last = stack_layers(packed[:-1]) if is_uniform and len(packed) > 1 else None

    def __call__(
        self, batch: ForwardBatch, pool: torch.Tensor, taps: Taps | None = None
    ) -> torch.Tensor:
        """Runs a step: [L, hidden], the normalised hidden states of `batch.logits_rows`."""
        hidden = self._embed(batch)
        last, num_rows = self.layers[-1], batch.logits_rows.shape[0]
        if batch.wants_all:
            return self.norm(self._run(hidden, batch, pool, taps, is_whole=True))
        # Rows of a tree are not requests of their own.
        if 2 * num_rows > hidden.shape[0] or batch.ancestors is not None:
            hidden = self._run(hidden, batch, pool, taps, is_whole=True)
            return self.norm(hidden.index_select(0, batch.logits_rows))
        # Of the last layer only the wanted rows are needed, apart from their K and V.
        hidden = self._run(hidden, batch, pool, taps, is_whole=False)
        if num_rows == 0:
            last.write_only(hidden, batch, pool)
            return hidden.new_empty((0, hidden.shape[1]))
        return self.norm(last.of_rows(hidden, batch, pool))

    def of_all_rows(self, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """Runs a step: [T, hidden], the normalised hidden states of all rows."""
        return self.norm(self._run(self._embed(batch), batch, pool, None, is_whole=True))

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        hidden, lora = self.embed_tokens.index_select(0, batch.token_ids), batch.lora
        if lora is not None and lora.embeddings is not None:
            replace_embeddings(hidden, batch.token_ids, lora.embeddings, lora.segments)
        added = addition_to(lora, "embed", 0)
        if added is not None:
            add_embedding_lora(hidden, batch.token_ids, added)
        return hidden

    def _run(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        pool: torch.Tensor,
        taps: Taps | None,
        *,
        is_whole: bool,
    ) -> torch.Tensor:
        """Runs all layers, or all but the last."""
        stack = self._whole if is_whole else self._but_last
        if stack is not None:
            step = self.layers[0].prepare(batch, pool)
            hidden = decoder_layers(hidden, stack, step, taps=taps)
        elif self._whole is None:
            for index, layer in enumerate(self.layers if is_whole else self.layers[:-1]):
                if taps is not None:
                    taps.take(index, hidden)
                hidden = layer(hidden, batch, pool)
        if taps is not None and not is_whole:
            taps.take(len(self.layers) - 1, hidden)
        return hidden


def one_row_requests(batch: ForwardBatch) -> ForwardBatch:
    """Treats each row of `logits_rows` as a request of its own with one new token.

    A row attends to the positions up to its own, so this changes nothing in what it computes.
    """
    rows = batch.logits_rows
    num_rows = rows.shape[0]
    requests = torch.searchsorted(batch.cu_q_lens, rows.to(torch.int32), right=True) - 1
    positions = batch.positions.index_select(0, rows)
    return ForwardBatch(
        token_ids=batch.token_ids.index_select(0, rows),
        positions=positions,
        cu_q_lens=torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device),
        kv_lens=(positions + 1).to(torch.int32),
        page_table=batch.page_table.index_select(0, requests),
        slots=batch.slots.index_select(0, rows),
        logits_rows=torch.arange(num_rows, device=rows.device),
        max_q_len=1,
        max_kv_len=batch.max_kv_len,
        lora=None if batch.lora is None else batch.lora.select(rows),
        request_slots=(
            None if batch.request_slots is None else batch.request_slots.index_select(0, requests)
        ),
    )
