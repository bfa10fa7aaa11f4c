"""Qwen2-VL, 2.5-VL and 3-VL: Qwen's layers. Positions of text are the same along
all axes of the rotation, so that its sections have an effect on images alone.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import Family
from weft.checkpoint.moe_config import MoENamesConfig, qwen_experts
from weft.checkpoint.parts import AttentionConfig, HeadNormConfig, NamesConfig
from weft.checkpoint.qwen_vision import (
    TextOfVision,
    read_qwen2_5_vision,
    read_qwen2_vision,
    read_qwen3_vision,
)
from weft.checkpoint.rope import RopeConfig

_NAMES = NamesConfig(
    bodies=("model.language_model", "model"), left_out=("visual.", "model.visual.")
)


def read_qwen2_vl(family: Family) -> ModelConfig:
    """Qwen2-VL and Qwen2.5-VL."""
    family = family.of_text()
    family.only("use_sliding_window", False)
    dim = family.head_dim()
    layer = AttentionConfig(rope=_rope(family, 1e6), scale=dim**-0.5, qkv_bias=True)
    config = _config(family, layer, dim, eps=1e-5)
    text = _text_of(family, dim, (16, 24, 24))
    has_windows = config.architecture == "Qwen2_5_VLForConditionalGeneration"
    read_vision = read_qwen2_5_vision if has_windows else read_qwen2_vision
    return replace(config, vision=read_vision(family.whole, text))


def read_qwen3_vl(family: Family) -> ModelConfig:
    """Qwen3-VL, dense."""
    family = family.of_text()
    dim = family.head_dim(128)
    layer = replace(
        family.attention(_rope(family, 5e6), dim**-0.5), head_norm=HeadNormConfig(norm=family.rms())
    )
    config = _config(family, layer, dim, eps=1e-6)
    text = _text_of(family, dim, (24, 20, 20))
    return replace(config, vision=read_qwen3_vision(family.whole, text))


def read_qwen3_vl_moe(family: Family) -> ModelConfig:
    """Qwen3-VL with experts, which its files keep as columns."""
    config = read_qwen3_vl(family)
    family = family.of_text()
    names = replace(config.names, moe=MoENamesConfig(is_transposed=True))
    return replace(config, names=names, moe=qwen_experts(family.fields))


def _text_of(family: Family, dim: int, sections: tuple[int, ...]) -> TextOfVision:
    sizes = family.hidden_size, family.num_layers, dim // 2
    return TextOfVision(family.fields, *sizes, sections)


def _rope(family: Family, theta: float) -> RopeConfig:
    name = next((n for n in ("rope_parameters", "rope_scaling") if family.fields.get(n)), "")
    values = family.fields.section(name)
    if values.text("rope_type", values.text("type", "default")) not in ("default", "mrope"):
        raise family.fields.error(name, "only default and mrope are supported")
    return RopeConfig(theta=values.number("rope_theta", family.fields.number("rope_theta", theta)))


def _config(family: Family, layer: AttentionConfig, dim: int, eps: float) -> ModelConfig:
    decoder = family.decoder(layer, family.rms(eps=eps))
    return family.config(decoder, head_dim=dim, names=_NAMES)
