"""The image tower of Pixtral and Mistral 3: pictures of any shape, rotations by row and column, and
a connector that joins squares of patches. Pure Python.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.fields import Fields
from weft.checkpoint.parts import NormConfig
from weft.checkpoint.vision_config import (
    NUM_CHANNELS,
    AxialRopeConfig,
    MergerConfig,
    VisionConfig,
    VisionNamesConfig,
    VitConfig,
    activation_of,
    image_token,
)

_NAMES = VisionNamesConfig(
    towers=("model.vision_tower", "vision_tower"),
    connectors=("model.multi_modal_projector", "multi_modal_projector"),
    patches="patch_conv",
    first_norm="ln_pre",
    layers="transformer.layers",
    attention_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    o="attention.o_proj",
    mlp_norm="ffn_norm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    last_norm="",
    connector_norm="norm",
    connector_join="patch_merger.merging_layer",
    connector_up="linear_1",
    projection="linear_2",
)
_OF_MISTRAL3 = {"image_size": 1540, "patch_size": 14}
"""Defaults of fields that Pixtral's own have otherwise."""


def read_mistral3_vision(whole: Fields, hidden: int, vocab_size: int, eps: float) -> VisionConfig:
    """The tower of Mistral 3.

    Args:
        whole: Fields of config.json.
        hidden: Width of the language model.
        eps: Of the language model's norms.

    Raises:
        ModelError: A field is malformed, or its value is not supported.
    """
    vision = whole.section("vision_config")
    for fields, name, value in (
        (whole, "vision_feature_layer", -1),
        (vision, "num_channels", NUM_CHANNELS),
        (vision, "model_type", "pixtral"),
    ):
        fields.only(name, value)
    vit = _vit(vision.replaced(**{**_OF_MISTRAL3, **{name: vision.get(name) for name in vision}}))
    return VisionConfig(
        vit=vit,
        connector=MergerConfig(
            factor=whole.positive("spatial_merge_size", 2),
            out_features=hidden,
            norm=NormConfig(eps=eps),
            activation=activation_of(whole, "gelu", "projector_hidden_act"),
            inner_features=hidden,
            has_bias=whole.flag("multimodal_projector_bias", False),
            has_join=True,
        ),
        image_token_id=image_token(whole, "image_token_index", 10, vocab_size),
        names=_NAMES,
        max_edge=vit.image_size,
    )


def read_llava_vision(whole: Fields, text: Fields) -> VisionConfig | None:
    """The tower of a LLaVA with Pixtral's; None: it has another, which is not supported. Raises
    ModelError as `read_mistral3_vision` does.
    """
    vision = whole.section("vision_config")
    if vision.get("model_type") != "pixtral":
        return None
    for name, value in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")):
        if whole.get(name) != value:
            raise whole.error(name, f"only {value!r} is supported, not {whole.get(name)!r}")
    vit, hidden = _vit(vision), text.positive("hidden_size")
    return VisionConfig(
        vit=vit,
        connector=MergerConfig(
            factor=1,
            out_features=hidden,
            norm=None,
            activation=activation_of(whole, "gelu", "projector_hidden_act"),
            inner_features=hidden,
            has_bias=whole.flag("multimodal_projector_bias", True),
        ),
        image_token_id=image_token(whole, "image_token_index", 32_000, text.positive("vocab_size")),
        names=replace(_NAMES, connector_norm="", connector_join=""),
        max_edge=vit.image_size,
    )


def _vit(vision: Fields) -> VitConfig:
    width, heads = vision.positive("hidden_size", 1024), vision.positive("num_attention_heads", 16)
    if width % (4 * heads):
        raise vision.error("num_attention_heads", f"4 x {heads} does not divide {width}")
    rope = vision.section("rope_parameters")
    return VitConfig(
        image_size=vision.positive("image_size", 1024),
        patch_size=vision.positive("patch_size", 16),
        hidden_size=width,
        num_layers=vision.positive("num_hidden_layers", 24),
        num_heads=heads,
        intermediate_size=vision.positive("intermediate_size", 4096),
        activation=activation_of(vision, "gelu"),
        norm=NormConfig(eps=1e-5),
        has_bias=False,
        positions="none",
        is_gated=True,
        rope=AxialRopeConfig(
            theta=rope.number("rope_theta", vision.number("rope_theta", 1e4)), takes_turns=True
        ),
    )
