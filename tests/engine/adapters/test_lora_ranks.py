"""Adapters over several ranks: tokens and logits are PEFT's, and those of one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import ConfigError
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.models.lora_reference import BASE, PeftModels, settings_of, unload_all
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 517
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 8,
    "num_pages": 200,
    "prefill_chunk_tokens": 16,
    "enable_lora": True,
    "num_threads": 1,
}
CASES = [
    ("qwen3", 2, 1),
    pytest.param("llama", 2, 1, marks=pytest.mark.full),
    pytest.param("llama", 4, 1, marks=pytest.mark.full),
    pytest.param("qwen3_moe", 2, 1, marks=pytest.mark.full),
    pytest.param("qwen3_moe", 2, 2, marks=pytest.mark.full),
    pytest.param("qwen3_moe", 4, 4, marks=pytest.mark.full),
]


def random_prompts(count: int) -> list[list[int]]:
    lengths = [random.randint(1, 50) for _ in range(count)]
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def run(llm: LLM, prompts: list[list[int]], adapters: list[bytes]) -> list[GeneratedSample]:
    stop = StopCriteria(max_tokens=6, ignore_eos=True)
    return llm.generate(prompts, stop=stop, top_logprobs=20, adapters=adapters)


@pytest.mark.parametrize(("kind", "size", "ep"), CASES)
def test_adapters_and_none_in_one_batch(
    kind: str, size: int, ep: int, tmp_path: Path, seed: int
) -> None:
    """More adapters than fit, so that some are written over others; with fewer KV heads than ranks
    if there are four, and one or two whole experts on each with `ep`.
    """
    sizes = {"num_attention_heads": 8} | ({} if ep == 1 else {"num_experts": max(4, ep)})
    folder = make_tiny(kind, tmp_path / "model", seed, vocab_size=VOCAB, **sizes)
    models = PeftModels(folder, tmp_path)
    names: tuple[str, ...] = ()
    adapters = settings_of(tiny_config(kind)["num_hidden_layers"])
    if kind == "qwen3":
        adapters = adapters[4:6]
    if kind == "qwen3_moe":
        names = ("q", "k", "v", "o", "experts", "router", "embed_tokens", "lm_head")
        of_experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        adapters = [
            {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
            {"r": 4, "target_modules": ["q_proj"], "target_parameters": of_experts},
            {"r": 4, "target_modules": ["embed_tokens", "lm_head", "mlp.gate"]},
        ]
    for index, settings in enumerate(adapters):
        models.add(seed + index, **settings)
    of_loras = {"max_loras": max(2, len(adapters) - 4), "lora_projections": names}
    with LLM(folder, **SETTINGS, tp=size, ep=ep, **of_loras) as llm:
        for directory in models.directories.values():
            llm.load_adapter(directory)
        digests = [*models.digests, BASE, *models.digests[:2]]
        prompts = random_prompts(len(digests))
        samples = run(llm, prompts, digests)
        for prompt, adapter, sample in zip(prompts, digests, samples, strict=True):
            models.check(adapter, prompt, sample)
        unload_all(llm.engine)


def test_what_ranks_cannot_have_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, 0)
    whole = {"lora_whole_matrices": 1, "lora_projections": ("q", "lm_head")}
    with pytest.raises(ConfigError, match="lora_whole_matrices"):
        LLM(folder, **SETTINGS, tp=2, **whole)
