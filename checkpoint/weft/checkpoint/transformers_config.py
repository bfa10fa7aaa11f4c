"""Configurations of architectures without a reader here, which transformers' own code computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.checkpoint.adapters.names import DENSE_KINDS
from weft.checkpoint.config import MAX_POSITIONS, ModelConfig
from weft.checkpoint.end_tokens import end_token_ids
from weft.checkpoint.fields import Fields
from weft.checkpoint.quantization import read_quantization
from weft.checkpoint.rope import RopeConfig
from weft.checkpoint.transformers_registry import known_to_transformers, own_class
from weft.contract.errors import ConfigError

_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
_OF_LENGTH = ("dynamic", "longrope", "su")
"""Rotations that transformers changes with the longest text of a batch."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_heads": (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
        "encoder_attention_heads",
    ),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"),
    "max_positions": (
        *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
        *("seq_length", "n_ctx", "max_seqlen"),
    ),
}
"""Names of one size in the configurations of various architectures; the first that is there
counts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """A configuration that transformers reads. Sizes here are for limits and messages; what the
    model caches is found out with the model itself.
    """

    values: str
    """config.json as canonical JSON."""
    remote_class: str = ""
    """The class in a file of the model's directory, `file.Class`, that is to be run; empty: it is
    one of transformers'.
    """
    folder: str = ""
    """The model's directory, which has that file."""
    linears: tuple[str, ...] | None = None
    """The kinds of projections that are linear modules in all layers; None: the model has not been
    loaded, which alone shows them.
    """

    @property
    def has_equal_layers(self) -> bool:
        """False: no draft head knows the layers."""
        return False

    @property
    def adapted_kinds(self) -> tuple[str, ...] | None:
        return DENSE_KINDS if self.linears is None else self.linears

    def fingerprint(self) -> bytes:
        return ModelConfig.fingerprint(replace(self, folder="", linears=None))


def check_trust(config: ModelConfig, *, trusts: bool) -> None:
    """Raises ConfigError for a model that needs code of its own directory, unless it is trusted."""
    if isinstance(config, TransformersConfig) and config.remote_class and not trusts:
        raise ConfigError(
            f"trust_remote_code: {config.architecture} is computed by {config.remote_class} of "
            f"{config.folder}, which is code that nobody has checked; read it, and give "
            "--trust-remote-code to run it with this worker's rights",
            param="trust_remote_code",
        )


def _rope_types(values: Any) -> list[Any]:
    """The kinds of rotations that an object, or the objects in it, name."""
    if not isinstance(values, Mapping):
        return []
    inner = [kind for value in values.values() for kind in _rope_types(value)]
    return [values.get("rope_type", values.get("type")), *inner]


def read_by_transformers(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> TransformersConfig:
    """Reads a configuration of any architecture, as far as Weft must know it before transformers
    does. Raises ModelError where a size is missing under all the names that are usual.
    """
    whole = Fields(raw, where)
    section = next((name for name in _TEXT_SECTIONS if isinstance(raw.get(name), Mapping)), None)
    fields = whole if section is None else whole.section(section)
    architecture = whole.get("architectures")[0]

    def size(kind: str, default: int | None = None) -> int:
        name = next((name for name in _NAMES[kind] if name in fields), _NAMES[kind][0])
        return fields.positive(name, default)

    for holder in (whole, fields):
        for name in ("rope_parameters", "rope_scaling"):
            if any(kind in _OF_LENGTH for kind in _rope_types(holder.get(name))):
                raise holder.error(name, "rotations by a text's length are not supported")
    hidden, heads = size("hidden_size"), size("num_heads")
    is_remote = architecture not in known_to_transformers()
    return TransformersConfig(
        architecture=architecture,
        model_type=whole.text("model_type", ""),
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden,
        num_layers=size("num_layers"),
        num_heads=heads,
        num_kv_heads=size("num_kv_heads", heads),
        head_dim=fields.positive("head_dim", max(2, hidden // heads)),
        intermediate_size=size("intermediate_size", 4 * hidden),
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1.0),
        max_position_embeddings=min(size("max_positions"), MAX_POSITIONS),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        moe=None,
        sliding_window=None,
        eos_token_ids=end_token_ids(raw, generation, where),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        quantization=read_quantization(whole),
        values=json.dumps(dict(raw), sort_keys=True, separators=(",", ":")),
        remote_class=own_class(raw) if is_remote else "",
        folder=where if is_remote else "",
    )
