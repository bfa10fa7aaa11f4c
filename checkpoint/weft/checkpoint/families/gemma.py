"""Gemma: GELU, scaled embeddings, norms by 1 + weight, from Gemma 2 on around both blocks; windows
in most layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from weft.checkpoint.config import ModelConfig, SlidingWindow
from weft.checkpoint.families.family import FULL, IMAGE_BODIES, SLIDING, VISION, Family
from weft.checkpoint.fields import Fields
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
    NormConfig,
)
from weft.checkpoint.rope import RopeConfig, rope_config
from weft.checkpoint.vision_config import (
    MeanPoolConfig,
    VisionConfig,
    VisionNamesConfig,
    image_token,
    siglip_vit,
)

_GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
"""Defaults of transformers for fields that `text_config` leaves out."""
_FEED_NORM = "pre_feedforward_layernorm"


def read_gemma(family: Family) -> ModelConfig:
    """Gemma (arXiv 2403.08295)."""
    dim = family.head_dim(256)
    family.only("use_bidirectional_attention", False)
    family.activation("gelu_pytorch_tanh")
    layer = family.attention(family.rope(), dim**-0.5)
    decoder = _decoder(family, (layer,) * family.num_layers, None)
    # Files of the first release say "gelu" and mean its approximation.
    decoder = replace(decoder, mlp=MlpConfig(activation="gelu_tanh"), order="before")
    return family.config(decoder, head_dim=dim, is_tied=True)


def read_gemma2(family: Family) -> ModelConfig:
    """Gemma 2 (arXiv 2408.00118): soft caps of scores and logits, windows in every other layer."""
    kinds = family.kinds(lambda layer: FULL if layer % 2 else SLIDING)
    layer = replace(
        family.attention(family.rope(), _scale(family)),
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


def read_vault_gemma(family: Family) -> ModelConfig:
    """VaultGemma: Gemma 2 without norms after its blocks."""
    config = read_gemma2(family)
    assert config.decoder is not None, "it is made of parts"
    names = replace(config.names, feed_norm=_FEED_NORM)
    return replace(config, decoder=replace(config.decoder, order="before"), names=names)


def read_gemma3(family: Family) -> ModelConfig:
    """Gemma 3 (arXiv 2503.19786), text: normalised heads; layers with a window rotate by a base of
    their own.
    """
    raw = family.raw
    if "text_config" in raw:
        text = family.whole.section("text_config")
        raw = {**raw, "text_config": _GEMMA3_TEXT | {name: text.get(name) for name in text}}
    family = family.replaced(raw).of_text()
    is_encoder = family.fields.flag("use_bidirectional_attention", False)
    if is_encoder:
        family.only("attn_logit_softcapping", None)
    pattern = family.fields.positive("sliding_window_pattern", 6)
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % pattern else FULL)
    norm = HeadNormConfig(norm=family.rms(adds_one=True))
    ropes = {kind: gemma3_rope(family, kind) for kind in (FULL, SLIDING)}
    layers = tuple(
        replace(
            family.attention(ropes[kind], _scale(family)),
            head_norm=norm,
            softcap=soft_cap(family, "attn_logit_softcapping"),
        )
        for kind in kinds
    )
    names = NamesConfig(
        bodies=IMAGE_BODIES,
        left_out=VISION,
        feed_norm=_FEED_NORM,
    )
    config = family.config(
        _decoder(family, layers, soft_cap(family, "final_logit_softcapping")),
        head_dim=family.head_dim(256),
        window=_bidirectional_window(family, kinds) if is_encoder else family.window(kinds, 4096),
        names=names,
        is_tied=True,
        kv_heads=4,
        is_encoder=is_encoder,
    )
    if config.architecture != "Gemma3ForConditionalGeneration" or "vision_config" not in raw:
        return config
    return replace(config, vision=_read_gemma3_vision(family.whole, config))


def _read_gemma3_vision(whole: Fields, text: ModelConfig) -> VisionConfig:
    """SigLIP, whose patches are pooled."""
    sizes = {"image_size": 224, "patch_size": 16, "hidden_size": 768, "num_hidden_layers": 12}
    sizes |= {"num_attention_heads": 12, "intermediate_size": 3072}
    vit = siglip_vit(whole.section("vision_config"), sizes, "learned")
    count = whole.positive("mm_tokens_per_image", 256)
    side = math.isqrt(count)
    if side * side != count or vit.grid % side:
        problem = f"{count} are not those of a square grid that divides {vit.grid} x {vit.grid}"
        raise whole.error("mm_tokens_per_image", f"{problem} patches")
    return VisionConfig(
        vit=vit,
        connector=MeanPoolConfig(
            factor=vit.grid // side,
            out_features=text.hidden_size,
            norm=NormConfig(eps=vit.norm.eps, adds_one=True),
        ),
        image_token_id=image_token(whole, "image_token_index", 262_144, text.vocab_size),
        sees_both_ways=True,
        names=VisionNamesConfig(
            towers=(
                "model.vision_tower.vision_model",
                "vision_tower.vision_model",
                "model.vision_tower",
                "vision_tower",
            ),
            connectors=("model.multi_modal_projector", "multi_modal_projector"),
            projection="mm_input_projection_weight",
            connector_norm="mm_soft_emb_norm",
            unused=("head",),
        ),
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
    return replace(
        family.decoder(
            layers,
            family.rms(adds_one=True),
            mlp=MlpConfig(activation=family.activation("gelu_pytorch_tanh", "hidden_activation")),
        ),
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
