"""Models with recurrent layers: right tokens wherever a request begins, goes on or is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError, ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.config import NEVER_SHIP_TOKENS, EngineConfig
from weft.engine.loop.combinations import check_recurrent
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.engine.engine_storm import Storm, Text, check_empty, make_texts, ride_out
from weft.testing.engine.late_device import LateDevice
from weft.testing.models.choices import is_sure
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_hybrid import greedy, make_hybrid, reference_hybrid, serve_hybrid

PAGE = 8
VOCAB = 517
NUM_NEW = 24
ALONE = {"transport": "data", "local_prefill_max_tokens": NEVER_SHIP_TOKENS}
FULL = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", autouse=True)
def _hybrid() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        serve_hybrid(patch)
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hybrid"), seed)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return reference_hybrid(model_dir)


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def generate(llm: LLM, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    stop = StopCriteria(max_tokens=num_new, ignore_eos=True)
    return [sample.token_ids for sample in llm.generate(prompts, stop=stop)]


def make_sure_texts(
    model_dir: Path, model: torch.nn.Module, clock: ManualClock, samplings: list[SamplingParams]
) -> list[Text]:
    """Of which each token is clearly the one to draw: states add up in the order of chunks."""

    def is_clear(text: Text) -> bool:
        samples = enumerate(text.samples)
        return all(is_sure(model, text.prompt, one, text.sampling, i) for i, one in samples)

    engine = make_engine(model_dir, "decode", clock, **ALONE)
    return make_texts(engine, clock, samplings, NUM_NEW, is_clear)


def check(engine: Engine) -> None:
    check_empty(engine)
    (states,) = engine.parts.companions
    states.memory.check_integrity()
    assert not states.memory.counts().used
    if states._index is not None:
        states._index.check_integrity()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=FULL),
        {"prefill_chunk_tokens": PAGE, "max_step_tokens": 17, "overlap": "on"},
        {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 11},
        pytest.param({"prefix_cache": False, "overlap": "on"}, marks=FULL),
    ],
)
def test_texts_however_prompts_are_cut(
    model_dir: Path, model: torch.nn.Module, settings: dict[str, Any]
) -> None:
    """Chunks and steps are as small as they can be, or drafts cross borders by the page."""
    prompts = [random_prompt(length) for length in (1, PAGE, PAGE + 1, 45, 130)]
    prompts[3] = prompts[3][:9] * 5  # Some drafts are accepted.
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    values = {"page_size": PAGE, "poison_free_pages": True, "max_running_requests": 16, **settings}
    with LLM(model_dir, dtype="float32", num_pages=120, **values) as llm:
        for _ in range(2):
            assert generate(llm, prompts, NUM_NEW) == expected
        hits = llm.engine.counters()["prefix_hit_tokens"]
        turns = [
            prompt + answer + random_prompt(3)
            for prompt, answer in zip(prompts, expected, strict=True)
        ]
        assert generate(llm, turns, 5) == [greedy(model, turn, 5) for turn in turns]
        if settings.get("prefix_cache", True):
            whole_pages = sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
            assert hits == whole_pages, "prompts are found up to their last page border"
        else:
            assert not hits
        check(llm.engine)


def test_prompts_that_part_from_a_cached_one_anywhere(
    model_dir: Path, model: torch.nn.Module
) -> None:
    """The first that does computes states up to there again; the next continues there."""
    base = random_prompt(100)
    values = {"page_size": PAGE, "num_pages": 300, "max_step_tokens": 64, "checkpoint_tokens": 48}
    values |= {"poison_free_pages": True, "prefill_chunk_tokens": 40}
    borders = {48, 96}
    with LLM(model_dir, dtype="float32", **values) as llm:
        assert generate(llm, [base], 3) == [greedy(model, base, 3)]
        for length in random.sample(range(1, 101), 30):
            prompt = base[:length] + random_prompt(random.randint(1, 12))
            if prompt[length] in base[length : length + 1]:  # It would part later.
                prompt[length] = 3 + (prompt[length] - 2) % (VOCAB - 3)
            before = llm.engine.counters()["prefix_hit_tokens"]
            assert generate(llm, [prompt], 3) == [greedy(model, prompt, 3)]
            found = llm.engine.counters()["prefix_hit_tokens"] - before
            assert found == max((border for border in borders if border <= length), default=0)
            borders.add(length // PAGE * PAGE)
        check(llm.engine)


def test_prompts_that_arrive_together_compute_what_they_share_once(
    model_dir: Path, model: torch.nn.Module
) -> None:
    stem = random_prompt(9 * PAGE + 3)
    prompts = [stem + random_prompt(5) for _ in range(4)]
    with LLM(model_dir, dtype="float32", page_size=PAGE, prefill_chunk_tokens=3 * PAGE) as llm:
        assert generate(llm, prompts, 4) == [greedy(model, prompt, 4) for prompt in prompts]
        assert llm.engine.counters()["prefix_hit_tokens"] == 3 * 9 * PAGE
        check(llm.engine)


@pytest.mark.parametrize(
    ("num_requests", "prefix_cache"),
    [
        (8, True),
        pytest.param(200, True, marks=FULL),
        pytest.param(100, False, marks=FULL),
    ],
)
def test_storms_on_a_device_that_is_late(
    model_dir: Path, model: torch.nn.Module, num_requests: int, prefix_cache: bool
) -> None:
    """Forks, cancels and pre-emptions; blocks are NaN from the moment they are free."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, clock = random.Random(seed), ManualClock()
    samplings = [SamplingParams(temperature=float(i % 2 == 0), seed=i, n=4) for i in range(6)]
    texts = make_sure_texts(model_dir, model, clock, samplings)
    for text in texts:
        if text.sampling.temperature == 0.0:
            assert list(text.samples[0]) == greedy(model, list(text.prompt), NUM_NEW)
    engine = make_engine(
        model_dir,
        "decode",
        clock,
        **ALONE,
        num_pages=32,
        max_running_requests=3,
        max_step_tokens=32,
        prefill_chunk_tokens=16,
        checkpoint_tokens=4 * PAGE,
        overlap="on",
        prefix_cache=prefix_cache,
    )
    device = LateDevice(engine, rng, leaves=True)
    storm = Storm(engine, [], clock, texts, rng)
    try:
        ride_out(storm, num_requests, 24, lambda: bool(storm.num_preempted))
        device.work()
        assert device.most_queued > 2
        check(engine)
    finally:
        storm.close()


@pytest.mark.parametrize(
    ("num_requests", "way"),
    [
        (12, WAYS[0].values[0]),
        pytest.param(100, WAYS[0].values[0], marks=FULL),
        *(pytest.param(60, way.values[0], marks=[*way.marks, FULL]) for way in WAYS[1:]),
    ],
)
def test_drafts_and_faulty_prefill_workers_in_a_storm(
    model_dir: Path, model: torch.nn.Module, num_requests: int, way: dict[str, Any]
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, clock = random.Random(seed), ManualClock()
    samplings = [SamplingParams(temperature=0.0, seed=i, n=4) for i in range(4)]
    texts = make_sure_texts(model_dir, model, clock, samplings)
    values = {**way, "num_pages": 90, "checkpoint_tokens": 4 * PAGE, "max_running_requests": 4}
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 12}
    owner = make_engine(model_dir, "decode", clock, **values, **drafts, max_step_tokens=64)
    fillers = [
        make_engine(model_dir, "prefill", clock, **values, worker_id=name) for name in ("p0", "p1")
    ]
    storm = Storm(owner, fillers, clock, texts, rng)
    try:
        ride_out(storm, num_requests, 12, lambda: owner.counters()["fills_done"] > 0)
        assert owner.counters()["fills_done"]
        for engine in (owner, *fillers):
            check(engine)
    finally:
        storm.close()


def test_settings_that_such_models_do_not_take(model_dir: Path, tmp_path: Path) -> None:
    own = ModelConfig.load(model_dir)
    check_recurrent(EngineConfig(model_dir=model_dir, device="cuda"), own)
    ranks: dict[str, Any] = {"device": "cuda", "tp": 2, "host_cache_bytes": 1 << 20}
    check_recurrent(EngineConfig(model_dir=model_dir, **ranks), own)
    with pytest.raises(ConfigError, match=r"drafter = mtp: must be none or ngram with several"):
        check_recurrent(EngineConfig(model_dir=model_dir, drafter="mtp", **ranks), own)
    for settings, name in (
        ({"deterministic": True}, "deterministic"),
        ({"drafter": "model", "draft_dir": model_dir}, "draft_dir"),
    ):
        with pytest.raises((ConfigError, ModelError)) as error:
            make_engine(model_dir, "decode", ManualClock(), **settings)
        assert error.value.param == name


@pytest.mark.parametrize(
    "settings", [WAYS[0], pytest.param(*WAYS[1].values, marks=[*WAYS[1].marks, FULL]), *WAYS[2:3]]
)
def test_prefill_workers_ship_states_behind_pages(
    model_dir: Path, model: torch.nn.Module, settings: dict[str, Any]
) -> None:
    """Prompts of every length, and such as begin alike on both sides."""
    clock = ManualClock()
    values = {**settings, "prefill_chunk_tokens": 2 * PAGE, "checkpoint_tokens": 4 * PAGE}
    owner = make_engine(model_dir, "decode", clock, **values)
    filler = make_engine(model_dir, "prefill", clock, **values)
    pair, base = EnginePair(owner, [filler], clock), random_prompt(90)
    try:
        for length in (PAGE, 3 * PAGE + 1, 90, 60, 61, 90):
            prompt = base[:length] + random_prompt(random.randint(1, 9))
            (tokens,) = pair.finish(pair.submit(prompt, 5, [pair.candidate("prefill")]))
            assert tokens == greedy(model, prompt, 5)
        counters = owner.counters()
        assert counters["fills_done"] >= 2
        assert not counters["fills_failed"]
        check(owner)
        check(filler)
    finally:
        pair.close()
