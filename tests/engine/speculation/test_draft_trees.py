"""Trees of drafts never change the text, nor what is left in pages, wherever texts end."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ConfigError
from weft.contract.keys import PageKeys
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.base.config import EngineConfig
from weft.engine.base.drafts import DraftShape
from weft.engine.loop.llm import LLM
from weft.engine.sampling.sampler import Sampler
from weft.engine.scheduler.plan import Plan
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
from weft.testing.engine.drafters import NotedRuns, speculate, texts_of
from weft.testing.engine.eagle3_cases import HeadReference
from weft.testing.engine.tree_drafters import (
    MIXED,
    SHAPES,
    PublishedPages,
    TreeDrafter,
    WatchedTrees,
)
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import EOS_TOKEN_ID, make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

WIDE = DraftShape(31, 6, 4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    return make_tiny("llama", path, seed, vocab_size=VOCAB, num_hidden_layers=4, tokenizer=True)


@pytest.fixture(scope="module")
def draft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), model_dir, seed + 1)


@pytest.mark.each_of("kind", "chance")
@pytest.mark.parametrize("chance", [1.0, 0.0, 0.8], ids=["oracle", "wrong", "random"])
@pytest.mark.parametrize("kind", ["greedy", "filtered", "penalties", "samples"])
def test_trees_change_no_token(model_dir: Path, kind: str, chance: float) -> None:
    """Trees, chains and none in turn."""
    overlap = random.choice(["off", "on"])
    print(f"overlap {overlap}")
    # Long enough for more than ten trees, however seldom the gate chooses one.
    params, stop = PARAMS[kind], StopCriteria(max_tokens=3 * NUM_NEW, min_tokens=3)
    prompts = random_prompts(6)
    top = None if kind == "greedy" else 2
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop, top)
    texts = texts_of(prompts, expected, params.seed)
    with llm(model_dir, drafter="ngram", overlap=overlap, poison_free_pages=True) as drafting:
        drafter = TreeDrafter(texts, VOCAB, chance)
        speculate(drafting.engine, drafter, MIXED)
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
    assert drafter.num_trees > 10
    assert 10 < counters["tree_runs"] <= counters["verified_runs"]
    if chance == 0.0:
        assert counters["accepted_tokens"] == 0 < counters["drafted_tokens"]
    else:
        assert drafter.num_right > 0
        assert counters["accepted_tokens"] > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_that_holds_the_text_yields_its_depth_and_one(
    model_dir: Path, shape: DraftShape
) -> None:
    prompts = random_prompts(3)
    params, stop = PARAMS["greedy"], StopCriteria(max_tokens=3 * NUM_NEW, ignore_eos=True)
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    with llm(model_dir, drafter="ngram", max_step_tokens=256) as drafting:
        texts = texts_of(prompts, expected, params.seed)
        drafter = TreeDrafter(texts, VOCAB, 1.0, is_varied=False)
        noted = NotedRuns(drafting.engine)
        speculate(drafting.engine, drafter, (shape,))
        same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
        counters = drafting.engine.counters()
    whole = [drawn for drafts, drawn, is_over in noted.runs if drafts == shape.num_drafts]
    assert len(whole) > 3
    for drafts, drawn, is_over in noted.runs:
        assert drawn == 1 + shape.depth or is_over or drafts < shape.num_drafts
    assert counters["accepted_tokens"] >= drafter.num_right > 0


def test_prompts_beside_trees_get_what_chains_leave(model_dir: Path) -> None:
    """Beside a prompt chains are drafted, so that it need not wait for the end of the others."""
    prompts = random_prompts(5, most=1)
    prompts[-1] = prompts[-1] * 400
    params, stop = PARAMS["greedy"], StopCriteria(max_tokens=40, ignore_eos=True)
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    settings = {"max_step_tokens": 128, "max_running_requests": 5, "max_draft_tokens": 3}
    with llm(model_dir, drafter="ngram", **settings) as drafting:
        drafter = TreeDrafter(texts_of(prompts, expected, params.seed), VOCAB, 0.5)
        speculate(drafting.engine, drafter, (WIDE,))
        launch, seen = drafting.engine.scheduler.launch, []

        def watched(plan: Plan) -> int:
            seen.append((len(plan.verifies), sum(item.num_tokens for item in plan.chunks)))
            return launch(plan)

        drafting.engine.scheduler.launch = watched  # type: ignore[method-assign]
        same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
    last = max(index for index, (_, num_prompt) in enumerate(seen) if num_prompt)
    assert all(num_prompt >= 2 * PAGE for _, num_prompt in seen[1:last])
    assert sum(num_verified == 4 for num_verified, _ in seen[:last]) > 3


@pytest.mark.parametrize("end", ["eos", "stop token", "max_tokens", "context"])
def test_ends_inside_the_path_of_a_tree(model_dir: Path, end: str) -> None:
    """Then another request goes on with the text, from what is cached of it."""
    greedy = PARAMS["greedy"]
    with llm(model_dir) as plain:
        free = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        for place in range(7):
            num_tokens = 1 + place + 1  # The first token is the prompt's.
            for _ in range(50):
                (prompt,) = random_prompts(1)
                (sample,) = plain.generate([prompt], greedy, free)
                last = sample.token_ids[num_tokens - 1]
                if sample.token_ids.index(last) == num_tokens - 1:
                    break
            text, settings = sample.token_ids, {"drafter": "ngram", "max_step_tokens": 256}
            longer = [*prompt, *text[:num_tokens], *random_prompts(1)[0]]
            stop, after = free, free
            if end == "max_tokens":
                stop = replace(free, max_tokens=num_tokens)
            elif end == "stop token":
                stop = replace(free, stop_token_ids=(last,))
            elif end == "context":
                settings["max_context_tokens"] = len(prompt) + num_tokens
                longer, after = [*prompt, *text[: num_tokens - 1]], replace(free, max_tokens=1)
            (wanted,) = plain.generate([longer], greedy, after)
            with llm(model_dir, **settings) as drafting:
                engine = drafting.engine
                if end == "eos":
                    engine._intake._eos = frozenset({last})
                    stop = replace(free, ignore_eos=False)
                texts = {(tuple(prompt), 0): prompt + text}
                speculate(engine, TreeDrafter(texts, VOCAB, 1.0), (WIDE,))
                published = PublishedPages(engine)
                (cut,) = drafting.generate([prompt], greedy, stop)
                assert cut.token_ids == text[:num_tokens]
                assert cut.finish_reason == (
                    "length" if end in ("max_tokens", "context") else "stop"
                )
                # What is cached are keys of the text, and of nothing behind it.
                tokens = prompt + cut.token_ids
                keys = PageKeys(engine._intake.namespace(""), PAGE)
                assert set(published.pages) <= set(keys.upto(tokens, (len(tokens) - 1) // PAGE))
                check_pages(drafting)
                engine._intake._eos = frozenset()
                known = {(tuple(longer), 0): longer + wanted.token_ids}
                engine.pipeline._drafter = TreeDrafter(known, VOCAB, 0.7)
                before = engine.counters()["prefix_hit_tokens"]
                (again,) = drafting.generate([longer], greedy, after)
                assert again.token_ids == wanted.token_ids
                hits = engine.counters()["prefix_hit_tokens"] - before
                num_shared = min(len(tokens) - 1, len(longer) - 1)
                assert hits >= num_shared // PAGE * PAGE


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_pages_are_those_of_a_run_without_drafts(
    model_dir: Path, draft_dir: Path, overlap: str
) -> None:
    """The target's KV and the head's entries, with paths that end anywhere in a page."""
    prompts = random_prompts(10, 2 * PAGE)
    params, stop = PARAMS["filtered"], StopCriteria(max_tokens=4 * PAGE, ignore_eos=True)
    settings = {"draft_dir": draft_dir, "num_pages": 300}
    with llm(model_dir, **settings) as plain:
        single = PublishedPages(plain.engine)
        expected = plain.generate_all(prompts, params, stop)
        texts = texts_of(prompts, expected, params.seed)
        settings |= {"poison_free_pages": True, "overlap": overlap}
        with llm(model_dir, drafter="eagle3", draft_width=4, **settings) as drafting:
            trees = PublishedPages(drafting.engine)
            speculate(drafting.engine, TreeDrafter(texts, VOCAB, 0.8), MIXED)
            same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
            num_accepted = drafting.engine.counters()["accepted_tokens"]
            for text in texts.values():
                num_pages = (len(text) - 1) // PAGE
                found, wanted = trees.of(text, num_pages), single.of(text, num_pages)
                assert found is not None
                assert wanted is not None
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert num_accepted > 50


@pytest.mark.parametrize("num_pages", [None, 26], ids=["room", "few-pages"])
def test_the_text_is_the_same_when_the_head_grows_trees(
    model_dir: Path, draft_dir: Path, num_pages: int | None
) -> None:
    """With other shapes each step; twice, the second time on a warm cache."""
    prompts = random_prompts(8, 2 * PAGE)
    params = replace(PARAMS["samples"], n=1 if num_pages else 2)
    stop = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    given = {"draft_dir": draft_dir, "num_pages": num_pages, "poison_free_pages": True}
    given |= {"overlap": random.choice(["off", "on"]), "draft_width": 4, "max_step_tokens": 600}
    with llm(model_dir, drafter="eagle3", **given) as drafting:
        engine = drafting.engine
        assert engine.drafter is not None
        speculate(engine, engine.drafter, MIXED)
        for _ in range(2):
            same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
        counters = engine.counters()
        check_pages(drafting)
    assert counters["drafted_tokens"] > 500
    assert not num_pages or counters["preemptions"] > 0


def test_trees_are_those_of_highest_path_probability(model_dir: Path, draft_dir: Path) -> None:
    """Whatever happened to a request: pre-emption, prefix hits, samples of one prompt."""
    prompts = random_prompts(6)
    params, stop = PARAMS["samples"], StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    texts = texts_of(prompts, expected, params.seed)
    given = {"draft_dir": draft_dir, "num_pages": 140, "poison_free_pages": True}
    given |= {"overlap": random.choice(["off", "on"]), "draft_width": 4, "max_step_tokens": 600}
    with llm(model_dir, drafter="eagle3", **given) as drafting:
        watched = WatchedTrees(drafting.engine, TreeDrafter(texts, VOCAB, 0.8))
        same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
    watched.check(HeadReference(model_dir, draft_dir), 8)


def test_trees_of_a_model_whose_layers_have_windows(tmp_path: Path, seed: int) -> None:
    """Which count positions, not rows; one that is no longer than a tree is refused."""
    shape = {"vocab_size": VOCAB, "num_hidden_layers": 4}
    windows = (33, 32)
    target_dirs = [
        make_tiny("mistral", tmp_path / f"{window}", seed, sliding_window=window, **shape)
        for window in windows
    ]
    draft_dir = make_tiny_draft(tmp_path / "d", target_dirs[0], seed + 1)
    prompts = random_prompts(4)
    params, stop = PARAMS["filtered"], StopCriteria(max_tokens=20 * PAGE, ignore_eos=True)
    with llm(target_dirs[0]) as plain:
        expected = plain.generate_all(prompts, params, stop)
    texts = texts_of(prompts, expected, params.seed)
    given = {"draft_dir": draft_dir, "drafter": "eagle3", "draft_width": 3}
    with llm(target_dirs[0], **given) as drafting:
        speculate(drafting.engine, TreeDrafter(texts, VOCAB, 0.8), MIXED)
        same(model_dir, prompts, params, drafting.generate_all(prompts, params, stop), expected)
        assert drafting.engine.counters()["tree_runs"] > 10
    with pytest.raises(ConfigError, match="draft_width = 3"):
        llm(target_dirs[1], **given)


def test_grammars_hold_inside_trees(model_dir: Path) -> None:
    """In one batch with free requests; each token is drawn behind those before it."""
    prompts = random_prompts(8)
    words = {"type": "array", "items": {"enum": ["ab", "c"]}, "minItems": 1, "maxItems": 4}

    def run(model: LLM) -> list[Outcome]:
        desk = Desk(model.engine, model_dir)
        limit = StopCriteria(max_tokens=60)
        submits = [
            desk.submit(
                schema(words) if index % 2 else None,
                prompt,
                temperature=1.0,
                seed=index,
                stop=limit,
            )
            for index, prompt in enumerate(prompts)
        ]
        return [outcome for outcome in desk.run(*submits) if isinstance(outcome, Outcome)]

    with llm(model_dir) as plain:
        expected = run(plain)
    texts = {
        (tuple(prompt), index): prompt + outcome.ids
        for index, (prompt, outcome) in enumerate(zip(prompts, expected, strict=True))
    }
    with llm(model_dir, drafter="ngram", max_step_tokens=600) as drafting:
        speculate(drafting.engine, TreeDrafter(texts, VOCAB, 0.8), MIXED)
        found = run(drafting)
        assert [outcome.ids for outcome in found] == [outcome.ids for outcome in expected]
        assert [outcome.reason for outcome in found] == [outcome.reason for outcome in expected]
        assert sum(outcome.num_accepted for outcome in found[1::2]) > 0
        check_pages(drafting)


def test_requests_of_all_kinds_in_one_batch(
    model_dir: Path, draft_dir: Path, tmp_path: Path, seed: int
) -> None:
    """Beside each other, twice, the second time on a warm cache."""
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=4)
    folders = [make_adapter(tmp_path / name, config, seed + i) for i, name in enumerate("ab")]
    digits = Constraint(kind="regex", text="[0-9]{12,20}")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 30, "top_p": 0.9, "logit_bias": {7: 3.0}},
        {"speculates": False},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"constraint": digits},
        {"min_tokens": 9},
        {"adapter": 0},
        {"adapter": 1, "temperature": 0.0},
    ]
    prompts = random_prompts(2 * len(kinds))

    def run(model: LLM) -> list[list[int]]:
        adapters = [model.load_adapter(folder) for folder in folders]
        found = []
        for turn in "12":
            submits = []
            for number, prompt in enumerate(prompts):
                kind = {"temperature": 1.0, "seed": number} | kinds[number % len(kinds)]
                least, adapter = kind.pop("min_tokens", 0), kind.pop("adapter", None)
                submits.append(
                    Submit(
                        gateway=0,
                        request_id=f"{turn}-{number}",
                        attempt=1,
                        prompt=prompt,
                        sampling=SamplingParams(**kind),
                        stop=StopCriteria(max_tokens=NUM_NEW, min_tokens=least),
                        adapter=b"" if adapter is None else adapters[adapter],
                    )
                )
            outcomes = Desk(model.engine, model_dir).run(*submits)
            found += [outcome.ids for outcome in outcomes if isinstance(outcome, Outcome)]
        assert len(found) == 2 * len(prompts)
        return found

    with llm(model_dir, enable_lora=True) as plain:
        expected = run(plain)
    texts = {
        (tuple(prompt), index): [*prompt, *ids]
        for index, (prompt, ids) in enumerate(zip(prompts, expected, strict=False))
    }
    given = {"draft_dir": draft_dir, "draft_width": 4, "enable_lora": True}
    given |= {"max_step_tokens": 600, "overlap": random.choice(["off", "on"])}
    with llm(model_dir, drafter="eagle3", **given) as drafting:
        speculate(drafting.engine, TreeDrafter(texts, VOCAB, 0.8), MIXED)
        assert run(drafting) == expected
        assert drafting.engine.counters()["accepted_tokens"] > 100
        check_pages(drafting)


def test_a_fixed_gate_drafts_in_every_step(model_dir: Path, draft_dir: Path) -> None:
    """Trees for four requests, chains for five, whatever comes of them; the text is the same."""
    params, stop = PARAMS["greedy"], StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    prompts = random_prompts(5, PAGE)
    given = {"drafter": "eagle3", "draft_dir": draft_dir, "draft_gate": "fixed"}
    with llm(model_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    with llm(model_dir, draft_width=4, max_step_tokens=600, **given) as drafting:
        for count in (4, 5):
            before = drafting.engine.counters()
            same(
                model_dir,
                prompts[:count],
                params,
                drafting.generate_all(prompts[:count], params, stop),
                expected[:count],
            )
            after = drafting.engine.counters()
            runs, trees, accepted = (
                after[name] - before[name]
                for name in ("verified_runs", "tree_runs", "accepted_tokens")
            )
            # A text's first token comes from its prompt's step, and there may be prompts beside.
            assert runs + accepted >= count * (NUM_NEW - 4)
            assert trees > 0.8 * runs if count == 4 else trees < 0.5 * runs


def test_settings_that_grow_no_trees_are_refused(model_dir: Path, draft_dir: Path) -> None:
    for settings in (
        {"drafter": "ngram"},
        {"drafter": "model", "draft_dir": draft_dir},
        {"drafter": "eagle", "draft_dir": draft_dir},
        {"drafter": "eagle3", "draft_dir": draft_dir, "deterministic": True},
    ):
        with pytest.raises(ConfigError, match="draft_width = 2"):
            EngineConfig(model_dir=model_dir, draft_width=2, **settings)


@pytest.mark.needs("triton-interpreter")
def test_min_tokens_hold_inside_constrained_trees(model_dir: Path) -> None:
    """Of siblings all are as many tokens on, whichever rows they have; drawn as on a GPU."""
    some = Constraint(kind="regex", text="[0-9]{1,20}")
    prompts = random_prompts(4)
    submits = [
        Submit(
            gateway=0,
            request_id=f"r{number}",
            attempt=1,
            prompt=prompt,
            sampling=SamplingParams(
                temperature=1.0, seed=number, constraint=some, logit_bias={EOS_TOKEN_ID: 6.0}
            ),
            stop=StopCriteria(max_tokens=40, min_tokens=9),
        )
        for number, prompt in enumerate(prompts)
    ]

    def run(model: LLM) -> list[list[int]]:
        outcomes = Desk(model.engine, model_dir).run(*submits)
        return [outcome.ids for outcome in outcomes if isinstance(outcome, Outcome)]

    with llm(model_dir) as plain:
        expected = run(plain)
    pairs = enumerate(zip(prompts, expected, strict=True))
    texts = {(tuple(prompt), number): prompt + ids for number, (prompt, ids) in pairs}
    with llm(model_dir, drafter="ngram", max_step_tokens=600) as drafting:
        most = drafting.engine.config.max_running_requests
        drafting.engine._step_sampler._sampler = Sampler(
            VOCAB, most, device=torch.device("cpu"), max_masked_rows=64 * most
        )
        speculate(drafting.engine, TreeDrafter(texts, VOCAB, 0.8), MIXED)
        assert run(drafting) == expected
    assert all(len(ids) >= 9 for ids in expected)
