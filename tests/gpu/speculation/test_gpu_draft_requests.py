"""Drafts on a GPU for batches of all kinds of requests, and up to each request's last token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.executor.graphs import GraphBucket
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.ports import DraftGate
from weft.testing.engine.constrained import Desk, Outcome
from weft.testing.engine.draft_storm import check_storm, draft_storm, known_of, samplings_of
from weft.testing.engine.drafters import KnownGraphs, RandomGate
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny, tiny_config
from weft.testing.scheduling.draft_machine import FixedGate

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
VOCAB = 517
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 4, "head_dim": 64}
SETTINGS: dict[str, Any] = {
    **{"device": "cuda", "dtype": "float32", "page_size": PAGE, "num_pages": 300},
    **{"max_running_requests": 8, "max_step_tokens": 64, "prefill_chunk_tokens": 32},
    **{"max_context_tokens": 256, "max_draft_tokens": 3, "poison_free_pages": True},
    **{"enable_lora": True, "max_loras": 2, "lora_memory_bytes": 8 << 20},
}


@dataclass(frozen=True)
class Kind:
    """A way to ask."""

    params: dict[str, Any]
    adapter: int | None = None
    min_tokens: int = 0
    is_drafted: bool = True


SEEDED = {"temperature": 1.0, "seed": 5}
DIGITS = Constraint(kind="regex", text="[0-9]{12,20}")
KINDS = {
    "greedy": Kind({}),
    "seeded": Kind(SEEDED),
    "filtered": Kind({**SEEDED, "top_k": 30, "top_p": 0.9, "logit_bias": {7: 3.0}}),
    "adapter, greedy": Kind({}, adapter=0),
    "adapter, seeded": Kind(SEEDED, adapter=1),
    "opted out": Kind({**SEEDED, "speculates": False}, is_drafted=False),
    "penalties": Kind({**SEEDED, "repetition_penalty": 1.3, "frequency_penalty": 0.3}),
    "min_tokens": Kind({}, min_tokens=9),
    "grammar": Kind({**SEEDED, "constraint": DIGITS}),
    "grammar, greedy": Kind({"constraint": DIGITS}),
    "grammar, penalties": Kind({**SEEDED, "constraint": DIGITS, "frequency_penalty": 0.3}),
    "grammar, min_tokens": Kind({**SEEDED, "constraint": DIGITS}, min_tokens=16),
}


class Bench:
    """A target with two adapters, its engine without drafts, and one whose drafts are mostly right.

    Args:
        folder: For the models.
    """

    def __init__(self, folder: Path) -> None:
        seed = random.randrange(1 << 30)
        print(f"seed {seed}")
        random.seed(seed)
        self.target_dir = make_tiny("llama", folder / "t", seed, tokenizer=True, **SHAPE)
        draft_dir = make_tiny_draft(folder / "d", self.target_dir, seed + 1)
        config = tiny_config("llama", **SHAPE)
        folders = [make_adapter(folder / name, config, seed + i) for i, name in enumerate("ab")]
        self.plain = LLM(self.target_dir, **SETTINGS)
        drafts = {"drafter": "eagle3", "draft_dir": draft_dir}
        self.drafting = LLM(self.target_dir, **SETTINGS, **drafts)
        for llm in (self.plain, self.drafting):
            self.adapters = [llm.load_adapter(folder) for folder in folders]
        assert self.drafting.engine.scheduler.running_plans.drafts_on_device
        self.buckets = note_buckets(self.drafting.engine)

    def close(self) -> None:
        """Ends both engines."""
        self.plain.close()
        self.drafting.close()

    def submit(self, number: int, kind: Kind, stop: StopCriteria) -> Submit:
        """A request with a prompt of its own."""
        return Submit(
            gateway=0,
            request_id=f"r{number}",
            attempt=1,
            prompt=[random.randrange(3, VOCAB) for _ in range(random.randint(1, 3 * PAGE))],
            sampling=SamplingParams(**({"temperature": 0.0} | kind.params)),
            stop=stop,
            adapter=b"" if kind.adapter is None else self.adapters[kind.adapter],
        )

    def run(self, llm: LLM, submits: Sequence[Submit]) -> list[Outcome]:
        """What comes of requests; nothing is left of them."""
        outcomes = Desk(llm.engine, self.target_dir).run(*submits)
        found = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
        assert len(found) == len(outcomes), outcomes
        llm.engine.memory.check_integrity()
        assert llm.engine.memory.counts().used == 0
        return found

    def draft(
        self, submits: Sequence[Submit], outcomes: Sequence[Outcome], chance: float, gate: DraftGate
    ) -> KnownGraphs:
        """From now on these are drafted, with this chance to be right."""
        texts = {
            (tuple(submit.prompt), 0): [*submit.prompt, *outcome.ids]
            for submit, outcome in zip(submits, outcomes, strict=True)
        }
        engine = self.drafting.engine
        graphs = KnownGraphs(engine, texts, VOCAB, chance)
        engine.scheduler.running_plans.gate = gate
        return graphs


def texts_of(outcomes: Sequence[Outcome]) -> list[tuple[list[int], str]]:
    return [(outcome.ids, outcome.reason) for outcome in outcomes]


def note_buckets(engine: Engine) -> Counter[tuple[str, bool]]:
    """Counts an engine's steps by their graph's kind, and whether it has adapters."""
    counts: Counter[tuple[str, bool]] = Counter()
    graphs = engine.parts.local.graphs
    assert graphs is not None
    buckets = graphs.buckets
    of, of_decodes, of_requests = buckets.of, buckets.of_decodes, buckets.of_requests

    def noted(bucket: GraphBucket | None) -> GraphBucket | None:
        if bucket is not None:
            counts[bucket.kind, bucket.has_lora] += 1
        return bucket

    buckets.of = lambda arrays: noted(of(arrays))  # type: ignore[method-assign]
    buckets.of_decodes = lambda plan: noted(of_decodes(plan))  # type: ignore[method-assign]
    buckets.of_requests = lambda requests: noted(of_requests(requests))  # type: ignore[method-assign]
    return counts


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.close()


def test_all_kinds_in_one_batch(bench: Bench) -> None:
    """Some are drafted for while steps of theirs are under way; the others take a token a step."""
    names = random.sample([*KINDS] * 3, 3 * len(KINDS))
    submits = []
    for number, name in enumerate(names):
        stop = StopCriteria(
            max_tokens=random.randint(20, 60),
            min_tokens=KINDS[name].min_tokens,
            stop_token_ids=tuple(random.sample(range(3, VOCAB), 6)),
        )
        submits.append(bench.submit(number, KINDS[name], stop))
    expected = bench.run(bench.plain, submits)
    graphs = bench.draft(submits, expected, 0.7, RandomGate((1, 2, 3)))
    bench.buckets.clear()
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for _ in range(2):  # The second time on a warm cache.
        found = bench.run(bench.drafting, submits)
        assert texts_of(found) == texts_of(expected)
        for name, outcome in zip(names, found, strict=True):
            drafted[name] += outcome.num_drafted
            accepted[name] += outcome.num_accepted
    print(dict(drafted), dict(accepted), dict(bench.buckets), graphs.num_late)
    for name, kind in KINDS.items():
        assert (drafted[name] > 0) == (accepted[name] > 0) == kind.is_drafted, name
    assert graphs.num_late > 20
    assert bench.buckets["verify", True] > 5


@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_each_place_of_a_last_token(bench: Bench, chance: float) -> None:
    """Near its last token a request waits for what is under way, and ends where it should."""
    stops = [StopCriteria(max_tokens=count, ignore_eos=True) for count in range(1, 25)]
    kinds = [KINDS["greedy"], KINDS["seeded"], KINDS["adapter, greedy"]]
    free = StopCriteria(max_tokens=30, ignore_eos=True)
    longer = [bench.submit(i, random.choice(kinds), free) for i in range(len(stops))]
    whole = bench.run(bench.plain, longer)
    # Drafts know what would follow the last token, too.
    graphs = bench.draft(longer, whole, chance, FixedGate(3))
    submits = [replace(submit, stop=stop) for submit, stop in zip(longer, stops, strict=True)]
    expected = [
        (one.ids[: stop.max_tokens], "length") for one, stop in zip(whole, stops, strict=True)
    ]
    for order in (1, -1):
        found = bench.run(bench.drafting, submits[::order])
        assert texts_of(found) == expected[::order]
    num_accepted = sum(outcome.num_accepted for outcome in found)
    assert graphs.num_late > 10
    assert (num_accepted > 0) == (chance > 0.0)


def test_a_storm_of_cancels_and_pre_emptions_leaves_nothing(tmp_path: Path) -> None:
    """Requests leave while steps that verify their drafts run, and others take their pages."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    target_dir = make_tiny("llama", tmp_path / "t", seed, **SHAPE)
    settings: dict[str, Any] = {"drafter": "eagle3"}
    settings["draft_dir"] = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    settings |= {name: SETTINGS[name] for name in ("device", "page_size", "max_step_tokens")}
    storm = draft_storm(
        target_dir, samplings_of((0.0, 1.0)), 30, overlap="on", max_draft_tokens=3, **settings
    )
    try:
        engine = storm.owner
        assert engine.scheduler.running_plans.drafts_on_device
        graphs = KnownGraphs(engine, known_of(storm.texts), VOCAB, 0.7)
        engine.scheduler.running_plans.gate = RandomGate((0, 1, 2, 3))
        check_storm(storm, 250)
        assert graphs.num_late > 100
    finally:
        storm.close()
