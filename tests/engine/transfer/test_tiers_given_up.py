"""Loads from tiers that are given up: where their requests go on, and what their pages come to."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from weft.contract import faults
from weft.contract.faults import FaultSpec
from weft.contract.submits import Cancel
from weft.engine.base.background import BackgroundThread
from weft.engine.base.config import EngineConfig
from weft.engine.requests.request import State
from weft.engine.sources.tiers import tiers
from weft.engine.sources.tiers.build import load_tiers
from weft.engine.sources.tiers.loads import LoadChunk
from weft.testing.engine.tier_bench import NUM_NEW, VOCAB, TierBench, prompt_of
from weft.testing.models.tiny_models import make_tiny

PAGE, POOL_PAGES = 8, 32
LENGTH = 20 * PAGE + 3
FOR_EVER_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny("llama", path, seed=random.randrange(2**31), vocab_size=VOCAB, num_hidden_layers=2)
    return path


@pytest.fixture
def bench(model_dir: Path) -> Iterator[TierBench]:
    bench = TierBench(
        model_dir,
        LENGTH,
        num_pages=POOL_PAGES,
        host_cache_bytes=8 << 20,
        load_back_threshold=0,
        prefill_chunk_tokens=4 * PAGE,
        load_by_layer="never",
    )
    yield bench
    bench.close()


@contextlib.contextmanager
def stalled(delay_s: float) -> Iterator[None]:
    """Reading a page of host memory takes so long."""
    point = faults.TIER_HOST
    point.arm(FaultSpec(point=point.name, kind="stall", delay_s=delay_s))
    try:
        yield
    finally:
        point.clear()


def begin_load(bench: TierBench, prompt: list[int]) -> str:
    """Asks for a prompt, whose load then stands still; its id."""
    asked = bench.pair.submit(prompt, max_tokens=NUM_NEW)
    bench.pair.run(lambda: faults.TIER_HOST.states()[0].fired == 1)
    return asked


def test_a_chunk_that_begins_as_its_load_is_given_up_keeps_no_page(
    bench: TierBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread notes it right behind the question whether it has, and finds the load stopped."""

    class BeginsLate(LoadChunk):
        """Has not begun when it is asked first."""

        num_asked = 0

        @property  # type: ignore[override]
        def is_begun(self) -> bool:
            self.num_asked += 1
            return self.num_asked > 1

        @is_begun.setter
        def is_begun(self, value: bool) -> None:
            pass

    prompt = prompt_of(LENGTH)
    bench.ask(prompt)
    bench.push_out()
    monkeypatch.setattr(tiers, "LoadChunk", BeginsLate)
    with stalled(FOR_EVER_S):
        asked = begin_load(bench, prompt)
        bench.pair.send(cancels=[Cancel(gateway=1, request_id=asked, attempt=1)])
        bench.pair.run(lambda: bool(bench.pair.answers[asked].finished))
    bench.settle()
    assert bench.engine.memory.counts().quarantined == 0


def test_a_load_that_was_given_up_is_not_queued_again(
    bench: TierBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader goes on, but with others' loads. A request that is pre-empted may load again."""
    monkeypatch.setattr(BackgroundThread, "stuck_s", lambda thread, now: 0.0)
    prompt = prompt_of(LENGTH)
    expected = bench.ask(prompt)
    bench.push_out()
    with stalled(FOR_EVER_S):
        asked = begin_load(bench, prompt)
        (request,) = bench.engine.scheduler.filling
        bench.pair.clock.offset_s += 6.0
        bench.pair.run(lambda: request.state is State.RUNNING)
    assert [fill.failure for fill in request.timeline.fills] == ["nothing came for 5 s"]
    bench.engine.scheduler.preempt(request)
    bench.engine.memory.flush_cache()
    assert bench.pair.finish(asked) == [expected]
    assert [fill.failure for fill in bench.fills()] == ["nothing came for 5 s", ""]


@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_too_much_host_memory_leaves_a_small_tier(size: int, tmp_path: Path) -> None:
    """Whether the system refuses it, or no address is that large."""
    config = EngineConfig(model_dir=tmp_path, host_cache_bytes=size)
    made = load_tiers(config, 4096, 0, Mock(), lambda rows: None)
    assert made is not None
    assert "bytes of host memory for KV pages" in made.notices[0]
    assert 0 < made.host.counts().total < size // 4096
