"""Prompts whose cached pages come layer by layer while they are computed, and loads that fail then.

Texts are compared with transformers' greedy generation, which caches nothing. Free pages hold NaN,
so a layer that is read too early spoils the text.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from weft.contract import faults
from weft.contract.faults import FaultPoint, FaultSpec
from weft.contract.submits import Cancel
from weft.engine.executor.layer_pools import HostLayers
from weft.engine.loop import pipeline
from weft.engine.loop.llm import LLM
from weft.engine.sources.tiers.layer_loads import LayerPolicy
from weft.pages.tiers.tier import PageLoad
from weft.testing.engine.tier_bench import NUM_NEW, VOCAB, TierBench, prompt_of
from weft.testing.engine.waiting_steps import WaitingSteps, wait_long
from weft.testing.models.choices import GreedyReference
from weft.testing.models.tiny_models import make_tiny

PAGE, POOL_PAGES, NUM_LAYERS = 8, 64, 5
LENGTH = 40 * PAGE + 3
NUM_FAULTS, NUM_FAULTS_IN_ALL = 10, 200
KINDS = ["llama", "qwen3_moe"]
SLOW_S = 0.3
"""Longer than a step waits for a group of layers in these tests."""


class Model:
    def __init__(self, kind: str, folder: Path) -> None:
        seed = random.randrange(2**31)
        sizes = {"vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS}
        self.folder = make_tiny(kind, folder, seed=seed, **sizes)
        self.reference = GreedyReference(folder, NUM_NEW)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("llama", tmp_path_factory.mktemp("llama"))


class Bench(TierBench):
    """Knows the steps that wait for layers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        values: dict[str, Any] = {
            "num_pages": POOL_PAGES,
            "host_cache_bytes": 16 << 20,
            "load_back_threshold": 0,
            "load_by_layer": "always",
            "prefill_chunk_tokens": 4 * PAGE,
        }
        super().__init__(folder, LENGTH, **(values | settings))
        self.waiting_steps = WaitingSteps(self.engine)

    @property
    def layers(self) -> HostLayers:
        pool = self.engine.parts.local.layer_pool
        assert isinstance(pool, HostLayers)
        return pool


@contextlib.contextmanager
def bench_of(folder: Path, **settings: Any) -> Iterator[Bench]:
    bench = Bench(folder, **settings)
    try:
        yield bench
        bench.settle()
        counts = bench.engine.memory.counts()
        assert counts.used == counts.quarantined == 0
    finally:
        bench.pair.close()


@contextlib.contextmanager
def armed(point: FaultPoint, kind: str, **values: Any) -> Iterator[None]:
    point.arm(FaultSpec(point=point.name, kind=kind, **values))
    try:
        yield
    finally:
        point.clear()


def continued(prompt: list[int]) -> list[int]:
    """A random part of a prompt, and new tokens: what an agent's next turn looks like."""
    end = random.randrange(10 * PAGE, len(prompt))
    return prompt[:end] + prompt_of(random.randrange(3, 12 * PAGE))


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("medium", ["host", "disk"])
def test_texts_are_those_of_no_cache(
    model: Model,
    medium: str,
    overlap: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_long(monkeypatch)
    settings: dict[str, Any] = {"overlap": overlap}
    if medium == "disk":
        settings |= {"host_cache_bytes": 0, "disk_cache_dir": tmp_path, "num_pages": 180}
    with bench_of(model.folder, **settings) as bench:
        prompt = prompt_of(LENGTH)
        assert bench.ask(prompt) == model.reference(prompt)
    with bench_of(model.folder, **settings) as bench:
        if medium == "host":
            bench.ask(prompt)
            bench.push_out()
        again = continued(prompt)
        assert bench.ask(again) == model.reference(again)
        assert bench.waiting_steps.count > 0
        (fill,) = bench.fills()
        assert (fill.source, fill.failure) == (medium, "")
        assert fill.accepted_tokens == fill.end_token - fill.start_token > 0
        again = continued(prompt)  # Its pages are in the pool.
        assert bench.ask(again) == model.reference(again)


def test_a_step_begins_before_the_second_group_comes(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And until all have come, no page is published: nobody else can find one."""
    with bench_of(llama.folder) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        layers, waited = bench.layers, threading.Event()
        copy, wait = layers.copy, layers.waits.wait
        published: list[int] = []

        def late(group: int, loads: Sequence[PageLoad], pages: Sequence[int]) -> bool:
            if group == 1:
                assert waited.wait(30.0), "no step reads layers that have come"
            memory = bench.engine.memory
            published.extend(page for page in pages if memory.is_published(page))
            return copy(group, loads, pages)

        def tell(layer: int) -> None:
            if layer == layers.waits.groups[1].start:
                waited.set()
            wait(layer)

        monkeypatch.setattr(layers, "copy", late)
        monkeypatch.setattr(layers.waits, "wait", tell)
        monkeypatch.setattr(layers.waits, "_timeout_s", 30.0)
        assert bench.ask(prompt) == llama.reference(prompt)
        assert waited.is_set()
        assert published == []
        counts = bench.engine.memory.counts()
        assert counts.cached >= LENGTH // PAGE  # They are found from now on.


def hurry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are given up soon."""
    monkeypatch.setattr(bench.layers.waits, "_timeout_s", SLOW_S / 6)
    monkeypatch.setattr(pipeline, "INCOMING_TIMEOUT_S", SLOW_S / 6)


def spoil(bench: Bench, files: Path | None) -> contextlib.AbstractContextManager[None]:
    """One fault of the next load, or two."""
    skip = random.randrange(LENGTH // PAGE * NUM_LAYERS)
    at = faults.TIER_HOST
    if files is not None:
        at = faults.TIER_DISK_READ
        found = [path for path in files.rglob("*.*") if path.is_file()]
        for path in random.sample(found, min(len(found), random.randrange(3))):
            if random.random() < 0.5:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])
    kind = random.choice(["corrupt", "delay"])
    return armed(at, kind, skip=skip, count=random.choice([1, 2]), delay_s=SLOW_S)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("medium", ["host", "disk"])
@pytest.mark.parametrize(
    "num_faults", [NUM_FAULTS, pytest.param(NUM_FAULTS_IN_ALL // 2, marks=pytest.mark.full)]
)
def test_faults_of_loads_spoil_no_text(
    llama: Model,
    num_faults: int,
    medium: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = tmp_path if medium == "disk" else None
    settings: dict[str, Any] = {}
    if files is not None:
        settings = {"host_cache_bytes": 0, "disk_cache_dir": files}
    num_failed = 0
    with bench_of(llama.folder, **settings) as bench:
        hurry(bench, monkeypatch)
        for _ in range(num_faults):
            prompt = prompt_of(LENGTH)
            bench.ask(prompt)
            bench.push_out()
            if files is not None:
                assert bench.engine.tiers is not None
                bench.engine.tiers.host.flush()
            again = continued(prompt)
            with spoil(bench, files):
                assert bench.ask(again) == llama.reference(again)
                num_failed += any(fill.failure for fill in bench.fills())
            bench.settle()
        assert bench.waiting_steps.count
        if num_faults > NUM_FAULTS:  # A few faults may all be harmless ones.
            assert num_failed >= num_faults / 8


def test_a_step_that_waited_too_long_is_dropped_though_the_load_ends_well(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load goes on as soon as the step has gone on without it, and has ended before the step's
    outcome is asked for.
    """
    with bench_of(llama.folder) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        layers = bench.layers
        monkeypatch.setattr(layers.waits, "_timeout_s", 0.02)
        monkeypatch.setattr(pipeline, "INCOMING_TIMEOUT_S", 30.0)
        copy, wait, left = layers.copy, layers.waits.wait, threading.Event()

        def late(group: int, loads: Sequence[PageLoad], pages: Sequence[int]) -> bool:
            if group == 2:
                assert left.wait(30.0)
            return copy(group, loads, pages)

        def tell(layer: int) -> None:
            wait(layer)
            if layers.waits.was_left:
                left.set()

        monkeypatch.setattr(layers, "copy", late)
        monkeypatch.setattr(layers.waits, "wait", tell)
        assert bench.ask(prompt) == llama.reference(prompt)
        assert left.is_set()
        assert [fill.failure for fill in bench.fills()] == ["it was given up", ""]


def test_a_loader_that_dies_costs_only_time(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_of(llama.folder) as bench:
        hurry(bench, monkeypatch)
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        copy = bench.layers.copy

        def fail(group: int, loads: Sequence[PageLoad], pages: Sequence[int]) -> bool:
            if group == random_group:
                raise RuntimeError("no memory")
            return copy(group, loads, pages)

        random_group = random.randrange(NUM_LAYERS)
        monkeypatch.setattr(bench.layers, "copy", fail)
        assert bench.ask(prompt) == llama.reference(prompt)
        assert any(fill.failure for fill in bench.fills())


def test_a_request_that_is_cancelled_while_its_pages_come_leaves_nothing(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load keeps its pages until its thread has ended."""
    with bench_of(llama.folder) as bench:
        hurry(bench, monkeypatch)
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        copy, may_end = bench.layers.copy, threading.Event()

        def stand(group: int, loads: Sequence[PageLoad], pages: Sequence[int]) -> bool:
            if group == 1:
                assert may_end.wait(60.0)
            return copy(group, loads, pages)

        monkeypatch.setattr(bench.layers, "copy", stand)
        asked = bench.pair.submit(prompt, max_tokens=NUM_NEW)
        bench.pair.run(lambda: bench.waiting_steps.count > 0)
        bench.pair.send(cancels=[Cancel(gateway=1, request_id=asked, attempt=1)])
        bench.pair.run(lambda: bool(bench.pair.answers[asked].finished))
        assert bench.engine.memory.counts().used >= LENGTH // PAGE
        may_end.set()
        bench.settle()
        assert bench.engine.memory.counts().used == 0
        assert bench.ask(prompt) == llama.reference(prompt)


def test_other_requests_share_pages_that_came_by_layer(llama: Model) -> None:
    with bench_of(llama.folder) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        again = continued(prompt)
        asked = [bench.pair.submit(again, max_tokens=NUM_NEW)]
        asked += [bench.pair.submit(continued(prompt), max_tokens=NUM_NEW) for _ in range(3)]
        assert bench.pair.finish(asked[0]) == [llama.reference(again)]
        for other in asked[1:]:
            bench.pair.finish(other)
        assert bench.waiting_steps.count > 0


@pytest.mark.parametrize(
    ("load_s", "compute_s", "pays"),
    [
        (0.08, 0.12, True),
        (0.12, 0.08, True),
        (0.0, 0.1, True),  # Not measured yet.
        (0.5, 0.1, False),  # Others would wait for it.
        (0.08, 1e-3, False),
        (1e-3, 0.1, False),
    ],
)
def test_loads_go_by_layer_where_it_pays(load_s: float, compute_s: float, *, pays: bool) -> None:
    assert LayerPolicy(is_forced=False).pays(load_s, compute_s) == pays
    assert LayerPolicy(is_forced=True).pays(load_s, compute_s)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("llama", {}, "there is no tier"),
        ("llama", {"host_cache_bytes": 1 << 20, "tp": 2}, "ranks or stages"),
        ("llama", {"host_cache_bytes": 1 << 20}, ""),
        ("qwen3_moe", {"host_cache_bytes": 1 << 20, "enable_return_routed_experts": True}, "rout"),
    ],
)
def test_loads_that_stay_whole_say_why(
    tmp_path: Path, kind: str, settings: dict[str, Any], said: str
) -> None:
    folder = make_tiny(kind, tmp_path)
    sizes: dict[str, Any] = {"dtype": "float32", "num_pages": 16, "load_by_layer": "always"}
    with LLM(folder, **sizes, **settings) as llm:
        notices = [one for one in llm.engine.info.notices if "load_by_layer" in one]
    assert len(notices) == bool(said)
    assert all(said in one for one in notices)
