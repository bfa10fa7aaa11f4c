"""What configurations of towers of several families say, and what of it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ModelError
from weft.testing.models.image_families import FAMILIES


def raw_of(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    config = FAMILIES[family]().config()
    raw = {**config.to_dict(), "architectures": [ARCHITECTURES[family]]}
    vision = {**raw["vision_config"], **fields.get("vision", {})}
    return {**raw, **fields.get("whole", {}), "vision_config": vision}


ARCHITECTURES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
    "pixtral": "LlavaForConditionalGeneration",
}


@pytest.mark.parametrize(
    ("family", "fields", "name", "reason"),
    [
        ("gemma3", {"whole": {"mm_tokens_per_image": 15}}, "mm_tokens_per_image", "square grid"),
        ("gemma3", {"whole": {"mm_tokens_per_image": 9}}, "mm_tokens_per_image", "8 x 8"),
        ("gemma3", {"whole": {"image_token_index": 900}}, "image_token_index", "none of 517"),
        ("gemma3", {"vision": {"hidden_act": "tanh"}}, "hidden_act", "'tanh' is not supported"),
        ("internvl", {"whole": {"downsample_ratio": 0.3}}, "downsample_ratio", "0.3"),
        ("internvl", {"whole": {"vision_feature_layer": -2}}, "vision_feature_layer", "only -1"),
        ("internvl", {"vision": {"image_size": [48, 60]}}, "image_size", "only squares"),
        ("internvl", {"vision": {"norm_type": "group"}}, "norm_type", "'group' is not supported"),
        ("internvl", {"vision": {"use_mean_pooling": False}}, "use_mean_pooling", "only True"),
        ("llama4", {"vision": {"pixel_shuffle_ratio": 0.3}}, "pixel_shuffle_ratio", "0.3"),
        ("llama4", {"vision": {"projector_output_dim": 41}}, "projector_output_dim", "41"),
        ("llama4", {"vision": {"intermediate_size": 80}}, "intermediate_size", "192"),
        ("llama4", {"vision": {"num_attention_heads": 8}}, "hidden_size", "multiples of 4"),
        ("mistral3", {"whole": {"vision_feature_layer": [1]}}, "vision_feature_layer", "only -1"),
        ("mistral3", {"vision": {"num_attention_heads": 5}}, "num_attention_heads", "does not"),
        ("mistral3", {"vision": {"model_type": "other"}}, "model_type", "only 'pixtral'"),
        ("paddleocr_vl", {"vision": {"num_attention_heads": 5}}, "num_attention_heads", "5"),
        ("pixtral", {"whole": {"vision_feature_layer": -2}}, "vision_feature_layer", "only -1"),
    ],
)
def test_what_is_not_supported_is_named(
    family: str, fields: dict[str, Any], name: str, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason) as error:
        ModelConfig.from_dict(raw_of(family, fields))
    assert error.value.param == name


def test_a_llava_with_another_tower_serves_its_text() -> None:
    config = ModelConfig.from_dict(raw_of("pixtral", {"vision": {"model_type": "clip"}}))
    assert config.vision is None


@pytest.mark.parametrize(
    ("family", "vision", "whole", "shape", "rows"),
    [
        (
            "gemma3",
            {"image_size": 896, "patch_size": 14},
            {"mm_tokens_per_image": 256},
            (896, 896),
            256,
        ),
        ("internvl", {"image_size": [448, 448], "patch_size": [14, 14]}, {}, (448, 448), 256),
        ("llama4", {"image_size": 336, "patch_size": 14}, {}, (336, 336), 144),
        ("mistral3", {"image_size": 1540, "patch_size": 14}, {}, (1540, 1540), 55 * 55),
        ("pixtral", {"image_size": 1024, "patch_size": 16}, {}, (1024, 1024), 64 * 64),
    ],
)
def test_tokens_of_published_models(
    family: str,
    vision: dict[str, Any],
    whole: dict[str, Any],
    shape: tuple[int, int],
    rows: int,
) -> None:
    config = ModelConfig.from_dict(raw_of(family, {"vision": vision, "whole": whole})).vision
    assert config is not None
    most = config.most_pixels
    assert shape[0] * shape[1] == (config.tile_size**2 if most is None else most)
    assert shape[0] * shape[1] // config.square_size**2 == rows
