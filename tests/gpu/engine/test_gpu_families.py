"""Every architecture on a GPU: tokens of small random models against transformers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.every_family import (
    EVERY_FAMILY,
    gaps_of,
    greedy_tokens,
    missing_type,
    write_model,
)
from weft.testing.models.families import HYBRIDS, HYBRIDS_WITH_IMAGES
from weft.testing.models.float32_reference import BFLOAT16_ULPS

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.usefixtures("few_threads")]

NUM_NEW = 12
LENGTHS = (21, 70, 17)
"""Of prompts: of several chunks, longer than windows and their pages, and longer than what LongRoPE
calls the original length.
"""
NAMES = [name for name in EVERY_FAMILY if name not in (*HYBRIDS, *HYBRIDS_WITH_IMAGES)]
WHOLE_TABLE = {"gemma3n": {"vocab_size_per_layer_input": 259}}
"""Further fields of families that transformers 5.17, which a GPU machine may have, cannot compute
without them: it rejects ids beyond Gemma 3n's table of per-layer embeddings.
"""
OTHERS = ("gpt-oss", "deepseek-v3", "gemma3", "gemma4", "llama4", "mimo", "cohere2", "glm4-moe")
"""Families that between them have every part, for what is long."""


@pytest.fixture
def few_threads() -> Any:
    """Torch's threads on the host, beside other test processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    return [[random.randrange(3, 250) for _ in range(length)] for length in LENGTHS]


def make_llm(path: Path, **settings: Any) -> LLM:
    """Few sizes of steps, so that few graphs are captured; prompts come in chunks of a page."""
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "num_pages": 100,
        "max_running_requests": 3,
        "max_step_tokens": 16,
        "prefill_chunk_tokens": 16,
        "max_context_tokens": 128,
        "poison_free_pages": True,
    }
    return LLM(path, **(values | settings))


def answers(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    samples = llm.generate(given, SamplingParams(temperature=0.0), stop)
    return [sample.token_ids for sample in samples]


@pytest.mark.parametrize("name", NAMES)
def test_float32_tokens(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """By captured steps, prompts in chunks; once more with what is cached of them."""
    if why := missing_type(name):
        pytest.skip(why)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    reference = write_model(name, tmp_path / "model", seed, **WHOLE_TABLE.get(name, {}))
    record_property("architecture", ModelConfig.load(tmp_path / "model").architecture)
    record_property("column", "on a GPU")
    given = prompts()
    expected = [greedy_tokens(reference, prompt, NUM_NEW) for prompt in given]
    with make_llm(tmp_path / "model") as llm:
        assert answers(llm, given) == expected
        assert answers(llm, given) == expected, "with a hit"
        assert llm.engine.counters()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("name", OTHERS)
def test_bfloat16_near_ties(name: str, tmp_path: Path) -> None:
    """Each token is the choice of float32 with rounded weights, or within a near-tie of it."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    reference = write_model(name, tmp_path / "model", seed)
    given = prompts()
    rounded = copy.deepcopy(reference).to(torch.bfloat16).float()
    gaps: list[float] = []
    with make_llm(tmp_path / "model", dtype="bfloat16") as llm:
        is_moe = llm.engine.parts.local._model.config.moe is not None
        for prompt, tokens in zip(given, answers(llm, given), strict=True):
            gaps += gaps_of(rounded, prompt, tokens)
    far = sum(gap > BFLOAT16_ULPS for gap in gaps)
    # Where two experts are nearly alike, rounding decides which one is asked.
    assert far <= (0.2 * len(gaps) if is_moe else 0), sorted(gaps)[-5:]


@pytest.mark.parametrize("name", OTHERS)
def test_whole_prompts_without_graphs(name: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    reference = write_model(name, tmp_path / "model", seed)
    given = prompts()
    expected = [greedy_tokens(reference, prompt, NUM_NEW) for prompt in given]
    settings = {"max_step_tokens": 128, "prefill_chunk_tokens": 128, "cuda_graphs": False}
    with make_llm(tmp_path / "model", **settings) as llm:
        assert answers(llm, given) == expected
