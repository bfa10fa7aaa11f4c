"""Pages freed behind sliding windows change no token, wherever a request begins or goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.errors import ConfigError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.kernels.shared import cpu
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.engine.engine_pair import ManualClock, make_engine
from weft.testing.engine.engine_storm import Storm, Text, check_empty, make_texts, ride_out
from weft.testing.engine.late_device import LateDevice
from weft.testing.models.choices import Choices, check_same
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_models import make_tiny

PAGE = 8
VOCAB = 517
WINDOW = 21
NUM_NEW = 30
ALONE = {"transport": "data", "local_prefill_max_tokens": NEVER_SHIP_TOKENS}
RANKS = {"tp": 2, "check_ranks": True, "rank_timeout_s": 60.0}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": LAYERS, "use_sliding_window": True},
    "qwen3": {"layer_types": [*LAYERS, LAYERS[0]], "num_hidden_layers": 4},
    "mistral": {"num_hidden_layers": 3},
}
"""Models with a window in some layers and, the last one, in every layer."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(
    params=[
        "qwen2",
        pytest.param("mistral", marks=pytest.mark.full),
        pytest.param("qwen3", marks=pytest.mark.full),
    ],
    scope="module",
)
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    overrides = {"sliding_window": WINDOW, "use_sliding_window": True, **KINDS[request.param]}
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"), seed, **overrides)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def greedy(model: torch.nn.Module, prompt: list[int], num_new: int) -> list[int]:
    return Choices(lambda tokens: model(torch.tensor([tokens])).logits[0], prompt, num_new)


def generate(llm: LLM, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    stop = StopCriteria(max_tokens=num_new, ignore_eos=True)
    return [sample.token_ids for sample in llm.generate(prompts, stop=stop)]


def check(engine: Engine) -> None:
    check_empty(engine)
    for window in engine.parts.companions:
        if window._index is not None:
            window._index.check_integrity()


@pytest.mark.parametrize(
    ("settings", "prefix_cache"),
    [
        *product([{}, {"prefill_chunk_tokens": 2 * PAGE, "overlap": "on"}], [True, False]),
        (RANKS, True),
        pytest.param(RANKS | {"overlap": "on"}, False, marks=pytest.mark.full),
    ],
)
def test_texts_far_beyond_the_window(
    model_dir: Path, model: torch.nn.Module, settings: dict[str, Any], prefix_cache: bool
) -> None:
    prompts = [random_prompt(length) for length in (5, WINDOW, 64, 203, 290)]
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    values = {"page_size": PAGE, "poison_free_pages": True, "prefix_cache": prefix_cache}
    with LLM(model_dir, dtype="float32", num_pages=120, **values, **settings) as llm:
        for _ in range(2):
            assert generate(llm, prompts, NUM_NEW) == expected
        assert bool(llm.engine.counters()["prefix_hit_tokens"]) == prefix_cache
        check(llm.engine)


@pytest.mark.parametrize("ranks", [{}, pytest.param(RANKS, marks=pytest.mark.full)])
def test_prompts_that_part_from_a_cached_one_anywhere(
    model_dir: Path, model: torch.nn.Module, ranks: dict[str, Any]
) -> None:
    """Whatever pages of the window the cache has given up by then."""
    base = random_prompt(150)
    values = {"page_size": PAGE, "num_pages": 64, "max_running_requests": 2}
    values |= {"max_step_tokens": 4 * PAGE, "prefill_chunk_tokens": 4 * PAGE} | ranks
    hits = set()
    with LLM(model_dir, dtype="float32", poison_free_pages=True, **values) as llm:
        (window,) = llm.engine.parts.companions
        assert window.memory.num_usable_pages < llm.engine.memory.num_usable_pages
        assert generate(llm, [base], 3) == [greedy(model, base, 3)]
        for length in random.sample(range(1, 151), 50):
            prompt = base[:length] + random_prompt(random.randint(1, 20))
            before = llm.engine.counters()["prefix_hit_tokens"]
            assert generate(llm, [prompt], 3) == [greedy(model, prompt, 3)]
            hits.add((llm.engine.counters()["prefix_hit_tokens"] - before) // PAGE)
        assert window.memory.num_evictions
        assert len(hits) > 5
        check(llm.engine)


def test_a_window_in_every_layer(tmp_path: Path, seed: int) -> None:
    """The first layer keeps its pages, the others free them."""
    path = make_tiny("mistral", tmp_path, seed, sliding_window=WINDOW, num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt = random_prompt(random.randint(100, 130))
    with LLM(path, dtype="float32", page_size=PAGE, num_pages=64, poison_free_pages=True) as llm:
        kept, freed = llm.engine.parts.layout.groups
        assert (kept.layers, freed.layers) == (1, 2)
        for length in (len(prompt), random.randint(40, 99)):
            cut = prompt[:length] + random_prompt(5)
            assert generate(llm, [cut], 9) == [greedy(model, cut, 9)]
        assert llm.engine.counters()["prefix_hit_tokens"]
        check(llm.engine)


def test_a_request_has_no_more_pages_than_its_window_needs(model_dir: Path) -> None:
    values = {"page_size": PAGE, "max_step_tokens": 16, "prefill_chunk_tokens": 16}
    settings = {**values, "overlap": "on", "num_pages": 100, "max_running_requests": 1}
    with LLM(model_dir, dtype="float32", **settings) as llm:
        engine, most = llm.engine, [0, 0]
        turn = engine.turn

        def noted_turn(*args: Any) -> Any:
            out = turn(*args)
            used = [memory.counts().used for memory in engine.memories]
            most[:] = map(max, most, used)
            return out

        engine.turn = noted_turn  # type: ignore[method-assign]
        generate(llm, [random_prompt(400)], 200)
        assert most[0] == 75
        assert most[1] <= -(-WINDOW // PAGE) + 2 + 4
        total, used = engine.memories[1].counts().total, most[1]
        assert used <= total < 75, (used, total)


@pytest.mark.full
def test_ranks_under_load_lose_no_page(model_dir: Path, model: torch.nn.Module) -> None:
    """Random ends, cancels and pre-emptions; pages are NaN from the moment they are free."""
    rng, clock = random.Random(random.randrange(2**32)), ManualClock()
    samplings = [SamplingParams(temperature=float(i % 2 == 0), seed=i, n=4) for i in range(12)]
    sizes = {"max_running_requests": 3, "max_step_tokens": 32, "prefill_chunk_tokens": 16}
    engine = make_engine(model_dir, "decode", clock, **ALONE, num_pages=31, **sizes, **RANKS)
    assert len(engine.memories) == 2
    alone = make_engine(model_dir, "decode", clock, **ALONE, window_pages="keep")
    texts = make_texts(alone, clock, samplings, NUM_NEW)
    storm = Storm(engine, [], clock, texts, rng)
    try:
        ride_out(storm, 200, 24, lambda: bool(storm.num_preempted))
        check(engine)
    finally:
        storm.close()


@pytest.mark.parametrize(
    ("leaves", "prefix_cache"),
    [
        (True, True),
        pytest.param(False, True, marks=pytest.mark.full),
        pytest.param(True, False, marks=pytest.mark.full),
        (False, False),
    ],
)
def test_freed_pages_are_not_touched_however_late_the_device_is(
    model_dir: Path, model: torch.nn.Module, leaves: bool, prefix_cache: bool
) -> None:
    """Random ends, cancels and pre-emptions; pages are NaN from the moment they are free."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, clock = random.Random(seed), ManualClock()
    samplings = [SamplingParams(temperature=float(i % 2 == 0), seed=i, n=4) for i in range(12)]
    quiet = make_engine(model_dir, "decode", clock, overlap="off", **ALONE, window_pages="keep")
    assert len(quiet.memories) == 1
    texts: list[Text] = make_texts(quiet, clock, samplings, NUM_NEW)
    for text in texts:
        if text.sampling.temperature == 0.0:
            assert list(text.samples[0]) == greedy(model, list(text.prompt), NUM_NEW)
    engine = make_engine(
        model_dir,
        "decode",
        clock,
        **ALONE,
        num_pages=31,
        max_running_requests=3,
        max_step_tokens=32,
        prefill_chunk_tokens=16,
        overlap="on",
        prefix_cache=prefix_cache,
    )
    device = LateDevice(engine, rng, leaves=leaves)
    storm = Storm(engine, [], clock, texts, rng)
    try:
        ride_out(
            storm,
            200,
            24,
            lambda: (
                bool(storm.num_preempted) and bool(engine.memories[1].num_evictions) == prefix_cache
            ),
        )
        device.work()
        assert device.most_queued > 2
        assert storm.num_preempted
        assert engine.memories[1].num_evictions or not prefix_cache
        check(engine)
    finally:
        storm.close()


def test_adapters_change_the_layers_of_every_group(model_dir: Path, tmp_path: Path) -> None:
    """By their numbers, whatever their index in a pool."""
    config = json.loads((model_dir / "config.json").read_text())
    adapter = make_adapter(tmp_path / "adapter", config, random.randrange(2**31))
    prompts = [random_prompt(length) for length in (9, 70, 130, 131)]
    stop, found = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True), []
    for window_pages in ("keep", "auto"):
        settings = {"window_pages": window_pages, "page_size": PAGE, "enable_lora": True}
        with LLM(model_dir, dtype="float32", num_pages=120, **settings) as llm:
            digests = [b"", llm.load_adapter(adapter)] * 2
            samples = llm.generate(prompts, stop=stop, adapters=digests)
            found.append([sample.token_ids for sample in samples])
    assert found[0] == found[1]


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_graphs_find_the_pages_of_every_group(
    model_dir: Path,
    model: torch.nn.Module,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps run as those of a GPU, whose page tables only get what changes."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    prompts = [random_prompt(random.randint(1, 90)) for _ in range(5)]
    params = SamplingParams(temperature=temperature, seed=5, n=2)
    stop = StopCriteria(max_tokens=30, ignore_eos=True)
    settings = {"dtype": "float32", "page_size": PAGE, "max_running_requests": 4}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 160}
    with LLM(model_dir, **settings, window_pages="keep") as plain:
        expected = plain.generate_all(prompts, params, stop)
    with LLM(model_dir, poison_free_pages=True, overlap="on", num_pages=60, **settings) as llm:
        steps = RecordedSteps(llm.engine, 0)
        groups = llm.generate_all(prompts, params, stop)
        for prompt, group, wanted in zip(prompts, groups, expected, strict=True):
            for number, (one, other) in enumerate(zip(group, wanted, strict=True)):
                check_same(lambda: model, prompt, one.token_ids, other.token_ids, params, number)
        assert {"ragged", "decode"} <= set(steps.num_replays)
        check(llm.engine)


def test_models_keep_all_pages_where_these_are_needed_elsewhere(model_dir: Path) -> None:
    for settings, why in (
        (
            {},
            "this worker may exchange pages with others; with window_pages = free on all of them "
            "it may free its own",
        ),
        ({**ALONE, "window_pages": "keep"}, "window_pages is keep"),
    ):
        engine = make_engine(model_dir, "decode", ManualClock(), **settings)
        assert len(engine.memories) == 1
        assert f"pages are kept behind sliding windows: {why}" in engine.info.notices
        engine.close()
    for settings, why in (
        ({"drafter": "eagle3", "draft_dir": model_dir, "draft_width": 4}, "drafts form trees"),
        ({"pp": 2}, "only tp's on CPUs free them"),
    ):
        with pytest.raises(ConfigError, match=f"window_pages = free: must be .*{why}"):
            make_engine(model_dir, "decode", ManualClock(), window_pages="free", **settings)
