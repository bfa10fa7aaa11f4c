"""Next tokens of several steps leave the engine together; what a client waits for never waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from weft.contract.submits import (
    Accepted,
    Failed,
    Failure,
    Finished,
    GatewayBatch,
    Pong,
    Preempted,
    Tokens,
)
from weft.contract.timeline import Timeline
from weft.engine.loop.stream_pace import MANY_SAMPLES, MAX_INTERVAL_S, SAMPLE_S, StreamPace

NEXT = GatewayBatch(gateway=1, tokens=[Tokens("r", 1, 0, 7, [3], [])])
FINISHED = Finished(
    request_id="r",
    attempt=1,
    sample=0,
    reason="stop",
    stop_token_id=None,
    completion_tokens=1,
    cached_prompt_tokens=0,
    timeline=Timeline(submitted_at=0.0),
)
FAILED = Failed(request_id="n", attempt=1, failure=Failure(reason="INTERNAL", message="why"))
URGENT: dict[str, Callable[[GatewayBatch], GatewayBatch]] = {
    "first tokens": lambda batch: replace(batch, has_first_tokens=True),
    "accepted": lambda batch: replace(batch, accepted=[Accepted(request_id="n", attempt=1)]),
    "computed here": lambda batch: replace(batch, computed_here=[("n", 1)]),
    "preempted": lambda batch: replace(
        batch, preempted=[Preempted(request_id="n", attempt=1, sample=0)]
    ),
    "finished": lambda batch: replace(batch, finished=[FINISHED]),
    "failed": lambda batch: replace(batch, failed=[FAILED]),
    "pong": lambda batch: replace(batch, pongs=[Pong(nonce=3, unknown=[])]),
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", URGENT)
def test_what_must_not_wait_takes_the_gathered_tokens_along(kind: str) -> None:
    clock = Clock()
    pace = StreamPace(1.0, clock)
    assert pace.should_flush([NEXT], 1)
    gathered = [NEXT] * random.randint(1, 5)
    assert not pace.should_flush(gathered, 1)
    urgent = URGENT[kind](NEXT)
    assert pace.should_flush([*gathered, urgent], 1)
    assert not pace.should_flush([NEXT], 1), "what comes later gathers again"


def test_an_interval_holds_from_message_to_message() -> None:
    clock = Clock()
    interval_s = random.uniform(0.01, 1.0)
    pace = StreamPace(interval_s, clock)
    assert pace.should_flush([NEXT], 1)
    clock.now += 0.9 * interval_s
    assert not pace.should_flush([NEXT], 1)
    assert pace.should_flush([], 1), "nothing waits"
    clock.now += 0.2 * interval_s
    assert pace.should_flush([NEXT], 1)
    assert not pace.should_flush([NEXT], 1)


def test_without_an_interval_every_step_goes_out() -> None:
    pace = StreamPace(0.0, Clock())
    assert all(pace.should_flush([NEXT], random.randint(1, 1000)) for _ in range(5))


def test_by_itself_few_samples_never_wait_and_many_for_some_computing_or_long_enough() -> None:
    clock, computed = Clock(), Clock()
    pace = StreamPace(None, clock, computed)
    for samples in range(1, 3 * MANY_SAMPLES):
        computed.now += 1.0
        assert pace.should_flush([NEXT], samples)
        if samples < MANY_SAMPLES:
            assert pace.should_flush([NEXT], samples)
            continue
        computed.now += 0.9 * samples * SAMPLE_S
        clock.now += 0.9 * MAX_INTERVAL_S
        assert not pace.should_flush([NEXT], samples)
        if random.random() < 0.5:
            computed.now += 0.2 * samples * SAMPLE_S
        else:
            clock.now += 0.2 * MAX_INTERVAL_S
        assert pace.should_flush([NEXT], samples)
        assert not pace.should_flush([NEXT], samples)
