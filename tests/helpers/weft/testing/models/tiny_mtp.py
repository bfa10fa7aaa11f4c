"""Small random checkpoints that bring an MTP head, and a plain reading of the head.

Transformers leaves such heads out. Here the head's layer is the only layer of a second model of
transformers, which gets projections of embeddings and hidden states in place of embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm
from weft.testing.models.families import FAMILIES
from weft.testing.models.reference_models import make_reference

Tensors = dict[str, torch.Tensor]
NEAR_TIE = 1e-5
"""Difference of logits, relative to the largest, that roundings in float32 may turn over."""


class Kind(NamedTuple):
    """How a family's checkpoints name the MTP head's tensors and set its fields."""

    model_type: str
    """The target's, in transformers."""
    fields: dict[str, Any]
    """Of the target's config.json."""
    of_head: dict[str, Any]
    """The same for the model of the head's layer alone."""
    layer: str
    embedding_norm: str
    state_norm: str
    projection: str
    last_norm: str = ""
    copies: tuple[str, ...] = ()
    is_state_first: bool = False
    architecture: str = ""
    """In place of the target's own, if transformers does not have it."""
    adds_one: bool = False
    """Whether norms multiply by 1 plus their weights."""


def _behind(model_type: str, fields: dict[str, Any], layers: int) -> Kind:
    layer = f"model.layers.{layers}"
    return Kind(
        model_type,
        {**fields, "num_hidden_layers": layers, "first_k_dense_replace": 1},
        {"first_k_dense_replace": 0},
        *(f"{layer}{part}" for part in ("", ".enorm", ".hnorm", ".eh_proj", ".shared_head.norm")),
        (f"{layer}.embed_tokens", f"{layer}.shared_head.head"),
    )


_EXPERTS = {
    "n_routed_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
    "n_shared_experts": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
KINDS = {
    "glm": _behind("glm4_moe", {**_EXPERTS, "attention_bias": True, "use_qk_norm": True}, 3),
    "deepseek": _behind(
        "deepseek_v3",
        {**_EXPERTS, "head_dim": None, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
         "qk_rope_head_dim": 16, "v_head_dim": 20, "num_key_value_heads": 6, "q_lora_rank": 40,
         "n_group": 3, "topk_group": 2},
        2,
    ),
    "ernie": Kind(
        "ernie4_5_moe",
        {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 44},
        {"moe_layer_start_index": 1, "moe_layer_end_index": 0},
        "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0",
        "model.mtp_linear_proj.0",
    ),
    "mimo": Kind(
        "qwen2",
        {},
        {},
        *(f"model.mtp_layers.0{part}" for part in
          ("", ".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm")),
        is_state_first=True,
        architecture="MiMoForCausalLM",
    ),
    "qwen": Kind(
        "qwen3_next",
        {**FAMILIES["qwen3_next"][1], "num_hidden_layers": 4},
        {"layer_types": ["full_attention"]},
        *("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc",
          "mtp.norm"),
        adds_one=True,
    ),
}  # fmt: skip


class NaiveMtp:
    """A target and its head over transformers' hidden states, in float32.

    Args:
        kind: The family.
        target: Of transformers.
        layer: A model of the head's layer.
        tensors: The checkpoint's.
    """

    def __init__(self, kind: Kind, target: Any, layer: Any, tensors: Tensors) -> None:
        self._kind, self._target, self._layer = kind, target, layer
        self._tensors = tensors
        self._embedding = tensors["model.embed_tokens.weight"]
        self._lm_head = tensors["lm_head.weight"]
        if kind.copies:
            self._embedding, self._lm_head = (tensors[f"{name}.weight"] for name in kind.copies)

    @torch.inference_mode()
    def agrees(self, tokens: list[int], chain: list[int]) -> bool:
        """Whether these are the drafts behind a text, as far as float32 can tell: with an embedding
        that some roundings change, where they ask others of experts that are nearly alike.
        """
        weight = self._target.get_input_embeddings().weight
        kept = weight.clone()
        for change in (0.0, *[3e-6] * 16):
            weight.copy_(kept * (1 + change * torch.randn(weight.shape)))
            is_right = self._agrees(tokens, chain)
            weight.copy_(kept)
            if is_right:
                return True
        return False

    def _agrees(self, tokens: list[int], chain: list[int]) -> bool:
        output = self._target(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        states, known = output.hidden_states[-1][0], list(tokens[1:])
        for token in chain:
            state = self._last_state(states, known)
            logits = self._lm_head @ state
            if float((logits.max() - logits[token]) / logits.abs().max()) > NEAR_TIE:
                return False
            states, known = torch.cat((states, state[None])), [*known, token]
        return True

    def _last_state(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        kind = self._kind
        both = [
            self._norm(self._embedding[tokens], kind.embedding_norm),
            self._norm(states, kind.state_norm),
        ]
        if kind.is_state_first:
            both.reverse()
        x = linear(torch.cat(both, dim=1), self._tensors[f"{kind.projection}.weight"])
        positions = torch.arange(1, len(tokens) + 1)[None]
        made = self._layer.model(inputs_embeds=x[None], position_ids=positions, use_cache=False)
        last: torch.Tensor = made.last_hidden_state[0, -1]
        return last

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors[f"{name}.weight"] + self._kind.adds_one
        return rms_norm(x, weight.shape, weight, self._target.config.rms_norm_eps)


def make_tiny_mtp(
    name: str, path: Path, seed: int, *, has_own: bool = False, **overrides: Any
) -> NaiveMtp:
    """Writes a checkpoint with a head.

    Args:
        name: Of `KINDS`.
        path: Directory to create.
        seed: Of the weights.
        has_own: Whether the head's embedding and LM head differ from the target's.
        **overrides: Fields of config.json.
    """
    kind = KINDS[name]
    kind = kind._replace(fields={**kind.fields, **overrides})
    target = make_reference(kind.model_type, path, seed, **kind.fields)
    alone = path / "head"
    fields = {**kind.fields, "num_hidden_layers": 1, **kind.of_head}
    layer = make_reference(kind.model_type, alone, seed + 1, **fields)
    tensors, of_head = (load_file(folder / "model.safetensors") for folder in (path, alone))
    generator = torch.Generator().manual_seed(seed + 2)
    hidden = target.config.hidden_size
    for norm in (kind.embedding_norm, kind.state_norm):
        tensors[f"{norm}.weight"] = 1.0 + 0.2 * torch.randn(hidden, generator=generator)
    projection = torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    tensors[f"{kind.projection}.weight"] = projection
    for tensor_name, tensor in of_head.items():
        if tensor_name.startswith("model.layers.0."):
            tensors[f"{kind.layer}.{tensor_name.removeprefix('model.layers.0.')}"] = tensor
    if kind.last_norm:
        tensors[f"{kind.last_norm}.weight"] = of_head["model.norm.weight"]
    else:
        layer.model.norm = torch.nn.Identity()
    source = of_head if has_own else tensors
    for copy, own in zip(kind.copies, ("model.embed_tokens", "lm_head"), strict=False):
        tensors[f"{copy}.weight"] = source[f"{own}.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    if kind.architecture:
        config = json.loads((path / "config.json").read_text())
        config |= {"architectures": [kind.architecture], "model_type": name}
        (path / "config.json").write_text(json.dumps(config))
    return NaiveMtp(kind, target, layer, tensors)


def make_cycle(path: Path, seed: int) -> None:
    """Makes a checkpoint of GLM speak a language in which each token has one successor, and its
    head guess most of them.

    Layers add little to the embeddings, of which the LM head reads the successor. The head's
    projection passes on the embeddings, somewhat blurred.
    """
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.05
    embedding = tensors["model.embed_tokens.weight"]
    vocab, hidden = embedding.shape
    successors = torch.randperm(vocab, generator=generator)
    tensors["lm_head.weight"][successors] = embedding
    layer = KINDS["glm"]
    for copy, own in zip(layer.copies, ("model.embed_tokens", "lm_head"), strict=True):
        tensors[f"{copy}.weight"] = tensors[f"{own}.weight"].clone()
    blurred = torch.randn(hidden, 2 * hidden, generator=generator) * 1.6 / (2 * hidden) ** 0.5
    blurred[:, :hidden] += torch.eye(hidden)
    tensors[f"{layer.projection}.weight"] = blurred
    save_file(tensors, path / "model.safetensors")
