"""The configuration of bidirectional encoders: BERT and its kin, and ModernBERT. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.checkpoint.architectures import encoder_stem
from weft.checkpoint.config import ModelConfig, num_labels
from weft.checkpoint.fields import Fields
from weft.checkpoint.pooling import ActivationName
from weft.checkpoint.rope import RopeConfig
from weft.checkpoint.rotary_encoders import (
    activation,
    read_gte,
    read_jina2,
    read_jina3,
    read_nomic,
    with_usual_names,
)

BODIES = ("bert", "roberta", "new", "gte", "nomic_bert")
"""Prefixes of the names of an encoder's tensors, in files that also contain a head."""
_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Configuration of an encoder; fields that only decoders use have neutral values."""

    is_encoder: bool = True
    activation: ActivationName = "gelu"
    norm_eps: float
    """Epsilon of layer norms."""
    num_token_types: int = 0
    """Kinds of texts in a pair that have an embedding; 0: none."""
    position_offset: int = 0
    """Row of the first position in the table of positions."""
    positions: Literal["table", "rotary", "alibi"] = "table"
    """How tokens know their positions: rows that are added to embeddings, rotated heads, or scores
    that fall with the distance (ALiBi).
    """
    is_gated: bool = False
    """Whether the feed-forward block multiplies an activated product by another product."""
    down_bias: bool = True
    """Whether the last product of the feed-forward block has a bias; `mlp_bias` decides on the
    others.
    """
    reach: int | None = None
    """Tokens to each side that local layers attend to; None: there are no local layers."""
    global_layers: tuple[int, ...] = ()
    """If there are local layers: indices of the layers that attend to all tokens."""
    local_theta: float = _LOCAL_THETA
    """Base of the rotary wavelengths of local layers."""
    norm_bias: bool = True
    classifier_bias: bool = True
    classifier_activation: ActivationName = "tanh"

    def sees_all(self, layer: int) -> bool:
        """Whether a layer attends to all tokens."""
        return self.reach is None or layer in self.global_layers


def tells_texts_apart(config: ModelConfig) -> bool:
    """Whether tokens of the second text of a pair have another embedding added."""
    return isinstance(config, EncoderConfig) and config.num_token_types > 1


def read_encoder_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """The `ConfigReader` of encoders."""
    fields = Fields(with_usual_names(raw), where)
    architecture = str(raw["architectures"][0])
    own = _READERS[encoder_stem(architecture)](fields)
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    if hidden % heads:
        raise fields.error("num_attention_heads", f"{heads} does not divide {hidden}")
    is_classifier = architecture.endswith("ForSequenceClassification")
    head: Literal["classes", "none"] = "classes" if is_classifier else "none"
    return EncoderConfig(
        architecture=architecture,
        model_type=fields.text("model_type", ""),
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.positive("intermediate_size"),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qk_norm=False,
        moe=None,
        sliding_window=None,
        eos_token_ids=(),
        bos_token_id=None,
        head=head,
        num_labels=num_labels(fields) if is_classifier else 0,
        **own,
    )


def _bert(fields: Fields) -> dict[str, Any]:
    return _classic(fields, is_roberta=False)


def _roberta(fields: Fields) -> dict[str, Any]:
    return _classic(fields, is_roberta=True)


def _classic(fields: Fields, *, is_roberta: bool) -> dict[str, Any]:
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise fields.error("position_embedding_type", f"{kind!r} is not supported")
    padding = fields.get("pad_token_id")
    offset = (1 if padding is None else int(padding)) + 1 if is_roberta else 0
    rows = fields.positive("max_position_embeddings", 512)
    return {
        "max_position_embeddings": rows - offset,
        "rope": RopeConfig(theta=1.0),
        "activation": activation(fields, "hidden_act"),
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "num_token_types": fields.positive("type_vocab_size", 2),
        "position_offset": offset,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True),
    }


def _modern(fields: Fields) -> dict[str, Any]:
    num_layers, every = (
        fields.positive("num_hidden_layers"),
        fields.positive("global_attn_every_n_layers", 3),
    )
    kinds = fields.get("layer_types")
    if kinds is None:
        layers = tuple(range(0, num_layers, every))
    else:
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    bias = fields.flag("attention_bias", False)
    return {
        "max_position_embeddings": fields.positive("max_position_embeddings", 8192),
        "rope": RopeConfig(theta=_theta(fields, "full_attention", "global", _GLOBAL_THETA)),
        "local_theta": _theta(fields, "sliding_attention", "local", _LOCAL_THETA),
        "activation": activation(fields, "hidden_activation"),
        "positions": "rotary",
        "is_gated": True,
        "norm_eps": fields.number("norm_eps", 1e-5),
        "norm_bias": fields.flag("norm_bias", False),
        "reach": fields.positive("local_attention", 128) // 2,
        "global_layers": layers,
        "qkv_bias": bias,
        "o_bias": bias,
        **dict.fromkeys(("mlp_bias", "down_bias"), fields.flag("mlp_bias", False)),
        "classifier_bias": fields.flag("classifier_bias", False),
        "classifier_activation": activation(fields, "classifier_activation"),
    }


def _theta(fields: Fields, kind: str, name: str, default: float) -> float:
    rope = fields.section("rope_parameters").section(kind)
    rope_type = rope.text("rope_type", "default")
    if rope_type != "default":
        raise rope.error("rope_type", f"{rope_type!r} is not supported")
    return rope.number("rope_theta", fields.number(f"{name}_rope_theta", default))


_READERS: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "Bert": _bert,
    "Gte": read_gte,
    "JinaBert": read_jina2,
    "JinaEmbeddingsV3": read_jina3,
    "ModernBert": _modern,
    "New": read_gte,
    "NomicBert": read_nomic,
    "Roberta": _roberta,
    "XLMRoberta": _roberta,
}
"""Readers of the fields that differ between encoders, by the first part of an architecture's
name.
"""


def is_unused_of_encoder(name: str, config: EncoderConfig) -> bool:
    """Whether a tensor has no influence on vectors: heads of the training, and counters."""
    if name.endswith(("embeddings.position_ids", "rotary_emb.inv_freq")):
        return True
    if config.head == "classes":
        return False
    heads = ("cls.", "lm_head.", "head.", "decoder.", "pooler.", "classifier.")
    prefix = next((one for one in BODIES if name.startswith(f"{one}.")), None)
    own = name if prefix is None else name.removeprefix(f"{prefix}.")
    return own.startswith(heads)
