"""Pools behind a staging area: what is copied when, what may be used again when, what is bounded.

The whole fill protocol runs through a staging area in test_fill_protocol.py and test_leaks.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ConfigError
from weft.contract.submits import Cancel
from weft.engine.base.config import EngineConfig
from weft.engine.executor.orders import Order, PoisonPages, ZeroPages
from weft.engine.loop.engine import Engine
from weft.engine.scheduler.plan import Plan
from weft.engine.transfer import device_pages
from weft.engine.transfer.build import stages_on_device
from weft.engine.transfer.mover import DeviceMove, PageMover
from weft.engine.transfer.transport import HOST_LAST_TOKENS
from weft.pages.transfer.chunks import ShipChunk
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine, num_quarantined
from weft.testing.engine.late_device import LateDevice
from weft.testing.engine.local_plane import join_planes
from weft.testing.models.tiny_models import make_tiny

PAGE = 8
STAGED: dict[str, Any] = {"force_staging": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed=random.randrange(2**31))


@pytest.mark.parametrize(
    ("settings", "is_on_device"),
    [
        ({}, False),
        ({"device_memory_share": 0.5}, True),
        ({"device_memory_share": 0.5, "has_store": True}, False),
        ({"device_memory_share": 0.5, "transport": "data"}, False),
        ({"device_memory_share": 0.5, "staging_memory": "host"}, False),
        ({"staging_memory": "device"}, True),
    ],
)
def test_workers_that_share_a_gpu_stage_on_it(
    settings: dict[str, Any], is_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other GPU is there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig(model_dir=Path(), device="cuda", **settings)
    assert stages_on_device(config, torch.device("cuda:0")) == is_on_device


@pytest.fixture(scope="module")
def page_bytes(model_dir: Path) -> int:
    engine = make_engine(model_dir, "decode", ManualClock())
    engine.close()
    return engine.info.page_bytes


@pytest.mark.parametrize("settings", [{}, {"last_piece_tokens": 7}], ids=["default", "given"])
@pytest.mark.parametrize("way", [{}, STAGED], ids=["from the pool", "through host memory"])
def test_a_long_prompts_last_step_is_small_where_pages_leave_slowly(
    way: dict[str, Any], settings: dict[str, Any], model_dir: Path
) -> None:
    engine = make_engine(model_dir, "prefill", ManualClock(), **way, **settings)
    engine.close()
    expected = settings.get("last_piece_tokens", HOST_LAST_TOKENS if way else 0)
    assert engine.scheduler._limits.last_piece_tokens == expected


Start = Callable[..., EnginePair]


@pytest.fixture
def start(model_dir: Path) -> Iterator[Start]:
    pairs = []

    def make(**settings: Any) -> EnginePair:
        clock = ManualClock()
        owner = make_engine(model_dir, "decode", clock, **(STAGED | settings))
        filler = make_engine(model_dir, "prefill", clock, worker_id="p0", **(STAGED | settings))
        pairs.append(EnginePair(owner, [filler], clock))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def new_prompt(num_pages: int) -> list[int]:
    return [random.randrange(3, 500) for _ in range(num_pages * PAGE + 3)]


def alone(pair: EnginePair, prompt: list[int]) -> list[int]:
    (tokens,) = pair.finish(pair.submit(prompt, candidates=[]))
    pair.owner.memory.flush_cache()
    return tokens


class HeldMove(DeviceMove):
    """A copy that is under way until the test lets it end."""

    def __init__(self, move: DeviceMove, may_end: threading.Event) -> None:
        self._move, self._may_end = move, may_end

    def is_done(self) -> bool:
        return self._may_end.is_set()

    def wait(self) -> None:
        assert self._may_end.wait(60)

    def digests(self) -> list[int]:
        return self._move.digests()

    def digest_s(self) -> float:
        return self._move.digest_s()


def hold(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> tuple[list[list[int]], threading.Event]:
    """Holds an engine's copies in one direction; pages of the pool in each, and the release."""
    mover = engine.parts.transport._exchange._mover  # type: ignore[attr-defined]
    move, may_end = getattr(mover, method), threading.Event()
    held: list[list[int]] = []

    def moved(*args: Any, **kwargs: Any) -> HeldMove:
        held.append(list(args[1 if method == "move_in" else 0]))
        return HeldMove(move(*args, **kwargs), may_end)

    monkeypatch.setattr(mover, method, moved)
    return held, may_end


def test_pages_being_written_are_nobody_elses(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of a chunk that is on its way into the pool is cancelled."""
    pair = start()
    owner = pair.owner
    held, may_end = hold(owner, monkeypatch, "move_in")
    request_id = pair.submit(new_prompt(10))
    pair.run(lambda: bool(held))
    pair.send(cancels=[Cancel(gateway=1, request_id=request_id, attempt=1)])
    pair.turn()
    assert pair.answers[request_id].finished[0].reason == "cancelled"
    pair.run(lambda: num_quarantined(owner) == 0)  # the filler has said `stopped`
    in_work = {page for pages in held for page in pages}
    assert owner.memory.counts().used == len(in_work)
    assert not owner.is_idle
    taken = owner.memory.allocate(owner.memory.num_available_pages)
    assert in_work.isdisjoint(taken)
    owner.memory.release(taken)
    may_end.set()
    pair.settle()
    assert owner.memory.counts().free == owner.memory.counts().total


def test_pages_being_read_are_neither_changed_nor_freed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of a chunk that is on its way out of the pool is stopped."""
    pair = start()
    filler = pair.fillers["p0"]
    held, may_end = hold(filler, monkeypatch, "move_out")
    request_id = pair.submit(new_prompt(10))
    pair.run(lambda: bool(held))
    pair.send(cancels=[Cancel(gateway=1, request_id=request_id, attempt=1)])
    for _ in range(50):
        pair.turn()
    assert num_quarantined(pair.owner), "nothing may be said while a write could follow"
    taken = filler.memory.allocate(filler.memory.num_available_pages)
    assert {page for pages in held for page in pages}.isdisjoint(taken)
    filler.memory.release(taken)
    staging = filler.parts.transport.staging_counts()
    assert staging is not None
    assert staging.used == sum(map(len, held))
    may_end.set()
    pair.settle()
    assert num_quarantined(pair.owner) == 0


def test_a_prompt_longer_than_the_staging_area_comes_in_several_leases(
    start: Start, page_bytes: int
) -> None:
    pair = start(staging_bytes=6 * page_bytes)
    prompt = new_prompt(16)
    expected = alone(pair, prompt)
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == [expected]
    fills = pair.answers[request_id].finished[0].timeline.fills
    assert [fill.failure for fill in fills] == [""] * len(fills)
    assert sum(fill.accepted_tokens for fill in fills) == 16 * PAGE
    assert len(fills) >= 4  # one page of the six is to send from
    pair.settle()


def test_many_prompts_share_a_small_area(start: Start, page_bytes: int) -> None:
    pair = start(staging_bytes=5 * page_bytes, prefill_chunk_tokens=4 * PAGE)
    prompts = [new_prompt(random.randint(1, 9)) for _ in range(8)]
    expected = [alone(pair, prompt) for prompt in prompts]
    assert pair.finish(*[pair.submit(prompt) for prompt in prompts]) == expected
    pair.settle()


def test_prompts_that_come_together_are_filled_one_after_the_other(
    start: Start, page_bytes: int
) -> None:
    """They do not share a small area: the first one's answer need not wait for the last one's."""
    pair = start(staging_bytes=17 * page_bytes, prefill_chunk_tokens=2 * PAGE)
    requests = [pair.submit(new_prompt(8)) for _ in range(6)]
    pair.finish(*requests)
    timelines = [pair.answers[request].finished[0].timeline for request in requests]
    assert [len(timeline.fills) for timeline in timelines] == [1] * len(requests)
    ends = [timeline.submitted_at + timeline.fills[0].end_s for timeline in timelines]
    assert ends == sorted(ends)
    pair.settle()


def submit_large_among_small(pair: EnginePair) -> tuple[list[str], str, list[str]]:
    """Seven small prompts, a large one, and seven small ones."""
    before = [pair.submit(new_prompt(2)) for _ in range(7)]
    large = pair.submit(new_prompt(14))
    return before, large, [pair.submit(new_prompt(2)) for _ in range(7)]


def test_a_large_prompt_is_not_overtaken(start: Start, page_bytes: int) -> None:
    """Small ones that come behind it wait until it has found room."""
    pair = start(staging_bytes=17 * page_bytes, prefill_chunk_tokens=2 * PAGE)
    before, large, after = submit_large_among_small(pair)
    pair.finish(*before, large, *after)
    timelines = {
        request: pair.answers[request].finished[0].timeline for request in (*before, large, *after)
    }
    begins = {name: one.submitted_at + one.fills[0].start_s for name, one in timelines.items()}
    assert timelines[large].fills[0].end_token >= 8 * PAGE, "it began with little"
    assert all(begins[large] <= begins[request] for request in after)
    assert any(begins[request] < begins[large] for request in before)
    pair.settle()


def test_a_large_prompt_that_ends_lets_others_go_on(start: Start, page_bytes: int) -> None:
    """It is cancelled while it waits for room."""
    pair = start(staging_bytes=17 * page_bytes, prefill_chunk_tokens=2 * PAGE)
    before, large, after = submit_large_among_small(pair)
    pair.turn()
    pair.send(cancels=[Cancel(gateway=1, request_id=large, attempt=1)])
    pair.finish(*before, *after)
    assert pair.answers[large].finished[0].reason == "cancelled"
    pair.settle()


@dataclass
class Moved:
    """A copy: pages of the pool, and the orders between which it may be under way."""

    pages: set[int]
    begin: int
    """Orders before are over."""
    end: int = 1 << 40
    """Orders from here on came after it had ended."""


class NumberedMark:
    """How many orders there were."""

    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None:
        """On a CPU everything is done."""

    def hold(self, stream: None) -> None:
        """As `wait`."""


class DeviceLog:
    """What an engine tells its device to do, in order, and where its copies are in it."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders: list[tuple[str, set[int]]] = []
        self.moves: list[Moved] = []
        self.num_committed = 0
        """Orders of which the engine knows that they are over."""
        executor, scheduler = engine.parts.local, engine.scheduler
        mover = engine.parts.transport._exchange._mover  # type: ignore[attr-defined]
        self._launch, self._follow = scheduler.launch, executor.order
        monkeypatch.setattr(scheduler, "launch", self.launch)
        monkeypatch.setattr(executor, "order", self.order)
        self._move_in, self._move_out, self._commit = (
            mover.move_in,
            mover.move_out,
            scheduler.commit,
        )
        monkeypatch.setattr(mover, "move_in", self.move_in)
        monkeypatch.setattr(mover, "move_out", self.move_out)
        monkeypatch.setattr(mover, "mark", lambda: NumberedMark(len(self.orders)))
        monkeypatch.setattr(scheduler, "commit", self.commit)
        self._ends: dict[int, int] = {}

    def order(self, order: Order) -> None:
        """On pages."""
        if isinstance(order, ZeroPages | PoisonPages):
            name = "zero" if isinstance(order, ZeroPages) else "poison"
            self.orders.append((name, set(order.pages)))
        self._follow(order)

    def launch(self, plan: Plan) -> int:
        """Of a step."""
        if len(plan):
            self.orders.append(("launch", self._pages_named(plan)))
            self._ends[id(plan)] = len(self.orders)
        return self._launch(plan)

    def commit(self, number: int, plan: Plan) -> None:
        """A step and what was ordered before it are over."""
        self.num_committed = self._ends.pop(id(plan), self.num_committed)
        self._commit(number, plan)

    def move_in(
        self, staged: Sequence[int], pages: Sequence[int], after: Any, **kwargs: Any
    ) -> DeviceMove:
        """Behind its mark."""
        noted = Moved(set(pages), after.number)
        return self._followed(noted, self._move_in(staged, pages, after, **kwargs))

    def move_out(self, pages: Sequence[int], staged: Sequence[int], **kwargs: Any) -> DeviceMove:
        """Of steps that are committed."""
        noted = Moved(set(pages), self.num_committed)
        return self._followed(noted, self._move_out(pages, staged, **kwargs))

    def _followed(self, noted: Moved, move: DeviceMove) -> DeviceMove:
        self.moves.append(noted)
        digests = move.digests

        def read() -> list[int]:
            noted.end = len(self.orders)
            return digests()

        move.digests = read  # type: ignore[method-assign]
        return move

    @staticmethod
    def _pages_named(plan: Plan) -> set[int]:
        """Pages that a step's requests have."""
        requests = [*plan.decodes, *(item.request for item in plan.chunks)]
        return {page for request in requests for page in request.held.pages}


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_copies_come_behind_what_uses_the_pages(
    start: Start, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """Into the pool: no step, wipe or poison of the pages beside it. Out of it: no change, and
    the steps that computed them are over.

    Tenants take turns in small pools, so that pages change namespace and are wiped.
    """
    pair = start(num_pages=40, overlap=overlap)
    filler = pair.fillers["p0"]
    landed, shipped = DeviceLog(pair.owner, monkeypatch), DeviceLog(filler, monkeypatch)
    for number in range(12):
        pair.finish(pair.submit(new_prompt(10), cache_salt=f"tenant {number % 3}"))
    pair.settle()
    for order in (landed, shipped):
        assert {name for name, _ in order.orders} >= {"zero", "launch"}
        assert order.moves
    wiped_before = 0
    for move in landed.moves:
        beside = landed.orders[move.begin : move.end]
        assert not [name for name, pages in beside if pages & move.pages]
        before = landed.orders[: move.begin]
        wiped_before += any(name == "zero" and pages & move.pages for name, pages in before)
    assert wiped_before
    for move in shipped.moves:
        later = shipped.orders[move.begin : move.end]
        assert not [name for name, pages in later if name != "launch" and pages & move.pages]
        computed = [pages for name, pages in shipped.orders[: move.begin] if name == "launch"]
        assert move.pages <= set().union(*computed)


def test_pages_are_read_behind_steps_that_are_under_way(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU whose staging pages are its own memory reads them."""
    monkeypatch.setattr(PageMover, "is_direct", True)
    pair = start(overlap="on")
    filler = pair.fillers["p0"]
    join_planes(pair.owner, [filler])
    prompts = [new_prompt(count) for count in (10, 4, 7)]
    expected = [alone(pair, prompt) for prompt in prompts]
    device = LateDevice(filler, random.Random(), early_chance=0.0)
    num_early, order = [0], filler.parts.transport.shipper.read_early

    def read_early(chunk: ShipChunk, after: Any) -> None:
        num_early[0] += after._number > device.num_done
        order(chunk, after)

    monkeypatch.setattr(filler.parts.transport.shipper, "read_early", read_early)
    requests = [pair.submit(prompt) for prompt in prompts]
    assert pair.finish(*requests) == expected
    assert num_early[0] > 0
    fills = [fill for one in requests for fill in pair.answers[one].finished[0].timeline.fills]
    assert [(fill.transport, fill.failure) for fill in fills] == [("nixl", "")] * len(fills)
    assert sum(fill.accepted_tokens for fill in fills) == 21 * PAGE
    device.work()
    pair.settle()


def test_a_trial_finds_copies_that_go_wrong(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter = device_pages.scatter_pages

    def spoilt(source: torch.Tensor, *where: Any) -> None:
        source[0, -1] ^= 1
        scatter(source, *where)

    monkeypatch.setattr(device_pages, "scatter_pages", spoilt)
    with pytest.raises(ConfigError, match="do not come back"):
        make_engine(model_dir, "decode", ManualClock(), **STAGED)


def test_a_trial_finds_digests_that_go_wrong(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = device_pages.page_digests
    monkeypatch.setattr(device_pages, "page_digests", lambda *args: digests(*args) ^ 1)
    with pytest.raises(ConfigError, match="do not come back"):
        make_engine(model_dir, "decode", ManualClock(), **STAGED)


def test_an_area_of_too_few_pages_is_refused(model_dir: Path, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="give at least") as raised:
        make_engine(model_dir, "decode", ManualClock(), **STAGED, staging_bytes=3 * page_bytes)
    assert raised.value.param == "staging_bytes"


def test_a_copy_that_fails_ends_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device holds after a failure cannot be trusted: its process is to end."""
    pair = start()

    def fail(*args: Any, **kwargs: Any) -> DeviceMove:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(PageMover, "move_in", fail)
    pair.submit(new_prompt(4))
    with pytest.raises(RuntimeError, match="copying pages"):
        pair.run(lambda: False)


def test_a_filler_with_other_memory_sends_data(start: Start) -> None:
    """NIXL between memory of a host and of a GPU is slower than messages."""
    pair = start()
    filler = pair.fillers["p0"]
    join_planes(pair.owner, [filler])
    prompt = new_prompt(10)
    expected = alone(pair, prompt)
    for memory_type, transport in (("DRAM", "nixl"), ("VRAM", "data")):
        filler.filler._lanes = replace(filler.filler._lanes, memory_type=memory_type)
        pair.owner.memory.flush_cache()
        request_id = pair.submit(prompt)
        assert pair.finish(request_id) == [expected]
        (fill,) = pair.answers[request_id].finished[0].timeline.fills
        assert (fill.transport, fill.failure) == (transport, "")
    pair.settle()
