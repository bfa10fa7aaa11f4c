"""Drafts in a storm of random cancels, pre-emptions, fills and faults: no page and no text is lost.

Three ways of drafting: n-grams of the text so far, a head whose drafts follow from what the host
knows, and drafts behind steps whose outcome only the device knows.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drafters import KnownDrafter, KnownGraphs, RandomGate
from eagle3_cases import WatchedHead, check_chains
from engine_pair import ManualClock, make_engine
from engine_storm import Storm, Text, check_empty, make_texts, ride_out
from tiny_drafts import make_tiny_draft
from tiny_models import make_tiny
from weft.engine.engine import Engine
from weft.engine.request import SamplingParams
from weft.engine.sampling.sampler import derive_seed

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
NUM_NEW = 30
NUM_TEXTS = 12
MAX_SAMPLES = 4
MAX_OPEN = 24
REPEATED = {5: 100.0, 6: 100.0, 7: 100.0}
"""A bias: texts of three tokens, whose runs come again."""
COUNTS = pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.full)])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    path = tmp_path_factory.mktemp("t")
    return make_tiny("llama", path, seed, vocab_size=VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def draft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), model_dir, seed + 1)


def storm_of(model_dir: Path, samplings: list[SamplingParams], **settings: Any) -> Storm:
    """An owner that drafts, with two fillers, and too few pages for all."""
    clock = ManualClock()
    draft_dir, overlap = settings.get("draft_dir"), settings.pop("overlap")
    quiet = make_engine(model_dir, "decode", clock, overlap="off")
    texts = make_texts(quiet, clock, samplings, NUM_NEW)
    shared = {"max_running_requests": 8, "prefill_chunk_tokens": 16, "overlap": overlap}
    owner = make_engine(
        model_dir, "decode", clock, num_pages=64, has_store=True, **shared, **settings
    )
    fillers = [
        make_engine(
            model_dir, "prefill", clock, num_pages=48, worker_id=name, draft_dir=draft_dir, **shared
        )
        for name in ("p0", "p1")
    ]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return Storm(owner, fillers, clock, texts, random.Random(seed))


def samplings_of(temperatures: tuple[float, ...], **values: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperatures[number % len(temperatures)],
            seed=number,
            n=MAX_SAMPLES,
            **values,
        )
        for number in range(NUM_TEXTS)
    ]


def known_of(texts: list[Text]) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """For `KnownDrafter`."""
    return {
        (text.prompt, derive_seed(text.sampling.seed, index)): [*text.prompt, *sample]
        for text in texts
        for index, sample in enumerate(text.samples)
    }


def check_storm(storm: Storm, count: int) -> None:
    """Rides it out, with drafts all along; nothing is left of it."""
    ride_out(storm, count, MAX_OPEN)
    for engine in (storm.owner, *storm.fillers.values()):
        check_empty(engine)
    counters = storm.owner.counters()
    print(storm.faults, counters)
    assert counters["speculated_steps"] > count // 2
    assert counters["drafted_tokens"] > counters["accepted_tokens"] > count // 2
    assert storm.num_preempted
    assert counters["fills_done"]
    assert storm.faults["cancel"]
    assert storm.faults["cancel of a sample"]
    assert any(sent.tokens and "cancelled" in told for sent in storm.sent
               for told in sent.reasons.values())  # fmt: skip


def flip_depths(engine: Engine) -> None:
    engine.drafting.gate = engine.scheduler.running_plans.gate = RandomGate((0, 1, 2, 3, 5))


@COUNTS
def test_ngram_drafts(model_dir: Path, count: int) -> None:
    overlap = random.choice(["off", "on"])
    samplings = samplings_of((0.0, 1.0), logit_bias=REPEATED)
    storm = storm_of(model_dir, samplings, overlap=overlap, drafter="ngram")
    try:
        flip_depths(storm.owner)
        check_storm(storm, count)
    finally:
        storm.close()


@COUNTS
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_drafts_of_a_head(model_dir: Path, draft_dir: Path, overlap: str, count: int) -> None:
    """Whatever happened to a request, its drafts are those of the head for its text."""
    settings = {"overlap": overlap, "drafter": "eagle3", "draft_dir": draft_dir}
    storm = storm_of(model_dir, samplings_of((0.0, 1.0)), **settings)
    try:
        watched = WatchedHead(storm.owner, KnownDrafter(known_of(storm.texts), VOCAB, 0.6))
        check_storm(storm, count)
    finally:
        storm.close()
    check_chains(watched, model_dir, draft_dir)


@COUNTS
def test_drafts_behind_steps_under_way(model_dir: Path, draft_dir: Path, count: int) -> None:
    """Requests leave, and others take their slots and pages, while steps of theirs that verify
    drafts are still to come."""
    settings = {"overlap": "on", "drafter": "eagle3", "draft_dir": draft_dir}
    storm = storm_of(model_dir, samplings_of((0.0,)), **settings)
    try:
        graphs = KnownGraphs(storm.owner, known_of(storm.texts), VOCAB, 0.7)
        check_storm(storm, count)
        assert graphs.num_late > count
        assert storm.owner.counters()["surplus_tokens"] > 0
    finally:
        storm.close()
