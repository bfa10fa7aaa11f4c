"""Recurrent layers on several ranks: the texts of one rank, and states that workers with other
numbers of ranks continue.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import ConfigError
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import OF_STATES, check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import make_family

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB, NUM_NEW = 8, 259, 24
FULL = pytest.mark.full
FAMILIES: list[Any] = [
    ("qwen3_next", {}),
    pytest.param("qwen3_5", {}, marks=FULL),
    pytest.param("qwen3_5_moe", {}, marks=FULL),
    pytest.param("bamba", {"mamba_n_groups": 2}, marks=FULL),
    pytest.param("falcon_h1", {"mamba_n_groups": 2}, marks=FULL),
    pytest.param("granite_hybrid", {"mamba_n_groups": 2}, marks=FULL),
    pytest.param("nemotron_h", {}, marks=FULL),
    pytest.param("lfm2", {}, marks=FULL),
]


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    return [sample.token_ids for sample in llm.generate(prompts, stop=stop)]


@pytest.mark.parametrize(("name", "fields"), FAMILIES)
def test_texts_are_those_of_one_rank(
    name: str, fields: dict[str, int], tmp_path: Path, seed: int
) -> None:
    """With prompts in chunks, prefix hits and drafts."""
    path = make_family(name, tmp_path / "model", seed, **fields)
    base = random_prompt(100)
    prompts = [base[:37] + random_prompt(5), base, base[:9] * 6, base[:64] + random_prompt(20)]
    settings: dict[str, Any] = {
        "dtype": "float32",
        "page_size": PAGE,
        "num_pages": 200,
        "prefill_chunk_tokens": 3 * PAGE,
        "max_running_requests": 4,
        "checkpoint_tokens": 4 * PAGE,
        "poison_free_pages": True,
        "drafter": "ngram",
        "draft_gate": "fixed",
        "max_draft_tokens": 3,
    }
    turns, found = [], []
    for size in (1, 2):
        with LLM(path, tp=size, num_threads=1, **settings) as llm:
            first = run(llm, prompts)
            pairs = zip(prompts, first, strict=True)
            turns = turns or [[*prompt, *answer[:9]] for prompt, answer in pairs]
            assert run(llm, prompts) == first
            found.append([*first, *run(llm, turns)])
            assert llm.engine.counters()["prefix_hit_tokens"] > 0
    for prompt, alone, together in zip([*prompts, *turns], *found, strict=True):
        check_same(partial(load_reference, path), prompt, together, alone, near_tie=OF_STATES)


@FULL
@pytest.mark.parametrize(("owner", "filler"), [(1, 2), (2, 1), (2, 2)])
def test_states_are_shipped_between_workers_of_other_numbers_of_ranks(
    owner: int, filler: int, tmp_path: Path, seed: int
) -> None:
    path = make_family("nemotron_h", tmp_path / "model", seed)
    clock, settings = ManualClock(), {"num_threads": 1}
    pair = EnginePair(
        make_engine(path, "decode", clock, tp=owner, **settings),
        [make_engine(path, "prefill", clock, worker_id="p0", tp=filler, **settings)],
        clock,
    )
    try:
        prompt = random_prompt(6 * PAGE + 3)
        (alone,) = pair.finish(pair.submit(prompt, NUM_NEW, candidates=[]))
        pair.owner._flush()
        request_id = pair.submit(prompt, NUM_NEW)
        assert pair.finish(request_id) == [alone]
        (fill,) = pair.answers[request_id].finished[0].timeline.fills
        assert (fill.accepted_tokens, fill.failure) == (6 * PAGE, "")
        pair.settle()
    finally:
        pair.close()


def test_numbers_of_ranks_that_do_not_divide_states_are_refused(tmp_path: Path) -> None:
    path = make_family("bamba", tmp_path, 0, mamba_n_groups=1)
    with pytest.raises(ConfigError, match=r"1 groups of Mamba 2 layers.*tp = 1"):
        LLM(path, tp=2)
