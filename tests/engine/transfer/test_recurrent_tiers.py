"""States of recurrent layers go to host memory and disk with the pages before them, and come back.

Texts are those of the small hybrid's other formula (`weft.testing.models.tiny_hybrid`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract import faults
from weft.contract.faults import FaultSpec
from weft.contract.keys import PageKeys, block_keys
from weft.contract.layout import StatePart, StatePlane
from weft.engine.executor.block_pool import BlockPool
from weft.engine.executor.ranks.share import runs_over_ranks
from weft.engine.executor.states import RankBlocks, StateMemory
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.tier_bench import NUM_NEW, TierBench
from weft.testing.models.tiny_hybrid import greedy, make_hybrid, reference_hybrid, serve_hybrid

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB = 8, 517
LENGTH = 12 * PAGE + 3
FULL = pytest.mark.full


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


@contextlib.contextmanager
def bench_of(model_dir: Path, **settings: Any) -> Iterator[TierBench]:
    values: dict[str, Any] = {
        "num_pages": 40,
        "host_cache_bytes": 8 << 20,
        "load_back_threshold": 0,
        "prefill_chunk_tokens": 4 * PAGE,
        "max_running_requests": 2,
        "checkpoint_tokens": 5 * PAGE,
    }
    bench = TierBench(model_dir, LENGTH, **(values | settings))
    try:
        yield bench
        bench.settle()
        (states,) = bench.engine.parts.companions
        states.memory.check_integrity()
        assert not states.memory.counts().used
        assert states._reserved == (0, 0)
    finally:
        bench.pair.close()


def prompt_of(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": "on"},
        pytest.param({"write_through_threshold": 1}, marks=FULL),
        pytest.param({"write_through_threshold": 1000}, marks=FULL),
    ],
    ids=["at_once", "on_a_hit", "given_up"],
)
def test_prompts_go_on_at_borders_whose_states_come_back(
    model_dir: Path, model: torch.nn.Module, settings: dict[str, Any]
) -> None:
    with bench_of(model_dir, **settings) as bench:
        prompt = prompt_of(LENGTH)
        expected = greedy(model, prompt, NUM_NEW)
        assert bench.ask(prompt) == expected
        bench.push_out()
        # The checkpoint is the last block before the place where this prompt parts.
        again = prompt[: 8 * PAGE] + prompt_of(2 * PAGE)
        assert bench.ask(again) == greedy(model, again, NUM_NEW)
        (fill,) = bench.fills()
        assert (fill.source, fill.failure) == ("host", "")
        assert (fill.end_token, fill.accepted_tokens) == (5 * PAGE, 5 * PAGE - fill.start_token)
        bench.push_out()
        assert bench.ask(prompt) == expected
        assert bench.fills()[-1].end_token == 12 * PAGE
        assert not bench.counters("host")["corrupt_pages"]


def test_pages_without_the_states_behind_them_do_not_count(
    model_dir: Path, model: torch.nn.Module
) -> None:
    """Blocks are dropped from host memory, as if they had been evicted there: the prompt goes on
    where the last one is, and nowhere if there is none.
    """
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        expected = greedy(model, prompt, NUM_NEW)
        assert bench.ask(prompt) == expected
        tiers = bench.engine.tiers
        assert tiers is not None
        keys = PageKeys(bench.engine._intake.namespace("", b""), PAGE).upto(prompt, 12)
        for border, found in ((12, [10 * PAGE]), (10, [5 * PAGE]), (5, [])):
            bench.push_out()
            for dropped in (5, 10, 12):
                if dropped >= border:
                    tiers.host.drop(block_keys(keys[dropped - 1], 1)[0])
            assert bench.ask(prompt) == expected
            assert [fill.accepted_tokens for fill in bench.fills()] == found


def test_states_come_back_from_disk_after_a_restart(
    model_dir: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    expected = greedy(model, prompt, NUM_NEW)
    settings = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 64 << 20, "host_cache_bytes": 0}
    with bench_of(model_dir, **settings) as bench:
        assert bench.ask(prompt) == expected
    with bench_of(model_dir, **settings) as bench:
        assert bench.ask(prompt) == expected
        (fill,) = bench.fills()
        assert (fill.source, fill.accepted_tokens) == ("disk", 12 * PAGE)


@pytest.mark.parametrize("kind", ["corrupt", pytest.param("error", marks=FULL)])
def test_a_damaged_state_is_a_miss(model_dir: Path, model: torch.nn.Module, kind: str) -> None:
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        expected = greedy(model, prompt, NUM_NEW)
        assert bench.ask(prompt) == expected
        bench.push_out()
        faults.TIER_HOST.arm(FaultSpec(point=faults.TIER_HOST.name, kind=kind, skip=12))
        try:
            assert bench.ask(prompt) == expected
        finally:
            faults.TIER_HOST.clear()
        assert bench.ask(prompt) == expected


def test_blocks_go_in_pages_and_back_byte_by_byte() -> None:
    """As they do when they are shipped (`StateMemory.to_pages`); the last page ends with zeros."""
    parts = (StatePart("state", (3, 5), "float32"), StatePart("conv", (7,), "bfloat16"))
    plane = StatePlane(name="any", layers=2, parts=parts, ring=())
    memory = StateMemory(plane, 4, 1, 1, torch.device("cpu"))
    for pool in memory.pools.blocks:
        pool.copy_(torch.randn(pool.shape))
    page_bytes = random.choice([16, 40, 64, 256])
    num_pages = -(-plane.block_bytes // page_bytes)
    pool = BlockPool(memory.of_blocks, num_pages, page_bytes)
    rows = torch.zeros((num_pages, page_bytes), dtype=torch.uint8)
    memory.to_pages(2, range(num_pages), rows)
    numbers = range(2 * num_pages, 3 * num_pages)
    assert [pool.read(number).tolist() for number in numbers] == rows.tolist()
    pinned = np.zeros((num_pages, page_bytes), np.uint8)
    digests = [pool.copy_out(number, row) for number, row in zip(numbers, pinned, strict=True)]
    assert pinned.tolist() == rows.tolist()
    expected = [part[2].clone() for part in memory.of_blocks]
    for to, direct in ((1, False), (3, True)):
        others = range(to * num_pages, (to + 1) * num_pages)
        if direct:
            assert pool.copy_in(list(pinned), others) == digests
        else:
            for index, number in enumerate(others):
                pool.target(index, number)[:] = pinned[index]
            pool.commit(others)
        for part, right in zip(memory.of_blocks, expected, strict=True):
            assert torch.equal(part[to], right)


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_that_ranks_have_apart_lie_in_pages_as_those_of_one(size: int) -> None:
    """As on GPUs, where rank 0 maps the blocks of all: here all are in one memory."""
    parts = (StatePart("state", (8, 3, 5), "float32"), StatePart("conv", (16, 3), "bfloat16"))
    plane = StatePlane(name="any", layers=3, parts=parts, ring=())
    alone = StateMemory(plane, 4, 1, 1, torch.device("cpu"))
    for pool in alone.pools.blocks:
        pool.copy_(torch.randn(pool.shape))
    ranks = [[part.contiguous() for part in pool.chunk(size, dim=2)] for pool in alone.pools.blocks]
    own = tuple(of_part[0] for of_part in ranks)
    blocks = RankBlocks(runs_over_ranks(ranks), own, is_mapped=True)
    memory = StateMemory(plane.of_rank(size), 4, 1, 1, torch.device("cpu"), blocks)
    page_bytes = random.choice([16, 64, 256])
    num_pages = -(-plane.block_bytes // page_bytes)
    rows = torch.zeros((2, num_pages, page_bytes), dtype=torch.uint8)
    for of, pages in zip((alone, memory), rows, strict=True):
        of.to_pages(2, range(num_pages), pages)
        pool = BlockPool(of.of_blocks, num_pages, page_bytes)
        numbers = range(2 * num_pages, 3 * num_pages)
        assert [pool.read(number).tolist() for number in numbers] == pages.tolist()
    assert torch.equal(*rows)
    memory.from_pages(3, range(num_pages), rows[0])
    for of_part, pool in zip(ranks, alone.pools.blocks, strict=True):
        assert torch.equal(torch.cat(of_part, dim=2)[3], pool[2])
    memory.poison([3])
    for first, *others in ranks:
        assert first[3].isnan().all()
        assert not any(other[3].isnan().any() for other in others)


def test_a_fill_ends_with_a_state_that_alone_comes_from_a_tier(
    model_dir: Path, model: torch.nn.Module
) -> None:
    """The filler has all pages and an earlier state, and loads the last one."""
    clock = ManualClock()
    values = {"num_pages": 80, "prefill_chunk_tokens": 4 * PAGE, "checkpoint_tokens": 100 * PAGE}
    tiers = {"host_cache_bytes": 8 << 20, "load_back_threshold": 0, "write_through_threshold": 0}
    owner = make_engine(model_dir, "decode", clock, **values)
    filler = make_engine(model_dir, "prefill", clock, **values, **tiers)
    pair, prompt = EnginePair(owner, [filler], clock), prompt_of(12 * PAGE + 1)
    try:
        expected = greedy(model, prompt, NUM_NEW)
        assert pair.finish(pair.submit(prompt, NUM_NEW)) == [expected]
        pair.settle()
        owner.memory.flush_cache()
        # Of the two blocks that are kept, the last one saves fewer tokens, and is evicted first.
        (states,) = filler.parts.companions
        counts = states.memory.counts()
        assert counts.cached == 2
        states.memory.release(states.memory.allocate(counts.free + 1))
        assert states.memory.counts().cached == 1
        assert pair.finish(pair.submit(prompt, NUM_NEW)) == [expected]
        assert owner.counters()["fills_done"] == 2
        assert filler.counters()["prompt_tokens"] == 12 * PAGE, "the state was computed anew"
    finally:
        pair.close()
