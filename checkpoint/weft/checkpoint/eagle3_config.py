"""The `config.json` of an EAGLE-3 head, checked against the model it drafts for. Pure Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.draft_config import (
    ARCHITECTURE,
    SPECULATORS_FIELD,
    HeadConfig,
    kind_of,
    read_layer,
)
from weft.checkpoint.eagle_config import EagleConfig, head_kind
from weft.checkpoint.fields import Fields, read_json_file
from weft.contract.errors import ModelError

NUM_AUX_LAYERS = 3
_AUX_FIELD = "eagle_aux_hidden_state_layer_ids"
_LAYER_FIELD = "transformer_layer_config"
_OF_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""What transformers takes for fields that a Llama's file lacks; speculators writes no others."""


_OTHER_FORMS = {
    "norm_before_fc": "norm the target's states first",
    "fc_norm": "norm each of the target's states first",
    "norm_output": "draft on from normed states",
}
"""Flags of speculators for layers that a head here does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Shape and arithmetic of a head (Li et al. 2025, EAGLE-3)."""

    draft_vocab_size: int
    """Tokens of the target that the head can propose."""
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    """Layers of the target whose input the head reads; empty: `default_aux_layers`."""
    norms_first: bool = False
    """Whether the layer's residual is the normed state (`norm_before_residual`)."""

    @classmethod
    def load(cls, draft_dir: Path) -> Eagle3Config:
        """Reads `config.json` of a directory."""
        fields = Fields(read_json_file(draft_dir / "config.json"), str(draft_dir))
        if kind_of(fields) != "eagle3":
            raise fields.error("architectures", f"not those of EAGLE-3, such as {ARCHITECTURE}")
        for name, what in _OTHER_FORMS.items():
            if fields.flag(name, False):
                raise fields.error(name, f"heads that {what} are not supported")
        layer = read_layer(_layer_fields(fields))
        config = cls(
            **layer,
            draft_vocab_size=fields.positive("draft_vocab_size"),
            target_hidden_size=fields.positive("target_hidden_size", layer["hidden_size"]),
            aux_layers=_aux_layers(fields),
            norms_first=fields.flag("norm_before_residual", False),
        )
        if config.draft_vocab_size > config.vocab_size:
            problem = f"{config.draft_vocab_size} of a vocabulary of {config.vocab_size}"
            raise fields.error("draft_vocab_size", problem)
        return config

    def check_target(self, target: ModelConfig, where: Path) -> None:
        """Refuses a target that the head was not made for, as `HeadConfig.check_sizes` does."""
        self.check_sizes(target, where, ("target_hidden_size", self.target_hidden_size))
        bad = [layer for layer in self.layers_of(target) if not 0 <= layer < target.num_layers]
        if bad:
            raise ModelError(
                f"{where}: {_AUX_FIELD}: the head wants what enters layer {bad[0]} of a model with "
                f"{target.num_layers} layers",
                param=_AUX_FIELD,
            )

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Indices of the layers of `target` whose input the head reads, in the order of `fc`."""
        return self.aux_layers or default_aux_layers(target.num_layers)

    def fingerprint(self) -> bytes:
        """Canonical bytes of everything that changes drafts and their KV."""
        values = self.values()
        if not self.norms_first:
            del values["norms_first"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def load_head_config(draft_dir: Path) -> EagleConfig | Eagle3Config:
    """Reads `config.json` of an EAGLE head of any kind; raises the errors of
    `Eagle3Config.load`.
    """
    kind = EagleConfig if head_kind(draft_dir) == "eagle" else Eagle3Config
    return kind.load(draft_dir)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers of a target whose hidden states a head reads if its file does not say."""
    return (2, num_layers // 2, num_layers - 3)


def _layer_fields(fields: Fields) -> Fields:
    """The fields of the head's one layer, which speculators' layout has in an object of their
    own.
    """
    if SPECULATORS_FIELD not in fields:
        return fields
    section = fields.section(_LAYER_FIELD)
    own = section.replaced(**{k: v for k, v in _OF_LLAMA.items() if k not in section})
    if own.get("model_type") != "llama":
        raise fields.error(_LAYER_FIELD, f"layers of {own.get('model_type')!r} are not supported")
    return own


def _aux_layers(fields: Fields) -> tuple[int, ...]:
    """vLLM's field names the layers that the states enter. The field in `eagle_config`, as SGLang
    and TensorRT-LLM read it, names the layers that they leave.
    """
    entered = fields.indices(_AUX_FIELD)
    left = fields.section("eagle_config").indices(_AUX_FIELD)
    layers = entered or tuple(layer + 1 for layer in left)
    if len(layers) not in (0, NUM_AUX_LAYERS):
        raise fields.error(_AUX_FIELD, f"expected {NUM_AUX_LAYERS} layers, got {len(layers)}")
    return layers
