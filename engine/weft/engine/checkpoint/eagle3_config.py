"""The `config.json` of an EAGLE-3 head, checked against the model it drafts for.

Pure Python, as `weft.engine.checkpoint.config`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.config import ModelConfig, read_json_file
from weft.engine.checkpoint.draft_config import ARCHITECTURE, check_layer, check_sizes, kind_of
from weft.engine.checkpoint.fields import Fields
from weft.engine.checkpoint.rope import RopeConfig, rope_config, rope_values

NUM_AUX_LAYERS = 3
_AUX_FIELD = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Shape and arithmetic of a head (Li et al. 2025, EAGLE-3)."""

    vocab_size: int
    """Size of the target's vocabulary."""
    draft_vocab_size: int
    """Tokens of the target that the head can propose."""
    hidden_size: int
    """Hidden size of the head."""
    target_hidden_size: int
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    aux_layers: tuple[int, ...]
    """Layers of the target whose input the head sees; empty: `default_aux_layers`."""

    @classmethod
    def load(cls, draft_dir: Path) -> Eagle3Config:
        """Reads `config.json` of a directory.

        Raises:
            ModelError: The file is missing or malformed, or of a head that is not supported; the
                message names the field.
        """
        fields = Fields(read_json_file(draft_dir / "config.json"), str(draft_dir))
        if kind_of(fields) != "eagle3":
            raise fields.error("architectures", f"not those of EAGLE-3, such as {ARCHITECTURE}")
        check_layer(fields)
        hidden_size = fields.positive("hidden_size")
        num_heads = fields.positive("num_attention_heads")
        default_dim = hidden_size // num_heads if hidden_size % num_heads == 0 else None
        config = cls(
            vocab_size=fields.positive("vocab_size"),
            draft_vocab_size=fields.positive("draft_vocab_size"),
            hidden_size=hidden_size,
            target_hidden_size=fields.positive("target_hidden_size", hidden_size),
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=fields.positive("head_dim", default_dim),
            intermediate_size=fields.positive("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope_config(fields),
            aux_layers=_aux_layers(fields),
        )
        if config.num_heads % config.num_kv_heads:
            problem = f"{config.num_kv_heads} does not divide {config.num_heads} attention heads"
            raise fields.error("num_key_value_heads", problem)
        if config.draft_vocab_size > config.vocab_size:
            problem = f"{config.draft_vocab_size} of a vocabulary of {config.vocab_size}"
            raise fields.error("draft_vocab_size", problem)
        return config

    def check_target(self, target: ModelConfig, where: Path) -> None:
        """Refuses a target that the head was not made for.

        Args:
            target: The model that is to be drafted for.
            where: The head's directory, for the message.

        Raises:
            ModelError: Sizes differ; the message names the field and both values.
        """
        check_sizes(
            where,
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            # The head's K and V lie in the target's pages, as one more layer.
            ("num_key_value_heads", self.num_kv_heads, target.num_kv_heads),
            ("head_dim", self.head_dim, target.head_dim),
        )
        bad = [layer for layer in self.layers_of(target) if not 0 <= layer < target.num_layers]
        if bad:
            raise ModelError(
                f"{where}: {_AUX_FIELD}: the head wants what enters layer {bad[0]} of a model with "
                f"{target.num_layers} layers",
                param=_AUX_FIELD,
            )

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """The layers of `target`, from 0, whose input the head sees, in the order of `fc`."""
        return self.aux_layers or default_aux_layers(target.num_layers)

    def fingerprint(self) -> bytes:
        """Canonical bytes of everything that changes drafts and their KV."""
        values = {**asdict(self), "rope": rope_values(self.rope)}
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers of a target whose hidden states a head reads by default, if its file does not say."""
    return (2, num_layers // 2, num_layers - 3)


def _aux_layers(fields: Fields) -> tuple[int, ...]:
    """vLLM's field names the layers that the states enter; the one in `eagle_config`, as SGLang and
    TensorRT-LLM read it, those that they leave."""
    entered = fields.indices(_AUX_FIELD)
    left = fields.section("eagle_config").indices(_AUX_FIELD)
    layers = entered or tuple(layer + 1 for layer in left)
    if len(layers) not in (0, NUM_AUX_LAYERS):
        raise fields.error(_AUX_FIELD, f"expected {NUM_AUX_LAYERS} layers, got {len(layers)}")
    return layers
