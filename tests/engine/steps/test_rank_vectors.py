"""Ranks that make vectors, and ranks of GGUF files, against transformers on the same numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from weft.checkpoint.resolve import resolve_model
from weft.contract.errors import ConfigError
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import check_choices
from weft.testing.models.gguf_models import SIZES, gguf_models
from weft.testing.models.tiny_embedders import make_embedder, make_judge
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
RANKS = {"tp": 2, "check_ranks": True, "dtype": "float32", "page_size": 8}
RANKS |= {"prefill_chunk_tokens": 64, "max_step_tokens": 96, "num_pages": 200}


def random_prompts(*lengths: int) -> list[list[int]]:
    return [[random.randrange(5, 500) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("pooling", ["lasttoken", pytest.param("mean", marks=pytest.mark.full)])
def test_embeddings(tmp_path: Path, seed: int, pooling: str) -> None:
    """Also of prompts that are cut, and of those whose steps the ranks would divide."""
    folder = make_embedder("qwen3", tmp_path / "m", seed, pooling=pooling, **HEADS)
    prompts = random_prompts(1, 9, 40, 90, 150)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        hidden = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    wanted = [one[-1] if pooling == "lasttoken" else one.mean(0) for one in hidden]
    with LLM(folder, **RANKS) as llm:
        for _ in range(2):
            for found, vector in zip(
                llm.pool(prompts, PoolingParams(output="embedding")), wanted, strict=True
            ):
                assert np.allclose(found[0], vector / vector.norm(), atol=1e-5)
        each = PoolingParams(output="token_embeddings", normalises=False)
        for rows, right in zip(llm.pool(prompts, each), hidden, strict=True):
            assert np.allclose(rows, right, atol=1e-4)
        pages = llm.engine.sizes()
        assert not any(pages[name] for name in ("groups", "slots", "running"))


@pytest.mark.full
def test_logits_of_labels(tmp_path: Path, seed: int) -> None:
    folder = make_judge("qwen3", tmp_path / "m", seed, labels=(9, 2), **HEADS)
    prompts = random_prompts(3, 77)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(folder, **RANKS) as llm:
        found = llm.pool(prompts, PoolingParams(output="label_logits", label_ids=(9, 2)))
    for one, ids in zip(found, prompts, strict=True):
        with torch.inference_mode():
            assert np.allclose(one[0], model(torch.tensor([ids])).logits[0, -1, [9, 2]], atol=2e-4)


def test_vectors_of_ranks_on_gpus_are_refused(tmp_path: Path) -> None:
    folder = make_embedder("qwen3", tmp_path / "m", **HEADS)
    with pytest.raises(ConfigError, match="vectors ranks on GPUs do not make yet"):
        LLM(folder, **(RANKS | {"device": "cuda", "check_ranks": False}))


GGUF: dict[str, tuple[str, dict[str, str]]] = {
    "4 and 6 bits": (
        "llama",
        {"v_proj.weight": "Q6_K", "_proj.weight": "Q4_K", "embed_tokens.weight": "Q6_K"},
    ),
    "8 bits": ("qwen3", {"_proj.weight": "Q8_0", "embed_tokens.weight": "Q8_0"}),
    "experts": ("qwen3_moe", {"self_attn.o_proj.weight": "Q4_0", "_proj.weight": "MXFP4"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "8 bits" else pytest.mark.full) for n in GGUF]
)
def test_gguf(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("weft.checkpoint.gguf_folder.cache_folder", lambda: tmp_path / "cache")
    kind, types = GGUF[name]
    sizes: dict[str, Any] = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4}
    source = make_tiny(kind, tmp_path / "source", seed, **sizes)
    path, floats = gguf_models(source, tmp_path / "tiny.gguf", types)
    prompts = random_prompts(5, 90)
    params, stop = SamplingParams(temperature=0.0), StopCriteria(max_tokens=16, ignore_eos=True)
    with LLM(resolve_model(str(path)), **RANKS) as llm:
        samples = llm.generate(prompts, params, stop)
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    for prompt, sample in zip(prompts, samples, strict=True):
        text = torch.tensor([prompt + sample.token_ids[:-1]])
        with torch.inference_mode():
            logits = model(text, use_cache=False).logits[0, len(prompt) - 1 :]
        check_choices(logits, sample.token_ids)
