"""Steps behind steps on a GPU: the same tokens, no wait but for tokens, no touch of freed pages."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import WeftError
from weft.contract.messages import Inbox, Outbox
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.contract.submits import Cancel, Submit
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.testing.engine.constrained import Desk, Outcome, schema
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

VOCAB = 517
PERSON = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
DIGITS = Constraint(kind="regex", text="[0-9]{3}-[a-f]{2,4}")


EXACT: dict[str, dict[str, Any]] = {
    "llama": {"dtype": "float32"},
    "qwen3": {"dtype": "bfloat16", "deterministic": True},
    "qwen3_moe": {"dtype": "float32"},
}
"""Kinds of models, and with what a step's other requests change no bit that decides. (In bfloat16
otherwise near-ties do: `test_gpu_engine.py` has that.)"""


@pytest.fixture(scope="module", params=EXACT)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: str = request.param
    path = tmp_path_factory.mktemp("tiny") / kind
    seed = random.randrange(10**6)
    return make_tiny(kind, path, seed, tokenizer=True, vocab_size=VOCAB, head_dim=64)


def make_llm(path: Path, **settings: Any) -> LLM:
    values: dict[str, Any] = {
        **EXACT[path.name],
        "device": "cuda",
        "num_pages": 400,
        "max_running_requests": 8,
        "max_step_tokens": 96,
        "prefill_chunk_tokens": 64,
        "poison_free_pages": True,
    }
    return LLM(path, **(values | settings))


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 11},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 1.1, "frequency_penalty": 0.8, "seed": 8},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 5},
    {"temperature": 0.8, "min_p": 0.02, "logit_bias": {7: 4.0, 9: -5.0}, "seed": 6},
    {"constraint": DIGITS, "temperature": 1.0, "seed": 3},
    {"constraint": PERSON, "temperature": 1.0, "seed": 4, "repetition_penalty": 1.1},
)


def mixed_submits(count: int, name: str = "mixed") -> list[Submit]:
    """Of every kind, some with log-probabilities, ending by stop tokens, lengths and grammars."""
    submits = []
    for index in range(count):
        sampling = SamplingParams(**({"temperature": 0.0} | KINDS[index % len(KINDS)]))
        stop = StopCriteria(
            max_tokens=random.randint(1, 80),
            ignore_eos=True,
            min_tokens=random.choice([0, 5]),
            stop_token_ids=tuple(random.sample(range(3, VOCAB), 8)),
        )
        submits.append(
            Submit(
                gateway=0,
                request_id=f"{name}-{index}",
                attempt=1,
                prompt=[random.randrange(3, VOCAB) for _ in range(random.randint(1, 80))],
                sampling=sampling,
                stop=stop,
                top_logprobs=random.choice([None, None, 3]),
            )
        )
    return submits


def check_equal(ours: list[Outcome | WeftError], theirs: list[Outcome | WeftError]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, Outcome), one
        assert isinstance(other, Outcome), other
        assert one.ids == other.ids
        assert one.reason == other.reason
        assert [p.token_id for p in one.logprobs] == [p.token_id for p in other.logprobs]


@pytest.fixture(scope="module")
def mixed(model_dir: Path) -> Iterator[tuple[list[Submit], list[Outcome | WeftError]]]:
    """Requests, and what comes of them one step at a time."""
    submits = mixed_submits(48)
    with make_llm(model_dir, overlap="off") as llm:
        yield submits, Desk(llm.engine, model_dir).run(*submits)


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"num_pages": 15}], ids=str)
def test_overlap_changes_no_token(
    model_dir: Path, mixed: tuple[list[Submit], list[Outcome | WeftError]], settings: dict[str, Any]
) -> None:
    submits, expected = mixed
    with make_llm(model_dir, **settings) as llm:
        assert llm.engine.config.is_overlapped
        check_equal(Desk(llm.engine, model_dir).run(*submits), expected)
        counters = llm.engine.counters()
        llm.engine.memory.check_integrity()
        assert llm.engine.memory.counts().used == 0
    assert counters["surplus_tokens"] > 0
    assert bool(counters["preemptions"]) == ("num_pages" in settings)


def test_no_turn_waits_for_the_device_but_for_its_tokens(
    model_dir: Path, mixed: tuple[list[Submit], list[Outcome | WeftError]]
) -> None:
    submits, expected = mixed
    with make_llm(model_dir) as llm:
        engine = llm.engine
        desk = Desk(engine, model_dir)
        desk.run(*submits)  # Compiles kernels, grows tables.
        engine.memory.flush_cache()
        turn = engine.turn

        def checked(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return turn(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine.turn = checked  # type: ignore[method-assign]
        check_equal(desk.run(*submits), expected)


def stall_at_random(owner: object, name: str) -> None:
    """Makes a method take 5 ms more in one call of five."""
    method: Callable[..., Any] = getattr(owner, name)

    def stalled(*args: Any, **kwargs: Any) -> Any:
        if random.random() < 0.2:
            time.sleep(0.005)
        return method(*args, **kwargs)

    setattr(owner, name, stalled)


def test_a_host_that_stalls_changes_no_token(
    model_dir: Path, mixed: tuple[list[Submit], list[Outcome | WeftError]]
) -> None:
    submits, expected = mixed
    with make_llm(model_dir) as llm:
        engine = llm.engine
        for owner, name in (
            (engine.scheduler, "plan"),
            (engine.scheduler, "commit"),
            (engine._step_sampler, "prepare"),
            (engine.parts.local, "launch"),
            (engine.parts.local, "keep"),
            (engine, "step_done"),
        ):
            stall_at_random(owner, name)
        check_equal(Desk(engine, model_dir).run(*submits), expected)


class FreePageWriter:
    """Fills every page with NaN as soon as it is free, beside the steps under way.

    Steps that begin later wait for it, as they would for a transfer into a page that they read.
    """

    def __init__(self, engine: Engine) -> None:
        self.num_pages = 0
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = engine.parts.local.pool
        self._set_free = engine.memory._set_free
        engine.memory._set_free = self.on_free  # type: ignore[method-assign]
        self._pool[engine.memory._free] = float("nan")
        torch.cuda.synchronize()

    def on_free(self, page: int) -> None:
        """The memory allows it from now on."""
        self._set_free(page)
        self.num_pages += 1
        with torch.cuda.stream(self._stream):
            self._pool[page].fill_(float("nan"))
            written = self._stream.record_event()
        torch.cuda.current_stream().wait_event(written)


def cancel_at_random(engine: Engine, doomed: Sequence[Submit]) -> None:
    """Sends cancels of these, one in three turns, until there is none left."""
    turn, left = engine.turn, random.sample(list(doomed), len(doomed))

    def turned(inbox: Inbox | None = None) -> Outbox:
        if inbox is None and left and random.random() < 0.3:
            cancel = Cancel(gateway=0, request_id=left.pop().request_id, attempt=1)
            inbox = Inbox(cancels=[cancel])
        return turn(inbox)

    engine.turn = turned  # type: ignore[method-assign]


def test_freed_pages_are_not_touched_by_steps_under_way(
    model_dir: Path, mixed: tuple[list[Submit], list[Outcome | WeftError]]
) -> None:
    submits, expected = mixed
    with make_llm(model_dir, num_pages=15, poison_free_pages=False) as llm:
        engine = llm.engine
        desk = Desk(engine, model_dir)
        writer = FreePageWriter(engine)
        for turn in range(3):
            doomed = mixed_submits(len(submits), f"doomed-{turn}")
            cancel_at_random(engine, doomed)
            # Side by side, so that each kind gets the other's pages.
            both = [submit for pair in zip(submits, doomed, strict=True) for submit in pair]
            check_equal(desk.run(*both)[::2], expected)
            engine.memory.flush_cache()
        assert engine.counters()["preemptions"]
        torch.cuda.synchronize()
        assert writer.num_pages > 0
        assert bool(engine.parts.local.pool[engine.memory._free].isnan().all())


def test_constrained_answers_are_valid(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        desk = Desk(llm.engine, model_dir)
        prompts = [[random.randrange(3, VOCAB) for _ in range(9)] for _ in range(12)]
        bias = {desk.tokenizer.token_to_id(symbol): 12.0 for symbol in "}0"}
        submits = [
            desk.submit(PERSON, prompt, temperature=1.0, seed=seed, logit_bias=bias)
            for seed, prompt in enumerate(prompts)
        ]
        for outcome in desk.run(*submits):
            assert isinstance(outcome, Outcome), outcome
            assert outcome.reason == "stop"
            assert isinstance(json.loads(desk.text(outcome))["a"], int)
