"""A head's entries in pages that others computed: wherever a fill, a chunk or a hit ends they are
those of the whole text run at once, and drafts go on from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.timeline import Timeline
from weft.engine.loop.llm import LLM
from weft.testing.engine.drafters import KnownDrafter
from weft.testing.engine.eagle3_cases import (
    HeadReference,
    PublishedEntries,
    WatchedHead,
    check_chains,
)
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny
from weft.testing.scheduling.draft_machine import FixedGate

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
LAYERS = 4
NUM_NEW = 5 * PAGE + 3
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    path = tmp_path_factory.mktemp("t")
    return make_tiny("llama", path, seed, vocab_size=VOCAB, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def draft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), model_dir, seed + 1)


@pytest.fixture(scope="module")
def reference(model_dir: Path, draft_dir: Path) -> HeadReference:
    return HeadReference(model_dir, draft_dir)


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Iterator[LLM]:
    """Without drafts."""
    with LLM(model_dir, dtype="float32", page_size=PAGE, num_pages=400) as made:
        yield made


def random_tokens(count: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(count)]


def texts_of(plain: LLM, prompts: list[list[int]]) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """For `KnownDrafter`."""
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    samples = plain.generate(prompts, GREEDY, stop)
    return {
        (tuple(prompt), GREEDY.seed): prompt + sample.token_ids
        for prompt, sample in zip(prompts, samples, strict=True)
    }


def pair_of(model_dir: Path, heads: tuple[Path | None, ...], **settings: Any) -> EnginePair:
    """An owner and its fillers, each with a head of its own or none."""
    settings["overlap"] = random.choice(("off", "on"))
    print(f"overlap {settings['overlap']}")
    clock = ManualClock()
    owner, *others = heads
    return EnginePair(
        make_engine(model_dir, "decode", clock, drafter="eagle3", draft_dir=owner, **settings),
        [
            make_engine(
                model_dir, "prefill", clock, worker_id=f"p{index}", draft_dir=head, **settings
            )
            for index, head in enumerate(others)
        ],
        clock,
    )


@pytest.mark.parametrize(
    "chunk_pages", [1, *(pytest.param(pages, marks=pytest.mark.full) for pages in (2, 3, 5))]
)
def test_entries_and_drafts_wherever_a_fill_ends(
    model_dir: Path, draft_dir: Path, reference: HeadReference, plain: LLM, chunk_pages: int
) -> None:
    """The rest of a prompt behind what was filled has each length; what the filler finds cached,
    and what the owner has already, end at each place of a page too."""
    offsets = random.sample(range(PAGE), PAGE)
    prompts = [random_tokens(4 * PAGE + offset + 1) for offset in range(PAGE)]
    cached = [prompt[: PAGE + at] for prompt, at in zip(prompts, offsets, strict=True)]
    texts = texts_of(plain, prompts)
    settings = {"prefill_chunk_tokens": chunk_pages * PAGE}
    pair = pair_of(model_dir, (draft_dir, draft_dir), **settings)
    try:
        owner, filler = pair.owner, pair.fillers["p0"]
        published, sent = PublishedEntries(owner), PublishedEntries(filler)
        watched = WatchedHead(owner, KnownDrafter(texts, VOCAB, 0.6))
        for place, (prompt, begin) in enumerate(zip(prompts, cached, strict=True)):
            # Of neither, of the filler, of both: what is cached goes on otherwise.
            for is_owner in (False, True)[: random.randint(0, 2)]:
                other = [*begin, *random_tokens(PAGE)]
                pair.finish(pair.submit(other, 1, [] if is_owner else None))
                pair.settle()
                if not is_owner:
                    owner.memory.flush_cache()
            request_id = pair.submit(prompt, NUM_NEW)
            (tokens,) = pair.finish(request_id)
            text = texts[tuple(prompt), GREEDY.seed]
            assert prompt + tokens == text, place
            (fill,) = pair.answers[request_id].finished[0].timeline.fills
            assert (fill.end_token, fill.failure) == (len(prompt) // PAGE * PAGE, "")
            assert published.check(text[:-1], reference) == (len(text) - 1) // PAGE
            assert sent.check(prompt, reference) >= 4
            pair.settle()
        counters = owner.counters()
        assert counters["fills_done"] >= PAGE
        assert counters["accepted_tokens"] > 0
    finally:
        pair.close()
    check_chains(watched, model_dir, draft_dir)


class Guessing:
    """A head that is right now and then: it chooses among few tokens, and so does the target.

    Args:
        model_dir: Of the target.
        path: Directory for the head.
        seed: Of its weights.
    """

    def __init__(self, model_dir: Path, path: Path, seed: int) -> None:
        self.draft_dir = make_tiny_draft(path, model_dir, seed, draft_vocab_size=4)
        (ids,) = load_file(path / "model.safetensors")["t2d"].nonzero(as_tuple=True)
        self.params = SamplingParams(
            temperature=1.0, seed=seed, logit_bias={int(token): 100.0 for token in ids}
        )

    def lengths(
        self, pair: EnginePair, prompts: list[list[int]], fills: bool
    ) -> tuple[list[list[int]], float, list[Timeline]]:
        """Texts of some prompts one by one, tokens a request and step, and what happened."""
        candidates = None if fills else []
        ids = []
        for prompt in prompts:
            ids.append(pair.submit(prompt, 3 * PAGE, candidates, self.params))
            pair.finish(ids[-1])
        pair.settle()
        timelines = [pair.answers[request_id].finished[0].timeline for request_id in ids]
        accepted = sum(timeline.num_accepted_tokens for timeline in timelines)
        drafted = sum(timeline.num_drafted_tokens for timeline in timelines)
        assert len(prompts) == 1 or 0 < accepted < drafted
        texts = [pair.answers[request_id].tokens[0] for request_id in ids]
        num_decoded = sum(map(len, texts)) - len(texts)  # The first token is the prompt's.
        return texts, num_decoded / (num_decoded - accepted), timelines


@pytest.fixture(scope="module")
def guessing(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Guessing:
    return Guessing(model_dir, tmp_path_factory.mktemp("g"), seed + 2)


def guess(pair: EnginePair) -> None:
    """The owner always drafts three tokens."""
    pair.owner.scheduler.running_plans.gate = FixedGate(3)


def test_hits_and_fills_accept_as_many_drafts(model_dir: Path, guessing: Guessing) -> None:
    prompts = [random_tokens(3 * PAGE + offset) for offset in range(1, PAGE + 1)]
    pair = pair_of(model_dir, (guessing.draft_dir, guessing.draft_dir))
    try:
        guess(pair)
        texts, cold, _ = guessing.lengths(pair, prompts, fills=False)
        begins = [prompt[: 2 * PAGE + place] for place, prompt in enumerate(prompts)]
        for what in ("hits", "fills", "hits and fills"):
            pair.owner.memory.flush_cache()
            if what != "fills":
                others = [[*begin, *random_tokens(PAGE)] for begin in begins]
                pair.finish(*(pair.submit(other, 1, []) for other in others))
            found, length, timelines = guessing.lengths(pair, prompts, fills=what != "hits")
            print(f"{what}: {length:.3f} tokens a step, cold {cold:.3f}")
            assert found == texts
            assert length == pytest.approx(cold, rel=0.02)
            hits = [timeline.matched_tokens >= 2 * PAGE for timeline in timelines]
            filled = [sum(f.accepted_tokens for f in t.fills) > 0 for t in timelines]
            assert all(hits) == (what != "fills")
            assert any(filled) == (what != "hits")
    finally:
        pair.close()


@pytest.mark.parametrize("head", ["none", "another"])
def test_a_filler_without_the_owners_head(
    model_dir: Path, guessing: Guessing, head: str, tmp_path: Path
) -> None:
    """It declines, the owner computes the prompt, and drafts are what they are without a filler."""
    other = None if head == "none" else make_tiny_draft(tmp_path, model_dir, 99)
    prompts = [random_tokens(3 * PAGE + offset) for offset in range(1, PAGE + 1)]
    pair = pair_of(model_dir, (guessing.draft_dir, other))
    try:
        guess(pair)
        texts, cold, _ = guessing.lengths(pair, prompts, fills=False)
        pair.owner.memory.flush_cache()
        found, length, timelines = guessing.lengths(pair, prompts, fills=True)
        assert found == texts
        assert length == pytest.approx(cold, rel=0.02)
        for timeline, prompt in zip(timelines, prompts, strict=True):
            for fill in timeline.fills:
                assert "declined: namespace" in fill.failure
            # Another prompt may begin with the same tokens by chance.
            assert timeline.local_prefill_tokens > len(prompt) - PAGE
        assert pair.owner.counters()["fills_declined"] == sum(len(t.fills) for t in timelines) > 0
        assert pair.fillers["p0"].counters()["computed_tokens"] == 0
    finally:
        pair.close()


@pytest.mark.parametrize("settings", WAYS)
def test_a_corrupt_byte_of_the_heads_layer_is_found(
    model_dir: Path, guessing: Guessing, settings: dict[str, Any]
) -> None:
    """Wherever it is in the layer; the page is filled from elsewhere."""
    prompt = random_tokens(4 * PAGE + 3)
    heads = (guessing.draft_dir,) * 3
    pair = pair_of(model_dir, heads, **settings)
    try:
        guess(pair)
        (text,), cold, _ = guessing.lengths(pair, [prompt], fills=False)
        pair.owner.memory.flush_cache()
        layout = pair.owner.parts.layout
        kv_heads, layers = layout.plane.heads, layout.plane.layers
        layer_bytes = layout.page_bytes // kv_heads // layers
        places = []

        def flip(pool: np.ndarray, pages: Any) -> None:
            if not places:
                page = int(random.choice(list(pages)))
                place = random.randrange(layer_bytes)
                place += (random.randrange(kv_heads) * layers + LAYERS) * layer_bytes
                places.append((page, place))
                pool[page, place] ^= 1 << random.randrange(8)

        pair.owner.parts.transport.port.before_digest = flip
        (found,), length, (timeline,) = guessing.lengths(pair, [prompt], fills=True)
        print(places)
        assert found == text
        assert length == pytest.approx(cold, rel=0.02)
        assert pair.owner.counters()["digest_mismatches"] == 1
        first, second = timeline.fills
        assert "digest" in first.failure
        assert (second.worker_id, second.failure) == ("p1", "")
    finally:
        pair.close()
