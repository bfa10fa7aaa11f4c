"""Digests that travel with the notification: chunks are accepted without their events."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.contract.fills import FillerEvent
from weft.contract.handle import FillEvent
from weft.pages.transfer.chunks import ShipChunk
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.models.tiny_models import make_tiny

PAGE = 8
NUM_PAGES = 6
NIXL = [way for way in WAYS if way.values[0]["transport"] == "nixl"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed=random.randrange(2**31))


@pytest.fixture(params=NIXL)
def pair(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[EnginePair]:
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock, **request.param)
    filler = make_engine(model_dir, "prefill", clock, **request.param, worker_id="p0")
    pair = EnginePair(owner, [filler], clock)
    yield pair
    pair.close()


def new_prompt() -> list[int]:
    return [random.randrange(3, 500) for _ in range(NUM_PAGES * PAGE + 3)]


def alone(pair: EnginePair, prompt: list[int]) -> list[int]:
    """What the owner generates by itself, from an empty cache."""
    (tokens,) = pair.finish(pair.submit(prompt, candidates=[]))
    pair.owner.memory.flush_cache()
    return tokens


def fills_of(pair: EnginePair, request_id: str) -> list[Any]:
    return pair.answers[request_id].finished[0].timeline.fills


def tell(pair: EnginePair, events: list[FillEvent]) -> None:
    """Brings the owner events of the first lease."""
    lease_id = pair.commands[0].lease_id
    pair.send(filler_events=[FillerEvent(lease_id=lease_id, event=event) for event in events])


def offer_no_digests(pair: EnginePair) -> None:
    """Makes the owner one that reads no digests in notifications."""
    receiver = pair.owner.parts.transport._receiver
    assert receiver is not None
    receiver._target = replace(receiver.target(), max_notified_digests=0)


def test_notifications_alone_fill_a_prompt(pair: EnginePair) -> None:
    prompt = new_prompt()
    expected = alone(pair, prompt)
    pair.on_event = lambda event: [] if event.kind == "written" else [event]
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == [expected]
    (fill,) = fills_of(pair, request_id)
    assert (fill.accepted_tokens, fill.failure) == (NUM_PAGES * PAGE, "")
    assert fill.computed_tokens == NUM_PAGES * PAGE
    pair.settle()


def test_the_event_of_an_accepted_chunk_is_not_stale(pair: EnginePair) -> None:
    """It may come before the notification or long behind it."""
    prompt = new_prompt()
    expected = alone(pair, prompt)
    held: list[FillEvent] = []

    def hold(event: FillEvent) -> list[FillEvent]:
        if event.kind == "written":
            held.append(event)
            return []
        return [event] if event.kind == "accepted" else [*held, event]

    pair.on_event = hold
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == [expected]
    pair.settle()
    assert [fill.failure for fill in fills_of(pair, request_id)] == [""]
    assert pair.owner.fills.counters.stale_events == 0


def test_an_owner_that_reads_no_digests_gets_none(pair: EnginePair) -> None:
    prompt = new_prompt()
    expected = alone(pair, prompt)
    offer_no_digests(pair)
    held: list[FillEvent] = []

    def hold(event: FillEvent) -> list[FillEvent]:
        held.append(event)
        return [event] if event.kind == "accepted" else []

    pair.on_event = hold
    request_id = pair.submit(prompt)
    pair.run(lambda: held and held[-1].kind == "done")
    pair.stall(0)
    (fill,) = pair.owner.fills.open_fills
    assert fill.record.accepted_tokens == 0
    assert sum(chunk.is_notified for chunk in fill.chunks.values()) == len(fill.chunks) > 1
    tell(pair, [event for event in held if event.kind != "accepted"])
    assert pair.finish(request_id) == [expected]
    pair.settle()


def test_a_filler_that_contradicts_itself_is_not_trusted(pair: EnginePair) -> None:
    prompt = new_prompt()
    expected = alone(pair, prompt)
    shipper = pair.fillers["p0"].parts.transport.shipper
    ship, kept = shipper.ship, []

    def ship_first(chunk: ShipChunk) -> None:
        """Keeps all chunks but the first one, so that the lease stays open."""
        if chunk.index:
            kept.append(chunk)
        else:
            ship(chunk)

    shipper.ship = ship_first  # type: ignore[method-assign]
    told: list[FillEvent] = []

    def hold(event: FillEvent) -> list[FillEvent]:
        if event.kind == "written":
            told.append(event)
        return [] if event.kind == "written" else [event]

    pair.on_event = hold
    request_id = pair.submit(prompt)
    pair.run(lambda: told and any(fill.next_chunk for fill in pair.owner.fills.open_fills))
    lie = replace(told[0], digests=[digest ^ 1 for digest in told[0].digests])
    tell(pair, [lie])
    assert pair.finish(request_id) == [expected]
    (fill,) = fills_of(pair, request_id)
    assert (fill.accepted_tokens, fill.failure) == (PAGE, "malformed report of chunk 0")
    for chunk in kept:
        ship(chunk)
    pair.clock.offset_s += 2
    pair.settle()
