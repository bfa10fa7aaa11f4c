"""Attention over the paged pool, with its projections."""

from __future__ import annotations

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.batch import ForwardBatch
from weft.engine.model.layers.linear import Linear
from weft.engine.model.layers.norm import RMSNorm
from weft.engine.model.weights.specs import LinearSpec
from weft.kernels.attention import paged_attention
from weft.kernels.lora import addition_to
from weft.kernels.rope import rope_and_cache


def qkv_spec(
    in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool = False
) -> LinearSpec:
    """The projections of q, k and v of all heads."""
    return LinearSpec(
        names=("q_proj", "k_proj", "v_proj"),
        in_features=in_features,
        rows=(num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim),
        split="out",
        unit=head_dim,
        bias=bias,
    )


def o_spec(hidden: int, num_heads: int, head_dim: int, *, bias: bool = False) -> LinearSpec:
    """The projection of all heads back to the hidden size."""
    return LinearSpec(
        names=("o_proj",),
        in_features=num_heads * head_dim,
        rows=(hidden,),
        split="in",
        unit=head_dim,
        bias=bias,
    )


class Attention:
    """Grouped-query attention of one layer with rotary positions.

    It is cut in two where the last layer of a step may stop, or go on with fewer rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        cos_sin: torch.Tensor,
        *,
        qkv_proj: Linear,
        o_proj: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        """Assembles the layer from its parts.

        Args:
            config: Head counts and sizes.
            layer: The layer's index in the pool.
            cos_sin: [max_positions, head_dim] float32, shared by all layers.
            qkv_proj: [hidden] -> q, k and v of all heads.
            o_proj: All heads -> [hidden].
            q_norm: Norm of each head of q before the rotation, or None.
            k_norm: The same for k.
        """
        self.layer = layer
        self.cos_sin = cos_sin
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.scale = config.head_dim**-0.5
        self.eps = config.rms_norm_eps
        self.window = config.window_of(layer)
        """Number of positions that a row attends to; None: all."""

    def write(self, x: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """Writes K and V of x [T, hidden]; returns the rotated q [T, heads, head_dim]."""
        return rope_and_cache(
            self.qkv_proj(x, lora=addition_to(batch.lora, "qkv", self.layer)),
            batch.positions,
            self.cos_sin,
            pool,
            self.layer,
            batch.slots,
            self.num_heads,
            self.num_kv_heads,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
        )

    def attend(
        self, q: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention of q over its requests' pages, projected, plus `residual`: [T,
        hidden].
        """
        mixed = paged_attention(
            q,
            pool,
            self.layer,
            batch.page_table,
            batch.cu_q_lens,
            batch.kv_lens,
            self.scale,
            batch.max_q_len,
            batch.max_kv_len,
            window=self.window,
            is_fixed=self.o_proj.weight.is_fixed,
            ancestors=batch.ancestors,
        )
        return self.o_proj(mixed, residual, addition_to(batch.lora, "o", self.layer))
