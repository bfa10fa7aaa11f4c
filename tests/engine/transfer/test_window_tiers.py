"""Pages behind windows are freed beside tiers: host memory and disk have them with the pages of the
first group, and bring the last window before a border. Texts are transformers' greedy ones.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract import faults
from weft.contract.faults import FaultSpec
from weft.contract.keys import PageKeys, block_keys
from weft.contract.request import SamplingParams
from weft.contract.submits import Cancel
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.engine.executor import device_pool
from weft.engine.executor.device_pool import DevicePool, PinnedRows
from weft.engine.executor.local import LocalExecutor
from weft.testing.engine.engine_pair import ManualClock, make_engine
from weft.testing.engine.engine_storm import Storm, check_empty, make_texts, ride_out
from weft.testing.engine.tier_bench import NUM_NEW, VOCAB, TierBench, prompt_of
from weft.testing.models.choices import Choices
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
WINDOW = 21
LENGTH = 20 * PAGE + 3
FULL = pytest.mark.full
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": LAYERS, "use_sliding_window": True, "num_hidden_layers": 3},
    "mistral": {"num_hidden_layers": 4},
}
"""A window page takes two pages of a tier, or three."""
WORKERS: list[dict[str, Any]] = [
    {"window_pages": "free"},
    {"transport": "data", "local_prefill_max_tokens": NEVER_SHIP_TOKENS},
]
"""One that may exchange pages with others, and one that does not."""


@pytest.fixture(params=["qwen2", pytest.param("mistral", marks=FULL)], scope="module")
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    fields = {"vocab_size": VOCAB, "sliding_window": WINDOW, **KINDS[request.param]}
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"), seed, **fields)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def greedy(model: torch.nn.Module, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    return Choices(lambda tokens: model(torch.tensor([tokens])).logits[0], prompt, num_new)


@contextlib.contextmanager
def bench_of(model_dir: Path, **settings: Any) -> Iterator[TierBench]:
    values: dict[str, Any] = {
        "num_pages": 48,
        "host_cache_bytes": 8 << 20,
        "load_back_threshold": 0,
        "prefill_chunk_tokens": 4 * PAGE,
        "max_step_tokens": 4 * PAGE,
        "max_running_requests": 2,
        "poison_free_pages": True,
        **random.choice(WORKERS),
    }
    print(values)
    bench = TierBench(model_dir, LENGTH, **(values | settings))
    try:
        yield bench
        bench.settle()
        check_empty(bench.engine)
        (window,) = bench.engine.parts.companions
        assert not len(window)
        assert window._reserved == (0, 0)
    finally:
        bench.pair.close()


def play(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    """Pages come and go as those of a pool in such memory."""
    if "device" in pool:
        monkeypatch.setattr(LocalExecutor, "page_pool", lambda executor: DevicePool(executor.pool))
    if "pinned" in pool:
        monkeypatch.setattr(device_pool, "register", lambda memory: 0)
        monkeypatch.setattr(
            LocalExecutor, "pin", lambda executor, rows: PinnedRows(rows, executor.pool)
        )


@pytest.mark.parametrize(
    ("threshold", "pool", "ranks"),
    [
        (0, "host", 1),
        *(
            pytest.param(threshold, pool, 1, marks=FULL)
            for threshold, pool in ((0, "device"), (0, "device and pinned"), (1, "host"))
        ),
        pytest.param(1000, "host", 1, marks=FULL),
        pytest.param(0, "host", 2, marks=FULL),
    ],
)
def test_prompts_go_on_wherever_the_last_window_comes_back(
    model_dir: Path,
    model: torch.nn.Module,
    threshold: int,
    pool: str,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, pool)
    settings = {"write_through_threshold": threshold, "tp": ranks}
    settings |= {"overlap": random.choice(["off", "on"])}
    print(settings)
    with bench_of(model_dir, **settings) as bench:
        (window,) = bench.engine.parts.companions
        assert window.memory.num_usable_pages < 30
        prompt = prompt_of(LENGTH)
        expected = greedy(model, prompt)
        assert bench.ask(prompt) == expected
        if threshold == 1:
            assert bench.ask(prompt) == expected
        bench.push_out()
        assert bench.ask(prompt) == expected
        loaded = bench.counters("host")["loaded_pages"]
        if threshold == 0:
            (fill,) = [fill for fill in bench.fills() if fill.source == "host"]
            assert (fill.end_token, fill.failure) == (20 * PAGE, "")
            assert fill.accepted_tokens == fill.end_token - fill.start_token
            of_window = -(-(WINDOW - 1) // PAGE) * window_pages(bench)
            assert loaded <= 20 + of_window
        assert loaded or threshold
        for _ in range(5 if threshold else 3):
            cut = random.randint(1, LENGTH)
            parting = prompt[:cut] + prompt_of(random.randint(1, 2 * PAGE))
            if random.random() < 0.5:
                bench.push_out()
            assert bench.ask(parting) == greedy(model, parting)
        assert not bench.counters("host")["corrupt_pages"]


def window_pages(bench: TierBench) -> int:
    """Pages of a tier that a window page takes."""
    layout = bench.engine.parts.layout
    own, other = (group.page_bytes(layout.page_size) for group in layout.groups)
    return -(-other // own)


def test_a_window_that_lacks_a_page_counts_for_nothing(
    model_dir: Path, model: torch.nn.Module
) -> None:
    """Pages vanish from host memory: the prompt goes on where a whole window is left."""
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        expected = greedy(model, prompt)
        assert bench.ask(prompt) == expected
        tiers, need = bench.engine.tiers, -(-(WINDOW - 1) // PAGE)
        assert tiers is not None
        keys = PageKeys(bench.engine._intake.namespace("", b""), PAGE).upto(prompt, 20)
        # Each turn drops pages from `dropped` on, so that the last border with a whole window moves
        # from 20 pages to `found`.
        for dropped, found in ((19, 19), (18, 18), (15, 15), (2, 2)):
            bench.push_out()
            for index in range(dropped, 20):
                keys_of = block_keys(keys[index], window_pages(bench))
                tiers.host.drop(random.choice(keys_of))
            assert bench.ask(prompt) == expected
            fills = [fill for fill in bench.fills() if fill.source == "host"]
            assert fills, dropped
            assert fills[0].end_token == found * PAGE, (dropped, need)


def test_windows_come_back_from_disk_after_a_restart(
    model_dir: Path, model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(LENGTH)
    expected = greedy(model, prompt)
    settings = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 64 << 20, "host_cache_bytes": 0}
    with bench_of(model_dir, **settings) as bench:
        turn = bench.pair.turn

        def turn_and_wait() -> None:
            """Requests leave room for few copies at once, and the disk gets no page later."""
            turn()
            bench.await_moves()

        monkeypatch.setattr(bench.pair, "turn", turn_and_wait)
        assert bench.ask(prompt) == expected
    with bench_of(model_dir, **settings) as bench:
        assert bench.ask(prompt) == expected
        (fill,) = bench.fills()
        assert (fill.source, fill.accepted_tokens) == ("disk", 20 * PAGE)


def test_a_flush_leaves_no_window_page_in_host_memory(model_dir: Path) -> None:
    with bench_of(model_dir, write_through_threshold=1000) as bench:
        bench.ask(prompt_of(LENGTH))
        bench.settle()
        assert bench.engine.tiers is not None
        assert all(memory.counts().cached for memory in bench.engine.memories)
        bench.pair.send(flush_cache=[1])
        bench.pair.turn()
        bench.settle()
        counts = [memory.counts() for memory in bench.engine.memories]
        assert not any(found.cached for found in (*counts, bench.engine.tiers.host.counts()))


@FULL
@pytest.mark.parametrize("count", [1, 10])
def test_a_load_that_fails_in_its_middle_is_computed(
    model_dir: Path, model: torch.nn.Module, count: int
) -> None:
    kind = random.choice(["corrupt", "error"])
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        expected = greedy(model, prompt)
        assert bench.ask(prompt) == expected
        for _ in range(count):
            bench.push_out()
            skip = random.randrange(24)
            faults.TIER_HOST.arm(FaultSpec(point=faults.TIER_HOST.name, kind=kind, skip=skip))
            try:
                assert bench.ask(prompt) == expected
            finally:
                faults.TIER_HOST.clear()
            assert bench.ask(prompt) == expected


@FULL
def test_a_request_cancelled_while_its_window_is_loaded_leaves_nothing(model_dir: Path) -> None:
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        for _ in range(2):
            bench.push_out()
            gone = bench.pair.submit(prompt, max_tokens=NUM_NEW)
            for _ in range(random.randrange(4)):
                bench.pair.turn()
            bench.pair.send(cancels=[Cancel(gateway=1, request_id=gone, attempt=1)])
            bench.settle()
            check_empty(bench.engine)


@FULL
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("count", [150, 1000])
def test_a_storm(
    model_dir: Path, model: torch.nn.Module, tmp_path: Path, count: int, disk: bool, drafter: str
) -> None:
    """Fills, loads, cancels, samples and pre-emptions, with tiers on all workers."""
    clock = ManualClock()
    samplings = [SamplingParams(temperature=float(i % 2 == 0), seed=i, n=4) for i in range(12)]
    quiet = make_engine(model_dir, "decode", clock, overlap="off", window_pages="keep")
    texts = make_texts(quiet, clock, samplings, 30)
    for text in texts:
        if text.sampling.temperature == 0.0:
            assert list(text.samples[0]) == greedy(model, list(text.prompt), 30)
    shared: dict[str, Any] = {
        "window_pages": "free",
        "max_running_requests": 4,
        "max_step_tokens": 32,
        "prefill_chunk_tokens": 16,
        "overlap": random.choice(["off", "on"]),
        "host_cache_bytes": random.choice([200, 600]) << 10,
        "load_back_threshold": 0,
        "write_through_threshold": random.choice([0, 0, 1, 1000]),
        "poison_free_pages": True,
    }
    if disk:
        shared |= {"disk_cache_dir": tmp_path, "disk_cache_bytes": 4 << 20}
    print(shared)
    own = {"num_pages": 36, "drafter": drafter, "has_store": random.random() < 0.7}
    owner = make_engine(model_dir, "decode", clock, **own, **shared)
    fillers = [
        make_engine(model_dir, "prefill", clock, num_pages=48, worker_id=name, **shared)
        for name in ("p0", "p1")
    ]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    storm, tiers = Storm(owner, fillers, clock, texts, random.Random(seed)), owner.tiers
    assert tiers is not None

    def has_seen_all() -> bool:
        loaded = sum(tier.counters["loaded_pages"] for tier in tiers.report())
        return all((storm.num_preempted, owner.counters()["fills_done"], loaded))

    try:
        assert len(owner.memories) == 2
        ride_out(storm, count, 24, has_seen_all)
        for engine in (owner, *fillers):
            check_empty(engine)
            (window,) = engine.parts.companions
            assert (len(window), window._reserved) == (0, (0, 0))
            if window._index is not None:
                window._index.check_integrity()
        print(storm.faults, owner.counters())
        assert has_seen_all()
    finally:
        storm.close()
