"""Scheduling policies in an engine with a model: who is next, and that no token changes by it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.errors import Overloaded
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import Choices
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("overlap")

PAGE = 8
VOCAB = 517


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    return make_tiny("llama", path, seed=random.randrange(2**31), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.eval()


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    return Choices(lambda tokens: model(torch.tensor([tokens])).logits[0], prompt, count)


def prompt_of(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def one_engine(model_dir: Path, **settings: object) -> EnginePair:
    clock = ManualClock()
    return EnginePair(make_engine(model_dir, "decode", clock, **settings), [], clock)


def test_an_urgent_request_takes_the_place_of_a_running_one(
    model_dir: Path, model: torch.nn.Module
) -> None:
    pair = one_engine(
        model_dir, scheduling_policy="priority", preemption_threshold=5, max_running_requests=1
    )
    try:
        low, high = prompt_of(20), prompt_of(30)
        slow = pair.submit(low, 12, priority=3)
        pair.run(lambda: len(pair.answers[slow].tokens.get(0, [])) >= 3)
        fast = pair.submit(high, 4, priority=-2)
        assert pair.finish(fast) == [greedy(model, high, 4)]
        assert not pair.answers[slow].finished
        assert pair.finish(slow) == [greedy(model, low, 12)]
        assert pair.answers[slow].finished[0].timeline.num_preemptions == 1
        assert pair.owner.counters()["urgent_preemptions"] == 1
        assert (pair.answers[fast].num_starts, pair.answers[slow].num_starts) == (1, 2)
        pair.settle()
    finally:
        pair.close()


def test_samples_that_are_not_forked_yet_count_as_waiting(
    model_dir: Path, model: torch.nn.Module
) -> None:
    pair = one_engine(model_dir, max_running_requests=2, max_waiting_requests=8)
    several = SamplingParams(temperature=0.0, n=4)
    prompt = prompt_of(20)
    try:
        first, second = (pair.submit(prompt, 6, sampling=several) for _ in range(2))
        pair.turn()  # One of each is in the step, or waits for it.
        pair.submit(prompt, 6)
        pair.submit(prompt, 6)
        third = pair.submit(prompt, 6, sampling=several)
        with pytest.raises(Overloaded, match="8 requests are waiting"):
            pair.turn()
        del pair.answers[third]
        found = pair.finish(first, second, samples=4)
        assert found == [greedy(model, prompt, 6)] * 2
        # And no longer, once they have run.
        again = pair.submit(prompt, 6, sampling=several)
        pair.finish(again, samples=4)
        pair.settle()
    finally:
        pair.close()


def test_more_samples_than_may_wait_take_turns_in_an_engine_alone(model_dir: Path) -> None:
    with LLM(model_dir, dtype="float32", num_pages=200, max_waiting_requests=5) as llm:
        sampling = [SamplingParams(temperature=0.0, n=n) for n in (3, 1, 8, 2, 1, 1, 4)]
        prompts = [prompt_of(10) for _ in sampling]
        stop = StopCriteria(max_tokens=3, ignore_eos=True)
        found = llm.generate_all(prompts, sampling, stop)
        assert [len(samples) for samples in found] == [one.n for one in sampling]
        assert all(len(one.token_ids) == 3 for samples in found for one in samples)


def test_costs_are_told_how_much_of_a_prompt_a_step_computes(model_dir: Path) -> None:
    settings = {"prefill_chunk_tokens": 16, "max_step_tokens": 64, "max_running_requests": 4}
    engine = make_engine(model_dir, "decode", ManualClock(), **settings)
    engine.costs.observe_local(64, 0.001)
    load = engine.costs.local_load()
    assert (load.step_tokens, load.chunk_tokens) == (64, 16)


def test_a_flood_of_one_tenant_leaves_room_for_another(model_dir: Path) -> None:
    pair = one_engine(model_dir, scheduling_policy="fair", max_running_requests=2)
    try:
        flood = [pair.submit(prompt_of(30), 6, tenant="flood") for _ in range(16)]
        pair.turn()
        quiet = [pair.submit(prompt_of(30), 6, tenant="quiet") for _ in range(3)]
        pair.finish(*quiet)
        assert sum(bool(pair.answers[name].finished) for name in flood) <= 8
        pair.finish(*flood)
        pair.settle()
    finally:
        pair.close()


@pytest.mark.parametrize(
    "policy", ["fcfs", "longest_prefix", "shortest_remaining", "priority", "fair"]
)
def test_prompts_that_come_together_compute_their_prefix_once(
    model_dir: Path, model: torch.nn.Module, policy: str
) -> None:
    pair = one_engine(model_dir, scheduling_policy=policy)
    try:
        stem = prompt_of(5 * PAGE + 3)
        prompts = [stem + prompt_of(4) for _ in range(5)]
        ids = [pair.submit(prompt, 3) for prompt in prompts]
        answers = pair.finish(*ids)
        assert answers == [greedy(model, prompt, 3) for prompt in prompts]
        counters = pair.owner.counters()
        assert counters["prefix_waits"] == 4
        assert counters["prompt_tokens"] <= len(prompts[0]) + 4 * (PAGE + 4)
        pair.settle()
    finally:
        pair.close()


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_a_prompt_ends_beside_a_stream_though_no_step_has_room_for_a_page(
    model_dir: Path, model: torch.nn.Module, tmp_path: Path, drafter: str
) -> None:
    sizes = ("page_size", "max_step_tokens", "prefill_chunk_tokens")
    settings: dict[str, object] = dict.fromkeys(sizes, 16) | {"max_running_requests": 4}
    if drafter != "none":
        draft_dir = make_tiny_draft(tmp_path / "draft", model_dir)
        settings |= {"drafter": drafter, "draft_dir": draft_dir, "draft_gate": "fixed"}
    pair = one_engine(model_dir, **settings)
    try:
        prompts = prompt_of(5), prompt_of(56)
        stream = pair.submit(prompts[0], 100)
        pair.run(lambda: bool(pair.answers[stream].tokens))
        other = pair.submit(prompts[1], 4)
        assert pair.finish(other) == [greedy(model, prompts[1], 4)]
        assert not pair.answers[stream].finished
        assert pair.finish(stream) == [greedy(model, prompts[0], 100)]
    finally:
        pair.close()


def test_a_started_prompt_is_not_passed_for_ever_by_shorter_ones(tmp_path: Path) -> None:
    """Running requests leave less than a page of each step, in which only short prompts end."""
    seed = random.randrange(2**31)
    path = make_tiny("llama", tmp_path, seed, vocab_size=517, num_hidden_layers=1)
    settings = {"max_step_tokens": 32, "max_running_requests": 32, "prefill_chunk_tokens": 16}
    clock = ManualClock()
    engine = make_engine(path, "decode", clock, page_size=16, num_pages=2000, **settings)
    pair = EnginePair(engine, [], clock)

    def short() -> str:
        prompt = [random.randrange(3, 500) for _ in range(3)]
        return pair.submit(prompt, random.randint(20, 100), candidates=[])

    running = [short() for _ in range(20)]
    for _ in range(3):
        pair.turn()
    long = pair.submit([random.randrange(3, 500) for _ in range(40)], 4, candidates=[])
    num_turns = 0
    while not pair.answers[long].finished:
        pair.turn()
        running = [one if not pair.answers[one].finished else short() for one in running]
        num_turns += 1
        assert num_turns < 400
