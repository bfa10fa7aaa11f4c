"""Tiers below a pool on a GPU: host memory that the GPU copies from and to by itself, and disk.

Texts are compared with those of a worker without tiers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract import faults
from weft.contract.faults import FaultSpec
from weft.contract.request import StopCriteria
from weft.contract.submits import Cancel
from weft.engine.executor import device_pool
from weft.engine.executor.layer_pools import DeviceLayers
from weft.engine.executor.port import Launched
from weft.engine.executor.step_input import StepInput
from weft.engine.loop.llm import LLM
from weft.testing.engine.tier_bench import NUM_NEW, VOCAB, TierBench, prompt_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
POOL_PAGES = 64
LENGTH = 40 * PAGE + 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("llama", folder, seed=random.randrange(2**31), vocab_size=VOCAB, head_dim=64)


class Reference:
    """Greedy continuations of a worker that computes everything."""

    def __init__(self, model_dir: Path) -> None:
        self._llm = LLM(
            model_dir, device="cuda:0", dtype="float32", num_pages=200, cuda_graphs=False
        )

    def __call__(self, prompt: list[int]) -> list[int]:
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        (sample,) = self._llm.generate([prompt], stop=stop)
        return sample.token_ids

    def close(self) -> None:
        self._llm.close()


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Iterator[Reference]:
    reference = Reference(model_dir)
    yield reference
    reference.close()


class Bench(TierBench):
    """On the GPU."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        values: dict[str, Any] = {
            "device": "cuda:0",
            "page_size": PAGE,
            "num_pages": POOL_PAGES,
            "max_running_requests": 8,
            "max_step_tokens": 16 * PAGE,
            "prefill_chunk_tokens": 8 * PAGE,
            "host_cache_bytes": 64 << 20,
            "load_back_threshold": 0,
            "cuda_graphs": False,
        }
        super().__init__(model_dir, LENGTH, **(values | settings))

    @property
    def is_pinned(self) -> bool:
        assert self.engine.tiers is not None
        return self.engine.tiers.host.medium.pinned is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("threshold", [0, 1000], ids=["at once", "given up"])
def test_what_the_pool_gave_up_comes_back_from_pinned_memory(
    model_dir: Path, reference: Reference, threshold: int
) -> None:
    bench = Bench(model_dir, write_through_threshold=threshold)
    assert bench.is_pinned
    prompt = prompt_of(LENGTH)
    expected = reference(prompt)
    assert bench.ask(prompt) == expected
    bench.push_out()
    again = prompt[: 20 * PAGE] + prompt_of(9 * PAGE)
    assert bench.ask(again) == reference(again)
    (fill,) = bench.fills()
    assert (fill.source, fill.failure) == ("host", "")
    assert fill.accepted_tokens == fill.end_token - fill.start_token > 0
    bench.push_out()
    assert bench.ask(prompt) == expected
    host = bench.counters("host")
    assert host["loaded_pages"] == host["hit_pages"] > 0
    assert host["corrupt_pages"] == host["failed_loads"] == host["failed_saves"] == 0
    bench.close()
    assert not bench.is_pinned


def test_memory_that_cannot_be_pinned_takes_one_copy_more(
    model_dir: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pool, "register", lambda memory: 2)
    bench = Bench(model_dir)
    assert not bench.is_pinned
    assert any("cannot be pinned" in notice for notice in bench.engine.info.notices)
    prompt = prompt_of(LENGTH)
    expected = reference(prompt)
    assert bench.ask(prompt) == expected
    bench.push_out()
    assert bench.ask(prompt) == expected
    assert [fill.source for fill in bench.fills()] == ["host"]
    bench.close()


def test_pages_on_disk_outlive_the_engine(
    model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    expected = reference(prompt)
    for is_second in (False, True):
        bench = Bench(model_dir, disk_cache_dir=tmp_path)
        assert bench.ask(prompt) == expected
        sources = {fill.source for fill in bench.fills()}
        # Some may come by host memory, while the request waits.
        assert sources <= ({"disk", "host"} if is_second else set())
        assert bool(sources) == is_second
        bench.close()


def test_a_bit_flipped_in_pinned_memory_is_found_by_the_gpu(
    model_dir: Path, reference: Reference
) -> None:
    bench = Bench(model_dir)
    prompt = prompt_of(LENGTH)
    expected = reference(prompt)
    bench.ask(prompt)
    bench.push_out()
    faults.TIER_HOST.arm(FaultSpec(point=faults.TIER_HOST.name, kind="corrupt", skip=3))
    try:
        assert bench.ask(prompt) == expected
    finally:
        faults.TIER_HOST.clear()
    assert bench.counters("host")["corrupt_pages"] == 1
    bench.close()


def test_a_storm_of_requests_and_cancels_loses_no_page(
    model_dir: Path, reference: Reference, tmp_path: Path
) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    bench = Bench(model_dir, disk_cache_dir=tmp_path, host_cache_bytes=8 << 20)
    begins = [prompt_of(rng.randint(4, 30) * PAGE) for _ in range(6)]
    texts: dict[str, list[int]] = {}
    for _ in range(120):
        prompt = rng.choice(begins) + prompt_of(rng.randint(1, 40))
        asked = bench.pair.submit(prompt, max_tokens=NUM_NEW)
        texts[asked] = prompt
        for _ in range(rng.randrange(6)):
            bench.pair.turn()
        if rng.random() < 0.3:
            bench.pair.send(cancels=[Cancel(gateway=1, request_id=asked, attempt=1)])
            del texts[asked]
    bench.settle()
    for asked in rng.sample(sorted(texts), 12):
        assert bench.pair.finish(asked) == [reference(texts[asked])]
    counts = bench.engine.memory.counts()
    assert (counts.used, counts.quarantined) == (0, 0)
    assert counts.free + counts.cached == counts.total
    assert bench.counters("host")["loaded_pages"] > 0
    assert bench.counters("host")["corrupt_pages"] == 0
    bench.close()
    torch.cuda.synchronize()


class LayerBench(Bench):
    """Loads go by layer; counts the steps that wait for layers."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        super().__init__(model_dir, **({"load_by_layer": "always"} | settings))
        self.num_waiting_steps = 0
        local = self.engine.parts.local
        launch = local.launch

        def count(step: StepInput) -> Launched:
            self.num_waiting_steps += step.waits_for_layers
            return launch(step)

        local.launch = count  # type: ignore[method-assign]


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "graphs"])
def test_steps_begin_while_layers_come(
    model_dir: Path, reference: Reference, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free pages hold NaN, so a layer that is read too early spoils the text. The device copies for
    longer than its steps would take alone.
    """
    bench = LayerBench(model_dir, cuda_graphs=cuda_graphs)
    layers = bench.engine.parts.local.layer_pool
    assert isinstance(layers, DeviceLayers)
    copy = layers._copy

    def slowly(group: int) -> None:
        with torch.cuda.stream(layers._stream):
            torch.cuda._sleep(200_000_000)  # Some 100 ms, longer than a busy host is late.
        copy(group)

    monkeypatch.setattr(layers, "_copy", slowly)
    prompt = prompt_of(LENGTH)
    assert bench.ask(prompt) == reference(prompt)
    for _ in range(3):
        bench.push_out()
        again = prompt[: random.randrange(20, 38) * PAGE] + prompt_of(random.randrange(3, 9 * PAGE))
        before = bench.num_waiting_steps
        assert bench.ask(again) == reference(again)
        assert bench.num_waiting_steps > before
        assert [fill.failure for fill in bench.fills()] == [""]
    bench.close()


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "graphs"])
def test_a_bad_page_that_came_by_layer_spoils_no_text(
    model_dir: Path, reference: Reference, cuda_graphs: bool
) -> None:
    bench = LayerBench(model_dir, cuda_graphs=cuda_graphs)
    point = faults.TIER_HOST
    for _ in range(5):
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        seed, skip = random.randrange(1000), random.randrange(30)
        point.arm(FaultSpec(point=point.name, kind="corrupt", seed=seed, skip=skip))
        try:
            assert bench.ask(prompt) == reference(prompt)
        finally:
            point.clear()
        assert any(fill.failure for fill in bench.fills())
    assert bench.counters("host")["corrupt_pages"] >= 5
    bench.close()
