"""The image tower of Llama 4: tiles with a class token, rotations by row and column, a connector of
three products. Pure Python.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.fields import Fields
from weft.checkpoint.parts import NormConfig
from weft.checkpoint.vision_config import (
    NUM_CHANNELS,
    AxialRopeConfig,
    MlpConnectorConfig,
    VisionConfig,
    VisionNamesConfig,
    image_token,
    siglip_vit,
)

_NAMES = VisionNamesConfig(
    towers=("vision_model", "model.vision_model"),
    connectors=("multi_modal_projector", "model.multi_modal_projector"),
    patches="patch_embedding.linear",
    positions="positional_embedding_vlm",
    class_token="class_embedding",
    first_norm="layernorm_pre",
    layers="model.layers",
    attention_norm="input_layernorm",
    o="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    last_norm="layernorm_post",
    projection="linear_1",
    connector_up="mlp.fc1",
    connector_mlp="vision_adapter",
)
_SIZES = {
    "image_size": 448,
    "patch_size": 14,
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
}


def read_llama4_vision(whole: Fields, hidden: int, vocab_size: int) -> VisionConfig:
    """The tower of Llama 4.

    Args:
        whole: Fields of config.json.
        hidden: Width of the language model.

    Raises:
        ModelError: A field is malformed, or its value is not supported.
    """
    vision = whole.section("vision_config")
    for name, value in (
        ("num_channels", NUM_CHANNELS),
        ("hidden_act", "gelu"),
        ("vision_feature_select_strategy", "default"),
        ("multi_modal_projector_bias", False),
    ):
        vision.only(name, value)
    vit = siglip_vit(vision.replaced(hidden_act="gelu"), _SIZES, "learned")
    if vit.head_dim % 4:
        raise vision.error("hidden_size", f"heads of {vit.head_dim}; rotations take multiples of 4")
    ratio = vision.number("pixel_shuffle_ratio", 0.5)
    factor = round(1 / ratio)
    if factor * ratio != 1 or vit.grid % factor:
        problem = f"a row of {vit.grid} patches is not divided by 1 / {ratio}"
        raise vision.error("pixel_shuffle_ratio", problem)
    inner = vision.positive("projector_input_dim", 4096)
    for name, wanted in (
        ("projector_output_dim", inner),
        ("vision_output_dim", inner),
        ("intermediate_size", vit.hidden_size * factor**2),
    ):
        if vision.positive(name, wanted) != wanted:
            problem = f"{vision.positive(name)} does not follow {wanted} of the part before it"
            raise vision.error(name, problem)
    parameters = vision.section("rope_parameters") if "rope_parameters" in vision else vision
    theta = parameters.number("rope_theta", 10_000.0)
    return VisionConfig(
        vit=replace(
            vit,
            norm=NormConfig(eps=1e-5, kind="layer", has_bias=True),
            has_patch_bias=False,
            has_class_token=True,
            is_unfolded=True,
            rope=AxialRopeConfig(theta=theta),
            first_place=1,
            has_adjacent_pairs=True,
        ),
        connector=MlpConnectorConfig(factor=factor, out_features=hidden, inner_features=inner),
        image_token_id=image_token(whole, "image_token_index", 200_092, vocab_size),
        names=_NAMES,
    )
