"""The image tower of InternVL: a vision transformer with a class token and scaled layers, a pixel
shuffle and an MLP. Pure Python.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.fields import Fields
from weft.checkpoint.parts import NormConfig
from weft.checkpoint.vision_config import (
    NUM_CHANNELS,
    MergerConfig,
    VisionConfig,
    VisionNamesConfig,
    VitConfig,
    activation_of,
    image_token,
    siglip_vit,
)

_NAMES = VisionNamesConfig(
    towers=("model.vision_tower", "vision_tower"),
    connectors=("model.multi_modal_projector", "multi_modal_projector"),
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    layers="encoder.layer",
    attention_norm="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    o="attention.projection_layer",
    q_norm="attention.q_norm",
    k_norm="attention.k_norm",
    attention_scale="lambda_1",
    mlp_norm="layernorm_after",
    mlp_scale="lambda_2",
    last_norm="",
    connector_norm="layer_norm",
    connector_up="linear_1",
    projection="linear_2",
)
_SIDES = {"image_size": 448, "patch_size": 14}
_SIZES = {
    **_SIDES,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


def read_internvl_vision(whole: Fields, text: Fields) -> VisionConfig:
    """The tower of InternVL 3 and 3.5, as transformers writes it.

    Args:
        whole: Fields of config.json.
        text: Fields of its text model, defaults included.

    Raises:
        ModelError: A field is malformed, or its value is not supported.
    """
    vision = whole.section("vision_config")
    for fields, name, value in (
        (whole, "vision_feature_layer", -1),
        (whole, "vision_feature_select_strategy", "default"),
        (vision, "num_channels", NUM_CHANNELS),
        (vision, "use_mask_token", False),
        (vision, "use_absolute_position_embeddings", True),
        (vision, "use_mean_pooling", True),
    ):
        fields.only(name, value)
    vit = _vit(vision)
    ratio = whole.number("downsample_ratio", 0.5)
    factor = round(1 / ratio)
    if factor * ratio != 1 or vit.grid % factor:
        problem = f"a row of {vit.grid} patches is not divided by 1 / {ratio}"
        raise whole.error("downsample_ratio", problem)
    hidden = text.positive("hidden_size")
    return VisionConfig(
        vit=vit,
        connector=MergerConfig(
            factor=factor,
            out_features=hidden,
            norm=NormConfig(eps=1e-5, kind="layer", has_bias=True),
            activation=activation_of(whole, "gelu", "projector_hidden_act"),
            is_norm_of_square=True,
            inner_features=hidden,
        ),
        image_token_id=image_token(whole, "image_token_id", 151_667, text.positive("vocab_size")),
        names=_NAMES,
    )


def _vit(vision: Fields) -> VitConfig:
    sides = {name: _side(vision, name, side) for name, side in _SIDES.items()}
    usual = vision.replaced(hidden_act=vision.text("hidden_act", "gelu"), **sides)
    vit = siglip_vit(usual, _SIZES, "learned")
    kind = vision.text("norm_type", "layer_norm")
    if kind not in ("layer_norm", "rms_norm"):
        raise vision.error("norm_type", f"{kind!r} is not supported (layer_norm, rms_norm are)")
    has_qk_norm = vision.flag("use_qk_norm", False)
    return replace(
        vit,
        norm=vit.norm if kind == "layer_norm" else NormConfig(eps=vit.norm.eps),
        has_qkv_bias=vision.flag("attention_bias", False),
        has_class_token=True,
        has_scales=True,
        qk_norm=NormConfig(eps=1e-6) if has_qk_norm else None,
    )


def _side(vision: Fields, name: str, default: int) -> int:
    """A number, or two that are equal."""
    value = vision.get(name)
    if not isinstance(value, list):
        return vision.positive(name, default)
    if len(value) != 2 or value[0] != value[1]:
        raise vision.error(name, f"only squares are supported, not {value!r:.40}")
    return vision.replaced(**{name: value[0]}).positive(name)
