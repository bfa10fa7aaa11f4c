"""Speculation never changes the text: right, wrong and random drafts, wherever texts end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.keys import PageKeys
from weft.contract.request import Constraint, Reasoning, SamplingParams, StopCriteria
from weft.engine.features.speculative.ngram import NgramDrafter
from weft.engine.loop.llm import LLM
from weft.testing.engine.constrained import Desk, Outcome, schema
from weft.testing.engine.draft_cases import (
    NUM_NEW,
    PAGE,
    PARAMS,
    VOCAB,
    check_pages,
    llm,
    random_prompts,
    same,
)
from weft.testing.engine.drafters import EndingDrafter, KnownDrafter, NotedRuns, speculate, texts_of
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import Choices
from weft.testing.models.tiny_models import EOS_TOKEN_ID, make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

DEPTHS = (0, 1, 2, 3, 5, 7)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    return make_tiny(request.param, path, seed, vocab_size=VOCAB, num_hidden_layers=2)


@pytest.mark.each_of("kind", "model_dir", "chance")
@pytest.mark.parametrize("chance", [1.0, 0.0, 0.7], ids=["oracle", "wrong", "random"])
@pytest.mark.parametrize("kind", PARAMS)
def test_drafts_change_no_token(model_dir: Path, kind: str, chance: float) -> None:
    overlap = random.choice(["off", "on"])
    print(f"overlap {overlap}")
    params, stop = PARAMS[kind], StopCriteria(max_tokens=NUM_NEW, min_tokens=3)
    prompts = random_prompts(6)
    top = None if kind == "greedy" else 2
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop, top)
    texts = texts_of(prompts, expected, params.seed)
    with llm(model_dir, drafter="ngram", overlap=overlap, poison_free_pages=True) as drafting:
        speculate(drafting.engine, KnownDrafter(texts, VOCAB, chance), DEPTHS)
        noted = NotedRuns(drafting.engine)
        same(
            model_dir, prompts, params, drafting.generate_all(prompts, params, stop, top), expected
        )
        for prompt, wanted in zip(prompts, expected, strict=True):  # Alone, on a warm cache.
            same(
                model_dir,
                [prompt],
                params,
                drafting.generate_all([prompt], params, stop, top),
                [wanted],
            )
        counters = drafting.engine.counters()
        check_pages(drafting)
    assert counters["speculated_steps"] > 0
    runs = [run for run in noted.runs if run[0] > 0]
    assert len(runs) == counters["verified_runs"] > 0
    if chance == 1.0:
        assert all(drawn == drafts + 1 for drafts, drawn, is_over in runs if not is_over)
        # What a request's end makes superfluous is not accepted.
        assert counters["accepted_tokens"] > 0.9 * counters["drafted_tokens"] > 0
    if chance == 0.0:
        assert all(drawn == 1 for _, drawn, _ in runs)
        assert counters["accepted_tokens"] == 0 < counters["drafted_tokens"]


def test_greedy_text_is_that_of_transformers(model_dir: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompts = random_prompts(3)
    params, stop = PARAMS["greedy"], StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    texts: dict[tuple[tuple[int, ...], int], list[int]] = {}
    with llm(model_dir) as plain:
        for prompt, sample in zip(prompts, plain.generate(prompts, params, stop), strict=True):
            choices = Choices(
                lambda tokens: reference(torch.tensor([tokens])).logits[0], prompt, NUM_NEW
            )
            assert sample.token_ids == choices
            texts[tuple(prompt), params.seed] = prompt + sample.token_ids
    with llm(model_dir, drafter="ngram") as drafting:
        speculate(drafting.engine, KnownDrafter(texts, VOCAB, 1.0), (7,))
        samples = drafting.generate(prompts, params, stop)
        for prompt, sample in zip(prompts, samples, strict=True):
            assert prompt + sample.token_ids == texts[tuple(prompt), params.seed]
            assert sample.timeline is not None
            # The first token is the prompt's; all others come eight a step.
            assert sample.timeline.num_accepted_tokens == sample.timeline.num_drafted_tokens
            assert sample.timeline.num_accepted_tokens == NUM_NEW - 1 - -(-(NUM_NEW - 1) // 8)


@pytest.mark.each_of("model_dir", "place")
@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("end", ["eos", "stop token", "max_tokens", "context"])
def test_ends_inside_an_accepted_run(model_dir: Path, end: str, place: int) -> None:
    """Then another request goes on with the text, from what is cached of it."""
    num_tokens = 1 + place + 1  # The first token is the prompt's.
    (prompt,) = random_prompts(1)
    greedy = PARAMS["greedy"]
    with llm(model_dir) as plain:
        free = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        for _ in range(50):
            (sample,) = plain.generate([prompt], greedy, free)
            last = sample.token_ids[num_tokens - 1]
            if sample.token_ids.index(last) == num_tokens - 1:
                break
            (prompt,) = random_prompts(1)
        text = sample.token_ids
        behind = random_prompts(1)[0]
        longer = [*prompt, *text[:num_tokens], *behind]
        if end == "context":  # There is room for one more token.
            longer = [*prompt, *text[: num_tokens - 2], behind[0]]
            free = replace(free, max_tokens=1)
        (wanted,) = plain.generate([longer], greedy, free)
    settings: dict[str, object] = {"drafter": "ngram"}
    stop = replace(free, max_tokens=NUM_NEW)
    if end == "max_tokens":
        stop = replace(free, max_tokens=num_tokens)
    elif end == "stop token":
        stop = replace(free, stop_token_ids=(last,))
    elif end == "context":
        settings["max_context_tokens"] = len(prompt) + num_tokens
    with llm(model_dir, **settings) as drafting:
        engine = drafting.engine
        if end == "eos":
            engine._intake._eos = frozenset({last})
            stop = replace(free, ignore_eos=False)
        texts = {(tuple(prompt), 0): prompt + text}
        speculate(engine, KnownDrafter(texts, VOCAB, 1.0), (7,))
        published: list[bytes] = []
        engine.memory.on_published.append(lambda page, key, parent: published.append(key))
        (cut,) = drafting.generate([prompt], greedy, stop)
        assert cut.token_ids == text[:num_tokens]
        assert cut.finish_reason == ("length" if end in ("max_tokens", "context") else "stop")
        # What is cached are keys of the text, and of nothing behind it.
        tokens = prompt + cut.token_ids
        known = PageKeys(engine._intake.namespace(""), PAGE)
        assert set(published) <= set(known.upto(tokens, (len(tokens) - 1) // PAGE))
        check_pages(drafting)
        engine._intake._eos = frozenset()
        engine.pipeline._drafter = KnownDrafter(
            {(tuple(longer), 0): longer + wanted.token_ids}, VOCAB, 0.5
        )
        before = engine.counters()["prefix_hit_tokens"]
        (again,) = drafting.generate([longer], greedy, free)
        assert again.token_ids == wanted.token_ids
        num_shared = len(tokens) - (2 if end == "context" else 1)
        hits = engine.counters()["prefix_hit_tokens"] - before
        assert hits >= num_shared // PAGE * PAGE


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_too_few_pages(model_dir: Path, overlap: str) -> None:
    """Requests are pre-empted and go on; drafts take no page from anybody."""
    params, stop = PARAMS["sampled"], StopCriteria(max_tokens=4 * PAGE, ignore_eos=True)
    prompts = random_prompts(8, 2 * PAGE)
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    texts = texts_of(prompts, expected, params.seed)
    with llm(model_dir, drafter="ngram", num_pages=16, overlap=overlap) as drafting:
        speculate(drafting.engine, KnownDrafter(texts, VOCAB, 0.7), DEPTHS)
        same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
        counters = drafting.engine.counters()
        check_pages(drafting)
    assert counters["preemptions"] > 0
    assert counters["accepted_tokens"] > 0


def test_text_that_repeats_itself_is_drafted_from_itself(model_dir: Path) -> None:
    """N-gram drafts: of two tokens every pair has soon come before."""
    prompts = random_prompts(4)
    params = SamplingParams(temperature=0.0, logit_bias={5: 100.0, 6: 100.0})
    stop = StopCriteria(max_tokens=120, ignore_eos=True)
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    # What the gate measures on a busy machine may be no reason for drafts.
    with llm(model_dir, drafter="ngram", draft_gate="fixed") as drafting:
        same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
        assert drafting.engine.counters()["speculated_steps"] > 10
        drafter = drafting.engine.drafter
        assert isinstance(drafter, NgramDrafter)
        assert not drafter._texts  # Nothing of who has gone is kept.


@pytest.fixture(scope="module")
def words_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """A model with a tokenizer."""
    path = tmp_path_factory.mktemp("words")
    return make_tiny("llama", path, seed, vocab_size=VOCAB, num_hidden_layers=1, tokenizer=True)


def constrained(
    model: LLM, path: Path, prompts: Sequence[list[int]], items: tuple[int, int]
) -> list[Outcome]:
    """Lists of so many items at least and at most."""
    desk, (least, most) = Desk(model.engine, path), items
    words = {"type": "array", "items": {"enum": ["ab", "c"]}, "minItems": least, "maxItems": most}
    submits = [
        desk.submit(schema(words), prompt, temperature=1.0, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    return [outcome for outcome in desk.run(*submits) if isinstance(outcome, Outcome)]


def outcome_texts(
    prompts: Sequence[list[int]], outcomes: Sequence[Outcome]
) -> dict[tuple[tuple[int, ...], int], list[int]]:
    assert len(outcomes) == len(prompts)
    return {
        (tuple(prompt), index): prompt + outcome.ids
        for index, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True))
    }


@pytest.mark.parametrize("chance", [1.0, 0.5])
def test_constraints_hold_inside_accepted_runs(words_dir: Path, chance: float) -> None:
    prompts = random_prompts(4)
    with llm(words_dir) as plain:
        expected = constrained(plain, words_dir, prompts, (2, 4))
    texts = outcome_texts(prompts, expected)
    with llm(words_dir, drafter="ngram") as drafting:
        speculate(drafting.engine, KnownDrafter(texts, VOCAB, chance), DEPTHS)
        found = constrained(drafting, words_dir, prompts, (2, 4))
        assert [outcome.ids for outcome in found] == [outcome.ids for outcome in expected]
        assert [outcome.reason for outcome in found] == ["stop"] * len(prompts)
        assert drafting.engine.counters()["accepted_tokens"] > 0
        check_pages(drafting)


def test_a_constraint_begins_inside_accepted_runs(words_dir: Path) -> None:
    """Drafts cross the end of the reasoning, behind which the constraint begins."""
    prompts, end = random_prompts(6), VOCAB - 3
    digits = Constraint(kind="regex", text="[0-9]{9,12}", reasoning=Reasoning(end=(end,)))

    def run(model: LLM) -> list[Outcome]:
        desk = Desk(model.engine, words_dir)
        settings: dict[str, Any] = {"temperature": 1.0, "logit_bias": {end: 4.0, EOS_TOKEN_ID: -20}}
        submits = [
            desk.submit(digits, prompt, seed=index, **settings)
            for index, prompt in enumerate(prompts)
        ]
        return [outcome for outcome in desk.run(*submits) if isinstance(outcome, Outcome)]

    with llm(words_dir) as plain:
        expected = run(plain)
    assert any(outcome.ids.index(end) for outcome in expected)
    with llm(words_dir, drafter="ngram", overlap=random.choice(["off", "on"])) as drafting:
        texts = outcome_texts(prompts, expected)
        speculate(drafting.engine, KnownDrafter(texts, VOCAB, 0.8), DEPTHS)
        found = run(drafting)
        assert [outcome.ids for outcome in found] == [outcome.ids for outcome in expected]
        assert drafting.engine.counters()["accepted_tokens"] > 0
        check_pages(drafting)


def test_a_grammar_ends_at_each_place_of_an_accepted_run(words_dir: Path) -> None:
    """Then others go on with the texts, from what is cached of them."""
    prompts = random_prompts(3)
    with llm(words_dir) as plain:
        expected = constrained(plain, words_dir, prompts, (6, 8))
        texts = outcome_texts(prompts, expected)
        longer = [[*text, *random_prompts(1)[0]] for text in texts.values()]
        free = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        wanted = plain.generate_all(longer, PARAMS["greedy"], free)
    after = {
        (tuple(prompt), 0): [*prompt, *group[0].token_ids]
        for prompt, group in zip(longer, wanted, strict=True)
    }
    with llm(words_dir, drafter="ngram", overlap=random.choice(["off", "on"])) as drafting:
        engine = drafting.engine
        noted = NotedRuns(engine)
        published: set[bytes] = set()
        engine.memory.on_published.append(lambda page, key, parent: published.add(key))
        known: set[bytes] = set()
        for text in texts.values():
            keys = PageKeys(engine._intake.namespace(""), PAGE)
            known |= set(keys.upto(text, (len(text) - 1) // PAGE))
        for place in range(8):
            engine.memory.flush_cache()
            noted.runs.clear()
            published.clear()
            speculate(engine, EndingDrafter(texts, VOCAB, place), (7,))
            found = constrained(drafting, words_dir, prompts, (6, 8))
            assert [outcome.ids for outcome in found] == [outcome.ids for outcome in expected]
            assert [outcome.reason for outcome in found] == ["stop"] * len(prompts)
            last_runs = [(drafts, drawn) for drafts, drawn, is_over in noted.runs if is_over]
            assert last_runs == [(7, place + 1)] * len(prompts)
            assert published <= known
            check_pages(drafting)
            before = engine.counters()["prefix_hit_tokens"]
            speculate(engine, KnownDrafter(after, VOCAB, 0.5), DEPTHS)
            same(
                model_dir,
                longer,
                PARAMS["greedy"],
                drafting.generate_all(longer, PARAMS["greedy"], free),
                wanted,
            )
            assert engine.counters()["prefix_hit_tokens"] - before >= PAGE * len(known)


def test_who_wants_no_drafts_gets_none_beside_others(model_dir: Path) -> None:
    """In one batch; all texts are what they are without drafts."""
    prompts = random_prompts(6)
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, PARAMS["sampled"], stop)
    known = KnownDrafter(texts_of(prompts, expected, PARAMS["sampled"].seed), VOCAB, 1.0)
    clock = ManualClock()
    engine = make_engine(
        model_dir, "decode", clock, drafter="ngram", overlap=random.choice(["off", "on"])
    )
    speculate(engine, known, (3,))
    pair = EnginePair(engine, [], clock)
    try:
        wishes = [index % 2 == 0 for index in range(len(prompts))]
        ids = [
            pair.submit(prompt, NUM_NEW, [], replace(PARAMS["sampled"], speculates=wish))
            for prompt, wish in zip(prompts, wishes, strict=True)
        ]
        found = pair.finish(*ids)
        assert found == [group[0].token_ids for group in expected]
        for request_id, wish in zip(ids, wishes, strict=True):
            timeline = pair.answers[request_id].finished[0].timeline
            assert (timeline.num_drafted_tokens > 0) == wish
            assert (timeline.num_accepted_tokens > 0) == wish
        pair.settle()
    finally:
        pair.close()
