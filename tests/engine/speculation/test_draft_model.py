"""A separate draft model: its drafts are its own greedy text, the text is the target's."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.errors import ConfigError, ModelError
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Cancel, Submit
from weft.engine.base.config import EngineConfig
from weft.engine.base.drafts import DraftShape
from weft.engine.executor.encodings import StepArrays
from weft.engine.features.speculative.gate import DECAY, MeasuredGate
from weft.engine.features.speculative.model_drafter import STEADY_TOKENS, ModelDrafter
from weft.engine.loop.llm import LLM
from weft.engine.requests.acceptance import Acceptance
from weft.engine.scheduler.plan import VerifyItem
from weft.testing.engine.draft_cases import NUM_NEW, PAGE, VOCAB, random_prompts
from weft.testing.engine.drafters import KnownDrafter, RandomGate, texts_of
from weft.testing.engine.engine_pair import ManualClock, make_engine
from weft.testing.models.choices import check_choices, check_same_groups
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

CHUNK = 2 * PAGE
DEPTHS = (0, 1, 2, 3, 5)
GREEDY = SamplingParams(temperature=0.0)
STOP = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    folder = tmp_path_factory.mktemp("t")
    return make_tiny("llama", folder, seed, vocab_size=VOCAB, num_hidden_layers=2)


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """Of another architecture and other sizes."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    folder = tmp_path_factory.mktemp("d")
    return make_tiny("qwen3", folder, seed + 1, vocab_size=VOCAB, num_hidden_layers=1, **sizes)


def llm(target_dir: Path, **settings: Any) -> LLM:
    given = {"dtype": "float32", "page_size": PAGE, "prefill_chunk_tokens": CHUNK}
    return LLM(target_dir, **{"num_pages": 200, **given, **settings})


def drafter_of(model: LLM, depths: Sequence[int] = DEPTHS) -> ModelDrafter:
    """The engine's, which is asked for so many drafts."""
    engine = model.engine
    assert isinstance(engine.drafter, ModelDrafter)
    engine.scheduler.running_plans.gate = RandomGate(depths)
    return engine.drafter


def check_memory(model: LLM) -> None:
    """Nobody has pages any more, of the target's pool or of the draft model's."""
    drafter = model.engine.drafter
    assert isinstance(drafter, ModelDrafter)
    for memory in (model.engine.memory, drafter.memory):
        memory.check_integrity()
        assert memory.counts().used == 0
    assert not drafter._texts


class Watched:
    """Notes a draft model's drafts, and has better ones verified, so that some are accepted."""

    def __init__(self, model: LLM, known: KnownDrafter) -> None:
        self._drafter, self._known = drafter_of(model), known
        self.chains: list[tuple[list[int], list[int]]] = []
        """Tokens so far, and what was drafted behind them."""
        model.engine.pipeline._drafter = self

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        chains = self._drafter.draft(items)
        for (request, start, max_drafts, _), chain in zip(items, chains, strict=True):
            assert len(chain) in (0, max_drafts)
            self.chains.append((request.tokens[: start + 1], list(chain)))
        return self._known.draft(items)

    def forget(self, slot: int) -> None:
        raise AssertionError("the engine's own drafter is told")


PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0, seed=11),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.4, seed=12),
    "samples": SamplingParams(temperature=1.0, n=3, seed=13),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_the_text_is_the_same(target_dir: Path, draft_dir: Path, kind: str) -> None:
    """With a random draft model and with the target as its own; in batches, alone, on a warm cache.

    What the gate measures decides in one of the runs.
    """
    overlap, params, prompts = random.choice(["off", "on"]), PARAMS[kind], random_prompts(6)
    print(f"overlap {overlap}")
    with llm(target_dir) as plain:
        expected = plain.generate_all(prompts, params, STOP)
    for folder, is_gated in ((draft_dir, False), (target_dir, False), (target_dir, True)):
        settings = {"overlap": overlap, "poison_free_pages": True, "draft_dir": folder}
        with llm(target_dir, drafter="model", **settings) as drafting:
            if not is_gated:
                drafter_of(drafting)
            groups = drafting.generate_all(prompts, params, STOP)
            for prompt in prompts:
                groups += drafting.generate_all([prompt], params, STOP)
            counters = drafting.engine.counters()
            check_memory(drafting)
        load = partial(load_reference, target_dir)
        check_same_groups(load, [*prompts, *prompts], groups, [*expected, *expected], params)
        assert is_gated or counters["drafted_tokens"] > 0
        if kind == "greedy" and folder == target_dir:
            assert counters["accepted_tokens"] == counters["drafted_tokens"]


def test_a_model_that_drafts_for_itself_is_always_right(target_dir: Path) -> None:
    depth, prompts = random.choice([1, 3, 5]), random_prompts(4, CHUNK // 4)
    print(f"depth {depth}")
    with llm(target_dir, drafter="model", draft_dir=target_dir) as drafting:
        drafter_of(drafting, (depth,))
        samples = drafting.generate(prompts, GREEDY, STOP)
    for sample in samples:
        assert sample.timeline is not None
        # The first token is the prompt's; all others come depth + 1 a step.
        num_steps = -(-(NUM_NEW - 1) // (depth + 1))
        assert sample.timeline.num_accepted_tokens == NUM_NEW - 1 - num_steps
        assert sample.timeline.num_drafted_tokens == sample.timeline.num_accepted_tokens


@pytest.mark.parametrize("num_pages", [200, 20], ids=["room", "few-pages"])
def test_drafts_are_the_models_greedy_text(
    target_dir: Path, draft_dir: Path, tmp_path: Path, seed: int, num_pages: int
) -> None:
    """Whatever was accepted before: after pre-emption, on prefix hits, beside other adapters."""
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=2)
    adapter = make_adapter(tmp_path / "a", config, seed)
    prompts = random_prompts(8, 3 * PAGE)
    # Longer texts with few pages: short ones may end in time for the next, without pre-emption.
    stop = STOP if num_pages == 200 else replace(STOP, max_tokens=3 * NUM_NEW)
    settings = {"enable_lora": True, "num_pages": num_pages}
    with llm(target_dir, **settings) as plain:
        adapters = [plain.load_adapter(adapter), b""] * 4
        expected = plain.generate_all(prompts, GREEDY, stop, adapters=adapters)
    known = KnownDrafter(texts_of(prompts, expected, GREEDY.seed), VOCAB, 0.6)
    with llm(target_dir, drafter="model", draft_dir=draft_dir, **settings) as drafting:
        drafting.load_adapter(adapter)
        watched = Watched(drafting, known)
        for _ in range(2):
            groups = drafting.generate_all(prompts, GREEDY, stop, adapters=adapters)
            for group, wanted in zip(groups, expected, strict=True):
                assert [s.token_ids for s in group] == [s.token_ids for s in wanted]
        counters = drafting.engine.counters()
        check_memory(drafting)
    assert counters["accepted_tokens"] > 0
    assert (counters["preemptions"] > 0) == (num_pages == 20)
    reference = AutoModelForCausalLM.from_pretrained(draft_dir, dtype=torch.float32).eval()
    chains = [(tokens, chain) for tokens, chain in watched.chains if chain]
    assert len(chains) > 30
    for tokens, chain in random.sample(chains, 30):
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens + chain])).logits[0, len(tokens) - 1 : -1]
        check_choices(logits, chain)


def test_a_long_prompt_is_taken_in_by_chunks(target_dir: Path) -> None:
    """No step of the draft model is larger; one that is up to date is drafted for meanwhile."""
    short, long = random_prompts(1, PAGE)[0], [random.randrange(3, VOCAB) for _ in range(7 * CHUNK)]
    rows: list[int] = []
    with llm(target_dir, drafter="model", draft_dir=target_dir) as drafting:
        drafter = drafter_of(drafting, (3,))
        run = drafter._executor.run

        def watched(arrays: StepArrays) -> torch.Tensor | None:
            rows.append(len(arrays.token_ids))
            return run(arrays)

        drafter._executor.run = watched  # type: ignore[method-assign]
        samples = drafting.generate([short, long], GREEDY, STOP)
    assert CHUNK < max(rows) <= CHUNK + 2 * STEADY_TOKENS
    for sample, at_least in zip(samples, (NUM_NEW // 2, 1), strict=True):
        assert sample.timeline is not None
        assert sample.timeline.num_accepted_tokens >= at_least
    # Of seven chunks one came with the first drafts.
    assert sum(rows) >= len(short) + len(long)


def test_what_is_still_being_read_does_not_count_against_drafts(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate learns from the drafts that were made: all of them are right."""
    long = [random.randrange(3, VOCAB) for _ in range(7 * CHUNK)]
    with llm(target_dir, drafter="model", draft_dir=target_dir) as drafting:
        gate = drafting.engine.scheduler.running_plans.gate
        assert isinstance(gate, MeasuredGate)
        monkeypatch.setattr(gate, "shape", lambda requests: DraftShape.chain(1))
        (sample,) = drafting.generate([long], GREEDY, STOP)
        assert sample.timeline is not None
        assert 0 < sample.timeline.num_drafted_tokens < NUM_NEW - 5
        learnt = Acceptance(1, DECAY)
        for _ in range(sample.timeline.num_drafted_tokens):
            learnt.observe(1, 1, 1)
        assert gate._acceptance.expected_tokens()[1] == pytest.approx(learnt.expected_tokens()[1])
        assert gate._acceptance.share == 1.0


def test_without_room_there_are_no_drafts(target_dir: Path, draft_dir: Path) -> None:
    prompts = random_prompts(6, 4 * PAGE)
    with llm(target_dir) as plain:
        expected = plain.generate_all(prompts, GREEDY, STOP)
    with llm(target_dir, drafter="model", draft_dir=draft_dir) as drafting:
        memory = drafter_of(drafting, (3,)).memory
        for num_free in (0, 5, 9):
            taken = memory.allocate(memory.counts().free - num_free)
            before = drafting.engine.counters()["drafted_tokens"]
            groups = drafting.generate_all(prompts, GREEDY, STOP)
            check_same_groups(
                partial(load_reference, target_dir), prompts, groups, expected, GREEDY
            )
            drafted = drafting.engine.counters()["drafted_tokens"] - before
            assert (drafted > 0) == (num_free > 0)
            assert memory.counts().used == len(taken)
            memory.release(taken)
        check_memory(drafting)


def shortened(model_dir: Path, path: Path, max_tokens: int) -> Path:
    """The same model with a context of so many tokens."""
    config = json.loads((shutil.copytree(model_dir, path) / "config.json").read_text())
    config["max_position_embeddings"] = max_tokens
    (path / "config.json").write_text(json.dumps(config))
    return path


def submit_of(name: str, prompt: list[int], stop: StopCriteria) -> Submit:
    return Submit(gateway=0, request_id=name, attempt=0, prompt=prompt, sampling=GREEDY, stop=stop)


def test_a_request_beyond_the_draft_models_context(target_dir: Path, tmp_path: Path) -> None:
    limit = 4 * PAGE
    short = shortened(target_dir, tmp_path / "short", limit)
    prompts = [random_prompts(1)[0][:5], [random.randrange(3, VOCAB) for _ in range(limit)]]
    stop = StopCriteria(max_tokens=2 * limit, ignore_eos=True)
    with llm(target_dir) as plain:
        expected = plain.generate_all(prompts, GREEDY, stop)
    with llm(target_dir, drafter="model", draft_dir=short) as drafting:
        drafter_of(drafting, (3,))
        groups = drafting.generate_all(prompts, GREEDY, stop)
        check_same_groups(partial(load_reference, target_dir), prompts, groups, expected, GREEDY)
        samples = [group[0] for group in groups]
        counts = [s.timeline.num_drafted_tokens for s in samples if s.timeline is not None]
        check_memory(drafting)
    assert 0 < counts[0] <= limit
    assert counts[1] == 0


def test_pages_end_with_the_draft_models_context(target_dir: Path, tmp_path: Path) -> None:
    """Long before the request does, so that others have them."""
    limit = 4 * PAGE
    short = shortened(target_dir, tmp_path / "short", limit)
    engine = make_engine(target_dir, "decode", ManualClock(), drafter="model", draft_dir=short)
    engine.scheduler.running_plans.gate = RandomGate((3,))
    stop = StopCriteria(max_tokens=4 * limit, ignore_eos=True)
    (prompt,) = random_prompts(1, PAGE)
    engine.turn(Inbox(submits=[submit_of("0", prompt, stop)]))
    held = []
    while engine.scheduler.has_work:
        held.append(engine.drafter.sizes()["draft_pages"])
        engine.turn()
    assert max(held) > 0
    assert not any(held[len(held) // 2 :])
    engine.close()


def test_cancelled_requests_give_their_pages_back(target_dir: Path) -> None:
    engine = make_engine(target_dir, "decode", ManualClock(), drafter="model", draft_dir=target_dir)
    engine.scheduler.running_plans.gate = RandomGate((3,))
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    submits = [
        submit_of(str(index), prompt, StopCriteria(max_tokens=400, ignore_eos=True))
        for index, prompt in enumerate(random_prompts(5, 2 * PAGE))
    ]
    engine.turn(Inbox(submits=submits))
    while engine.drafter.sizes()["draft_requests"] < len(submits):
        engine.turn()
    for submit in submits:
        for _ in range(random.randrange(3)):
            engine.turn()
        held = engine.drafter.sizes()["draft_requests"]
        engine.turn(Inbox(cancels=[Cancel(gateway=0, request_id=submit.request_id, attempt=0)]))
        assert engine.drafter.sizes()["draft_requests"] == held - 1
    assert engine.drafter.sizes() == {"draft_requests": 0, "draft_pages": 0}
    drafter.memory.check_integrity()
    engine.close()


def test_pages_are_those_of_a_worker_without_one(target_dir: Path, draft_dir: Path) -> None:
    """It has no part in what is shipped or named."""
    namespaces, sizes = set(), set()
    for settings in ({}, {"drafter": "model", "draft_dir": draft_dir}):
        with llm(target_dir, **settings) as model:
            namespaces.add(model.engine._intake.namespace(""))
            sizes.add(model.engine.parts.info.page_bytes)
            found = [n for n in model.engine.info.notices if n.startswith("draft model")]
            assert len(found) == len(settings) // 2
    assert len(namespaces) == len(sizes) == 1


def test_models_that_cannot_draft_are_refused(
    target_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    def refused(folder: Path, model: Path, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            llm(model, drafter="model", draft_dir=folder)

    with pytest.raises(ConfigError, match=r"drafter = model: must be .* draft_dir"):
        EngineConfig(model_dir=target_dir, drafter="model")
    refused(tmp_path, target_dir, ModelError, str(tmp_path))
    other = make_tiny("llama", tmp_path / "size", seed, vocab_size=VOCAB + 3)
    refused(other, target_dir, ModelError, f"vocab_size .* {VOCAB + 3}, .* {VOCAB}")
    head = make_tiny_draft(tmp_path / "head", target_dir)
    refused(head, target_dir, ModelError, f"{head}, .*LlamaForCausalLMEagle3.* is not supported")
    words, same = (
        make_tiny("llama", tmp_path / name, seed, vocab_size=VOCAB, tokenizer=True)
        for name in ("words", "same")
    )
    with llm(words, drafter="model", draft_dir=same):
        pass
    file = same / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"<|im_start|>"', '"<|begin|>"'))
    refused(same, words, ModelError, r"token '<\|begin\|>' is 1 .* None")
    file.write_text(text.replace('"vocab"', '"words"'))
    refused(same, words, ModelError, r"model.vocab")
    # A list, as Unigram models have it: a token's id is its place.
    pieces = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}, "added_tokens": None}
    other = {"model": {"vocab": {"<unk>": 0, "a": 2}}}
    for folder, content in ((same, pieces), (words, other)):
        (folder / "tokenizer.json").write_text(json.dumps(content))
    refused(same, words, ModelError, r"token 'a' is 1 .* 2")
