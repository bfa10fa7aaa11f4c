"""Gemma: GELU, scaled embeddings, norms by 1 + weight, from Gemma 2 on around both blocks; windows
in most layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig, SlidingWindow
from weft.checkpoint.families.family import FULL, SLIDING, VISION, Family
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
)
from weft.checkpoint.rope import RopeConfig, rope_config

_FEED_NORM = "pre_feedforward_layernorm"


def read_gemma(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Gemma (arXiv 2403.08295)."""
    family = Family(raw, generation, where)
    dim, bias = family.head_dim(256), family.fields.flag("attention_bias", False)
    family.only("use_bidirectional_attention", False)
    family.activation("gelu_pytorch_tanh")
    layer = AttentionConfig(rope=family.rope(), scale=dim**-0.5, qkv_bias=bias, o_bias=bias)
    decoder = _decoder(family, (layer,) * family.num_layers, None)
    # Files of the first release say "gelu" and mean its approximation.
    decoder = replace(decoder, mlp=MlpConfig(activation="gelu_tanh"), order="before")
    return family.config(decoder, head_dim=dim, is_tied=True)


def read_gemma2(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Gemma 2 (arXiv 2408.00118): soft caps of scores and logits, windows in every other layer."""
    family = Family(raw, generation, where)
    kinds = family.kinds(lambda layer: FULL if layer % 2 else SLIDING)
    layer = AttentionConfig(
        rope=family.rope(),
        scale=_scale(family),
        qkv_bias=family.fields.flag("attention_bias", False),
        o_bias=family.fields.flag("attention_bias", False),
        softcap=soft_cap(family, "attn_logit_softcapping", 50.0),
    )
    decoder = _decoder(
        family, (layer,) * len(kinds), soft_cap(family, "final_logit_softcapping", 30.0)
    )
    names = NamesConfig(feed_norm=_FEED_NORM)
    window = family.window(kinds, 4096)
    return family.config(
        decoder, head_dim=family.head_dim(256), window=window, names=names, is_tied=True, kv_heads=4
    )


def read_vault_gemma(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """VaultGemma: Gemma 2 without norms after its blocks."""
    config = read_gemma2(raw, generation, where)
    assert config.decoder is not None, "it is made of parts"
    names = replace(config.names, feed_norm=_FEED_NORM)
    return replace(config, decoder=replace(config.decoder, order="before"), names=names)


def read_gemma3(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Gemma 3 (arXiv 2503.19786), text: normalised heads; layers with a window rotate by a base of
    their own.
    """
    family = Family(raw, generation, where, "text_config" if "text_config" in raw else None)
    is_encoder = family.fields.flag("use_bidirectional_attention", False)
    if is_encoder:
        family.only("attn_logit_softcapping", None)
    pattern = family.fields.positive("sliding_window_pattern", 6)
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % pattern else FULL)
    norm = HeadNormConfig(norm=family.rms(adds_one=True))
    ropes = {kind: gemma3_rope(family, kind) for kind in (FULL, SLIDING)}
    bias = family.fields.flag("attention_bias", False)
    layers = tuple(
        AttentionConfig(
            rope=ropes[kind],
            scale=_scale(family),
            qkv_bias=bias,
            o_bias=bias,
            head_norm=norm,
            softcap=soft_cap(family, "attn_logit_softcapping"),
        )
        for kind in kinds
    )
    names = NamesConfig(
        bodies=("model.language_model", "language_model.model", "model"),
        left_out=VISION,
        feed_norm=_FEED_NORM,
    )
    return family.config(
        _decoder(family, layers, soft_cap(family, "final_logit_softcapping")),
        head_dim=family.head_dim(256),
        window=_bidirectional_window(family, kinds) if is_encoder else family.window(kinds, 4096),
        names=names,
        is_tied=True,
        kv_heads=4,
        is_encoder=is_encoder,
    )


def _bidirectional_window(family: Family, kinds: Sequence[str]) -> SlidingWindow | None:
    """EmbeddingGemma: a token attends to half of the file's length on each side."""
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    length = family.fields.positive("sliding_window", 4096)
    return SlidingWindow(length=length // 2 + 1, layers=layers) if layers else None


def gemma3_rope(family: Family, kind: str) -> RopeConfig:
    """Older files have one base for each kind of layers, and a scaling for those without a
    window.
    """
    fields = family.fields
    if fields.get("rope_parameters") is not None:
        return rope_config(fields, kind=kind, theta=1e6 if kind == FULL else 1e4)
    if kind == FULL:
        return rope_config(fields, theta=1e6)
    return RopeConfig(theta=fields.number("rope_local_base_freq", 1e4))


def _decoder(
    family: Family, layers: tuple[AttentionConfig, ...], softcap: float | None
) -> DecoderConfig:
    return DecoderConfig(
        norm=family.rms(adds_one=True),
        layers=layers,
        mlp=MlpConfig(activation=family.activation("gelu_pytorch_tanh", "hidden_activation")),
        order="around",
        embedding_multiplier=family.hidden_size**0.5,
        logit_softcap=softcap,
    )


def _scale(family: Family) -> float:
    return float(family.fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


def soft_cap(family: Family, name: str, default: float | None = None) -> float | None:
    """A bound; null means none, and an absent field means `default`."""
    if name in list(family.fields) and family.fields.get(name) is None:
        return None
    return default if name not in family.fields else family.fields.number(name)
