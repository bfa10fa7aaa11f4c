"""Granite 3 and 4 dense, HyperCLOVA X, and MiniCPM: Llama's layers with factors on embedding,
scores, additions and logits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import mixtral_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.checkpoint.parts import AttentionConfig, MlpConfig, NamesConfig


def read_granite(family: Family) -> ModelConfig:
    return _config(family)


def read_hyperclovax(family: Family) -> ModelConfig:
    """HyperCLOVA X SEED Think: norms around both blocks; the factor of logits multiplies."""
    fields, names = family.fields, NamesConfig(mixer_post="post_norm1", feed_post="post_norm2")
    config = _config(family, names=names, scale=family.head_dim() ** -0.5)
    assert config.decoder is not None
    is_around = fields.flag("use_post_norm", True)
    factor = fields.number("logits_scaling", 1.0)
    order: Any = "around" if is_around else "before"
    return replace(config, decoder=replace(config.decoder, order=order, logit_multiplier=factor))


def read_granite_moe(family: Family) -> ModelConfig:
    """Granite 3 with experts in every layer."""
    names = MoENamesConfig(
        router="router.layer",
        stacked=("input_linear.weight", "output_linear.weight"),
        experts="",
    )
    moe = mixtral_experts(family.fields)
    return _config(family, moe, NamesConfig(feeds=("block_sparse_moe",), moe=names))


def read_granite_shared(family: Family) -> ModelConfig:
    """Granite with shared experts in addition to those of `read_granite_moe`."""
    shared = family.fields.count("shared_intermediate_size", 1024)
    moe = mixtral_experts(family.fields, shared_size=shared)
    return _config(family, moe, NamesConfig(feeds=("",), moe=shared_names()))


def read_granite_swa(family: Family) -> ModelConfig:
    """Granite with windows in three of four layers, attention sinks, and a rotation by layer."""
    return _windowed(family, None, None)


def read_granite_moe_swa(family: Family) -> ModelConfig:
    """Reads Granite with windows and experts; `shared_intermediate_size` 0: no shared experts."""
    shared = family.fields.count("shared_intermediate_size", 0)
    moe = mixtral_experts(family.fields, shared_size=shared)
    experts = "block_sparse_moe.experts."
    names = replace(
        shared_names(),
        router="block_sparse_moe.router",
        stacked=(f"{experts}gate_up_proj", f"{experts}down_proj"),
    )
    return _windowed(family, moe, NamesConfig(feeds=("",), moe=names))


def read_minicpm(family: Family) -> ModelConfig:
    """MiniCPM (arXiv 2404.06395) and MiniCPM 4 without its sparse attention."""
    family.only("sparse_config", None)
    family.only("num_experts", 0)
    layer = AttentionConfig(rope=family.rope(), scale=family.head_dim() ** -0.5)
    return with_minicpm_factors(family, family.config(family.decoder(layer), is_tied=True))


def with_minicpm_factors(
    family: Family,
    config: ModelConfig,
    *,
    embedding: float = 1.0,
    depth: float = 1.0,
    base: int = 1,
) -> ModelConfig:
    """The configuration with MiniCPM's factors, whose fields have the given defaults."""
    fields = family.fields
    assert config.decoder is not None, "a family's configuration has its parts"
    decoder = replace(
        config.decoder,
        embedding_multiplier=fields.number("scale_emb", embedding),
        residual_multiplier=fields.number("scale_depth", depth) / math.sqrt(family.num_layers),
        logit_multiplier=fields.positive("dim_model_base", base) / family.hidden_size,
    )
    return replace(config, decoder=decoder)


def shared_names() -> MoENamesConfig:
    """Names of Granite's parameters below a layer, for models with shared experts."""
    return MoENamesConfig(
        router="block_sparse_moe.router.layer",
        stacked=(
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
        experts="",
        shared="shared_mlp",
        shared_gate_up="input_linear",
        shared_down="output_linear",
    )


def _windowed(family: Family, moe: MoEConfig | None, names: NamesConfig | None) -> ModelConfig:
    config, kinds = _config(family, moe, names), family.kinds(lambda n: SLIDING if n % 4 else FULL)
    decoder, thetas = config.decoder, family.numbers("layer_rope_theta")
    assert decoder is not None
    layer, count = decoder.attention, family.num_layers
    assert layer.rope is not None, "Granite's heads are rotated"
    of_layers = thetas or (layer.rope.theta,) * count
    layers = tuple(
        # A layer whose base is 0 does not rotate.
        replace(layer, has_sinks=True, rope=replace(layer.rope, theta=theta) if theta else None)
        for theta in of_layers
    )
    return replace(
        config,
        decoder=replace(decoder, layers=layers),
        sliding_window=family.window(kinds, 128),
    )


def _config(
    family: Family,
    moe: MoEConfig | None = None,
    names: NamesConfig | None = None,
    *,
    scale: float = 1.0,
) -> ModelConfig:
    fields = family.fields
    layer = family.attention(family.rope(), fields.number("attention_multiplier", scale))
    decoder = replace(
        family.decoder(
            layer,
            mlp=MlpConfig(activation=family.activation(), bias=fields.flag("mlp_bias", False)),
        ),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )
    return family.config(decoder, moe=moe, names=names)
