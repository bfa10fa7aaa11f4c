"""The fill protocol under faults: what is declined, detected, quarantined, released, repeated."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.contract.fills import (
    FillCommand,
    FillerEvent,
    FillStart,
    LeaseQuery,
    ProcessExited,
)
from weft.contract.handle import FillEvent
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams
from weft.contract.submits import Cancel
from weft.pages.fills import filler as filler_module
from weft.testing.engine.engine_pair import (
    WAYS,
    EnginePair,
    ManualClock,
    give_destinations,
    make_engine,
    num_quarantined,
    take_destinations,
)
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.usefixtures("overlap"), pytest.mark.each_of("overlap", "pair")]

PAGE = 8
ONE_DAY_S = 86_400.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed=random.randrange(2**31))


@pytest.fixture(params=WAYS)
def pair(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[EnginePair]:
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock, **request.param)
    fillers = [
        make_engine(model_dir, "prefill", clock, **request.param, worker_id=name)
        for name in ("p0", "p1")
    ]
    pair = EnginePair(owner, fillers, clock)
    yield pair
    pair.close()


def few_ways() -> pytest.MarkDecorator:
    """Runs a test on two ways that differ in everything, and with --full on all of them."""
    others = [pytest.param(*way.values, id=way.id, marks=pytest.mark.full) for way in WAYS[1:-1]]
    return pytest.mark.parametrize("pair", [WAYS[0], *others, WAYS[-1]], indirect=True)


def new_prompt(num_pages: int = 6) -> list[int]:
    return [random.randrange(3, 500) for _ in range(num_pages * PAGE + 3)]


def alone(pair: EnginePair, prompt: list[int]) -> list[int]:
    """What the owner generates by itself, from an empty cache."""
    pair.owner.memory.flush_cache()
    (tokens,) = pair.finish(pair.submit(prompt, candidates=[]))
    pair.owner.memory.flush_cache()
    return tokens


def fills_of(pair: EnginePair, request_id: str) -> list[Any]:
    return pair.answers[request_id].finished[0].timeline.fills


def test_shipped_text_equals_local_text(pair: EnginePair) -> None:
    prompt = new_prompt()
    expected = alone(pair, prompt)
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == [expected]
    (fill,) = fills_of(pair, request_id)
    assert (fill.accepted_tokens, fill.failure) == (6 * PAGE, "")
    assert not pair.answers[request_id].num_told_here
    pair.settle()


@few_ways()
def test_the_owner_runs_one_token_of_a_prompt_of_whole_pages(pair: EnginePair) -> None:
    num_pages = random.randint(2, 6)
    prompt = new_prompt(num_pages)[: num_pages * PAGE]
    expected = alone(pair, prompt)
    request = pair.submit(prompt)
    assert pair.finish(request) == [expected]
    timeline = pair.answers[request].finished[0].timeline
    assert [fill.accepted_tokens for fill in timeline.fills] == [num_pages * PAGE]
    assert timeline.local_prefill_tokens == 1
    again = pair.submit(prompt)  # Its last page was published behind the last token.
    assert pair.finish(again) == [expected]
    assert not pair.answers[again].finished[0].timeline.fills
    pair.settle()


def test_bytes_may_arrive_before_word_of_the_lease(pair: EnginePair) -> None:
    """NIXL's notifications and the filler's events take different ways: any order counts."""
    prompt = new_prompt()
    expected = alone(pair, prompt)
    held: list[FillEvent] = []

    def hold(event: FillEvent) -> list[FillEvent]:
        held.append(event)
        return []

    pair.on_event = hold
    request_id = pair.submit(prompt)
    pair.run(lambda: held and held[-1].kind == "done")
    pair.stall(0)
    lease_id = pair.commands[0].lease_id
    pair._to_owner.filler_events += [FillerEvent(lease_id=lease_id, event=e) for e in held]
    assert pair.finish(request_id) == [expected]
    (fill,) = fills_of(pair, request_id)
    assert (fill.accepted_tokens, fill.failure) == (6 * PAGE, "")
    pair.settle()


def test_pages_perturbed_before_the_digest_change_the_text(pair: EnginePair) -> None:
    """The shipped bytes are what the owner decodes from."""
    prompt = new_prompt()
    # Some prompts are answered by one token again and again, whatever came before.
    while len(set(expected := alone(pair, prompt))) < 3:
        prompt = new_prompt()

    def perturb(pool: np.ndarray, chunk: Any) -> None:
        pool[chunk.local_pages] = np.roll(pool[chunk.local_pages], 64, axis=1)

    for filler in pair.fillers.values():
        shipper, pool = filler.parts.transport.shipper, filler.parts.local.pool_bytes
        shipper.before_digest = partial(perturb, pool)
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) != [expected]
    assert fills_of(pair, request_id)[0].failure == ""


def test_a_flipped_bit_is_detected_and_filled_from_elsewhere(pair: EnginePair) -> None:
    prompt = new_prompt()
    expected = alone(pair, prompt)
    flips = iter([True])

    def flip(pool: np.ndarray, pages: Any) -> None:
        if next(flips, False):
            pool[pages[-1], random.randrange(pool.shape[1])] ^= 1 << random.randrange(8)

    pair.owner.parts.transport.port.before_digest = flip
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == [expected]
    assert pair.owner.counters()["digest_mismatches"] == 1
    first, second = fills_of(pair, request_id)
    assert "digest" in first.failure
    assert (second.worker_id, second.failure) == ("p1", "")
    pair.settle()


@few_ways()
@pytest.mark.parametrize("reason", ["epoch", "draining", "namespace", "layout", "invalid"])
def test_declined_fills_go_to_the_next_candidate(pair: EnginePair, reason: str) -> None:
    prompt = new_prompt()
    expected = alone(pair, prompt)
    candidates = [pair.candidate("p0"), pair.candidate("p1")]
    if reason == "epoch":
        candidates[0] = pair.candidate("p0", epoch=12345)
    elif reason == "draining":
        pair.fillers["p0"].turn(Inbox(drains=[True]))
    spoilt = {
        "namespace": {"cache_salt": "another tenant"},
        "layout": {"page_size": 16},
        "invalid": {"start_token": 3},
    }

    def spoil(command: FillCommand) -> list[FillCommand]:
        if command.worker_id == "p0" and command.handle is not None and reason in spoilt:
            return [replace(command, handle=replace(command.handle, **spoilt[reason]))]
        return [command]

    pair.on_command = spoil
    request_id = pair.submit(prompt, candidates=candidates)
    assert pair.finish(request_id) == [expected]
    first, second = fills_of(pair, request_id)
    assert first.failure.startswith(f"declined: {reason}")
    assert (second.worker_id, second.accepted_tokens) == ("p1", 6 * PAGE)
    pair.settle()


def test_without_a_willing_filler_the_owner_prefills(pair: EnginePair) -> None:
    prompt = new_prompt()
    expected = alone(pair, prompt)
    for filler in pair.fillers.values():
        filler.turn(Inbox(drains=[True]))
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == [expected]
    timeline = pair.answers[request_id].finished[0].timeline
    assert timeline.local_prefill_tokens == len(prompt)
    assert [fill.failure.split()[1] for fill in timeline.fills] == ["draining", "draining"]
    assert pair.answers[request_id].num_told_here == 1
    pair.settle()


def test_a_lease_is_used_once(pair: EnginePair) -> None:
    pair.finish(pair.submit(new_prompt()))
    start = next(c for c in pair.commands if c.action == "start")
    assert start.handle is not None
    filler = pair.fillers[start.worker_id]
    outbox = filler.turn(Inbox(fill_starts=[FillStart(stream=1, handle=start.handle)]))
    (reply,) = outbox.fill_replies
    assert (reply.event.kind, reply.event.reason) == ("declined", "invalid")


def test_a_start_after_a_query_is_declined(pair: EnginePair) -> None:
    """A query about a lease that never came in uses it up: its late start finds a closed door."""
    held: list[FillCommand] = []

    def hold(command: FillCommand) -> list[FillCommand]:
        if command.action == "start" and command.worker_id == "p0":
            held.append(command)
            return []
        return [command]

    pair.on_command = hold
    request_id = pair.submit(new_prompt())
    pair.run(lambda: bool(held))
    pair.stall(6)  # no progress: on to the next candidate, the pages to quarantine
    pair.run(lambda: bool(pair.answers[request_id].finished))
    assert num_quarantined(pair.owner) == 6
    pair.clock.offset_s += 2  # the next query is due
    pair.settle()
    assert num_quarantined(pair.owner) == 0
    assert held[0].handle is not None
    start = FillStart(stream=99, handle=held[0].handle)
    (reply,) = pair.fillers["p0"].turn(Inbox(fill_starts=[start])).fill_replies
    assert (reply.event.kind, reply.event.reason) == ("declined", "invalid")


def test_quarantine_ends_by_proof_and_never_by_time(pair: EnginePair) -> None:
    prompt = new_prompt(16)
    expected = alone(pair, prompt)
    is_held, may_go_on = threading.Event(), threading.Event()
    chunks: list[Any] = []

    def hold_second(chunk: Any) -> None:
        chunks.append(chunk)
        if len(chunks) == 2:  # Of the first filler: the next one goes on.
            is_held.set()
            may_go_on.wait(60)

    for filler in pair.fillers.values():
        filler.parts.transport.shipper.before_digest = hold_second
    request_id = pair.submit(prompt)
    pair.run(is_held.is_set)
    victim = pair.commands[0].worker_id
    pair.paused.add(victim)  # stopped in the middle of the fill
    pair.stall(6)
    assert pair.finish(request_id) == [expected]
    quarantined = num_quarantined(pair.owner)
    assert quarantined > 0
    pages = {page for fill in pair.owner.fills._fills.values() for page in fill.landed}
    pair.clock.offset_s += ONE_DAY_S
    for _ in range(50):
        pair.turn()
    assert num_quarantined(pair.owner) == quarantined
    taken = take_destinations(pair.owner)
    assert not pages & set(taken)
    give_destinations(pair.owner, taken)

    epoch = pair.fillers[victim].info.epoch
    wrong = ProcessExited(worker_id=victim, epoch=epoch ^ 1, query=1)
    pair.send(exits=[wrong])
    pair.turn()
    assert num_quarantined(pair.owner) == quarantined
    pair.send(exits=[ProcessExited(worker_id=victim, epoch=epoch, query=2)])
    pair.run(lambda: num_quarantined(pair.owner) == 0)
    assert pages <= set(take_destinations(pair.owner))
    may_go_on.set()


def test_a_filler_that_owes_an_answer_is_passed_over(pair: EnginePair) -> None:
    pair.paused.add("p0")
    both = [pair.candidate("p0"), pair.candidate("p1")]
    first = pair.submit(new_prompt(), candidates=both)
    pair.run(lambda: bool(pair.commands))
    pair.stall(6)
    pair.finish(first)
    assert [fill.worker_id for fill in fills_of(pair, first)] == ["p0", "p1"]
    prompt = new_prompt()
    second = pair.submit(prompt, candidates=both)
    tokens = pair.finish(second)
    avoided, filled = fills_of(pair, second)
    assert "not asked" in avoided.failure
    assert (filled.worker_id, filled.accepted_tokens) == ("p1", 6 * PAGE)
    assert pair.owner.counters()["fills_avoided"] == 1
    assert tokens == [alone(pair, prompt)]
    pair.paused.clear()
    pair.clock.offset_s += 2
    pair.settle()
    third = pair.submit(new_prompt(), candidates=both)
    pair.finish(third)
    assert fills_of(pair, third)[0].worker_id == "p0", "it has answered"


def test_a_new_incarnation_that_answers_is_proof(pair: EnginePair) -> None:
    request_id = pair.submit(new_prompt())
    pair.run(lambda: any(event.kind == "accepted" for event in pair.events))
    victim = pair.commands[0].worker_id
    pair.paused.add(victim)
    pair.stall(6)
    pair.finish(request_id)
    assert num_quarantined(pair.owner)
    object.__setattr__(pair.fillers[victim].info, "epoch", secrets.randbits(64))
    answer = pair.fillers[victim].turn(
        Inbox(lease_queries=[LeaseQuery(query=1, lease_id=b"x" * 16)])
    )
    assert answer.lease_replies[0].state == "unknown"
    pair.clock.offset_s += 2
    pair.paused.clear()
    pair.run(lambda: num_quarantined(pair.owner) == 0)


def test_cancel_in_mid_fill_stops_the_filler(pair: EnginePair) -> None:
    is_cancelled = threading.Event()
    for filler in pair.fillers.values():  # Else all may be written before the first is told of.
        filler.parts.transport.shipper.before_digest = lambda chunk: (
            chunk.index == 0 or is_cancelled.wait(60)
        )
    request_id = pair.submit(new_prompt(10))
    pair.run(lambda: any(event.kind == "written" for event in pair.events))
    pair.send(cancels=[Cancel(gateway=1, request_id=request_id, attempt=1)])
    pair.turn()
    assert pair.answers[request_id].finished[0].reason == "cancelled"  # at once
    is_cancelled.set()
    pair.settle()
    assert any(command.action == "stop" for command in pair.commands)
    assert num_quarantined(pair.owner) == 0
    prompt = new_prompt()
    assert pair.finish(pair.submit(prompt)) == [alone(pair, prompt)]


def test_samples_of_a_cancelled_first_are_filled_too(pair: EnginePair) -> None:
    prompt = new_prompt(10)
    expected = alone(pair, prompt)
    request_id = pair.submit(prompt, sampling=SamplingParams(temperature=0.0, n=3))
    pair.run(lambda: bool(pair.commands))
    pair.send(cancels=[Cancel(gateway=1, request_id=request_id, attempt=1, sample=0)])
    answer = pair.answers[request_id]
    pair.run(lambda: len(answer.finished) == 3)
    assert answer.tokens == {1: expected, 2: expected}
    fills = [fill for end in answer.finished[1:] for fill in end.timeline.fills]
    assert sum(fill.accepted_tokens for fill in fills) > 0
    pair.settle()


@pytest.mark.parametrize("lost", ["stop", "stopped", "query"])
def test_no_lost_message_leaves_a_lease_open(pair: EnginePair, lost: str) -> None:
    """A cancelled request's lease is asked about until it is answered for."""
    times = {"stop": 1, "stopped": 1, "query": 3}[lost]
    dropped: list[str] = []

    def drop(kind: str) -> bool:
        if kind != lost or len(dropped) == times:
            return False
        dropped.append(kind)
        return True

    def pass_command(command: FillCommand) -> list[FillCommand]:
        is_lost = drop(command.action) or (lost == "query" and command.action == "stop")
        return [] if is_lost else [command]

    def pass_event(event: FillEvent) -> list[FillEvent]:
        if event.kind == "accepted":  # At once, or the pages may be there before.
            pair.send(cancels=[Cancel(gateway=1, request_id=request_id, attempt=1)])
        return [] if drop(event.kind) else [event]

    pair.on_command, pair.on_event = pass_command, pass_event
    request_id = pair.submit(new_prompt(10))
    deadline = time.monotonic() + 60
    while len(dropped) < times or pair.owner.counters()["open_fills"]:
        assert time.monotonic() < deadline
        if pair.answers[request_id].finished and not pair.owner.counters()["open_fills"]:
            request_id = pair.submit(new_prompt(10))  # All pages had come before.
        pair.clock.offset_s += 0.5
        pair.turn()
    pair.settle()
    assert pair.owner.memory.counts().quarantined == 0


def test_a_lost_done_leaves_nothing_open(pair: EnginePair) -> None:
    """All pages were accepted, so no word of the filler is needed, not even if it is gone."""
    prompt = new_prompt()
    expected = alone(pair, prompt)
    pair.on_event = lambda event: [] if event.kind == "done" else [event]
    request_id = pair.submit(prompt, candidates=[pair.candidate("p0")])
    pair.run(lambda: any(event.kind == "done" for event in pair.events))
    pair.run(lambda: pair.owner.counters()["accepted_pages"] == 6)
    pair.paused.add("p0")
    pair.stall(6)
    assert pair.finish(request_id) == [expected]
    assert pair.owner.counters()["open_fills"] == 0
    (fill,) = fills_of(pair, request_id)
    assert (fill.accepted_tokens, fill.failure) == (6 * PAGE, "")
    assert fill.computed_tokens == 6 * PAGE
    pair.paused.clear()
    pair.settle()


def test_a_broken_stream_ends_the_fill_and_is_asked_about(pair: EnginePair) -> None:
    prompt = new_prompt(10)
    expected = alone(pair, prompt)

    def break_second(event: FillEvent) -> list[FillEvent]:
        if event.kind == "written" and event.chunk == 3:
            return [FillEvent(kind="broken", message="cut")]
        return [event]

    pair.on_event = break_second
    request_id = pair.submit(prompt, candidates=[pair.candidate("p0")])
    pair.run(lambda: bool(pair.commands) and pair.commands[-1].action == "stop")
    assert pair.finish(request_id) == [expected]
    pair.clock.offset_s += 2
    pair.settle()
    (fill,) = fills_of(pair, request_id)
    assert fill.failure == "cut"
    assert fill.accepted_tokens <= 3 * PAGE


def test_a_lease_that_runs_out_is_not_written_for(pair: EnginePair) -> None:
    """Without renewals the filler stops by itself and says that nothing more can arrive."""
    pair.on_command = lambda command: [] if command.action == "renew" else [command]
    request_id = pair.submit(new_prompt(60), candidates=[pair.candidate("p0")])
    pair.run(lambda: any(event.kind == "accepted" for event in pair.events))
    pair.clock.offset_s += 11
    filler = pair.fillers["p0"]
    replies = filler.turn(Inbox()).fill_replies
    written = filler.counters()["shipped_pages"]
    assert written < 60
    deadline = time.monotonic() + 60
    while not any(reply.event.kind == "failed" for reply in replies):
        assert time.monotonic() < deadline
        replies += filler.turn(Inbox()).fill_replies
    assert replies[-1].event.is_stopped
    assert "lease ran out" in replies[-1].event.message
    assert filler.counters()["shipped_pages"] == written
    pair.stall(6)
    pair.run(lambda: bool(pair.answers[request_id].finished))


def test_a_chunk_that_is_due_after_the_lease_is_not_posted(pair: EnginePair) -> None:
    """As after a SIGCONT: chunks are queued, time has passed, and no turn has looked at it."""
    is_queued, may_go_on = threading.Event(), threading.Event()

    def hold(chunk: Any) -> None:
        is_queued.set()
        may_go_on.wait(60)

    filler = pair.fillers["p0"]
    shipper = filler.parts.transport.shipper
    shipper.before_digest = hold
    pair.on_command = lambda command: [] if command.action == "renew" else [command]
    pair.submit(new_prompt(10), candidates=[pair.candidate("p0")])
    pair.run(is_queued.is_set)
    pair.paused.add("p0")
    pair.clock.offset_s += 11
    may_go_on.set()
    deadline = time.monotonic() + 60
    while shipper._queue or shipper._reading or shipper._posted or not shipper._out:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # A renewal that comes too late does not bring the lease back.
    (lease,) = filler.filler.leases
    replies = filler.turn(Inbox(fill_renewals=[lease.handle.lease_id])).fill_replies
    while not any(reply.event.kind == "failed" for reply in replies):
        assert time.monotonic() < deadline
        replies += filler.turn(Inbox()).fill_replies
    assert [reply.event.kind for reply in replies] == ["failed"]
    assert "lease ran out" in replies[0].event.message
    assert replies[0].event.is_stopped
    assert filler.counters()["shipped_pages"] == 0
    assert list(pair.owner.parts.transport.notifications()) == []


@pytest.mark.parametrize("is_renewed", [True, False])
def test_renewals_reach_chunks_that_are_queued(pair: EnginePair, is_renewed: bool) -> None:
    is_queued, may_go_on = threading.Event(), threading.Event()

    def hold(chunk: Any) -> None:
        is_queued.set()
        may_go_on.wait(60)

    filler = pair.fillers["p0"]
    filler.parts.transport.shipper.before_digest = hold
    pair.on_command = lambda command: [] if command.action == "renew" else [command]
    pair.submit(new_prompt(10), candidates=[pair.candidate("p0")])
    pair.run(is_queued.is_set)
    pair.paused.add("p0")
    (lease,) = filler.filler.leases
    pair.clock.offset_s += 8
    if is_renewed:
        filler.turn(Inbox(fill_renewals=[lease.handle.lease_id]))
    pair.clock.offset_s += 8
    may_go_on.set()
    replies = []
    deadline = time.monotonic() + 60
    while not any(reply.event.kind in ("written", "failed") for reply in replies):
        assert time.monotonic() < deadline
        replies += filler.turn(Inbox()).fill_replies
    kinds = {reply.event.kind for reply in replies}
    assert ("written" if is_renewed else "failed") in kinds


def test_events_of_another_epoch_and_unknown_leases_are_dropped(pair: EnginePair) -> None:
    pair.on_event = lambda event: (
        [replace(event, filler_epoch=event.filler_epoch ^ 1)]
        if event.kind == "accepted"
        else [event]
    )
    prompt = new_prompt()
    expected = alone(pair, prompt)
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == [expected]
    assert [f.accepted_tokens for f in fills_of(pair, request_id)] == [0, 0]
    pair.clock.offset_s += 2
    pair.settle()


@few_ways()
@pytest.mark.parametrize(
    "lie",
    [
        {"end_token": 10 * PAGE},
        {"end_token": PAGE + 1},
        {"start_token": PAGE},
        {"digests": []},
        {"digests": [1, 2, 3]},
    ],
)
def test_malformed_reports_end_the_fill(pair: EnginePair, lie: dict[str, Any]) -> None:
    receiver = pair.owner.parts.transport._receiver
    if receiver is not None:  # Otherwise the notification may tell the truth before.
        receiver._target = replace(receiver.target(), max_notified_digests=0)
    prompt = new_prompt()
    expected = alone(pair, prompt)
    pair.on_event = lambda event: (
        [replace(event, **lie)] if event.kind == "written" and event.chunk == 0 else [event]
    )
    request_id = pair.submit(prompt, candidates=[pair.candidate("p0")])
    assert pair.finish(request_id) == [expected]
    failure = fills_of(pair, request_id)[0].failure
    assert "malformed" in failure or "does not follow" in failure
    pair.clock.offset_s += 2
    pair.settle()


def test_data_is_read_from_the_pool_as_its_stream_takes_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached prompt is all there at once; what its owner does not read stays where it is."""
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock)
    monkeypatch.setattr(filler_module, "MAX_DATA_CHUNK_BYTES", owner.info.page_bytes)
    filler = make_engine(model_dir, "prefill", clock, worker_id="p0")
    pair = EnginePair(owner, [filler], clock)
    prompt = new_prompt(10)
    expected = pair.finish(pair.submit(prompt))
    pair.settle()
    start = next(command for command in pair.commands if command.action == "start")
    assert start.handle is not None
    handle = replace(start.handle, lease_id=secrets.token_bytes(16))
    replies = filler.turn(Inbox(fill_starts=[FillStart(stream=7, handle=handle)])).fill_replies
    shipped = filler.counters()["shipped_pages"]
    for num_pages in range(1, 11):
        deadline = time.monotonic() + 60
        while filler.counters()["shipped_pages"] < shipped + num_pages:
            assert time.monotonic() < deadline
            replies += filler.turn(Inbox()).fill_replies
        for _ in range(20):  # a stream that has taken less than all gets nothing more
            taken = Inbox(taken_fill_events=[(7, len(replies) - 1)])
            replies += filler.turn(taken).fill_replies
            time.sleep(0.001)
        assert filler.counters()["shipped_pages"] == shipped + num_pages
        if num_pages == 5:
            counts = filler.memory.counts()
            assert counts.used == 5, "what is to be shipped yet stays"
        inbox = Inbox(taken_fill_events=[(7, len(replies))])
        replies += filler.turn(inbox).fill_replies
    assert replies[-1].event.kind == "done"
    pages = b"".join(reply.event.data for reply in replies if reply.event.kind == "data")
    assert len(pages) == 10 * owner.info.page_bytes

    # A lease that is stopped lets go of what it has not shipped.
    handle = replace(start.handle, lease_id=secrets.token_bytes(16))
    filler.turn(Inbox(fill_starts=[FillStart(stream=8, handle=handle)]))
    replies = filler.turn(Inbox(fill_stops=[handle.lease_id])).fill_replies
    deadline = time.monotonic() + 60
    while not any(reply.event.kind == "stopped" for reply in replies):
        assert time.monotonic() < deadline
        replies += filler.turn(Inbox()).fill_replies
    pair.settle()
    owner.memory.flush_cache()
    assert pair.finish(pair.submit(prompt)) == expected
    pair.close()
