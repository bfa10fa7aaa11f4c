"""Ranks on GPUs that divide prompts make the tokens of one GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.testing.engine.ranked_texts import (
    adapted_texts,
    check_texts,
    make_llm,
    make_model,
    random_prompts,
    ranked,
    texts_of,
)
from weft.testing.models.float32_reference import ties_of
from weft.testing.models.lora_reference import PeftModels

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

SIZES: dict[str, Any] = {
    "drafter": "none",
    "prefill_chunk_tokens": 256,
    "max_step_tokens": 384,
    "num_pages": 160,
    "cp_least_tokens": 64,
}


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_texts_are_those_of_one_gpu(kind: str, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path / "model")
    prompts = random_prompts((5, 290, 141, 377, 12, 63, 700, 130, 254), 90)
    with make_llm(folder, **SIZES) as llm:
        alone = texts_of(llm, prompts)
    found = ranked("texts", folder, prompts, cp=2, **SIZES)
    assert any("context parallel: 2 ranks" in notice for notice in found["notices"])
    assert found["counters"]["prefix_hit_tokens"] > 0
    check_texts(found["texts"], alone)


def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    prompts = random_prompts((1, 300, 150, 640, 9, 200), 90)
    found = ranked("texts", folder, prompts, cp=2, dtype="bfloat16", **SIZES)
    greedy = [one["tokens"] for one in found["texts"][2 * len(prompts) :][: len(prompts)]]
    ties_of(folder, prompts, greedy).check(is_moe=False)


def test_texts_with_adapters_are_those_of_one_gpu(tmp_path: Path) -> None:
    """More adapters than the devices have room for, so that rows are written again."""
    folder = make_model("llama", tmp_path / "model")
    models = PeftModels(folder, tmp_path)
    for kind in ({"r": 8}, {"r": 24, "target_modules": ["k_proj", "o_proj"]}, {"r": 5}):
        models.add(random.randrange(1 << 30), **kind)
    folders = list(models.directories.values())
    prompts = random_prompts((5, 290, 141, 377, 12, 263, 700, 130, 254), 90)
    settings = {**SIZES, "enable_lora": True, "max_loras": 2, "lora_memory_bytes": 8 << 20}
    with make_llm(folder, **settings) as llm:
        alone = adapted_texts(llm, prompts, folders)
    assert ranked("adapted", folder, prompts, folders, cp=2, **settings)["tokens"] == alone
