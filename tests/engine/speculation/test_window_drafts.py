"""Drafts for models whose pages are freed behind windows: texts and drafts as if all were kept."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.draft_storm import check_storm, draft_storm, known_of, samplings_of
from weft.testing.engine.drafters import KnownDrafter, KnownGraphs, RandomGate, speculate, texts_of
from weft.testing.engine.eagle3_cases import WatchedHead, check_chains
from weft.testing.models.choices import check_same_groups
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
WINDOW = 2 * PAGE + 1
"""At a page border the row before, with which a head goes on, attends to one page more."""
NUM_NEW = 5 * PAGE
MOST = 5
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"layer_types": LAYERS, "use_sliding_window": True, "num_hidden_layers": 4},
    "mistral": {"num_hidden_layers": 4},
}
"""Models with a window in some layers, and in every layer."""


@pytest.fixture(
    params=["qwen3", pytest.param("mistral", marks=pytest.mark.full)],
    scope="module",
)
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    fields = {"vocab_size": VOCAB, "sliding_window": WINDOW, **KINDS[request.param]}
    return make_tiny(request.param, tmp_path_factory.mktemp("t"), seed, **fields)


@pytest.fixture(scope="module")
def draft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), model_dir, seed + 1)


def random_prompts() -> list[list[int]]:
    """They part from one another at any place behind the first window, or within it."""
    shared = [random.randrange(3, VOCAB) for _ in range(6 * PAGE + 3)]
    return [
        shared[: random.randint(1, len(shared))]
        + [random.randrange(3, VOCAB) for _ in range(random.randint(1, 4 * PAGE))]
        for _ in range(6)
    ]


def llm(model_dir: Path, **settings: Any) -> LLM:
    sizes = {"page_size": PAGE, "prefill_chunk_tokens": 2 * PAGE, "max_draft_tokens": MOST}
    return LLM(model_dir, dtype="float32", **sizes, **settings)


@pytest.mark.parametrize(
    ("drafter", "num_pages"),
    [
        ("eagle3", 26),
        pytest.param("eagle3", 200, marks=pytest.mark.full),
        pytest.param("eagle", None, marks=pytest.mark.full),
        pytest.param("ngram", 26, marks=pytest.mark.full),
    ],
)
def test_texts_and_drafts_whatever_happened_to_a_request(
    model_dir: Path, draft_dir: Path, tmp_path: Path, drafter: str, num_pages: int | None
) -> None:
    """Chunks, prefix hits whose first row lies before the window, samples, pre-emption."""
    overlap = random.choice(["off", "on"])
    print(f"overlap {overlap}")
    heads: dict[str, Path | None] = {"eagle3": draft_dir, "ngram": None}
    head = heads[drafter] if drafter in heads else make_tiny_eagle(tmp_path, model_dir, 7)
    prompts, few = random_prompts(), num_pages == 26
    params = SamplingParams(temperature=1.0, seed=5, n=1 if few else 2)
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    with llm(model_dir, window_pages="keep") as plain:
        expected = plain.generate_all(prompts, params, stop)
    known = KnownDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
    given = {"draft_dir": head, "drafter": drafter, "overlap": overlap, "num_pages": num_pages}
    with llm(model_dir, poison_free_pages=True, **given) as drafting:
        (window,) = drafting.engine.parts.companions
        watched = None
        if head is None:
            speculate(drafting.engine, known, (0, 1, 3, MOST))
        else:
            watched = WatchedHead(drafting.engine, known)
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, stop)
            check_same_groups(partial(load_reference, model_dir), prompts, groups, expected, params)
        counters = drafting.engine.counters()
        assert not window._held
        for memory in drafting.engine.memories:
            memory.check_integrity()
    assert counters["accepted_tokens"] > 0
    assert counters["prefix_hit_tokens"] > 0 or few
    if watched is not None:
        assert head is not None
        check_chains(watched, model_dir, head)


@pytest.mark.parametrize("drafter", ["eagle3", pytest.param("ngram", marks=pytest.mark.full)])
def test_a_request_has_no_more_pages_than_its_window_and_drafts_need(
    model_dir: Path, draft_dir: Path, drafter: str
) -> None:
    head = draft_dir if drafter == "eagle3" else None
    settings = {"drafter": drafter, "draft_dir": head, "num_pages": 100, "overlap": "on"}
    settings |= {"max_running_requests": 1, "max_step_tokens": 2 * PAGE}
    with llm(model_dir, prefix_cache=False, **settings) as drafting:
        engine, most = drafting.engine, [0, 0]
        turn = engine.turn

        def noted_turn(*args: Any) -> Any:
            out = turn(*args)
            most[:] = map(max, most, [memory.counts().used for memory in engine.memories])
            return out

        engine.turn = noted_turn  # type: ignore[method-assign]
        engine.scheduler.running_plans.gate = RandomGate((0, 2, MOST))
        stop = StopCriteria(max_tokens=150, ignore_eos=True)
        drafting.generate([[7] * 300], SamplingParams(temperature=0.0), stop)
        assert engine.counters()["drafted_tokens"] > 0
        assert most[0] == -(-450 // PAGE)
        # Pages of the prompt tokens of two steps come first, those of drafts later.
        assert most[1] <= -(-(WINDOW + 1 + 2 * MOST) // PAGE) + 3 < 12
        assert engine.memories[1].counts().total < 20


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["graphs", "ngram", "eagle3"])
@pytest.mark.parametrize("count", [120, 1500])
def test_a_storm(model_dir: Path, draft_dir: Path, drafter: str, count: int) -> None:
    """Fills, cancels and pre-emptions, also behind steps of which only the device knows the end."""
    settings: dict[str, Any] = {"overlap": "on", "window_pages": "free", "has_store": False}
    settings["drafter"] = "ngram" if drafter == "ngram" else "eagle3"
    settings["draft_dir"] = None if drafter == "ngram" else draft_dir
    temperatures = (0.0,) if drafter == "graphs" else (0.0, 1.0)
    storm = draft_storm(model_dir, samplings_of(temperatures), 30, **settings)
    try:
        assert len(storm.owner.memories) == 2
        known = known_of(storm.texts)
        if drafter == "graphs":
            KnownGraphs(storm.owner, known, VOCAB, 0.7)
        elif drafter == "eagle3":
            WatchedHead(storm.owner, KnownDrafter(known, VOCAB, 0.6))
        else:
            speculate(storm.owner, KnownDrafter(known, VOCAB, 0.6), (0, 1, 3, 5))
        check_storm(storm, count)
        assert not len(storm.owner.parts.windows[0])
    finally:
        storm.close()
