"""Decoders trained to attend in both directions, and embedders that are configurations."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel
from weft.contract.errors import ModelError
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.testing.models.tiny_embedders import make_embedder, write_json, write_modules
from weft.testing.models.tiny_encoders import make_encoder

pytestmark = pytest.mark.usefixtures("single_thread")

BOTH = {"is_causal": False}
NAMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "embeddinggemma": (
        "gemma3_text",
        "mean",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 20,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "EuroBERT": ("eurobert", "mean", {"num_key_value_heads": 2}),
    "gte-Qwen2": ("qwen2", "lasttoken", BOTH),
    "llama-embed-nemotron": ("llama", "mean", BOTH),
    "qwen3, both ways": ("qwen3", "cls", BOTH),
    "e5-mistral": ("mistral", "lasttoken", {}),
}
"""Kind of decoder, pooling and fields of embedders that are configurations of known parts."""
HEADLESS = {"llama-embed-nemotron": "LlamaBidirectionalModel"}


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_embedders_of_decoders(tmp_path: Path, seed: int, name: str) -> None:
    kind, pooling, fields = NAMES[name]
    dense: tuple[int, ...] = ()
    sizes = {"intermediate_size": 112}
    if kind in ("gemma3_text", "eurobert"):
        dense = (96, 40) if kind == "gemma3_text" else ()
        model_dir = make_encoder(kind, tmp_path / "m", seed, **sizes, **fields)
        write_modules(model_dir, 48, seed, pooling=pooling, dense=dense)
    else:
        model_dir = make_embedder(kind, tmp_path / "m", seed, pooling=pooling, **sizes, **fields)
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    prompts = [[random.randrange(5, 256) for _ in range(n)] for n in (1, 7, 33, 100, 33)]
    wanted = []
    for ids in prompts:
        states = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = {"mean": states.mean(0), "lasttoken": states[-1], "cls": states[0]}[pooling]
        for number in range(2, 2 + len(dense)):
            layer = load_file(model_dir / f"{number}_Dense/model.safetensors")
            pooled = layer["linear.weight"] @ pooled + layer["linear.bias"]
            pooled = pooled.tanh() if number == 2 else pooled
        wanted.append(pooled / pooled.norm())
    config = json.loads((model_dir / "config.json").read_text())
    config["architectures"] = [HEADLESS.get(name, config["architectures"][0])]
    write_json(model_dir / "config.json", config)
    for dtype, least in (("float32", 0.99999), ("bfloat16", 0.999)):
        with LLM(model_dir, dtype=dtype, num_pages=200) as llm:
            found = llm.pool(prompts, PoolingParams(output="embedding"))
        for one, vector in zip(found, wanted, strict=True):
            assert float(torch.from_numpy(one[0].copy()) @ vector) > least
    if fields:
        with LLM(model_dir, dtype="float32", deterministic=True, num_pages=200) as llm:
            together = llm.pool(prompts, PoolingParams(output="embedding"))
            alone = [llm.pool([prompt], PoolingParams(output="embedding"))[0] for prompt in prompts]
        assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    if "is_causal" in fields:
        with pytest.raises(ModelError, match="later ones"):
            LLM(model_dir, task="generate")


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_adapters_of_embedders_are_those_of_peft(
    tmp_path: Path, seed: int, *, is_causal: bool
) -> None:
    fields: dict[str, Any] = {} if is_causal else BOTH
    model_dir = make_embedder("qwen2", tmp_path / "m", seed, **fields)
    base = AutoModel.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(seed)
    wanted_of = get_peft_model(
        base,
        LoraConfig(
            task_type="FEATURE_EXTRACTION",
            r=4,
            init_lora_weights=False,
            target_modules=["q_proj", "o_proj", "up_proj", "down_proj"],
        ),
    )
    wanted_of.save_pretrained(tmp_path / "adapter")
    prompts = [[random.randrange(5, 256) for _ in range(n)] for n in (1, 30, 7)]
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "num_pages": 200}
    with LLM(model_dir, dtype="float32", **settings) as llm:
        digest = llm.load_adapter(tmp_path / "adapter")
        chosen = [digest, b"", digest]
        found = llm.pool(prompts, PoolingParams(output="embedding"), adapters=chosen)
    for one, ids, adapter in zip(found, prompts, chosen, strict=True):
        with contextlib.nullcontext() if adapter else wanted_of.disable_adapter():
            vector = wanted_of(torch.tensor([ids])).last_hidden_state[0, -1]
        assert float(torch.from_numpy(one[0].copy()) @ vector / vector.norm()) > 0.99999


MODULES = {
    "bert": ["query", "value", "attention.output.dense", "intermediate.dense", "output.dense"],
    "roberta": ["query", "key", "value", "dense"],
    "gte": "all-linear",
    "nomic_bert": "all-linear",
    "jina_embeddings_v3": "all-linear",
    "modernbert": ["Wqkv", "Wo", "Wi"],
}
SHORT = ("roberta", "modernbert")


@pytest.mark.parametrize(
    "kind",
    [*SHORT, *(pytest.param(k, marks=pytest.mark.full) for k in MODULES if k not in SHORT)],
)
@torch.no_grad()
def test_adapters_of_encoders_are_those_of_peft(tmp_path: Path, seed: int, kind: str) -> None:
    model_dir = make_encoder(kind, tmp_path / "m", seed)
    write_modules(model_dir, 48, seed, pooling="cls")
    base = AutoModel.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(seed)
    targets = MODULES[kind]
    options: dict[str, Any] = {"task_type": "FEATURE_EXTRACTION", "init_lora_weights": False}
    wanted_of = get_peft_model(base, LoraConfig(r=4, target_modules=targets, **options))
    wanted_of.save_pretrained(tmp_path / "adapter")
    prompts = [[random.randrange(5, 256) for _ in range(n)] for n in (1, 30, 7, 18)]
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "num_pages": 200}
    with LLM(model_dir, dtype="float32", **settings) as llm:
        digest = llm.load_adapter(tmp_path / "adapter")
        chosen = [digest, b"", digest, b""]
        found = llm.pool(prompts, PoolingParams(output="embedding"), adapters=chosen)
    changed = []
    for one, ids, adapter in zip(found, prompts, chosen, strict=True):
        with contextlib.nullcontext() if adapter else wanted_of.disable_adapter():
            vector = wanted_of(torch.tensor([ids])).last_hidden_state[0, 0]
        with wanted_of.disable_adapter():
            plain = wanted_of(torch.tensor([ids])).last_hidden_state[0, 0]
        changed.append(not torch.equal(vector, plain))
        assert float(torch.from_numpy(one[0].copy()) @ vector / vector.norm()) > 0.99999
    assert changed == [bool(adapter) for adapter in chosen]
