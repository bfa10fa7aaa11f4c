"""A hundred prompts in float32: the demo model's text is the same with its draft head and without.

Chats, code, texts to work on and several scripts; greedy and seeded; alone and sixteen at a time;
filled by another worker, pre-empted, on a warm cache, with adapters. In each case the engine's own
counters say that drafts were verified and that more than one token came of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.engine.drafters import RandomGate
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.meshes.mesh_prompts import PROMPTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[3]
DRAFT = ROOT / "drafts" / "smollm2-135m-eagle3"
ADAPTERS = (ROOT / "adapters" / "pirate", ROOT / "adapters" / "json")
HELD_OUT = ROOT / "scripts" / "draft_training" / "held_out.json"
NUM_PROMPTS = 100
MAX_PROMPT_TOKENS = 100
BATCH = 16
STOP = StopCriteria(max_tokens=16)
DEPTHS = (1, 2, 3, 5)
"""Drafts of a step, at random: what the gate would choose is another matter."""
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=1234),
}
Texts = list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> Texts:
    """Thirty of the mesh's tests, and seventy that the head was not trained on."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo"))
    chats = [prompt.as_messages() for prompt in PROMPTS if prompt.is_chat]
    chats += [entry["messages"] for entry in json.loads(HELD_OUT.read_text())]
    texts = [prompt.text for prompt in PROMPTS if not prompt.is_chat]
    found = [list(tokenizer(text)["input_ids"]) for text in texts]
    for messages in chats[: NUM_PROMPTS - len(found)]:
        found.append(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )
    assert len(found) == NUM_PROMPTS
    return [ids[:MAX_PROMPT_TOKENS] for ids in found]


def llm(**settings: Any) -> LLM:
    values: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 1 << 29}
    return LLM(resolve_model("demo"), **(values | settings))


def drafting(**settings: Any) -> LLM:
    made = llm(drafter="eagle3", draft_dir=DRAFT, poison_free_pages=True, **settings)
    flip_depths(made.engine)
    return made


def flip_depths(engine: Engine) -> None:
    engine.scheduler.running_plans.gate = RandomGate(DEPTHS)


def ids_of(samples: Sequence[GeneratedSample]) -> Texts:
    return [sample.token_ids for sample in samples]


@pytest.fixture(scope="module", params=PARAMS)
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return PARAMS[request.param]


@pytest.fixture(scope="module")
def expected(prompts: Texts, params: SamplingParams) -> Texts:
    """Without drafts."""
    with llm() as plain:
        return ids_of(plain.generate(prompts, params, STOP))


@pytest.fixture
def engine() -> Iterator[LLM]:
    with drafting() as made:
        yield made


class Counted:
    """What an engine's steps with drafts brought since this began."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.counters()

    def check(self, what: str) -> None:
        """Steps were speculated, and brought more than a token each."""
        names = ("speculated_steps", "verified_runs", "drafted_tokens", "accepted_tokens")
        counters = self._engine.counters()
        steps, runs, drafted, accepted = (counters[n] - self._before[n] for n in names)
        length = 1 + accepted / max(1, runs)
        print(f"{what}: {steps} steps, {drafted} drafts, {length:.2f} tokens a request and step")
        assert steps > 0
        assert length > 1.2


def test_alone(engine: LLM, prompts: Texts, params: SamplingParams, expected: Texts) -> None:
    counted = Counted(engine.engine)
    for prompt, wanted in zip(prompts, expected, strict=True):
        assert ids_of(engine.generate([prompt], params, STOP)) == [wanted]
    counted.check("alone")


def test_in_batches_and_again_on_a_warm_cache(
    engine: LLM, prompts: Texts, params: SamplingParams, expected: Texts
) -> None:
    order = random.sample(range(NUM_PROMPTS), NUM_PROMPTS)
    for what in ("batches", "prefix hits"):
        counted, before = Counted(engine.engine), engine.engine.counters()
        for begin in range(0, NUM_PROMPTS, BATCH):
            batch = order[begin : begin + BATCH]
            samples = engine.generate([prompts[i] for i in batch], params, STOP)
            assert ids_of(samples) == [expected[i] for i in batch]
        counted.check(what)
    num_hit = engine.engine.counters()["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    assert num_hit > 0.8 * sum(map(len, prompts))


def test_pre_empted(prompts: Texts, params: SamplingParams, expected: Texts) -> None:
    with drafting(num_pages=40) as few:
        counted = Counted(few.engine)
        for begin in range(0, NUM_PROMPTS, BATCH):
            samples = few.generate(prompts[begin : begin + BATCH], params, STOP)
            assert ids_of(samples) == expected[begin : begin + BATCH]
        counted.check("pre-empted")
        assert few.engine.counters()["preemptions"] > 10


def test_filled_by_another_worker(prompts: Texts, params: SamplingParams, expected: Texts) -> None:
    clock, model = ManualClock(), resolve_model("demo")
    settings = {"page_size": 16, "num_pages": 2000, "prefill_chunk_tokens": 256}
    settings |= {"draft_dir": DRAFT}
    owner = make_engine(model, "decode", clock, drafter="eagle3", **settings)
    flip_depths(owner)
    pair = EnginePair(owner, [make_engine(model, "prefill", clock, **settings)], clock)
    counted = Counted(owner)
    for begin in range(0, NUM_PROMPTS, BATCH):
        batch = range(begin, min(begin + BATCH, NUM_PROMPTS))
        ids = [pair.submit(prompts[i], STOP.max_tokens, sampling=params) for i in batch]
        answers = [pair.answers[request_id] for request_id in ids]
        pair.run(lambda answers=answers: all(a.finished for a in answers), timeout_s=300)
        for answer, i in zip(answers, batch, strict=True):
            # These go on behind the end of the text.
            assert answer.tokens[0][: len(expected[i])] == expected[i]
    counted.check("filled by another worker")
    assert owner.counters()["fills_done"] > 0.8 * NUM_PROMPTS
    pair.settle()
    pair.close()


def test_with_adapters(prompts: Texts, params: SamplingParams) -> None:
    def run(model: LLM) -> Texts:
        adapters = [*(model.load_adapter(folder) for folder in ADAPTERS), b""]
        found: Texts = []
        for begin in range(0, NUM_PROMPTS, BATCH):
            batch = prompts[begin : begin + BATCH]
            chosen = [adapters[(begin + i) % len(adapters)] for i in range(len(batch))]
            found += ids_of(model.generate(batch, params, STOP, adapters=chosen))
        return found

    with llm(enable_lora=True) as plain:
        wanted = run(plain)
    with drafting(enable_lora=True) as made:
        counted = Counted(made.engine)
        assert run(made) == wanted
        counted.check("with adapters")
