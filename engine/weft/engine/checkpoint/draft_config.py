"""Reading of the `config.json` fields that all draft heads have in common.

Pure Python, as `weft.engine.checkpoint.config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.digest import cached_file_digests, combine
from weft.engine.checkpoint.fields import Fields
from weft.engine.checkpoint.files import weight_files

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Architecture name of EAGLE-3 heads."""
EAGLE_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
"""Architecture names of EAGLE-1 and EAGLE-2 heads: their authors' and other servers'."""

HeadKind = Literal["eagle", "eagle3", "mtp"]
"""Kind of head. EAGLE-1 and EAGLE-2 heads are alike; they differ in how trees are drafted. mtp: a
head that the target's own checkpoint brings.
"""


def kind_of(fields: Fields) -> HeadKind:
    """Kind of draft head that a `config.json` describes.

    Raises:
        ModelError: It is of no supported kind.
    """
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
        f"EAGLE-2 {', '.join(EAGLE_ARCHITECTURES)} (files in the layout of speculators are not)",
    )


def check_layer(fields: Fields) -> None:
    """Refuses a head of more than one layer, or with another kind of layer.

    Raises:
        ModelError: The message names the field.
    """
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


def check_sizes(where: Path, *sizes: tuple[str, int, int]) -> None:
    """Refuses a target that a head was not made for.

    Args:
        where: The head's directory, for the message.
        sizes: Name, the head's, the target's.

    Raises:
        ModelError: Two differ; the message names the field and both values.
    """
    for name, mine, its in sizes:
        if mine != its:
            raise ModelError(
                f"{where}: {name} of the draft head is {mine}, of the target model {its}; "
                "give the head that was trained for this model",
                param=name,
            )


def head_digest(fingerprint: bytes, dtype: str, draft_dir: Path) -> bytes:
    """BLAKE2b-256 that names a draft head; the target's digest covers the parts that both share.

    Args:
        fingerprint: Fingerprint of the head's configuration.
        dtype: Dtype in which the head computes, with or without torch's prefix.
        draft_dir: The head's directory.

    Raises:
        ModelError: A file cannot be read.
    """
    name = dtype.removeprefix("torch.").encode()
    try:
        files = cached_file_digests(weight_files(draft_dir))
    except OSError as error:
        raise ModelError(f"cannot read the weights in {draft_dir}: {error}") from error
    return combine(b"weft-draft-1", fingerprint, name, *files)
