"""The `config.json` of an EAGLE-1 or EAGLE-2 head, checked against its target.

Pure Python, as `weft.engine.checkpoint.config`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.engine.checkpoint.config import ModelConfig, read_json_file
from weft.engine.checkpoint.draft_config import HeadKind, check_layer, check_sizes, kind_of
from weft.engine.checkpoint.fields import Fields
from weft.engine.checkpoint.rope import RopeConfig, rope_config, rope_values


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shape and arithmetic of a head (Li et al. 2024, EAGLE and EAGLE-2)."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig

    @classmethod
    def load(cls, draft_dir: Path) -> EagleConfig:
        """Reads `config.json` of a directory.

        Raises:
            ModelError: The file is missing or malformed, or of a head that is not supported; the
                message names the field.
        """
        fields = eagle_fields(draft_dir)
        check_layer(fields)
        hidden_size = fields.positive("hidden_size")
        num_heads = fields.positive("num_attention_heads")
        default_dim = hidden_size // num_heads if hidden_size % num_heads == 0 else None
        config = cls(
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=fields.positive("head_dim", default_dim),
            intermediate_size=fields.positive("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope_config(fields),
        )
        if config.num_heads % config.num_kv_heads:
            problem = f"{config.num_kv_heads} does not divide {config.num_heads} attention heads"
            raise fields.error("num_key_value_heads", problem)
        return config

    def check_target(self, target: ModelConfig, where: Path) -> None:
        """Refuses a target that the head was not made for; see `check_sizes`."""
        check_sizes(
            where,
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.hidden_size, target.hidden_size),
            # The head's K and V lie in the target's pages, as one more layer.
            ("num_key_value_heads", self.num_kv_heads, target.num_kv_heads),
            ("head_dim", self.head_dim, target.head_dim),
        )

    def fingerprint(self) -> bytes:
        """Canonical bytes of everything that changes drafts and their KV."""
        fields = {"kind": "eagle", **asdict(self), "rope": rope_values(self.rope)}
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def eagle_fields(draft_dir: Path) -> Fields:
    """The fields of a head's `config.json`; some keep them one level deeper, in `model`."""
    fields = Fields(read_json_file(draft_dir / "config.json"), str(draft_dir))
    return fields.section("model") if fields.get("model_type") == "eagle" else fields


def head_kind(draft_dir: Path) -> HeadKind:
    """Kind of draft head in a directory; see `kind_of`."""
    return kind_of(eagle_fields(draft_dir))
