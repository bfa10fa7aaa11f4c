"""Small random LoRA adapters: by PEFT, or written without it (so: quickly, and damaged at will)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERT_SHAPES = {
    "w1": (("outer", "rank", "hidden"), ("experts", "inner", "rank")),
    "w3": (("outer", "rank", "hidden"), ("experts", "inner", "rank")),
    "w2": (("experts", "rank", "inner"), ("outer", "hidden", "rank")),
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def peft_model(
    model_dir: Path, seed: int, *, spread: float = 0.1, resize: int | None = None, **settings: Any
) -> Any:
    """A float32 model of transformers with a random adapter of PEFT on it.

    Args:
        model_dir: Of the base model.
        seed: Of the adapter.
        spread: Deviation of the adapter's numbers.
        resize: Tokens of the vocabulary, where the adapter adds some.
        **settings: Of `peft.LoraConfig`.
    """
    from peft import LoraConfig, get_peft_model
    from weft.testing.models.every_family import load_reference

    base = load_reference(model_dir)
    if resize is not None:
        base.resize_token_embeddings(resize, mean_resizing=False)
    model = get_peft_model(base, LoraConfig(**{"target_modules": "all-linear", **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += spread * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def module_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(in, out) of each linear module of a dense layer, by its name from the layer on."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (hidden, q_size),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def adapter_tensors(
    config: Mapping[str, Any],
    seed: int,
    *,
    rank: int = 8,
    targets: Iterable[str] = LINEAR,
    layers: Iterable[int] | None = None,
    spread: float = 0.1,
) -> dict[str, torch.Tensor]:
    """Random float32 tensors of a dense model's adapter under the names that PEFT writes."""
    generator = torch.Generator().manual_seed(seed)
    chosen = set(targets)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]) if layers is None else layers:
        for module, (width, out) in module_shapes(config).items():
            if module.rpartition(".")[2] not in chosen:
                continue
            name = f"{PREFIX}model.layers.{layer}.{module}"
            for half, shape in (("A", (rank, width)), ("B", (out, rank))):
                numbers = spread * torch.randn(shape, generator=generator)
                tensors[f"{name}.lora_{half}.weight"] = numbers
    return tensors


def write_adapter(path: Path, tensors: Mapping[str, torch.Tensor], **settings: Any) -> Path:
    """Writes an adapter's directory.

    Args:
        path: Created if need be.
        tensors: By name.
        **settings: Fields of adapter_config.json; `r` must fit the tensors.

    Returns:
        `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": list(LINEAR),
        **settings,
    }
    (path / CONFIG_FILE).write_text(json.dumps(config))
    save_file(dict(tensors), path / WEIGHTS_FILE, metadata={"format": "pt"})
    return path


def make_leaning_adapter(path: Path, model_dir: Path, token_ids: Sequence[int], seed: int) -> Path:
    """An adapter of a dense model's last layer with which a few tokens come far more often."""
    tensors = load_file(model_dir / "model.safetensors")
    layer = json.loads((model_dir / "config.json").read_text())["num_hidden_layers"] - 1
    module = f"model.layers.{layer}.mlp.down_proj"
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    rows = head[list(token_ids)]
    # Which of them is likely depends on the context; all others are as they were, beside them.
    directions = 100 * rows / rows.norm(dim=1, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(len(rows), tensors[f"{module}.weight"].shape[1], generator=generator)
    halves = {"A": a, "B": directions.T.contiguous()}
    named = {f"{PREFIX}{module}.lora_{half}.weight": tensor for half, tensor in halves.items()}
    return write_adapter(path, named, r=len(rows), target_modules=["down_proj"])


def make_adapter(
    path: Path, config: Mapping[str, Any], seed: int, *, rank: int = 8, **options: Any
) -> Path:
    """Writes a random adapter of a dense model: `adapter_tensors` with `options`."""
    return write_adapter(path, adapter_tensors(config, seed, rank=rank, **options), r=rank)


def vocabulary_tensors(
    config: Mapping[str, Any], seed: int, *, rank: int = 8, spread: float = 0.1
) -> dict[str, torch.Tensor]:
    """Random changes of the embedding and of the LM head, as `adapter_tensors` makes others."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {
        "model.embed_tokens.lora_embedding_A": (rank, vocabulary),
        "model.embed_tokens.lora_embedding_B": (hidden, rank),
        "lm_head.lora_A.weight": (rank, hidden),
        "lm_head.lora_B.weight": (vocabulary, rank),
    }
    return {
        PREFIX + name: spread * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def make_expert_adapter(
    path: Path, model_dir: Path, seed: int, rank: int, *, is_shared: bool
) -> Path:
    """An adapter of attention, router and all experts, which may share their outer sides."""
    config = json.loads((model_dir / "config.json").read_text())
    draw, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    experts, kv = config["num_experts"], config["num_key_value_heads"] * config["head_dim"]
    sizes = {
        "outer": 1 if is_shared else experts,
        "experts": experts,
        "rank": rank,
        "hidden": hidden,
        "inner": config["moe_intermediate_size"],
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        modules = {
            f"mlp.experts.{name}": [[sizes[axis] for axis in half] for half in shapes]
            for name, shapes in EXPERT_SHAPES.items()
        }
        modules["self_attn.v_proj"] = [[rank, hidden], [kv, rank]]
        modules["mlp.gate"] = [[rank, hidden], [experts, rank]]
        for module, shapes in modules.items():
            for half, shape in zip("AB", shapes, strict=True):
                name = f"{PREFIX}model.layers.{layer}.{module}.lora_{half}.weight"
                tensors[name] = 0.1 * torch.randn(shape, generator=draw)
    return write_adapter(path, tensors, r=rank, target_modules=["v_proj", "gate", *EXPERT_SHAPES])
