"""Models that name their text model in `text_config`, among others LLaVA, InternVL, SmolVLM and
LFM2-VL. They are read as the text model, and served without their towers where `_TOWERS` has no
reader for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import IMAGE_HEADS, VISION, Family, FamilyReader
from weft.checkpoint.families.lfm2 import read_lfm2, read_lfm2_moe
from weft.checkpoint.families.llamas import read_llama, read_qwen2, read_qwen3
from weft.checkpoint.fields import Fields
from weft.checkpoint.internvl_vision import read_internvl_vision
from weft.checkpoint.pixtral_vision import read_llava_vision
from weft.checkpoint.vision_config import VisionConfig, read_idefics3_vision

_READERS: Mapping[str, FamilyReader] = {
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2_moe,
    "llama": read_llama,
    "mistral": read_llama,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
}
"""Readers by the text model's `model_type`."""
_TOWERS: Mapping[str, Callable[[Fields, Fields], VisionConfig | None]] = {
    "Idefics3ForConditionalGeneration": read_idefics3_vision,
    "InternVLForConditionalGeneration": read_internvl_vision,
    "LlavaForConditionalGeneration": read_llava_vision,
    "SmolVLMForConditionalGeneration": read_idefics3_vision,
}
"""Readers of image towers, by the architecture."""
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA = {
    **_SIZES,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "vocab_size": 32_000,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14_336, "max_position_embeddings": 131_072}
_QWEN = {
    **_SIZES,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "vocab_size": 151_936,
}
_USUAL: Mapping[str, Mapping[str, int]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}
"""Defaults of transformers for fields that `text_config` leaves out, by its `model_type`."""
_TIED = ("InternVL", "Lfm2Vl")
"""Beginnings of architectures whose LM head is the embedding unless the file says otherwise."""
_PARTS = ("vision_model", "vision_encoder", "vision_projection", "connector", "image_newline")
_OTHERS = tuple(f"{top}{part}" for top in ("", "model.") for part in _PARTS)


def read_with_images(family: Family) -> ModelConfig:
    config, own = read_text_model(family)
    names = replace(config.names, left_out=(*VISION, *_OTHERS))
    read_tower = _TOWERS.get(config.architecture)
    vision = None if read_tower is None else read_tower(family.whole, own)
    return replace(config, names=names, vision=vision)


def read_text_model(
    family: Family,
    usual: Mapping[str, Any] | None = None,
) -> tuple[ModelConfig, Fields]:
    """Reads the language model of a model that takes images: its configuration, and the fields of
    `text_config` with their defaults, which are `usual`; None: those of its model type. Raises
    ModelError if a field is malformed, or its value is not supported.
    """
    whole, raw = family.whole, family.raw
    text = whole.section("text_config")
    kind = text.text("model_type", "llama")
    if kind not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise whole.error("text_config.model_type", f"{kind!r} is not supported ({known} are)")
    given = {name: value for name, value in raw.items() if name != "text_config"}
    usual = _USUAL.get(kind, {}) if usual is None else usual
    own = {**usual, **given, **{name: text.get(name) for name in text}}
    own["tie_word_embeddings"] = _is_tied(whole, text)
    own["architectures"] = raw["architectures"]
    text_family = family.replaced(own)
    config = _READERS[kind](text_family)
    names = replace(
        config.names,
        bodies=("model.language_model", "language_model.model", "model.text_model", "model"),
        heads=IMAGE_HEADS,
    )
    return replace(config, names=names), text_family.whole


def _is_tied(whole: Fields, text: Fields) -> bool:
    default = whole.get("architectures")[0].startswith(_TIED)
    name = "tie_word_embeddings"
    return whole.flag(name, default) or text.flag(name, False)
