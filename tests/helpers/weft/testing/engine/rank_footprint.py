"""The memory that a model takes on each rank, computed from its configuration."""

from __future__ import annotations

from typing import NamedTuple

from weft.checkpoint.config import ModelConfig


class Footprint(NamedTuple):
    """Counts of the numbers that one rank holds; each number has the size of the dtype."""

    weights: int
    """Numbers of the model's weights, norms included."""
    kv: int
    """Numbers of the KV cache per token."""


def footprint_of_rank(config: ModelConfig, size: int, ep: int = 1) -> Footprint:
    """Counts what each of `size` ranks holds of a model that can be divided among them.

    Attention and MLPs are divided; several ranks hold the same KV head if there are fewer KV heads
    than ranks. Of experts each rank has a part of every one, or, with `ep` = `size`, whole ones.
    Embedding, LM head, routers and norms are whole on every rank.
    """
    hidden, dim, layers = config.hidden_size, config.head_dim, config.num_layers
    heads, kv_heads = config.num_heads // size, max(1, config.num_kv_heads // size)
    qkv = (heads + 2 * kv_heads) * dim
    vocabularies = 1 if config.tie_word_embeddings else 2
    weights = vocabularies * config.num_embeddings * hidden + hidden
    for layer in range(layers):
        weights += hidden * (qkv + heads * dim) + 2 * hidden
        weights += qkv * config.qkv_bias + hidden * config.o_bias
        weights += 2 * dim * config.qk_norm
        if config.moe is not None and config.moe.is_sparse(layer):
            inner = config.moe.intermediate_size // (1 if ep > 1 else size)
            weights += config.moe.num_experts * hidden  # The router.
            weights += config.moe.num_experts // ep * 3 * hidden * inner
        else:
            inner = config.intermediate_size // size
            weights += 3 * hidden * inner + (2 * inner + hidden) * config.mlp_bias
    return Footprint(weights, 2 * layers * kv_heads * dim)
