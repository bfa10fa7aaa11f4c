"""Reads the `config.json` fields that all draft heads have in common. Pure Python."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.digest import cached_file_digests, combine
from weft.checkpoint.fields import Fields
from weft.checkpoint.files import weight_files
from weft.checkpoint.rope import RopeConfig, rope_config, rope_values
from weft.contract.errors import ModelError

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Architecture name of EAGLE-3 heads."""
EAGLE_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
"""Architecture names of EAGLE-1 and EAGLE-2 heads, as their authors and other servers write
them.
"""

SPECULATORS_FIELD = "speculators_model_type"
"""Field of a config.json in the layout of the library speculators, which names the kind of head."""

HeadKind = Literal["eagle", "eagle3", "mtp"]
"""EAGLE-1 and EAGLE-2 heads are alike; they differ only in how trees are drafted. mtp: a head that
the target's own checkpoint contains.
"""


def kind_of(fields: Fields) -> HeadKind:
    """Kind of draft head that a `config.json` describes."""
    kind = fields.get(SPECULATORS_FIELD)
    if kind == "eagle3":
        return "eagle3"
    if kind is not None:
        raise fields.error(SPECULATORS_FIELD, f"{kind!r} is not supported, only eagle3")
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    # The authors of EAGLE-3 wrote the name of an ordinary model, and their new field.
    if name == ARCHITECTURE or (name == EAGLE_ARCHITECTURES[0] and "draft_vocab_size" in fields):
        return "eagle3"
    if name in EAGLE_ARCHITECTURES:
        return "eagle"
    raise fields.error(
        "architectures",
        f"{name!r} is no draft head that is supported; {ARCHITECTURE} is, and for EAGLE-1 and "
        f"EAGLE-2 {', '.join(EAGLE_ARCHITECTURES)}; in speculators' layout EAGLE-3",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Shape and arithmetic that the kinds of heads with files of their own share."""

    vocab_size: int
    """Size of the target's vocabulary."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig

    def check_sizes(self, target: ModelConfig, where: Path, hidden: tuple[str, int]) -> None:
        """Refuses a target that the head was not made for. `where` is the head's directory;
        `hidden` is the field of the target's hidden size, and its value in the head's file. Raises
        ModelError, whose message names the differing field and both values.
        """
        sizes: list[tuple[str, int, int]] = [
            ("vocab_size", self.vocab_size, target.vocab_size),
            (*hidden, target.hidden_size),
        ]
        if target.latent is None:
            # The head's K and V lie in the target's pages, as one more layer.
            sizes += [
                ("num_key_value_heads", self.num_kv_heads, target.num_kv_heads),
                ("head_dim", self.head_dim, target.head_dim),
            ]
        for name, mine, its in sizes:
            if mine != its:
                raise ModelError(
                    f"{where}: {name} of the draft head is {mine}, of the target model {its}; "
                    "give the head that was trained for this model",
                    param=name,
                )

    def values(self) -> dict[str, Any]:
        """Everything that changes drafts and their KV, for a fingerprint."""
        return {**asdict(self), "rope": rope_values(self.rope)}


def read_layer(fields: Fields) -> dict[str, Any]:
    """Arguments of `HeadConfig`."""
    if fields.positive("num_hidden_layers", 1) != 1:
        raise fields.error(
            "num_hidden_layers",
            "only heads of one layer are supported; a whole model drafts with --drafter model",
        )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"only silu is supported, not {activation!r}")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.error(name, "heads with these biases are not supported")
    if fields.get("quantization_config"):
        raise fields.error("quantization_config", "quantised heads are not supported")
    hidden_size = fields.positive("hidden_size")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        problem = f"{num_kv_heads} does not divide {num_heads} attention heads"
        raise fields.error("num_key_value_heads", problem)
    default_dim = hidden_size // num_heads if hidden_size % num_heads == 0 else None
    return {
        "vocab_size": fields.positive("vocab_size"),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": fields.positive("head_dim", default_dim),
        "intermediate_size": fields.positive("intermediate_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope_config(fields),
    }


def head_digest(fingerprint: bytes, dtype: str, draft_dir: Path) -> bytes:
    """BLAKE2b-256 that names a draft head; the target's digest covers the parts that both share.
    `dtype` is that in which the head computes, with or without torch's prefix.
    """
    name = dtype.removeprefix("torch.").encode()
    try:
        files = cached_file_digests(weight_files(draft_dir))
    except OSError as error:
        raise ModelError(f"cannot read the weights in {draft_dir}: {error}") from error
    return combine(b"weft-draft-1", fingerprint, name, *files)
