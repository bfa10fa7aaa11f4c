"""Models that transformers computes, on a GPU: tokens against plain transformers on a CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.engine.ranked_texts import ranked
from weft.testing.models.choices import Choices
from weft.testing.models.unread_models import (
    PLANNED,
    UNREAD,
    WITH_EXPERTS,
    load_unread,
    make_unread,
)

pytestmark = pytest.mark.needs("cuda")

GREEDY = SamplingParams(temperature=0.0)
STOP = StopCriteria(max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "num_pages": 100,
    "page_size": 16,
    "max_running_requests": 3,
    "max_step_tokens": 32,
    "prefill_chunk_tokens": 16,
}


# Releases of transformers on machines with GPUs do not know all, and refuse Moshi's pages.
KINDS = [kind for kind in UNREAD if kind in CONFIG_MAPPING and kind != "moshi"]


def prompt_of(count: int) -> list[int]:
    return [random.randrange(3, 160) for _ in range(count)]


def choices_of(path: Path, kind: str, prompt: list[int], count: int) -> Choices:
    reference = load_unread(path)
    return Choices(
        lambda tokens: reference(torch.tensor([tokens]), use_cache=False).logits[0],
        prompt,
        count,
        reference if kind in WITH_EXPERTS else None,
    )


@pytest.mark.whole_device
@pytest.mark.parametrize("kind", [kind for kind in PLANNED if kind in KINDS])
def test_ranks_of_the_published_plan_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    prompts = [prompt_of(70), prompt_of(19), prompt_of(7)]
    for cuda_graphs in (True, False):
        found = ranked("greedy", path, prompts, tp=2, drafter="none", cuda_graphs=cuda_graphs)
        for prompt, one in zip(prompts, found["texts"], strict=True):
            assert choices_of(path, kind, prompt, len(one["tokens"])) == one["tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_on_a_cpu(kind: str, tmp_path: Path) -> None:
    """Prompts in chunks, then decode steps of several requests, then behind cached pages."""
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    prompts = [prompt_of(70), prompt_of(19), prompt_of(7)]
    with LLM(path, dtype="float32", **SETTINGS) as llm:
        samples = llm.generate(prompts, GREEDY, STOP)
        again = prompts[0][:48] + prompt_of(9)
        samples += llm.generate([again], GREEDY, STOP)
    for prompt, sample in zip([*prompts, again], samples, strict=True):
        assert choices_of(path, kind, prompt, 12) == sample.token_ids


@pytest.mark.parametrize("kind", ["nanochat", "modernbert-decoder"])
def test_decode_steps_are_captured(kind: str, tmp_path: Path) -> None:
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    assert load_model(path, "bfloat16", "cuda").model.can_capture


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_weights_rounded_at_load_are_multiplied_as_such(quantization: str, tmp_path: Path) -> None:
    path = make_unread("nanochat", tmp_path, random.randrange(10**6))
    loaded = load_model(path, "bfloat16", "cuda", quantization=quantization)
    assert loaded.weight_format.startswith(quantization)
    with LLM(path, dtype="bfloat16", quantization=quantization, **SETTINGS) as llm:
        (sample,) = llm.generate([prompt_of(40)], GREEDY, STOP)
    assert len(sample.token_ids) == 12
