"""PaddleOCR-VL: ERNIE 4.5's dense layers, which rotate by time, row and column, behind SigLIP for
pictures of any size.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import Family
from weft.checkpoint.parts import AttentionConfig, MlpConfig, NamesConfig, NormConfig
from weft.checkpoint.qwen_vision import CLIP_PIXELS, TextOfVision, axes_of
from weft.checkpoint.rope import RopeConfig
from weft.checkpoint.vision_config import (
    AxialRopeConfig,
    MergerConfig,
    VisionConfig,
    VisionNamesConfig,
    image_token,
    siglip_vit,
)

_TOWERS = ("model.visual.", "visual.", "model.projector.", "mlp_AR.")
_SIZES = {
    "image_size": 384,
    "patch_size": 14,
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
}
_NAMES = VisionNamesConfig(
    towers=("model.visual.vision_model", "visual.vision_model"),
    connectors=("model.projector", "mlp_AR"),
    connector_norm="pre_norm",
    connector_up="linear_1",
    projection="linear_2",
    unused=("head", "embeddings.packing_position_embedding"),
)


def read_paddleocr_vl(family: Family) -> ModelConfig:
    family = family.of_text()
    fields, dim = family.fields, family.head_dim(128)
    name = next((n for n in ("rope_parameters", "rope_scaling") if fields.get(n)), "")
    values = fields.section(name)
    if values.text("rope_type", values.text("type", "default")) not in ("default", "mrope"):
        raise fields.error(name, "only default and mrope are supported")
    theta = values.number("rope_theta", fields.number("rope_theta", 500_000.0))
    bias = fields.flag("use_bias", False)
    layer = AttentionConfig(
        rope=RopeConfig(theta=theta), scale=dim**-0.5, qkv_bias=bias, o_bias=bias
    )
    decoder = family.decoder(
        layer, family.rms(eps=1e-5), mlp=MlpConfig(activation=family.activation(), bias=bias)
    )
    names = NamesConfig(bodies=("model.language_model", "model"), left_out=_TOWERS)
    config = family.config(decoder, head_dim=dim, names=names, is_tied=True, kv_heads=2)
    if "vision_config" not in family.whole:
        return config
    text = TextOfVision(fields, config.hidden_size, config.num_layers, dim // 2, (16, 24, 24))
    return replace(config, vision=_vision(family, text))


def _vision(family: Family, text: TextOfVision) -> VisionConfig:
    whole, vision = family.whole, family.whole.section("vision_config")
    vit = siglip_vit(vision, _SIZES, "centred")
    if vit.hidden_size % (4 * vit.num_heads):
        told = f"4 x {vit.num_heads} does not divide {vit.hidden_size}"
        raise vision.error("num_attention_heads", told)
    axes = axes_of(text)
    if sum(axes.sections) != text.num_pairs:
        told = f"{list(axes.sections)} are not {text.num_pairs} pairs together"
        raise text.fields.error("mrope_section", told)
    theta = vision.section("rope_parameters").number("rope_theta", 10_000.0)
    return VisionConfig(
        vit=replace(vit, rope=AxialRopeConfig(theta=theta)),
        connector=MergerConfig(
            factor=vision.positive("spatial_merge_size", 2),
            out_features=text.hidden_size,
            norm=NormConfig(eps=1e-5, kind="layer", has_bias=True),
        ),
        image_token_id=image_token(
            whole, "image_token_id", 100_295, text.fields.positive("vocab_size")
        ),
        pixels=CLIP_PIXELS,
        names=_NAMES,
        axes=axes,
        max_pixels=1536 * 1536,
    )
