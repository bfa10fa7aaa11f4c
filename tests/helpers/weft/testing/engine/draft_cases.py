"""What tests of speculation share: prompts, parameters, and when two texts count as the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from weft.contract.request import SamplingParams
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.models.choices import check_same_groups
from weft.testing.models.every_family import load_reference

PAGE = 8
VOCAB = 517
NUM_NEW = 21

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, seed=11),
    "filtered": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=12),
    "penalties": SamplingParams(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={5: 3.0, 9: -4.0},
        seed=13,
    ),
    "samples": SamplingParams(temperature=1.0, n=3, seed=14),
}


def random_prompts(number: int, most: int = 5 * PAGE) -> list[list[int]]:
    lengths = [random.randint(1, most) for _ in range(number)]
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def llm(model_dir: Path, **settings: object) -> LLM:
    return LLM(
        model_dir, dtype="float32", page_size=PAGE, prefill_chunk_tokens=2 * PAGE, **settings
    )


def same(
    model_dir: Path,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    groups: Sequence[Sequence[GeneratedSample]],
    expected: Sequence[Sequence[GeneratedSample]],
) -> None:
    """The texts are the same but where two tokens are as likely, and so are their ends and
    log-probabilities.
    """
    check_same_groups(partial(load_reference, model_dir), prompts, groups, expected, params)
    for group, expected_group in zip(groups, expected, strict=True):
        for sample, wanted in zip(group, expected_group, strict=True):
            if sample.token_ids != wanted.token_ids:  # Since two tokens were as good.
                continue
            assert sample.finish_reason == wanted.finish_reason
            for entry, other in zip(sample.logprobs, wanted.logprobs, strict=True):
                assert entry.token_id == other.token_id
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)


def check_pages(model: LLM) -> None:
    while model.engine.has_work:  # A step is under way where a stop token came last.
        model.engine.turn()
    memory = model.engine.memory
    memory.check_integrity()
    counts = memory.counts()
    assert counts.free + counts.cached == counts.total
