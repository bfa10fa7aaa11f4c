"""Families whose layers are Llama's except for some numbers: Seed-OSS, ERNIE 4.5, InternLM3,
SmolLM3, Ministral, Arcee, MiMo, Helium, Apertus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig, SlidingWindow
from weft.checkpoint.families.deepseek import read_mistral4
from weft.checkpoint.families.family import FULL, SLIDING, Family, mistral_names
from weft.checkpoint.mtp_config import MtpConfig, mimo_head
from weft.checkpoint.parts import AttentionConfig, HeadNormConfig, MlpConfig, NamesConfig
from weft.checkpoint.pixtral_vision import read_mistral3_vision
from weft.checkpoint.rope import RopeConfig


def read_llama(family: Family) -> ModelConfig:
    """Llama and Mistral as the text model of other models."""
    fields, bias = family.fields, family.fields.flag("attention_bias", False)
    is_mistral = fields.get("model_type") == "mistral"
    if not is_mistral:
        _check_no_window(family)
    return _alike(
        family,
        family.head_dim(),
        family.rope(),
        {"qkv_bias": bias, "o_bias": bias},
        mlp=_gated(family, fields.flag("mlp_bias", False)),
        window=_window(family) if is_mistral else None,
        kv_heads=8 if is_mistral else None,
    )


def read_qwen2(family: Family) -> ModelConfig:
    """Qwen2 as the text model of other models."""
    family.only("use_sliding_window", False)
    _check_no_window(family)
    return _alike(family, family.head_dim(), family.rope(), {"qkv_bias": True})


def read_qwen3(family: Family) -> ModelConfig:
    """Qwen3 as the text model of other models."""
    family.only("use_sliding_window", False)
    bias, norms = family.fields.flag("attention_bias", False), HeadNormConfig(norm=family.rms())
    attention = {"qkv_bias": bias, "o_bias": bias, "head_norm": norms}
    _check_no_window(family)
    return _alike(family, family.head_dim(128), family.rope(), attention)


def read_seed_oss(family: Family) -> ModelConfig:
    """Seed-OSS: only q, k and v have biases."""
    biases = {
        "qkv_bias": family.fields.flag("attention_bias", True),
        "o_bias": family.fields.flag("attention_out_bias", False),
    }
    bias = family.fields.flag("mlp_bias", False)
    return _alike(
        family, family.head_dim(128), family.rope(), biases, mlp=_gated(family, bias), kv_heads=8
    )


def read_ernie(family: Family) -> ModelConfig:
    """ERNIE 4.5, dense: rotates adjacent pairs."""
    bias = family.fields.flag("use_bias", False)
    rope = family.rope(theta=500_000.0, is_interleaved=True)
    biases = {"qkv_bias": bias, "o_bias": bias}
    dim = family.head_dim(128)
    return _alike(
        family, dim, rope, biases, mlp=_gated(family, bias), eps=1e-5, is_tied=True, kv_heads=2
    )


def read_internlm3(family: Family) -> ModelConfig:
    bias = family.fields.flag("bias", family.fields.flag("mlp_bias", False))
    qkv_bias = family.fields.flag("qkv_bias", family.fields.flag("attention_bias", False))
    biases = {"qkv_bias": qkv_bias, "o_bias": bias}
    dim = family.head_dim(128)
    return _alike(
        family, dim, family.rope(), biases, mlp=_gated(family, bias), eps=1e-5, kv_heads=2
    )


def read_smollm3(family: Family) -> ModelConfig:
    """SmolLM3: every fourth layer does not rotate."""
    fields, rotates = family.fields, family.rotated_layers()
    has_window = fields.flag("use_sliding_window", False) and "sliding_window" in fields
    kinds = family.kinds(lambda layer: SLIDING if has_window and not rotates[layer] else FULL)
    dim = family.head_dim()
    rope = family.rope(theta=2_000_000.0)
    layers = tuple(
        family.attention(rope if is_rotated else None, dim**-0.5) for is_rotated in rotates
    )
    decoder = family.decoder(
        layers, mlp=MlpConfig(activation=family.activation(), bias=fields.flag("mlp_bias", False))
    )
    window = family.window(kinds) if has_window else None
    return family.config(decoder, head_dim=dim, window=window, is_tied=True, kv_heads=4)


def read_arcee(family: Family) -> ModelConfig:
    """Arcee's AFM: an MLP of squared ReLU without gate."""
    fields, bias = family.fields, family.fields.flag("attention_bias", False)
    mlp = MlpConfig(
        activation=family.activation("relu2"), is_gated=False, bias=fields.flag("mlp_bias", False)
    )
    biases = {"qkv_bias": bias, "o_bias": bias}
    return _alike(family, family.head_dim(), family.rope(), biases, mlp=mlp, eps=1e-5)


def read_apertus(family: Family) -> ModelConfig:
    """Apertus (arXiv 2509.14233): an MLP of xIELU without gate."""
    fields, bias = family.fields, family.fields.flag("attention_bias", False)
    if not (fields.get("rope_parameters") or fields.get("rope_scaling")):
        raise fields.error("rope_parameters", "is missing")
    for name, value in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
        family.only(name, value)
    has_xielu = fields.text("hidden_act", "xielu") == "xielu"
    mlp = MlpConfig(
        activation="silu" if has_xielu else family.activation(),
        is_gated=False,
        has_xielu=has_xielu,
    )
    norms = HeadNormConfig(norm=family.rms(eps=1e-5))
    attention = {"qkv_bias": bias, "o_bias": bias, "head_norm": norms}
    names = NamesConfig(input_norm="attention_layernorm", feed_norm="feedforward_layernorm")
    rope = family.rope(theta=12e6)
    return _alike(family, family.head_dim(), rope, attention, mlp=mlp, eps=1e-5, names=names)


def read_cwm(family: Family) -> ModelConfig:
    """CWM: windows in three of four layers."""
    kinds = family.kinds(lambda layer: SLIDING if layer % 4 else FULL)
    dim, rope = family.head_dim(128), family.rope(theta=1e6)
    window = family.window(kinds, 8192)
    return _alike(family, dim, rope, window=window, eps=1e-5, kv_heads=8)


def read_helium(family: Family) -> ModelConfig:
    """Helium: rotates adjacent pairs."""
    bias = family.fields.flag("attention_bias", False)
    rope = family.rope(theta=1e5, is_interleaved=True)
    mlp = _gated(family, family.fields.flag("mlp_bias", False))
    # Its output projection has no bias in any case.
    return _alike(family, family.head_dim(128), rope, {"qkv_bias": bias}, mlp=mlp, eps=1e-8)


def read_ministral(family: Family) -> ModelConfig:
    """Ministral (8B, 2410): windows by layer."""
    return _alike(family, family.head_dim(), family.rope(), window=_window(family), kv_heads=8)


def read_mimo(family: Family) -> ModelConfig:
    """MiMo-7B (arXiv 2505.07608): Qwen2's layers, and an MTP head."""
    family.only("use_sliding_window", False)
    biases = {"qkv_bias": family.fields.flag("attention_bias", True)}
    names, dim = NamesConfig(left_out=("model.mtp_layers.",)), family.head_dim()
    return _alike(
        family, dim, family.rope(), biases, names=names, eps=1e-5, kv_heads=8, mtp=mimo_head()
    )


def read_mistral3(family: Family) -> ModelConfig:
    """Mistral Small 3.1 and 3.2, and Ministral 3, text. In the newer ones q grows with the position
    after the original context.
    """
    family = family.of_text()
    fields = family.fields
    if fields.get("model_type") == "mistral4":
        return _with_pixtral(read_mistral4(family), family)
    kind = fields.text("model_type", "mistral")
    if kind not in ("mistral", "ministral3"):
        raise fields.error("model_type", f"{kind!r} is not supported")
    is_ministral = kind == "ministral3"
    if is_ministral and not (fields.get("rope_parameters") or fields.get("rope_scaling")):
        raise fields.error("rope_parameters", "is missing")
    # Files in Mistral's own layout are for adjacent pairs.
    rope = family.rope(is_interleaved=fields.flag("rope_interleave", False))
    kinds = family.kinds(lambda layer: SLIDING if "sliding_window" in fields else FULL)
    config = _alike(
        family,
        family.head_dim(128 if is_ministral else None),
        rope,
        {"llama4_query_scale": family.llama4_query_scale()},
        window=family.window(kinds) if is_ministral else _window(family),
        names=mistral_names(),
        eps=1e-5 if is_ministral else 1e-6,
        kv_heads=8,
        is_tied=False,
    )
    return _with_pixtral(config, family)


def _with_pixtral(config: ModelConfig, family: Family) -> ModelConfig:
    if config.architecture != "Mistral3ForConditionalGeneration":
        return config
    sizes = config.hidden_size, config.vocab_size
    eps = family.rms().eps
    return replace(config, vision=read_mistral3_vision(family.whole, *sizes, eps))


def _window(family: Family) -> SlidingWindow | None:
    """A window of 4096 if the file has no such field; null means none."""
    fields = family.fields
    if "sliding_window" in list(fields) and "sliding_window" not in fields:
        _check_no_window(family)
        return None
    return family.window(family.kinds(lambda layer: SLIDING), 4096)


def _check_no_window(family: Family) -> None:
    if SLIDING in family.kinds(lambda layer: FULL):
        raise family.fields.error("layer_types", "a window is listed, but the model has none")


def _gated(family: Family, bias: bool) -> MlpConfig:
    return MlpConfig(activation=family.activation(), bias=bias)


def _alike(
    family: Family,
    dim: int,
    rope: RopeConfig,
    attention: Mapping[str, Any] | None = None,
    *,
    mlp: MlpConfig | None = None,
    eps: float = 1e-6,
    window: SlidingWindow | None = None,
    names: NamesConfig | None = None,
    is_tied: bool = False,
    kv_heads: int | None = None,
    mtp: MtpConfig | None = None,
) -> ModelConfig:
    layer = AttentionConfig(rope=rope, scale=dim**-0.5, **(attention or {}))
    decoder = family.decoder(layer, family.rms(eps=eps), mlp=mlp or _gated(family, False))
    return family.config(
        decoder, head_dim=dim, window=window, names=names, is_tied=is_tied, kv_heads=kv_heads,
        mtp=mtp,
    )  # fmt: skip
