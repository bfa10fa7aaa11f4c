"""Steps behind steps: a device as late as can be, a host that stalls, and no token changes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Cancel
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.engine_storm import Storm, Text, check_empty, make_texts, ride_out
from weft.testing.engine.late_device import LateDevice
from weft.testing.models.choices import Choices
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

PAGE = 8
VOCAB = 517
MAX_SAMPLES = 4
NUM_NEW = 14
NUM_REQUESTS = 400
MAX_OPEN = 24


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    seed = random.randrange(2**31)
    return make_tiny("llama", path, seed=seed, vocab_size=VOCAB, num_hidden_layers=1)


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def texts_of(model_dir: Path, number: int) -> list[Text]:
    """Prompts that share prefixes, and what an engine that does one step at a time makes of them;
    the greedy ones are what transformers makes of them."""
    clock = ManualClock()
    engine = make_engine(model_dir, "decode", clock, overlap="off")
    samplings = [
        SamplingParams(temperature=float(index % 2 == 0), seed=index, n=MAX_SAMPLES)
        for index in range(number)
    ]
    made = make_texts(engine, clock, samplings, NUM_NEW)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for text in made:
        if text.sampling.temperature == 0.0:
            assert list(text.samples[0]) == greedy(model, list(text.prompt))
    return made


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    return Choices(lambda tokens: model(torch.tensor([tokens])).logits[0], prompt, NUM_NEW)


@pytest.fixture(scope="module")
def texts(model_dir: Path) -> list[Text]:
    return texts_of(model_dir, 20)


@pytest.mark.each_of("leaves", "is_staged")
@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves"])
@pytest.mark.parametrize("is_staged", [False, True], ids=["direct", "staged"])
def test_freed_pages_are_not_touched_however_late_the_device_is(
    model_dir: Path, texts: list[Text], is_staged: bool, leaves: bool
) -> None:
    """Random ends, cancels, pre-emptions and faults; owner and fillers on late devices."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    clock = ManualClock()
    shared = {
        "max_running_requests": 8,
        "prefill_chunk_tokens": 16,
        "overlap": "on",
        "force_staging": is_staged,
    }
    owner = make_engine(
        model_dir, "decode", clock, num_pages=52, has_store=True, host_cache_bytes=1 << 20, **shared
    )
    fillers = [
        make_engine(model_dir, "prefill", clock, num_pages=48, worker_id=name, **shared)
        for name in ("p0", "p1")
    ]
    devices = [LateDevice(engine, rng, leaves=leaves) for engine in (owner, *fillers)]
    storm = Storm(owner, fillers, clock, texts, rng)

    def has_seen_all() -> bool:
        counters = owner.counters()
        seen = storm.num_preempted, counters["fills_done"], counters["partial_page_hits"]
        return all(seen)

    try:
        ride_out(storm, NUM_REQUESTS, MAX_OPEN, has_seen_all)
        for device in devices:
            device.work()
            assert device.most_queued > 1
        for engine in (owner, *fillers):
            check_empty(engine)
        assert has_seen_all()
    finally:
        storm.close()


def test_a_page_to_be_copied_stays_until_the_device_has_copied_it(model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    clock = ManualClock()
    engine = make_engine(model_dir, "decode", clock, overlap="on")
    pair = EnginePair(engine, [], clock)
    try:
        LateDevice(engine, random.Random(0), early_chance=0.0)
        stem = random_prompt(3 * PAGE)
        pair.finish(pair.submit(stem, 4))
        prompt = stem[: 2 * PAGE + 3] + random_prompt(5)
        request_id = pair.submit(prompt, NUM_NEW)
        while not pair.answers[request_id].finished:
            pair.turn()
            pair.send(flush_cache=[1])
        assert pair.answers[request_id].tokens[0] == greedy(model, prompt)
        assert engine.counters()["partial_page_hits"] == 1
        pair.settle()
    finally:
        pair.close()


def test_a_prompt_is_shipped_and_accepted_while_a_step_is_under_way(model_dir: Path) -> None:
    """No word between owner and filler waits for a device that does nothing."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock, overlap="on")
    filler = make_engine(model_dir, "prefill", clock, worker_id="p0")
    pair = EnginePair(owner, [filler], clock)
    try:
        device = LateDevice(owner, random.Random(0), early_chance=0.0, leaves=True)
        stream = pair.submit(random_prompt(5), NUM_NEW)
        pair.run(lambda: owner.pipeline.num_steps == 2)
        before = device.num_done
        prompt = random_prompt(4 * PAGE + 3)
        shipped = pair.submit(prompt, NUM_NEW, candidates=[pair.candidate("p0")])
        pair.run(lambda: owner.counters()["fills_done"] == 1)
        assert device.num_done == before, "something waited for the device"
        assert owner.pipeline.num_steps == 2
        owner.pipeline.leaves = False
        pair.finish(stream, shipped)
        assert pair.answers[shipped].tokens[0] == greedy(model, prompt)
        pair.settle()
    finally:
        pair.close()


def test_prompt_tokens_of_steps_under_way_are_still_to_be_computed(model_dir: Path) -> None:
    """The forecast of a local prompt counts them; the first of the two steps as half done."""
    clock = ManualClock()
    engine = make_engine(model_dir, "decode", clock, overlap="on", prefill_chunk_tokens=2 * PAGE)
    pair = EnginePair(engine, [], clock)
    try:
        LateDevice(engine, random.Random(0), early_chance=0.0, leaves=True)
        prompt = random_prompt(random.randrange(5 * PAGE, 12 * PAGE))
        request = pair.submit(prompt, NUM_NEW)
        pair.run(lambda: engine.pipeline.num_steps == 2)
        assert engine.costs.local_load().queued_tokens == len(prompt) - PAGE
        engine.pipeline.leaves = False
        pair.finish(request)
        assert engine.costs.local_load().queued_tokens == 0
        pair.settle()
    finally:
        pair.close()


def test_stop_tokens_end_texts_where_they_would_without_overlap(model_dir: Path) -> None:
    prompts = [random_prompt(random.randint(1, 5 * PAGE)) for _ in range(12)]
    free = StopCriteria(max_tokens=40, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, seed=3)
    settings = {"dtype": "float32", "page_size": PAGE, "poison_free_pages": True}
    with LLM(model_dir, **settings, num_pages=400, overlap="off") as llm:
        whole = [sample.token_ids for sample in llm.generate(prompts, seeded, free)]
    stops = tuple({token for text in whole for token in text[5:30:6]})
    stop = StopCriteria(max_tokens=40, ignore_eos=True, stop_token_ids=stops)
    with LLM(model_dir, **settings, num_pages=60, max_running_requests=5, overlap="on") as llm:
        samples = llm.generate(prompts, seeded, stop)
        counters = llm.engine.counters()
    for sample, text in zip(samples, whole, strict=True):
        end = next((i + 1 for i, token in enumerate(text) if token in stops), 40)
        assert sample.token_ids == text[:end]
        assert sample.finish_reason == ("stop" if text[end - 1] in stops else "length")
    assert counters["surplus_tokens"] > 0
    assert counters["generated_tokens"] == sum(len(sample.token_ids) for sample in samples)


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
def test_a_host_that_stalls_changes_no_token(
    model_dir: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    rng = random.Random(random.randrange(2**32))
    clock = ManualClock()
    engine = make_engine(model_dir, "decode", clock, num_pages=64, overlap="on")
    pair = EnginePair(engine, [], clock)

    def stalling(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def stalled(*args: object, **kwargs: object) -> object:
            if rng.random() < 0.2:
                time.sleep(0.005)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, stalled)

    try:
        if is_late:
            LateDevice(engine, rng)
        for owner, name in (
            (engine.scheduler, "plan"),
            (engine.scheduler, "commit"),
            (engine._step_sampler, "prepare"),
            (engine.parts.local, "launch"),
            (engine, "step_done"),
        ):
            stalling(owner, name)
        ids = [pair.submit(t.prompt, NUM_NEW, sampling=t.sampling) for t in texts]
        pair.finish(*ids, samples=MAX_SAMPLES)
        for request_id, text in zip(ids, texts, strict=True):
            tokens = pair.answers[request_id].tokens
            assert [tuple(tokens[i]) for i in range(MAX_SAMPLES)] == list(text.samples)
        pair.settle()
    finally:
        pair.close()


def test_prompts_wait_where_only_so_many_may_run(model_dir: Path) -> None:
    with LLM(model_dir, dtype="float32", page_size=PAGE, num_pages=64) as llm:
        prompts = [random_prompt(length) for length in (9, 20, 4, 12, 30)]
        stop = StopCriteria(max_tokens=6, ignore_eos=True)
        expected = [sample.token_ids for sample in llm.generate(prompts, stop=stop)]
        most, turn = 0, llm.engine.turn

        def counting(*args: object) -> object:
            nonlocal most
            outbox = turn(*args)  # type: ignore[arg-type]
            most = max(most, llm.engine.scheduler.num_requests)
            return outbox

        llm.engine.turn = counting  # type: ignore[method-assign, assignment]
        sampling = SamplingParams(temperature=0.0, n=2)
        groups = llm.generate_all(prompts, sampling, stop, max_at_once=2)
        assert [group[0].token_ids for group in groups] == expected
        assert all(len(group) == 2 for group in groups)
        assert 2 <= most <= 4
        with pytest.raises(ValueError, match="max_at_once = 0"):
            llm.generate(prompts, stop=stop, max_at_once=0)


def test_a_failed_step_ends_its_requests_and_nothing_else(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model_dir, dtype="float32", page_size=PAGE, num_pages=64, overlap="on") as llm:
        stop = StopCriteria(max_tokens=20, ignore_eos=True)
        prompts = [random_prompt(20) for _ in range(3)]
        expected = [sample.token_ids for sample in llm.generate(prompts, stop=stop)]
        executor, num_calls = llm.engine.parts.local, 0
        launch = executor.launch

        def failing(*args: object) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 8:
                raise RuntimeError("a kernel could not be launched")
            return launch(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(executor, "launch", failing)
        with pytest.raises(Exception, match="a step failed: RuntimeError"):
            llm.generate(prompts, stop=stop)
        assert [sample.token_ids for sample in llm.generate(prompts, stop=stop)] == expected
        while llm.engine.has_work:
            llm.engine.turn()
        check_empty(llm.engine)


def test_a_page_that_a_copy_will_fill_is_nobody_elses(tmp_path: Path) -> None:
    """Its request matches a part of a page, gets no chunk in the step that copies it, and is
    cancelled while that step is under way.
    """
    seed = random.randrange(2**31)
    path = make_tiny("llama", tmp_path, seed, vocab_size=517, num_hidden_layers=1)
    clock = ManualClock()
    settings = {"overlap": "on", "max_step_tokens": 16, "prefill_chunk_tokens": 16}
    engine = make_engine(path, "decode", clock, max_running_requests=8, **settings)
    pair = EnginePair(engine, [], clock)
    known = list(range(10, 34))
    pair.finish(pair.submit(known, 2, candidates=[]))
    while not engine.is_idle:
        pair.turn()
    device = LateDevice(engine, random.Random(0), early_chance=0.0)
    pair.submit(list(range(100, 114)), 4, candidates=[])  # Leaves two tokens of the step.
    cancelled = pair.submit([*known[:13], *range(200, 240)], 4, candidates=[])
    pair.turn()
    (waiting,) = [one for one in engine.scheduler.prefilling if not one.num_launched]
    assert waiting.held.pages
    pair.send(cancels=[Cancel(gateway=1, request_id=cancelled, attempt=1)])
    pair.turn()
    pair.turn()
    device.work()
    device.check_free()
    for _ in range(50):
        pair.turn()
    device.work()
    device.check_free()
    assert engine.is_idle
