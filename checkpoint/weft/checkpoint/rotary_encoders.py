"""Configurations of encoders like BERT with rotated heads or ALiBi: GTE, Nomic BERT, Jina. Pure
Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.fields import Fields
from weft.checkpoint.pooling import ActivationName
from weft.checkpoint.rope import RopeConfig, rope_config

_ACTIVATIONS: Mapping[str, ActivationName] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
}
_USUAL = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}
"""GPT-2's names of fields, which Nomic's first files use."""
_NTK = "ntk"


def with_usual_names(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json in which fields with GPT-2's names also have BERT's."""
    return {**{usual: raw[own] for own, usual in _USUAL.items() if own in raw}, **raw}


def activation(fields: Fields, name: str) -> ActivationName:
    """The activation that a field names."""
    given = fields.text(name, "gelu")
    found = _ACTIVATIONS.get(given)
    if found is None:
        raise fields.error(name, f"{given!r} is not supported")
    return found


def read_gte(fields: Fields) -> dict[str, Any]:
    """GTE (arXiv 2407.19669), in the layout of transformers or of its authors' files ("new")."""
    _only(fields, position_embedding_type="rope", layer_norm_type="layer_norm")
    _only(fields, logn_attention_scale=False)
    rope = _gte_rope(fields)
    return {**_rotary(fields, rope, 1e-12), **_biases(qkv=True, up=False, down=True)}


def read_nomic(fields: Fields) -> dict[str, Any]:
    """Nomic BERT (arXiv 2402.01613); contexts end where its training did."""
    _only(fields, prenorm=False, rotary_emb_interleaved=False, use_rms_norm=False)
    _only(fields, rotary_emb_fraction=1.0)
    for name in ("num_experts", "moe_every_n_layers"):
        if fields.get(name):
            raise fields.error(name, "experts are not supported")
    has_bias = {
        name: fields.flag(field, False)
        for name, field in (
            ("qkv", "qkv_proj_bias"),
            ("up", "mlp_fc1_bias"),
            ("down", "mlp_fc2_bias"),
        )
    }
    rope = rope_config(fields, theta=1000.0)
    return {**_rotary(fields, rope, 1e-12, "silu"), **_biases(**has_bias)}


def read_jina3(fields: Fields) -> dict[str, Any]:
    """Jina embeddings v3 (arXiv 2409.10173) without the adapters of its tasks."""
    rope = rope_config(fields, theta=20_000.0)
    return {
        **_rotary(fields, rope, 1e-5),
        "is_gated": False,
        **_biases(qkv=True, up=True, down=True),
    }


def read_jina2(fields: Fields) -> dict[str, Any]:
    """Jina embeddings v2 (arXiv 2310.19923)."""
    _only(fields, position_embedding_type="alibi")
    kind = fields.text("feed_forward_type", "geglu")
    if kind not in ("geglu", "reglu"):
        raise fields.error("feed_forward_type", f"{kind!r} is not supported")
    parts = _rotary(fields, RopeConfig(theta=1.0), 1e-12)
    own = {"positions": "alibi", "activation": "relu" if kind == "reglu" else "gelu"}
    return {**parts, **own, **_biases(qkv=True, up=False, down=True)}


def _rotary(fields: Fields, rope: RopeConfig, eps: float, default: str = "gelu") -> dict[str, Any]:
    has_own = "hidden_act" in fields
    return {
        "max_position_embeddings": fields.positive("max_position_embeddings"),
        "rope": rope,
        "positions": "rotary",
        "is_gated": True,
        "activation": activation(fields, "hidden_act") if has_own else _ACTIVATIONS[default],
        "norm_eps": fields.number("layer_norm_eps", eps),
        "num_token_types": fields.count("type_vocab_size", 0),
    }


def _biases(*, qkv: bool, up: bool, down: bool) -> dict[str, bool]:
    return {"qkv_bias": qkv, "o_bias": qkv, "mlp_bias": up, "down_bias": down}


def _gte_rope(fields: Fields) -> RopeConfig:
    """The authors' files may stretch the rotation by a fixed "NTK" factor: a larger base, and all
    wavelengths times factor^(2 / dim).
    """
    scaling = fields.section("rope_scaling")
    if scaling.text("type", "") != _NTK:
        return rope_config(fields, theta=160_000.0)
    if scaling.get("mixed_b") is not None:
        raise scaling.error("mixed_b", "is not supported")
    factor = scaling.number("factor")
    dim = fields.positive("hidden_size") // fields.positive("num_attention_heads")
    plain = RopeConfig(theta=fields.number("rope_theta", 10_000.0) * factor)
    return replace(plain, scaling="linear", factor=factor ** (2 / dim))


def _only(fields: Fields, **values: object) -> None:
    for name, value in values.items():
        if name in fields and fields.get(name) != value:
            raise fields.error(name, f"only {value!r} is supported")
