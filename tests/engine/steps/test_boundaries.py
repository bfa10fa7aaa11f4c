"""Prompt lengths, shared prefixes and chunks around page borders, local and shipped.

The reference is transformers' greedy generation of the same tiny model; what was found in caches
and what was shipped is compared with the formulas of docs/architecture.md on both sides' counters.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import GreedyReference
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("overlap")

PAGE = 8
NUM_NEW = 6
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1]
VOCAB = 517


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(
        "llama",
        path,
        seed=random.randrange(2**31),
        vocab_size=VOCAB,
        num_hidden_layers=3,
        head_dim=80,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return path


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> GreedyReference:
    return GreedyReference(model_dir, NUM_NEW)


def prompt_of(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


@pytest.fixture(params=[PAGE, 3 * PAGE], ids=["chunk_1_page", "chunk_3_pages"])
def pair(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[EnginePair]:
    clock = ManualClock()
    settings = {"prefill_chunk_tokens": request.param}
    owner = make_engine(model_dir, "decode", clock, **settings)
    filler = make_engine(model_dir, "prefill", clock, **settings)
    pair = EnginePair(owner, [filler], clock)
    yield pair
    pair.close()


@pytest.mark.each_of("overlap", "is_shipped")
@pytest.mark.parametrize("is_shipped", [False, True], ids=["local", "shipped"])
def test_tokens_hits_and_bytes_at_every_border(
    pair: EnginePair, reference: GreedyReference, is_shipped: bool
) -> None:
    page_bytes = pair.owner.parts.layout.page_bytes
    filler = pair.fillers["prefill"]
    for length in LENGTHS:
        shares = {0, 1, PAGE - 1, PAGE, PAGE + 1, length - 1, length}
        for shared in sorted(s for s in shares if 0 <= s <= length):
            pair.owner.memory.flush_cache()
            filler.memory.flush_cache()
            prompt = prompt_of(length)
            candidates = None if is_shipped else []
            earlier: list[int] = []
            if shared:
                earlier = prompt[:shared] + prompt_of(3)
                pair.finish(pair.submit(earlier, 1, candidates))
            before = pair.owner.counters() | {"filler": filler.counters()}
            request_id = pair.submit(prompt, NUM_NEW, candidates)
            (tokens,) = pair.finish(request_id)
            assert tokens == reference(prompt), (length, shared)

            answer = pair.answers[request_id].finished[0]
            timeline = answer.timeline
            end = (length - 1) // PAGE * PAGE
            exact = min(_num_cached(prompt, earlier), length - 1)
            full = exact // PAGE * PAGE
            if is_shipped and end > full:
                end = length // PAGE * PAGE
            shipped = end - full if is_shipped else 0
            hit = full if shipped else exact
            assert timeline.matched_tokens == answer.cached_prompt_tokens == hit, (length, shared)
            assert timeline.local_prefill_tokens == max(length - hit - shipped, 1)
            after = pair.owner.counters()
            assert (
                after["accepted_bytes"] - before["accepted_bytes"] == shipped // PAGE * page_bytes
            )
            shipped_bytes = filler.counters()["shipped_bytes"] - before["filler"]["shipped_bytes"]
            assert shipped_bytes == shipped // PAGE * page_bytes
            pair.settle()


def _num_cached(prompt: list[int], earlier: list[int]) -> int:
    """Leading tokens of a prompt that the full pages of an earlier one hold."""
    held = earlier[: len(earlier) // PAGE * PAGE]
    pairs = zip(prompt, held, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_hits_inside_pages_change_no_token(model_dir: Path, reference: GreedyReference) -> None:
    """Prompts that part at random tokens, several at a time, with a small pool and without."""
    rng = random.Random(random.randrange(2**31))
    stems = [prompt_of(6 * PAGE)]
    for _ in range(11):
        stem = rng.choice(stems)
        stems.append(stem[: rng.randint(1, len(stem))] + prompt_of(rng.randint(1, 3 * PAGE)))
    prompts = [stem[: rng.randint(1, len(stem))] for stem in stems for _ in range(3)]
    rng.shuffle(prompts)
    expected = [reference(prompt) for prompt in prompts]
    counters = {}
    for name, values in {
        "cached": {},
        "small": {"num_pages": 28, "kv_eviction_policy": "slru"},
        "uncached": {"prefix_cache": False},
    }.items():
        engine = make_engine(model_dir, "decode", ManualClock(), **values)
        pair = EnginePair(engine, [], ManualClock())
        try:
            ids: list[str] = []
            for prompt in prompts:
                ids.append(pair.submit(prompt, NUM_NEW, []))
                if rng.random() < 0.5:
                    pair.turn()
            assert pair.finish(*ids) == expected, name
            pair.settle()
            counters[name] = engine.counters()
        finally:
            pair.close()
    assert counters["cached"]["partial_page_hits"] > 0
    assert counters["small"]["partial_page_hits"] > 0
    assert counters["small"]["evicted_pages"] > 0
    assert counters["uncached"]["prefix_hit_tokens"] == 0


def test_prefilled_pages_of_the_filler_are_not_computed_again(
    pair: EnginePair, reference: GreedyReference
) -> None:
    prompt = prompt_of(5 * PAGE + 3)
    for _ in range(2):
        pair.owner.memory.flush_cache()
        request_id = pair.submit(prompt, NUM_NEW)
        assert pair.finish(request_id) == [reference(prompt)]
    fills = pair.answers[request_id].finished[0].timeline.fills
    assert [fill.computed_tokens for fill in fills] == [0]
    assert [fill.accepted_tokens for fill in fills] == [5 * PAGE]


def test_long_prompts_come_in_capped_fills(model_dir: Path, reference: GreedyReference) -> None:
    """A remainder over the cap comes in consecutive fills, one lease each."""
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock, num_pages=41)
    filler = make_engine(model_dir, "prefill", clock)
    pair = EnginePair(owner, [filler], clock)
    try:
        prompts = [prompt_of(20 * PAGE + 1) for _ in range(3)]
        ids = [pair.submit(prompt, NUM_NEW) for prompt in prompts]
        assert pair.finish(*ids) == [reference(prompt) for prompt in prompts]
        for i in ids:
            fills = pair.answers[i].finished[0].timeline.fills
            assert sum(fill.accepted_tokens for fill in fills) == 20 * PAGE
            assert max(fill.end_token - fill.start_token for fill in fills) <= 12 * PAGE
        pair.settle()
    finally:
        pair.close()


def test_samples_of_one_prompt_share_one_fill(pair: EnginePair) -> None:
    from weft.contract.request import SamplingParams

    prompt = prompt_of(4 * PAGE + 5)
    request_id = pair.submit(prompt, NUM_NEW, sampling=SamplingParams(n=4, seed=7))
    pair.finish(request_id, samples=4)
    answer = pair.answers[request_id]
    assert pair.owner.counters()["fills_started"] == 1
    texts = [tuple(answer.tokens[i]) for i in range(4)]
    assert len(set(texts)) == 4
    alone = [pair.submit(prompt, NUM_NEW, [], SamplingParams(n=4, seed=7)) for _ in range(1)]
    pair.finish(*alone, samples=4)
    assert [tuple(pair.answers[alone[0]].tokens[i]) for i in range(4)] == texts
    pair.settle()


def test_chunks_of_every_size_give_the_same_tokens(
    model_dir: Path, reference: GreedyReference
) -> None:
    prompt = prompt_of(6 * PAGE + 5)
    expected = reference(prompt)
    for chunk in itertools.chain(range(PAGE, 5 * PAGE, PAGE)):
        engine = make_engine(model_dir, "decode", ManualClock(), prefill_chunk_tokens=chunk)
        pair = EnginePair(engine, [], ManualClock())
        try:
            assert pair.finish(pair.submit(prompt, NUM_NEW)) == [expected]
        finally:
            pair.close()
