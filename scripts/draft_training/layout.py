"""The published layout of an EAGLE-3 head: config.json and model.safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .head import DraftHead, HeadShape
from .target import Target

_KEPT_FIELDS = (
    "max_position_embeddings",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "hidden_act",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Of the target's config.json, which hold for the head too."""
LM_HEAD = "lm_head.weight"
"""In the file; training never changes it, so it is no parameter of a `DraftHead`."""


def save_head(head: DraftHead, target: Target, folder: Path) -> None:
    """Writes a head in bfloat16, with its rows of the LM head; the embedding is the target's.

    Servers that read this layout want [draft_vocab, hidden] in the file: some of them would take
    the first rows of the target's LM head in its place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    theirs: dict[str, Any] = target.config.to_dict()
    rope = theirs.get("rope_parameters") or {}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # Not inside "eagle_config", where readers count the layers that the states leave.
        "eagle_aux_hidden_state_layer_ids": list(target.aux_layers),
        **head.shape.fields(),
        **{name: theirs[name] for name in _KEPT_FIELDS if theirs.get(name) is not None},
    }
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu()
        for name, tensor in {**head.state_dict(), LM_HEAD: head.lm_head}.items()
    }
    path = folder / "model.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    path.chmod(0o644)


def load_head(folder: Path, target: Target) -> DraftHead:
    """Reads a head onto the target's device, in float32, with the LM head that its file has."""
    config = json.loads((folder / "config.json").read_text())
    names = HeadShape.__dataclass_fields__
    shape = HeadShape(**{name: config[name] for name in names})
    tensors = load_file(folder / "model.safetensors", device=str(target.device))
    lm_head = tensors.pop(LM_HEAD, None)
    d2t = tensors["d2t"]
    token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    head = DraftHead(shape, token_ids, target.embedding, target.lm_head).to(target.device)
    head.load_state_dict(tensors)
    if lm_head is not None:
        head.lm_head = lm_head.to(head.lm_head.dtype)
    return head


def with_vocabulary(head: DraftHead, target: Target, token_ids: torch.Tensor) -> DraftHead:
    """The same weights over another draft vocabulary.

    The LM head is the target's, so nothing need be trained again.

    Args:
        head: A head of `target`.
        target: Whose rows the LM head is.
        token_ids: int64 [draft_vocab], rising.

    Raises:
        ValueError: The head has other rows than the target, so those of other tokens are not known.
    """
    rows = target.lm_head[head.token_ids]
    if not torch.equal(rows.to(torch.bfloat16), head.lm_head.to(torch.bfloat16)):
        raise ValueError("the head's LM head is not the target's; it cannot name other tokens")
    shape = replace(head.shape, draft_vocab_size=len(token_ids))
    other = DraftHead(shape, token_ids, target.embedding, target.lm_head)
    vocabulary = {name: tensor for name, tensor in other.named_buffers() if name in ("d2t", "t2d")}
    other.load_state_dict({**head.state_dict(), **vocabulary})
    return other.to(target.device)
