"""Pages that the pool gives up come back from host memory and disk; what fails there is a miss.

Texts are compared with transformers' greedy generation of the same tiny model.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weft.contract import faults
from weft.contract.errors import ConfigError
from weft.contract.faults import FaultPoint, FaultSpec
from weft.contract.keys import PageKeys
from weft.contract.layout import PagePart
from weft.contract.pages import Page
from weft.contract.submits import Cancel
from weft.engine.executor import device_pool
from weft.engine.executor.device_pool import DevicePool, PinnedRows
from weft.engine.executor.local import LocalExecutor
from weft.pages.tiers.disk import PageFiles
from weft.pages.tiers.keyed import PagePlace
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.tier_bench import NUM_NEW, VOCAB, TierBench, prompt_of
from weft.testing.models.choices import GreedyReference
from weft.testing.models.tiny_models import make_tiny

PAGE, POOL_PAGES = 8, 32
LENGTH = 20 * PAGE + 3
FOR_EVER_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny("llama", path, seed=random.randrange(2**31), vocab_size=VOCAB, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> GreedyReference:
    return GreedyReference(model_dir, NUM_NEW)


class Bench(TierBench):
    """With a small pool and host memory."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        values: dict[str, Any] = {
            "num_pages": POOL_PAGES,
            "host_cache_bytes": 8 << 20,
            "load_back_threshold": 0,
            "prefill_chunk_tokens": 4 * PAGE,
            "load_by_layer": "never",
        }
        super().__init__(model_dir, LENGTH, **(values | settings))

    def go_on(self) -> None:
        """Runs until nothing stands still any more."""
        tiers = self.engine.tiers
        assert tiers is not None
        self.pair.run(lambda: not tiers.sizes()["tier_stalls"])


@contextlib.contextmanager
def bench_of(model_dir: Path, **settings: Any) -> Iterator[Bench]:
    bench = Bench(model_dir, **settings)
    try:
        yield bench
        bench.settle()
    finally:
        bench.pair.close()


@contextlib.contextmanager
def armed(point: FaultPoint, kind: str, **values: Any) -> Iterator[None]:
    point.arm(FaultSpec(point=point.name, kind=kind, **values))
    try:
        yield
    finally:
        point.clear()


def play(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    """Pages come and go as those of a pool in such memory."""
    if "device" in pool:
        monkeypatch.setattr(LocalExecutor, "page_pool", lambda executor: DevicePool(executor.pool))
    if "pinned" in pool:
        monkeypatch.setattr(device_pool, "register", lambda memory: 0)
        monkeypatch.setattr(
            LocalExecutor, "pin", lambda executor, rows: PinnedRows(rows, executor.pool)
        )


@pytest.mark.parametrize("pool", ["host", "device", "device and pinned"])
@pytest.mark.parametrize("threshold", [0, 1, 1000], ids=["at_once", "on_a_hit", "given_up"])
def test_what_the_pool_gave_up_comes_back_from_host_memory(
    model_dir: Path,
    reference: GreedyReference,
    threshold: int,
    pool: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, pool)
    overlap = "off" if pool == "host" else "on"
    with bench_of(model_dir, write_through_threshold=threshold, overlap=overlap) as bench:
        prompt = prompt_of(LENGTH)
        expected = reference(prompt)
        assert bench.ask(prompt) == expected
        bench.push_out()
        again = prompt[: 10 * PAGE] + prompt_of(5 * PAGE)
        assert bench.ask(again) == reference(again)
        (fill,) = bench.fills()
        assert (fill.source, fill.failure) == ("host", "")
        assert fill.end_token == 10 * PAGE
        assert fill.accepted_tokens == fill.end_token - fill.start_token > 0
        bench.push_out()
        assert bench.ask(prompt) == expected
        host = bench.counters("host")
        assert host["loaded_pages"] == host["hit_pages"] > 0
        assert host["corrupt_pages"] == host["failed_loads"] == 0
        assert bool(bench.engine.tiers and bench.engine.tiers.num_written_back_pages) == (
            threshold > 0
        )


def test_pages_on_disk_outlive_the_engine(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    expected = reference(prompt)
    for is_second in (False, True):
        with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
            assert bench.ask(prompt) == expected
            sources = [fill.source for fill in bench.fills()]
            assert sources == (["disk"] if is_second else [])
            if is_second:
                assert bench.fills()[0].accepted_tokens == LENGTH // PAGE * PAGE


def test_host_memory_spills_to_disk(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    """Host memory of a few pages, disk for all: every prompt is found in one of the two."""
    prompts = [prompt_of(LENGTH) for _ in range(5)]
    expected = [reference(prompt) for prompt in prompts]
    page_bytes = page_bytes_of(model_dir)
    settings = {"host_cache_bytes": 48 * page_bytes, "disk_cache_dir": tmp_path}
    with bench_of(model_dir, write_through_threshold=1000, **settings) as bench:
        # What the disk has no time for is lost, so how much comes back from it is not certain.
        for _ in range(20):
            for prompt, text in zip(prompts, expected, strict=True):
                assert bench.ask(prompt) == text
                bench.settle()
            if bench.counters("disk")["loaded_pages"] > 20:
                break
        else:
            raise AssertionError(str(bench.engine.tiers and bench.engine.tiers.report()))
        assert bench.counters("host")["evicted_pages"] > 20


def test_flipped_bytes_on_disk_are_a_miss(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        bench.ask(prompt)
    files = sorted(path for path in tmp_path.rglob("*.*") if path.is_file())
    for path in random.sample(files, 3):
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        assert bench.ask(prompt) == reference(prompt)
        assert bench.counters("disk")["corrupt_pages"] == 1
        assert any(fill.failure for fill in bench.fills())
        bench.push_out()
        assert bench.ask(prompt) == reference(prompt)


def test_a_file_cut_short_is_gone_after_a_start(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        bench.ask(prompt)
    files = [path for path in tmp_path.rglob("*.*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        assert bench.engine.tiers is not None
        assert bench.engine.tiers.disk is not None
        assert bench.engine.tiers.disk.counts().cached == 0
        assert bench.ask(prompt) == reference(prompt)


def test_a_file_that_vanished_is_a_miss(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        bench.ask(prompt)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        for path in [path for path in tmp_path.rglob("*.*") if path.is_file()]:
            path.unlink()
        assert bench.ask(prompt) == reference(prompt)
        assert bench.counters("disk")["corrupt_pages"] == 1


def test_what_is_no_page_file_is_passed_over(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    """Links that lead nowhere or out of the folder, by the names of pages."""
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        bench.ask(prompt)
    first, second, *_ = (path for path in tmp_path.rglob("*.*") if path.is_file())
    outside = tmp_path / "outside"
    first.rename(outside)
    first.symlink_to(outside)
    second.unlink()
    second.symlink_to(tmp_path / "nowhere")
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        assert not first.is_symlink()
        assert not second.is_symlink()
        assert outside.is_file()
        assert bench.ask(prompt) == reference(prompt)


def test_folders_that_somebody_removed_are_made_again(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        bench.ask(prompt)
        bench.settle()
        (root,) = (path.parent for path in tmp_path.rglob("lock"))
        for name in ("pages", "new"):
            shutil.rmtree(root / name)
        for _ in range(2):  # The first page meets what is gone.
            bench.pair.send(flush_cache=[1])
            bench.pair.turn()
            bench.settle()
            bench.ask(prompt)
            bench.settle()
            bench.pair.clock.offset_s += 6.0  # The disk rests after a failure.
        assert bench.counters("disk")["failed_saves"] == 1
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        assert bench.ask(prompt) == reference(prompt)
        assert [fill.source for fill in bench.fills()] == ["disk"]


def test_a_full_disk_is_counted_and_nothing_else(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    """The system refuses every byte of a page's file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
        try:
            assert bench.ask(prompt) == reference(prompt)
            bench.push_out()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        counters = bench.counters("disk")
        assert counters["failed_saves"] > 0
        assert counters["saved_pages"] == 0
        assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]
        assert bench.ask(prompt) == reference(prompt)
        assert [fill.source for fill in bench.fills()] == ["host"]
        bench.pair.clock.offset_s += 10.0  # It is tried again after a while.
        bench.push_out()
        assert bench.counters("disk")["saved_pages"] > 0


@pytest.mark.parametrize("pool", ["host", "device and pinned"])
def test_a_bit_flipped_in_host_memory_is_a_miss(
    model_dir: Path, reference: GreedyReference, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    play(monkeypatch, pool)
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        with armed(faults.TIER_HOST, "corrupt"):
            assert bench.ask(prompt) == reference(prompt)
        assert bench.counters("host")["corrupt_pages"] == 1


def test_without_host_memory_the_engine_starts_with_a_few_pages(
    model_dir: Path, reference: GreedyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mmap.mmap

    def refuse(fileno: int, length: int, *args: Any, **values: Any) -> mmap.mmap:
        if length == (8 << 20) // page_bytes * page_bytes:
            raise OSError(12, "Cannot allocate memory")
        return real(fileno, length, *args, **values)

    page_bytes = page_bytes_of(model_dir)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with bench_of(model_dir) as bench:
        assert any("host memory" in notice for notice in bench.engine.info.notices)
        prompt = prompt_of(LENGTH)
        for _ in range(2):
            assert bench.ask(prompt) == reference(prompt)
            bench.push_out()


def test_a_request_cancelled_while_its_pages_are_loaded_leaves_nothing(
    model_dir: Path, reference: GreedyReference
) -> None:
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        with armed(faults.TIER_HOST, "stall", skip=2, delay_s=FOR_EVER_S):
            asked = bench.pair.submit(prompt)
            bench.pair.run(lambda: faults.TIER_HOST.states()[0].fired == 1)
            assert [r.state.value for r in bench.engine.scheduler.filling] == ["loading"]
            other = prompt_of(PAGE)  # Others are served meanwhile.
            assert bench.ask(other) == reference(other)
            bench.pair.send(cancels=[Cancel(gateway=1, request_id=asked, attempt=1)])
            bench.pair.run(lambda: bool(bench.pair.answers[asked].finished))
            # A write may still come.
            counts = bench.engine.memory.counts()
            assert (counts.used, counts.quarantined) == (0, 1)
        bench.settle()
        assert bench.ask(prompt) == reference(prompt)


def test_a_tier_that_stands_still_holds_up_nobody(
    model_dir: Path, reference: GreedyReference
) -> None:
    with bench_of(model_dir) as bench:
        prompts = [prompt_of(10 * PAGE), prompt_of(10 * PAGE)]
        for prompt in prompts:
            bench.ask(prompt)
        bench.push_out()
        with armed(faults.TIER_HOST, "stall", skip=2, delay_s=FOR_EVER_S):
            asked = bench.pair.submit(prompts[0], max_tokens=NUM_NEW)
            bench.pair.run(lambda: faults.TIER_HOST.states()[0].fired == 1)
            for _ in range(3):  # What came before is taken.
                bench.pair.turn()
            bench.pair.clock.offset_s += 6.0
            assert bench.pair.finish(asked) == [reference(prompts[0])]
            assert [fill.failure != "" for fill in bench.fills()] == [True]
            assert bench.ask(prompts[1]) == reference(prompts[1])
            assert bench.fills() == []  # It still stands.
        bench.go_on()
        bench.settle()
        bench.push_out()
        assert bench.ask(prompts[1]) == reference(prompts[1])
        assert [fill.source for fill in bench.fills()] == ["host"]


def test_a_disk_that_never_answers_costs_a_page(
    model_dir: Path, reference: GreedyReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's file is a pipe that nobody writes to: opening it waits for ever."""
    prompts = [prompt_of(LENGTH), prompt_of(LENGTH)]
    asked_for: list[bytes] = []
    read_part = PageFiles.read_part

    def read(files: PageFiles, place: PagePlace, into: Page, part: PagePart) -> bool:
        asked_for.append(place.name.key)
        return read_part(files, place, into, part)

    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        for prompt in prompts:
            bench.ask(prompt)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        tiers = bench.engine.tiers
        assert tiers is not None
        keys = PageKeys(bench.engine.parts.intake.namespace(""), PAGE).upto(prompts[0], 12)
        (path,) = [path for path in tmp_path.rglob("*") if path.name.startswith(keys[10].hex())]
        path.unlink()
        os.mkfifo(path)
        monkeypatch.setattr(PageFiles, "read_part", read)
        asked = bench.pair.submit(prompts[0], max_tokens=NUM_NEW)
        bench.pair.run(lambda: keys[10] in asked_for)
        for _ in range(3):  # What came before is taken.
            bench.pair.turn()
        bench.pair.clock.offset_s += 6.0
        assert bench.pair.finish(asked) == [reference(prompts[0])]
        assert bench.engine.memory.counts().quarantined == 1
        assert bench.counters("disk")["stalls"] == 1
        assert bench.ask(prompts[1]) == reference(prompts[1])
        assert bench.fills() == []  # The disk is let be.
        os.close(os.open(path, os.O_WRONLY))
        bench.go_on()
        assert bench.engine.memory.counts().quarantined == 0
        assert bench.counters("disk")["failed_loads"] == 1
        bench.push_out()
        assert bench.ask(prompts[1]) == reference(prompts[1])
        assert bench.fills()


def test_an_engine_ends_though_its_disk_never_answers(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(LENGTH)
    has_begun = threading.Event()
    read_part = PageFiles.read_part

    def read(files: PageFiles, place: PagePlace, into: Page, part: PagePart) -> bool:
        has_begun.set()
        return read_part(files, place, into, part)

    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        bench.ask(prompt)
    others = set(threading.enumerate())
    bench = Bench(model_dir, disk_cache_dir=tmp_path)
    for path in [path for path in tmp_path.rglob("*.*") if path.is_file()]:
        path.unlink()
        os.mkfifo(path)
    monkeypatch.setattr(PageFiles, "read_part", read)
    bench.pair.submit(prompt)
    bench.pair.run(has_begun.is_set)

    def is_stuck() -> bool:
        bench.pair.clock.offset_s += 3.0
        return bench.counters("disk")["stalls"] == 1

    bench.pair.run(is_stuck)
    bench.pair.close()
    left = [thread for thread in threading.enumerate() if thread not in others]
    assert left
    for path in tmp_path.rglob("*.*"):  # The thread that was left ends too.
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    for thread in left:
        thread.join(60)
        assert not thread.is_alive()


def test_a_request_that_waits_for_a_filler_may_go_on_with_a_load(
    model_dir: Path, reference: GreedyReference
) -> None:
    """Its filler falls silent before it was asked, and by then host memory serves again."""
    clock = ManualClock()
    owner = make_engine(
        model_dir,
        "decode",
        clock,
        num_pages=POOL_PAGES,
        host_cache_bytes=8 << 20,
        load_back_threshold=0,
    )
    pair = EnginePair(owner, [make_engine(model_dir, "prefill", clock, worker_id="p0")], clock)
    stalled, known = prompt_of(5 * PAGE + 1), prompt_of(5 * PAGE + 1)
    other = prompt_of(9 * PAGE + 1)  # All that fills may hold.
    try:
        for prompt in (stalled, known, *(prompt_of(LENGTH) for _ in range(3))):
            pair.finish(pair.submit(prompt, max_tokens=NUM_NEW, candidates=[]))
        pair.settle()
        pair.paused.add("p0")
        with armed(faults.TIER_HOST, "stall", skip=2, delay_s=FOR_EVER_S):
            first = pair.submit(stalled, max_tokens=NUM_NEW, candidates=[])
            pair.run(lambda: faults.TIER_HOST.states()[0].fired == 1)
            for _ in range(3):  # What came before is taken.
                pair.turn()
            clock.offset_s += 6.0
            assert pair.finish(first) == [reference(stalled)]
            fills = pair.submit(other, max_tokens=NUM_NEW)
            pair.run(lambda: bool(pair.commands))
            waits = pair.submit(known, max_tokens=NUM_NEW)
            pair.run(lambda: len(owner.scheduler.filling) == 2)
        assert owner.tiers is not None
        pair.run(lambda: not owner.tiers.sizes()["tier_stalls"])
        pair.stall(6.0)
        assert pair.finish(fills, waits) == [reference(other), reference(known)]
        loaded, avoided = pair.answers[waits].finished[-1].timeline.fills
        assert (loaded.source, loaded.accepted_tokens) == ("host", 5 * PAGE)
        assert "not asked" in avoided.failure
        pair.paused.clear()
        clock.offset_s += 2.0
        pair.settle()
    finally:
        pair.close()


def test_a_load_that_fails_in_its_middle_is_computed(
    model_dir: Path, reference: GreedyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving a chunk raises: the chunks behind it do not take its place."""
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir) as bench:
        bench.ask(prompt)
        bench.push_out()
        assert bench.engine.tiers is not None
        monkeypatch.setattr(bench.engine.tiers, "_most_chunk_pages", 4)
        pool, pages = bench.engine.tiers._load_pool, []
        target = pool.target

        def fail_once(index: int, page: int) -> Page:
            pages.append(page)
            if len(pages) == 6:
                raise RuntimeError("no pinned memory")
            return target(index, page)

        monkeypatch.setattr(pool, "target", fail_once)
        assert bench.ask(prompt) == reference(prompt)
        assert any(fill.failure for fill in bench.fills())
        assert bench.counters("host")["failed_loads"] == 4


def test_pages_come_to_host_memory_while_their_request_waits(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    """One runs, another waits for its place; meanwhile its pages are read from disk."""
    prompt = prompt_of(LENGTH)
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        bench.ask(prompt)
    with bench_of(model_dir, disk_cache_dir=tmp_path, max_running_requests=1) as bench:
        first = bench.pair.submit(prompt_of(PAGE), max_tokens=200)
        bench.pair.run(lambda: bool(bench.pair.answers[first].tokens))
        second = bench.pair.submit(prompt, max_tokens=NUM_NEW)
        num_pages = LENGTH // PAGE

        def have_come() -> bool:
            bench.await_moves()  # The first must not end before.
            return bench.counters("disk")["loaded_pages"] == num_pages

        bench.pair.run(have_come)
        bench.pair.send(cancels=[Cancel(gateway=1, request_id=first, attempt=1)])
        assert bench.pair.finish(second) == [reference(prompt)]
        assert [fill.source for fill in bench.fills()] == ["host"]


def test_loading_that_loses_is_not_done(model_dir: Path, reference: GreedyReference) -> None:
    """A tier that was found slow is left alone; the text is the same."""
    with bench_of(model_dir, load_back_threshold=None) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.push_out()
        assert bench.ask(prompt) == reference(prompt)
        assert [fill.source for fill in bench.fills()] == ["host"]
        assert bench.engine.tiers is not None
        for _ in range(100):
            bench.engine.tiers._policy.observe("host", 1, 1.0)
        bench.push_out()
        assert bench.ask(prompt) == reference(prompt)
        assert bench.fills() == []


def test_a_flush_empties_all_tiers(
    model_dir: Path, reference: GreedyReference, tmp_path: Path
) -> None:
    with bench_of(model_dir, disk_cache_dir=tmp_path) as bench:
        prompt = prompt_of(LENGTH)
        bench.ask(prompt)
        bench.settle()
        bench.pair.send(flush_cache=[1])
        bench.pair.turn()
        bench.settle()
        assert bench.engine.tiers is not None
        assert [tier.cached_pages for tier in bench.engine.tiers.report()] == [0, 0]
        assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]
        assert bench.ask(prompt) == reference(prompt)
        assert bench.fills() == []


def test_two_processes_do_not_share_a_folder(model_dir: Path, tmp_path: Path) -> None:
    with (
        bench_of(model_dir, disk_cache_dir=tmp_path),
        pytest.raises(ConfigError, match="another process"),
    ):
        Bench(model_dir, disk_cache_dir=tmp_path)


def page_bytes_of(model_dir: Path) -> int:
    bench = Bench(model_dir, host_cache_bytes=0)
    try:
        return bench.engine.info.page_bytes
    finally:
        bench.pair.close()
