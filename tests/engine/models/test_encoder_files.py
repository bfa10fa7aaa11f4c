"""Encoders whose authors' files differ from transformers': other names, fields and positions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ModelError
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.testing.models.tiny_embedders import write_json
from weft.testing.models.tiny_encoders import make_encoder

pytestmark = pytest.mark.usefixtures("single_thread")

Tensors = dict[str, torch.Tensor]
STATES = PoolingParams(output="token_embeddings", normalises=False)


GPT2 = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "max_trained_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
CASES: dict[str, dict[str, Any]] = {
    "gte": {
        "architectures": ["NewModel"],
        "model_type": "new",
        "rope_theta": 20_000,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
        "position_embedding_type": "rope",
    },
    "nomic_bert": {
        "rotary_emb_base": 1000,
        "prenorm": False,
        "activation_function": "swiglu",
        "hidden_act": None,
    },
    "jina_embeddings_v3": {},
}
"""Fields of the authors' files, which transformers' loses."""


def random_prompts() -> list[list[int]]:
    return [[random.randrange(5, 517) for _ in range(n)] for n in (1, 9, 60, 150)]


def check_states(model_dir: Path, prompts: list[list[int]], wanted: list[torch.Tensor]) -> None:
    with LLM(model_dir, dtype="float32", max_step_tokens=256, num_pages=100) as llm:
        for found, states in zip(llm.pool(prompts, STATES), wanted, strict=True):
            assert np.allclose(found, states, atol=1e-4)


@pytest.mark.parametrize("kind", CASES)
@torch.no_grad()
def test_names_and_fields_of_the_authors_and_of_transformers(
    tmp_path: Path, seed: int, kind: str
) -> None:
    model_dir = make_encoder(kind, tmp_path / "m", seed)  # transformers writes the authors' names.
    model = AutoModel.from_pretrained(model_dir, attn_implementation="eager")
    config = json.loads((model_dir / "config.json").read_text())
    if kind == "gte":  # https://kexue.fm/archives/9706, without "mixed_b".
        exponents = torch.arange(0, 12, 2) / 12
        model.rotary_emb.inv_freq = (20_000 * 8.0) ** -exponents / 8.0 ** (2 / 12)
    prompts = random_prompts()
    wanted = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    own = {k: v for k, v in config.items() if k != "rope_parameters"}
    if kind == "nomic_bert":
        own = {GPT2.get(field, field): value for field, value in own.items()}
    write_json(model_dir / "config.json", {**own, **CASES[kind]})
    check_states(model_dir, prompts, wanted)
    if kind == "gte":
        config["rope_parameters"] = {
            "rope_type": "linear",
            "rope_theta": 160_000.0,
            "factor": 8.0 ** (2 / 12),
        }
    write_json(model_dir / "config.json", config)
    save_file(model.state_dict(), model_dir / "model.safetensors")
    check_states(model_dir, prompts, wanted)


def naive_jina_2(tensors: Tensors, ids: list[int], heads: int, eps: float) -> torch.Tensor:
    """Jina embeddings v2 from its paper (arXiv 2310.19923): post-norm BERT with symmetric ALiBi and
    a gated feed-forward block.
    """
    functional = torch.nn.functional

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        own = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], *own, eps)

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    words, kinds = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
    x = norm(tensors[words][ids] + tensors[kinds][0], "embeddings.LayerNorm")
    at = torch.arange(len(ids))
    lower = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * lower)) for i in range(heads - lower)]
    bias = -torch.tensor(slopes)[:, None, None] * (at[:, None] - at).abs()
    for layer in range(2):
        base = f"encoder.layer.{layer}"
        q, k, v = (
            product(x, f"{base}.attention.self.{part}").view(len(ids), heads, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        attended = product(mixed, f"{base}.attention.output.dense")
        x = norm(x + attended, f"{base}.attention.output.LayerNorm")
        half, other = product(x, f"{base}.mlp.gated_layers").chunk(2, dim=-1)
        x = norm(
            x + product(functional.gelu(half) * other, f"{base}.mlp.wo"), f"{base}.mlp.layernorm"
        )
    return x


def test_jina_2_has_scores_that_fall_with_the_distance(tmp_path: Path, seed: int) -> None:
    size, inner, heads, eps = 48, 72, random.choice((4, 6)), 1e-12
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (517, size),
        "embeddings.token_type_embeddings.weight": (2, size),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(2):
        base = f"encoder.layer.{layer}"
        squares = [f"attention.self.{p}" for p in ("query", "key", "value")]
        for name in (*squares, "attention.output.dense"):
            shapes |= {f"{base}.{name}.weight": (size, size), f"{base}.{name}.bias": (size,)}
        shapes[f"{base}.mlp.gated_layers.weight"] = (2 * inner, size)
        shapes |= {f"{base}.mlp.wo.weight": (size, inner), f"{base}.mlp.wo.bias": (size,)}
        norms += [f"{base}.attention.output.LayerNorm", f"{base}.mlp.layernorm"]
    for name in norms:
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    tensors = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + ("orm.weight" in name)
        for name, shape in shapes.items()
    }
    model_dir = tmp_path / "m"
    config = {
        "architectures": ["JinaBertForMaskedLM"],
        "model_type": "bert",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "layer_norm_eps": eps,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "vocab_size": 517,
    }
    write_json(model_dir / "config.json", config)
    save_file(tensors, model_dir / "model.safetensors")
    prompts = random_prompts()
    check_states(model_dir, prompts, [naive_jina_2(tensors, ids, heads, eps) for ids in prompts])
    write_json(model_dir / "config.json", {**config, "feed_forward_type": "original"})
    with pytest.raises(ModelError, match="feed_forward_type"):
        ModelConfig.load(model_dir)
