"""Command R (Cohere), Command A and R7B (Cohere 2), and Cohere 2 with experts. Both blocks read one
norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import cohere_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.parts import HeadNormConfig, NormConfig
from weft.checkpoint.rope import RopeConfig


def read_cohere(family: Family) -> ModelConfig:
    """Command R and R+; heads may be normalised, each with a weight of its own."""
    kinds = (FULL,) * family.num_layers
    has_norms = family.fields.flag("use_qk_norm", False)
    return _config(family, kinds, {FULL: _rope(family)}, has_norms=has_norms)


def read_cohere2(family: Family) -> ModelConfig:
    """Command A and R7B: three of four layers have windows, and the others do not rotate."""
    family.only("use_qk_norm", False)
    pattern = family.fields.positive("sliding_window_pattern", 4)
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % pattern else FULL)
    return _config(family, kinds, {FULL: None, SLIDING: _rope(family)})


def read_cohere2_moe(family: Family) -> ModelConfig:
    """Cohere 2 with experts in all layers but the first, whose full attention may rotate too."""
    fields, dim = family.fields, family.head_dim(128)
    moe = cohere_experts(fields)
    pattern = fields.positive("sliding_window_pattern", 4)
    of_dense = fields.positive("prefix_dense_sliding_window_pattern", 1)
    first = fields.count("first_k_dense_replace", 0)

    def kind(layer: int) -> str:
        number, every = (layer, of_dense) if layer < first else (layer - first, pattern)
        return SLIDING if (number + 1) % every else FULL

    kinds, rope = family.kinds(kind), family.rope(is_interleaved=True)
    layers = tuple(
        family.attention(
            rope if kind == SLIDING or (of_dense == 1 and not moe.is_sparse(n)) else None, dim**-0.5
        )
        for n, kind in enumerate(kinds)
    )
    norm = NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer")
    decoder = replace(
        family.decoder(layers, norm if fields.get("rms_norm_eps") is None else family.rms()),
        order="parallel",
        logit_multiplier=fields.number("logit_scale", 0.0625),
    )
    dense = "prefix_dense_intermediate_size"
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds, 4096),
        is_tied=True,
        moe=moe,
        intermediate_size=None if fields.get(dense) is None else fields.positive(dense),
    )


def _rope(family: Family) -> RopeConfig:
    return family.rope(theta=500_000.0, is_interleaved=True)


def _config(
    family: Family,
    kinds: tuple[str, ...],
    ropes: Mapping[str, RopeConfig | None],
    *,
    has_norms: bool = False,
) -> ModelConfig:
    dim, fields = family.hidden_size // family.num_heads, family.fields
    family.only("use_parallel_block", True)
    norm = NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer")
    layers = tuple(
        replace(
            family.attention(ropes[kind], dim**-0.5),
            head_norm=HeadNormConfig(norm=norm, over="each") if has_norms else None,
        )
        for kind in kinds
    )
    decoder = replace(
        family.decoder(layers, norm),
        order="parallel",
        logit_multiplier=fields.number("logit_scale", 0.0625),
    )
    return family.config(decoder, head_dim=dim, window=family.window(kinds, 4096), is_tied=True)
