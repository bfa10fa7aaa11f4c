"""Readers of the towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5. Pure Python."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import NamedTuple

from weft.checkpoint.fields import Fields
from weft.checkpoint.parts import NormConfig
from weft.checkpoint.vision_config import (
    NUM_AXES,
    NUM_CHANNELS,
    AxesConfig,
    AxialRopeConfig,
    MergerConfig,
    PatchWindowsConfig,
    PixelsConfig,
    TapsConfig,
    VisionConfig,
    VisionNamesConfig,
    VitConfig,
    activation_of,
    image_token,
)

_EPS = 1e-6
"""Of all norms of these towers; configurations do not say it."""
_MAX_PIXELS = 28 * 28 * 1280
"""Of Qwen2-VL's image processor, whose file replaces it."""
CLIP_PIXELS = PixelsConfig(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
_NAMES = VisionNamesConfig(
    towers=("model.visual", "visual"),
    connectors=("model.visual.merger", "visual.merger"),
    patches="patch_embed.proj",
    positions="pos_embed",
    layers="blocks",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    o="attn.proj",
    mlp_norm="norm2",
    up="mlp.linear_fc1",
    down="mlp.linear_fc2",
    last_norm="",
    connector_norm="norm",
    connector_up="linear_fc1",
    projection="linear_fc2",
    taps="deepstack_merger_list",
)
_NAMES_2_5 = VisionNamesConfig(
    towers=_NAMES.towers,
    connectors=_NAMES.connectors,
    patches=_NAMES.patches,
    positions="",
    layers="blocks",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    o="attn.proj",
    mlp_norm="norm2",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    last_norm="",
    connector_norm="ln_q",
    connector_up="mlp.0",
    projection="mlp.2",
)


_NAMES_2 = replace(_NAMES_2_5, gate="", up="mlp.fc1", down="mlp.fc2")


class TextOfVision(NamedTuple):
    """What a tower's reader needs of its language model."""

    fields: Fields
    hidden_size: int
    num_layers: int
    num_pairs: int
    """Rotated pairs of a head."""
    usual_sections: tuple[int, ...]
    """`mrope_section` where the file has none."""


def read_qwen2_vision(whole: Fields, text: TextOfVision) -> VisionConfig | None:
    """The tower of Qwen2-VL; None: the file describes none. Raises ModelError if a field is
    malformed or not supported.
    """
    if "vision_config" not in whole:
        return None
    vision = whole.section("vision_config")
    norm = NormConfig(eps=_EPS, kind="layer", has_bias=True)
    usual = VitConfig(
        image_size=0,
        patch_size=14,
        hidden_size=1280,
        num_layers=32,
        num_heads=16,
        intermediate_size=5120,
        activation="quick_gelu",
        norm=norm,
        positions="none",
        has_patch_bias=False,
    )
    vit = _vit(vision, usual, width="embed_dim")
    inner = vit.hidden_size * vision.positive("mlp_ratio", 4)
    return VisionConfig(
        vit=replace(vit, intermediate_size=inner),
        # Here this field is the width of what comes out.
        connector=_merger(vision, text, norm, width="hidden_size"),
        image_token_id=_placeholder(whole, text),
        pixels=CLIP_PIXELS,
        names=_NAMES_2,
        axes=_whole_axes(text),
        max_pixels=_MAX_PIXELS,
    )


def read_qwen2_5_vision(whole: Fields, text: TextOfVision) -> VisionConfig | None:
    """The tower of Qwen2.5-VL; None: the file describes none. Raises ModelError if a field is
    malformed or not supported.
    """
    if "vision_config" not in whole:
        return None
    vision, norm = whole.section("vision_config"), NormConfig(eps=_EPS)
    vit = _vit(
        vision,
        VitConfig(
            image_size=0,
            patch_size=14,
            hidden_size=3584,
            num_layers=32,
            num_heads=16,
            intermediate_size=3420,
            activation="silu",
            norm=norm,
            positions="none",
            has_patch_bias=False,
            is_gated=True,
        ),
    )
    connector = _merger(vision, text, norm)
    side = vision.positive("window_size", 112) // connector.factor // vit.patch_size
    if not side:
        raise vision.error("window_size", f"is smaller than what becomes a row, {connector.factor}")
    windows = PatchWindowsConfig(
        side=side * connector.factor,
        full_layers=vision.indices("fullatt_block_indexes") or (7, 15, 23, 31),
    )
    return VisionConfig(
        vit=replace(vit, windows=windows),
        connector=connector,
        image_token_id=_placeholder(whole, text),
        pixels=CLIP_PIXELS,
        names=_NAMES_2_5,
        axes=_whole_axes(text),
        max_pixels=_MAX_PIXELS,
    )


def read_qwen3_vision(whole: Fields, text: TextOfVision) -> VisionConfig | None:
    """The tower of Qwen3-VL, and that of Qwen3.5, which has no taps; None: the file describes none.
    Raises ModelError if a field is malformed or not supported.
    """
    if "vision_config" not in whole:
        return None
    vision = whole.section("vision_config")
    norm = NormConfig(eps=_EPS, kind="layer", has_bias=True)
    count = vision.positive("num_position_embeddings", 2304)
    side = isqrt(count)
    if side**2 != count:
        raise vision.error("num_position_embeddings", f"{count} is no square")
    vit = _vit(
        vision,
        VitConfig(
            image_size=0,
            patch_size=16,
            hidden_size=1152,
            num_layers=27,
            num_heads=16,
            intermediate_size=4304,
            activation="gelu_tanh",
            norm=norm,
            positions="interpolated",
        ),
    )
    return VisionConfig(
        vit=replace(vit, image_size=side * vit.patch_size),
        connector=_merger(vision, text, norm),
        image_token_id=_placeholder(whole, text),
        pixels=CLIP_PIXELS,
        names=_NAMES,
        taps=_taps(vision, text, vit, norm),
        axes=replace(axes_of(text), is_interleaved=True),
        max_pixels=_MAX_PIXELS,
    )


def _placeholder(whole: Fields, text: TextOfVision) -> int:
    return image_token(whole, "image_token_id", 151_655, text.fields.positive("vocab_size"))


def _vit(vision: Fields, usual: VitConfig, width: str = "hidden_size") -> VitConfig:
    """The transformer's sizes, which by default are transformers'; the field `width` has its
    own.
    """
    channels = vision.positive("in_channels", vision.positive("in_chans", NUM_CHANNELS))
    if channels != NUM_CHANNELS:
        raise vision.error("in_channels", f"only {NUM_CHANNELS} are supported, not {channels}")
    rope = vision.section("rope_parameters")
    if rope.text("rope_type", "axial") not in ("axial", "default"):
        raise vision.error("rope_parameters", "only axial rotations are supported")
    activation = usual.activation
    if "hidden_act" in vision:
        activation = activation_of(vision, "")
    vit = replace(
        usual,
        patch_size=vision.positive("patch_size", usual.patch_size),
        hidden_size=vision.positive(width, usual.hidden_size),
        num_layers=vision.positive("depth", usual.num_layers),
        num_heads=vision.positive("num_heads", usual.num_heads),
        intermediate_size=vision.positive("intermediate_size", usual.intermediate_size),
        activation=activation,
        frames=vision.positive("temporal_patch_size", 2),
        rope=AxialRopeConfig(theta=rope.number("rope_theta", 10_000.0)),
    )
    # Rotations by rows and by columns each turn half of a head's pairs.
    if vit.hidden_size % (4 * vit.num_heads):
        raise vision.error(
            "num_heads",
            f"{vit.num_heads} heads of 4 elements or a multiple do not divide {vit.hidden_size}",
        )
    return vit


def _merger(
    vision: Fields, text: TextOfVision, norm: NormConfig, width: str = "out_hidden_size"
) -> MergerConfig:
    out = vision.positive(width, 3584)
    if out != text.hidden_size:
        raise vision.error(width, f"{out} is not the text's width {text.hidden_size}")
    factor = vision.positive("spatial_merge_size", 2)
    return MergerConfig(factor=factor, out_features=out, norm=norm)


def _taps(
    vision: Fields, text: TextOfVision, vit: VitConfig, norm: NormConfig
) -> TapsConfig | None:
    name = "deepstack_visual_indexes"
    layers = vision.indices(name)
    if not layers:
        return None
    if list(layers) != sorted(set(layers)) or layers[-1] >= vit.num_layers:
        told = f"expected rising numbers of layers below {vit.num_layers}, not {list(layers)}"
        raise vision.error(name, told)
    if len(layers) > text.num_layers:
        raise vision.error(name, f"are more than the text's {text.num_layers} layers")
    connector = replace(_merger(vision, text, norm), is_norm_of_square=True)
    return TapsConfig(layers=layers, connector=connector)


def _whole_axes(text: TextOfVision) -> AxesConfig:
    """Axes that turn all pairs of a head between them."""
    axes = axes_of(text)
    if sum(axes.sections) != text.num_pairs:
        told = f"{list(axes.sections)} are not {text.num_pairs} pairs together"
        raise text.fields.error("mrope_section", told)
    return axes


def axes_of(text: TextOfVision) -> AxesConfig:
    """`mrope_section`. Raises ModelError if it is malformed."""
    name = next((n for n in ("rope_parameters", "rope_scaling") if text.fields.get(n)), "")
    sections = text.fields.section(name).indices("mrope_section") or text.usual_sections
    if len(sections) != NUM_AXES:
        raise text.fields.error(f"{name}.mrope_section", f"expected {NUM_AXES} numbers")
    time, rows, columns = sections
    return AxesConfig(sections=(time, rows, columns))
