"""Mamba 2 together with attention: Bamba, Granite 4, Falcon-H1 and Nemotron-H."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import mixtral_experts, nemotron_experts
from weft.checkpoint.families.family import FULL, LINEAR, Family
from weft.checkpoint.families.granite import shared_names
from weft.checkpoint.fields import Fields
from weft.checkpoint.moe_config import MoEConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    MixerConfig,
    MlpConfig,
    NamesConfig,
    ParallelConfig,
)
from weft.checkpoint.recurrent_config import Mamba2Config

_MAMBA, _MLP, _MOE = LINEAR, "mlp", "moe"
_KINDS = {_MAMBA: _MAMBA, "mamba": _MAMBA, FULL: FULL, "attention": FULL}
_BLOCKS = {**_KINDS, _MLP: _MLP, _MOE: _MOE}
_LETTERS = {"M": _MAMBA, "*": FULL, "-": _MLP, "E": _MOE}
_FEED_FORWARD = NamesConfig(
    recurrent="mamba",
    feeds=("feed_forward",),
    feed_norm="pre_ff_layernorm",
    last_norm="final_layernorm",
)


def read_bamba(family: Family) -> ModelConfig:
    """Bamba (its blog post, 2024): half of each head is rotated."""
    fields, norm, bias = family.fields, family.rms(eps=1e-5), _bias(family)
    attention = AttentionConfig(
        rope=family.rope(partial=0.5), scale=family.head_dim() ** -0.5, qkv_bias=bias, o_bias=bias
    )
    with_attention = fields.indices("attn_layer_indices")
    kinds = [FULL if n in with_attention else _MAMBA for n in range(family.num_layers)]
    decoder = family.decoder(
        _mixers(family, kinds, attention, _mamba(family, norm.eps)),
        norm,
        mlp=MlpConfig(activation=family.activation(), bias=fields.flag("mlp_bias", False)),
    )
    return family.config(decoder, names=_FEED_FORWARD, kv_heads=8)


def read_granite_hybrid(family: Family) -> ModelConfig:
    """Granite 4, dense and with experts in addition to a shared MLP."""
    fields, norm, bias = family.fields, family.rms(), _bias(family)
    kind = fields.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise fields.error("position_embedding_type", f"{kind!r} is not supported (rope is)")
    attention = AttentionConfig(
        rope=family.rope() if kind == "rope" else None,
        scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        o_bias=bias,
    )
    kinds = family.listed(["layer_types", "layers_block_type"], _KINDS, lambda n: _MAMBA)
    decoder = replace(
        family.decoder(_mixers(family, kinds, attention, _mamba(family, norm.eps)), norm),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )
    shared = fields.positive("shared_intermediate_size", 1024)
    moe: MoEConfig | None = None
    names = NamesConfig(
        recurrent="mamba", feeds=("shared_mlp",), gate_up="input_linear", down="output_linear"
    )
    if fields.count("num_local_experts", 8):
        moe = mixtral_experts(fields, shared_size=shared)
        names = NamesConfig(recurrent="mamba", feeds=("",), moe=shared_names())
    return family.config(decoder, names=names, moe=moe, intermediate_size=shared)


def read_falcon_h1(family: Family) -> ModelConfig:
    """Falcon-H1 (arXiv 2507.22448): attention and Mamba 2 side by side in every layer."""
    fields, norm = family.fields, family.rms(eps=1e-5)
    for name in ("attention_bias", "mamba_proj_bias"):
        # Factors on a block's input could not be moved to its products.
        family.only(name, False)
    into = fields.number("attention_in_multiplier", 1.0)
    entering = fields.number("ssm_in_multiplier", 1.0)
    z, x, b, c, dt = _numbers(fields, "ssm_multipliers", 5)
    behind = fields.flag("mamba_norm_before_gate", True)
    attention = AttentionConfig(
        rope=family.rope(),
        scale=family.head_dim() ** -0.5 * fields.number("key_multiplier", 1.0) * into**2,
    )
    layer = ParallelConfig(
        attention=attention,
        mamba=_mamba(
            family,
            norm.eps,
            inner=fields.positive("mamba_d_ssm") if "mamba_d_ssm" in fields else None,
            norm="none"
            if not fields.flag("mamba_rms_norm", False)
            else ("before gate" if behind else "behind gate"),
            out_bias=fields.flag("projectors_bias", False),
            factors=(entering * z, entering * x, entering * b, entering * c, entering * dt),
        ),
        attention_factor=fields.number("attention_out_multiplier", 1.0) * into,
        mamba_factor=fields.number("ssm_out_multiplier", 1.0),
    )
    on_gate, on_result = _numbers(fields, "mlp_multipliers", 2)
    mlp = MlpConfig(
        activation=family.activation(),
        bias=fields.flag("mlp_bias", False),
        factors=(on_gate, on_result),
    )
    decoder = replace(
        family.decoder((layer,) * family.num_layers, norm, mlp=mlp),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_multiplier=fields.number("lm_head_multiplier", 1.0),
    )
    return family.config(decoder, names=_FEED_FORWARD, kv_heads=8)


def read_nemotron_h(family: Family) -> ModelConfig:
    """Nemotron-H and Nemotron Nano 2 (arXiv 2504.03624), and Nemotron 3 with experts.

    Checkpoints number blocks. A layer here is a mixer and the MLP after it, if there is one.
    """
    fields, norm = family.fields, family.rms(eps=1e-5, name="layer_norm_epsilon")
    family.only("sliding_window", None)
    dim, bias = family.head_dim(128), fields.flag("use_bias", False)
    inner = fields.positive("mamba_num_heads", 128) * fields.positive("mamba_head_dim", 64)
    least, largest = _step_bounds(fields)
    mamba = Mamba2Config(
        heads=fields.positive("mamba_num_heads", 128),
        head_dim=fields.positive("mamba_head_dim", 64),
        groups=fields.positive("n_groups", 8),
        state_size=fields.positive("ssm_state_size", 128),
        taps=fields.positive("conv_kernel", 4),
        eps=norm.eps,
        conv_bias=fields.flag("use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        least_step=least,
        largest_step=largest,
    )
    _check_mamba(family, mamba, inner)
    attention = AttentionConfig(rope=None, scale=dim**-0.5)
    kinds, blocks, feeds = _paired(family)
    if fields.text("mlp_hidden_act", "relu2") != "relu2":
        raise fields.error("mlp_hidden_act", "only relu2 is supported")
    moe = None
    if _MOE in feeds:
        dense = tuple(n for n, feed in enumerate(feeds) if feed != _MOE)
        moe = nemotron_experts(fields, dense)
    decoder = replace(
        family.decoder(
            _mixers(family, kinds, attention, mamba),
            norm,
            mlp=MlpConfig(activation="relu2", is_gated=False, bias=fields.flag("mlp_bias", False)),
        ),
        without_feed=tuple(n for n, feed in enumerate(feeds) if not feed),
    )
    names = NamesConfig(
        bodies=("backbone", "model"),
        left_out=("mtp.",),
        input_norm="norm",
        feed_norm="norm",
        last_norm="norm_f",
        embedding="embeddings",
        attention="mixer",
        recurrent="mixer",
        feeds=("mixer",),
        blocks=blocks,
    )
    return family.config(decoder, head_dim=dim, names=names, kv_heads=8, moe=moe)


def _paired(family: Family) -> tuple[list[str], tuple[tuple[int, int | None], ...], list[str]]:
    """The kind of each layer's mixer, the numbers of its blocks, and the kind of its feed-forward
    block, empty if it has none.
    """
    fields, pattern = family.fields, family.fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set(_LETTERS):
        listed: Sequence[str] = [_LETTERS[letter] for letter in pattern]
    elif pattern is None:
        listed = family.listed(["layers_block_type", "layer_types"], _BLOCKS, lambda n: "")
    else:
        raise fields.error("hybrid_override_pattern", "expected the letters M, *, - and E")
    kinds: list[str] = []
    blocks: list[tuple[int, int | None]] = []
    feeds: list[str] = []
    for number, kind in enumerate(listed):
        if kind not in (_MLP, _MOE):
            kinds.append(kind)
            blocks.append((number, None))
            feeds.append("")
        elif not blocks or feeds[-1]:
            raise fields.error("layers_block_type", "an MLP without a mixer is not supported")
        else:
            blocks[-1] = (blocks[-1][0], number)
            feeds[-1] = kind
    return kinds, tuple(blocks), feeds


def _mixers(
    family: Family, kinds: Sequence[str], attention: AttentionConfig, mamba: Mamba2Config
) -> tuple[MixerConfig, ...]:
    if FULL not in kinds or _MAMBA not in kinds:
        raise family.fields.error("layer_types", "expected layers with and without attention")
    return tuple(attention if kind == FULL else mamba for kind in kinds)


def _mamba(
    family: Family,
    eps: float,
    *,
    inner: int | None = None,
    norm: Literal["behind gate", "before gate", "none"] = "behind gate",
    out_bias: bool | None = None,
    factors: tuple[float, float, float, float, float] = (1.0,) * 5,
) -> Mamba2Config:
    fields, bias = family.fields, family.fields.flag("mamba_proj_bias", False)
    if inner is None:
        inner = fields.positive("mamba_expand", 2) * family.hidden_size
    heads = fields.positive("mamba_n_heads", 128)
    is_auto = fields.get("mamba_d_head") in (None, "auto")
    least, largest = _step_bounds(fields)
    config = Mamba2Config(
        heads=heads,
        head_dim=inner // heads if is_auto else fields.positive("mamba_d_head"),
        groups=fields.positive("mamba_n_groups", 1),
        state_size=fields.positive("mamba_d_state", 256),
        taps=fields.positive("mamba_d_conv", 4),
        eps=eps,
        norm=norm,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        out_bias=bias if out_bias is None else out_bias,
        least_step=least,
        largest_step=largest,
        factors=factors,
    )
    _check_mamba(family, config, inner)
    return config


def _check_mamba(family: Family, config: Mamba2Config, inner: int) -> None:
    if config.heads * config.head_dim != inner or config.heads % config.groups:
        raise family.fields.error(
            "mamba_n_heads",
            f"{config.heads} heads of {config.head_dim} in {config.groups} groups do not make "
            f"{inner} columns",
        )
    if family.fields.text("mamba_hidden_act", family.fields.text("hidden_act", "silu")) != "silu":
        raise family.fields.error("hidden_act", "only silu is supported with Mamba 2")


def _bias(family: Family) -> bool:
    return family.fields.flag("attention_bias", False)


def _numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    found = fields.get(name)
    if found is None:
        return (1.0,) * count
    are_numbers = isinstance(found, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in found
    )
    if not are_numbers or len(found) != count:
        raise fields.error(name, f"expected {count} numbers, got {found!r}")
    return tuple(map(float, found))


def _step_bounds(fields: Fields) -> tuple[float, float | None]:
    """None: no upper bound. `time_step_min`, `time_step_max` and `time_step_floor` are ranges of
    the initialisation.
    """
    found = fields.get("time_step_limit")
    if found is None:
        return 0.0, None
    if isinstance(found, list) and len(found) == 2 and isinstance(found[0], int | float):
        least, largest = float(found[0]), found[1]
        # transformers writes infinity as an object, since JSON has no literal for it.
        if isinstance(largest, dict) or largest == float("inf"):
            return least, None
        if isinstance(largest, int | float) and largest > least >= 0.0:
            return least, float(largest)
    raise fields.error("time_step_limit", f"expected two numbers, got {found!r}")
