"""Families with recurrent layers through the engine: the tokens that transformers computes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import OF_STATES, check_choices, where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import HYBRIDS, make_family
from weft.testing.models.threads import one_thread

PAGE = 8
VOCAB = 259
NUM_NEW = 20
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut": {"prefill_chunk_tokens": PAGE, "max_step_tokens": 17, "overlap": "on"},
    "drafts": {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 11},
}
BY_DEFAULT = {("qwen3_5", "cut"), ("falcon_h1", "drafts"), ("lfm2_moe", "cut")}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def crosses() -> list[object]:
    """All families with all settings, of which a few run by default."""
    pairs = [(name, setting) for name in HYBRIDS for setting in SETTINGS]
    return [
        pytest.param(*pair, marks=() if pair in BY_DEFAULT else (pytest.mark.full,))
        for pair in pairs
    ]


@pytest.mark.parametrize(("name", "setting"), crosses())
def test_tokens_are_transformers(name: str, setting: str, tmp_path: Path) -> None:
    """Twice, the second time from cached prefixes; some requests share a prefix."""
    path = make_family(name, tmp_path, seed := random.randrange(10**6))
    print(f"seed {seed}")
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in (1, PAGE, 45, 130)]
    prompts[2] = prompts[2][:9] * 5  # Some drafts are accepted.
    prompts += [[*prompts[3][:cut], 7, 8, 9] for cut in (3 * PAGE, 101)]
    values: dict[str, Any] = {"page_size": PAGE, "poison_free_pages": True}
    values |= {"checkpoint_tokens": 6 * PAGE, "max_running_requests": 16}
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(path, dtype="float32", num_pages=160, **values, **SETTINGS[setting]) as llm:
        first, again = ([s.token_ids for s in llm.generate(prompts, stop=stop)] for _ in "12")
        assert llm.engine.counters()["prefix_hit_tokens"] >= 130 // PAGE * PAGE
    assert_most_likely(path, [*prompts, *prompts], [*first, *again])


@torch.inference_mode()
def assert_most_likely(path: Path, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Each token is the one with the largest logit of a run over all of the text before it."""
    model, seen = load_reference(path), []
    for prompt, text in zip(prompts, texts, strict=True):
        if prompt + text in seen:
            continue
        seen.append(prompt + text)
        logits = model(torch.tensor([prompt + text]), use_cache=False).logits[0]
        with where_experts_are_sure(lambda: model, prompt + text):
            check_choices(logits[len(prompt) - 1 : -1], text, OF_STATES)
