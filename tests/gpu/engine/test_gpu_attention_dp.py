"""Engines on GPUs that share experts make the tokens of one GPU, and end together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.testing.engine.ranked_texts import (
    check_texts,
    greedy_texts,
    make_llm,
    make_model,
    random_prompts,
    texts_of,
)
from weft.testing.engine.shared_experts import engines
from weft.testing.models.float32_reference import Ties, ties_of
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

LIMIT_S = 8.0
SHARES = (
    (5, 90, 41, 177, 12, 63),
    (100, 33, 60, 8, 21),
    (54, 7, 120, 9, 48),
    (70, 3, 31, 66, 15),
)
"""Lengths of each engine's prompts, of every kind of request."""


@pytest.mark.parametrize(
    ("size", "graphs", "piece_rows"), [(2, True, None), (2, False, 7), (4, True, None)]
)
def test_texts_are_those_of_one_gpu(
    size: int, graphs: bool, piece_rows: int | None, tmp_path: Path
) -> None:
    """With drafts, constraints, drawn tokens, prefix hits and scored prompts; with 7 rows in an
    exchange prompts take several.
    """
    folder = make_model("qwen3_moe", tmp_path / "model")
    shares = [random_prompts(lengths) for lengths in SHARES[:size]]
    with make_llm(folder) as llm:
        alone = [texts_of(llm, prompts) for prompts in shares]
    settings = {"cuda_graphs": graphs, "piece_rows": piece_rows}
    found = engines("texts", folder, shares, **settings)
    for rank, (one, other) in enumerate(zip(found, alone, strict=True)):
        assert any(f"worker {rank} of {size}" in notice for notice in one["notices"])
        for name in ("accepted_tokens", "prefix_hit_tokens"):
            assert one["counters"][name] > 0, name
        check_texts(one["texts"], other)


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_without_requests_computes_its_experts(graphs: bool, tmp_path: Path) -> None:
    folder, prompts = make_model("qwen3_moe", tmp_path / "model"), random_prompts(SHARES[0])
    with make_llm(folder) as llm:
        alone = greedy_texts(llm, prompts)
    shares = [prompts, []] if graphs else [[], prompts]
    busy, idle = (0, 1) if graphs else (1, 0)
    found = engines("greedy", folder, shares, cuda_graphs=graphs)
    assert [one["tokens"] for one in found[busy]["texts"]] == [one["tokens"] for one in alone]
    assert found[idle]["counters"]["empty_steps"] > 0
    assert found[busy]["counters"]["dispatched_rows"] > 0


def test_tokens_of_latents_are_those_of_one_gpu(tmp_path: Path) -> None:
    kind, fields = MOE_FAMILIES["deepseek-v3"]
    folder = tmp_path / "model"
    make_reference(kind, folder, random.randrange(1 << 30), **{**fields, "n_routed_experts": 12})
    shares = [[[random.randrange(3, 250) for _ in range(n)] for n in own] for own in SHARES[:2]]
    with make_llm(folder) as llm:
        alone = [greedy_texts(llm, prompts) for prompts in shares]
    found = engines("greedy", folder, shares)
    for one, other in zip(found, alone, strict=True):
        assert [each["tokens"] for each in one["texts"]] == [each["tokens"] for each in other]


@pytest.mark.parametrize("form", ["floats", "fp8 blocks"])
def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(form: str, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    folder = floats = make_tiny("qwen3_moe", tmp_path / "tiny", seed, **sizes, num_experts=8)
    if form == "fp8 blocks":
        folder, floats = fp8_copy(folder, tmp_path / "fp8", "blocks")
    shares = [[[random.randrange(3, 250) for _ in range(n)] for n in own] for own in SHARES[:2]]
    settings: dict[str, Any] = {"dtype": "bfloat16", "drafter": "none"}

    def ties(texts: list[list[dict[str, Any]]]) -> Ties:
        prompts = [prompt for own in shares for prompt in own]
        return ties_of(floats, prompts, [one["tokens"] for own in texts for one in own])

    with make_llm(folder, **settings) as llm:
        alone = ties([greedy_texts(llm, prompts) for prompts in shares])
    found = ties([one["texts"] for one in engines("greedy", folder, shares, **settings)])
    # Where two experts are equally likely, rounding decides which one is asked.
    assert found.num_far <= 2 * alone.num_far + 0.02 * found.num_tokens, (found, alone)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_an_engine_that_is_lost_ends_all_in_time(how: str, tmp_path: Path) -> None:
    folder = make_model("qwen3_moe", tmp_path / "model")
    (found,) = engines(how, folder, [[], []], rank_timeout_s=LIMIT_S)
    assert found["error"].startswith("worker 1 of 2")
    assert {"killed": "has ended", "stopped": "has not come"}[how] in found["error"]
    assert found["seconds"] < LIMIT_S + 5
