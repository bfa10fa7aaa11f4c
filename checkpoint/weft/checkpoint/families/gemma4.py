"""Gemma 4, text: layers that share K and V, wider heads in layers without a window, a second
embedding, and in one size experts in addition to the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import gemma4_experts
from weft.checkpoint.families.family import FULL, IMAGE_BODIES, SLIDING, VISION, Family
from weft.checkpoint.fields import Fields
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
    PerLayerConfig,
)
from weft.checkpoint.rope import RopeConfig

_TOWERS = ("audio_tower", "embed_vision", "embed_audio", "vision_embedder")
_OTHERS = tuple(f"{top}{part}." for top in ("", "model.") for part in _TOWERS)
"""Prefixes of image and audio tensors, which are left out."""


def read_gemma4(family: Family) -> ModelConfig:
    """Gemma 4, E2B to 31B."""
    family = family.of_text()
    fields, count = family.fields, family.num_layers
    if fields.get("use_bidirectional_attention") == "all":
        raise fields.error("use_bidirectional_attention", "'all' is not supported")
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % 6 else FULL)
    kinds = (*kinds[:-1], FULL)
    sources = kv_sources(fields, kinds)
    layers = tuple(
        _attention(family, layer, kinds[layer], sources[layer]) for layer in range(count)
    )
    inner = fields.positive("intermediate_size")
    is_wide = fields.flag("use_double_wide_mlp", False)
    shared_inner = 2 * inner if is_wide else inner
    per_layer = None
    if fields.count("hidden_size_per_layer_input", 256):
        per_layer = PerLayerConfig(
            vocab_size=fields.positive("vocab_size_per_layer_input", 262_144),
            dim=fields.positive("hidden_size_per_layer_input", 256),
        )
    softcap = fields.get("final_logit_softcapping")
    decoder = replace(
        family.decoder(
            layers,
            mlp=MlpConfig(
                activation=family.activation("gelu_pytorch_tanh", "hidden_activation"),
                sizes=tuple(inner if source is None else shared_inner for source in sources),
            ),
        ),
        order="around",
        embedding_multiplier=family.hidden_size**0.5,
        logit_softcap=None if softcap is None else fields.number("final_logit_softcapping"),
        per_layer=per_layer,
        has_layer_factors=True,
    )
    names = replace(text_names(sources), moe=MoENamesConfig(router="router.proj"))
    moe = gemma4_experts(fields) if fields.flag("enable_moe_block", False) else None
    return family.config(
        decoder,
        head_dim=family.head_dim(256),
        window=family.window(kinds, 512),
        names=names,
        is_tied=True,
        kv_heads=4,
        moe=moe,
    )


def kv_sources(fields: Fields, kinds: tuple[str, ...], shared: int = 0) -> list[int | None]:
    """For each layer, the layer whose K and V it uses; None: its own. The last layers use those of
    the last layer of their kind that has its own. The file says how many they are; by default
    `shared`.
    """
    own = len(kinds) - fields.count("num_kv_shared_layers", shared)
    if own < len(kinds) and not set(kinds[own:]) <= set(kinds[: max(own, 0)]):
        raise fields.error("num_kv_shared_layers", "some kind of layers has no K and V of its own")
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    return [None if layer < own else last[kind] for layer, kind in enumerate(kinds)]


def text_names(sources: Sequence[int | None]) -> NamesConfig:
    """Names in files that also have towers, and K and V of layers that use another layer's."""
    sharing = (layer for layer, source in enumerate(sources) if source is not None)
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return NamesConfig(
        bodies=IMAGE_BODIES,
        left_out=(*VISION, *_OTHERS),
        unused=tuple(f"layers.{layer}.self_attn.{part}." for layer in sharing for part in parts),
        feed_norm="pre_feedforward_layernorm",
    )


def _attention(family: Family, layer: int, kind: str, source: int | None) -> AttentionConfig:
    fields, is_full = family.fields, kind == FULL
    own = fields.section("per_layer_config").section(str(layer))
    shares = fields.flag("attention_k_eq_v", False)
    dim, kv_heads = _optional(own, "head_dim"), _optional(own, "num_key_value_heads")
    if "per_layer_config" not in fields and is_full:
        dim = fields.positive("global_head_dim", 512)
        kv_heads = _optional(fields, "num_global_key_value_heads") if shares else None
    return replace(
        family.attention(_rope(family, kind), 1.0),
        head_norm=HeadNormConfig(norm=family.rms()),
        head_dim=dim,
        kv_heads=kv_heads,
        value_norm=family.rms(),
        is_value_key=shares and is_full,
        kv_from=source,
    )


def _optional(fields: Fields, name: str) -> int | None:
    return None if fields.get(name) is None else fields.positive(name)


def _rope(family: Family, kind: str) -> RopeConfig:
    if "rope_parameters" in family.fields:
        return family.rope(kind, theta=1e6 if kind == FULL else 1e4, partial=1.0)
    if kind == SLIDING:
        return RopeConfig(theta=1e4)
    return RopeConfig(theta=1e6, scaling="proportional", partial=0.25)
