"""Two stages on GPUs make the tokens of one GPU."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weft.testing.engine.eagle3_cases import check_chains
from weft.testing.engine.ranked_texts import (
    adapted_texts,
    check_texts,
    greedy_texts,
    make_llm,
    make_model,
    random_prompts,
    ranked,
    texts_of,
)
from weft.testing.models.float32_reference import ties_of
from weft.testing.models.lora_reference import PeftModels
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_mtp import make_cycle, make_tiny_mtp

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

SIZES: dict[str, Any] = {"drafter": "none", "num_pages": 90}


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [("llama", "none"), ("qwen3_moe", "none"), ("llama", "ngram"), ("qwen3_moe", "ngram")],
)
def test_texts_are_those_of_one_gpu(kind: str, drafter: str, tmp_path: Path) -> None:
    """With prompts in chunks, prefix hits, constraints, and too few pages for all."""
    folder = make_model(kind, tmp_path / "model")
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    settings = SIZES | {"drafter": drafter}
    with make_llm(folder, **settings) as llm:
        alone = texts_of(llm, prompts)
    found = ranked("texts", folder, prompts, pp=2, **settings)
    assert any("2 stages" in notice for notice in found["notices"])
    assert found["counters"]["prefix_hit_tokens"] > 0
    assert drafter == "none" or found["counters"]["accepted_tokens"] > 0
    check_texts(found["texts"], alone)


@pytest.mark.parametrize(
    ("kind", "cuda_graphs"), [("eagle3", True), ("eagle3", False), ("eagle", True)]
)
def test_drafts_of_a_head_are_the_heads_and_texts_those_of_one_gpu(
    kind: str, cuda_graphs: bool, tmp_path: Path
) -> None:
    """Of an EAGLE-3 head that reads layers of both stages."""
    seed = random.randrange(1 << 30)
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=4)
    make = make_tiny_draft if kind == "eagle3" else make_tiny_eagle
    head = {"drafter": kind, "draft_dir": make(tmp_path / "head", folder, seed)}
    prompts = random_prompts((5, 90, 41, 177, 12, 63))
    with make_llm(folder, **SIZES) as llm:
        alone = texts_of(llm, prompts)
    settings = SIZES | head | {"cuda_graphs": cuda_graphs}
    found = ranked("drafted-texts", folder, prompts, pp=2, **settings)
    noted = SimpleNamespace(chains=[(tokens, chain) for tokens, chain in found["chains"]])
    check_chains(noted, folder, head["draft_dir"], allowed=1)
    # With drawn tokens, constraints, prefix hits and log-probabilities.
    check_texts(found["texts"], alone)


def test_drafts_of_an_mtp_head_are_accepted(tmp_path: Path) -> None:
    folder, seed = tmp_path / "model", random.randrange(1 << 30)
    make_tiny_mtp("glm", folder, seed)
    make_cycle(folder, seed)
    prompts = [[random.randrange(3, 250) for _ in range(count)] for count in (1, 30, 90, 17)]
    found = ranked("greedy", folder, prompts, pp=2, **SIZES | {"drafter": "mtp"})
    with make_llm(folder, **SIZES) as llm:
        alone = greedy_texts(llm, prompts)
    assert [one["tokens"] for one in found["texts"]] == [one["tokens"] for one in alone]
    counters = found["counters"]
    assert counters["accepted_tokens"] > counters["drafted_tokens"] / 4


def test_tokens_with_adapters_are_those_of_one_gpu(tmp_path: Path) -> None:
    """More adapters than the devices have room for."""
    folder = make_model("llama", tmp_path / "model")
    models = PeftModels(folder, tmp_path)
    kinds = ({"r": 8}, {"r": 24, "target_modules": ["k_proj", "o_proj"]}, {"r": 5})
    for kind in kinds:
        models.add(random.randrange(1 << 30), **kind)
    models.add(random.randrange(1 << 30), r=4, target_modules=["embed_tokens", "lm_head", "v_proj"])
    folders = list(models.directories.values())
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    names = ("q", "k", "v", "o", "gate", "up", "down", "embed_tokens", "lm_head")
    settings = {"enable_lora": True, "max_loras": 2, "lora_memory_bytes": 8 << 20}
    settings |= SIZES | {"num_pages": 120, "lora_projections": names}
    found = ranked("adapted", folder, prompts, folders, pp=2, **settings)["tokens"]
    with make_llm(folder, **settings) as llm:
        assert found == adapted_texts(llm, prompts, folders)
    plain = ranked("adapted", folder, prompts, pp=2, **settings)["tokens"]
    assert plain != found


def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    found = ranked("texts", folder, prompts, pp=2, dtype="bfloat16", **SIZES)
    greedy = [one["tokens"] for one in found["texts"][2 * len(prompts) :][: len(prompts)]]
    ties_of(folder, prompts, greedy).check(is_moe=False)


def test_a_stage_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    found = ranked("killed", folder, [], pp=2, **SIZES)
    assert "rank 1" in found["error"]
    assert "signal 9" in found["error"]
