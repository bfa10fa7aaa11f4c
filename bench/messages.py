"""Processor time of a Session's messages at both ends, gateway and decode worker.

A submit has a prompt of 64k tokens in its parts, 300 entries of logit_bias and `n`: built and
packed by the gateway, then read by a Session up to the engine. An event has 256 tokens, one of each
of as many samples: built and packed by the worker, then read by the gateway.

    python bench/messages.py                            about a minute
    python bench/messages.py --baseline ../old-tree     beside another working tree, in turns
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from harness import Harness, Run, in_turns, spread, timed
from weft.contract.submits import GatewayBatch, TokenColumns
from weft.decode.events import batch_to_proto
from weft.decode.session import Session
from weft.v1 import decode_pb2

PROMPT_TOKENS = 65_536
PART_TOKENS = 32_768
SAMPLES = 256
CALLS = 20
"""Calls that are timed together."""

harness = Harness(__file__, __doc__, repeats=41)


class Engine:
    """Takes what a Session sends."""

    loop_age_s = 0.0

    def __init__(self) -> None:
        self.num_submits = 0

    def send(self, inbox: Any) -> None:
        self.num_submits += len(inbox.submits)


def submit_messages() -> list[bytes]:
    """A submit as a gateway sends it."""
    rng = random.Random(1)
    ids = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    submit = decode_pb2.Submit(
        request_id="0123456789abcdef",
        attempt=1,
        prompt={"ids": ids[:PART_TOKENS]},
        prompt_length=PROMPT_TOKENS,
        sampling={
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "seed": 7,
            "n": 4,
            "logit_bias": {token: rng.uniform(-100, 100) for token in range(300)},
        },
        stop={"max_tokens": 100, "stop_token_ids": [1, 2]},
        first_token_timeout={"seconds": 60},
        total_timeout={"seconds": 600},
        prefill_candidates=[
            {"worker_id": f"prefill-{n}", "address": f"10.0.0.{n}:7001", "tokens_per_second": 1e4}
            for n in range(4)
        ],
    )
    part = decode_pb2.PromptPart(
        request_id=submit.request_id, attempt=1, tokens={"ids": ids[PART_TOKENS:]}
    )
    requests = (
        decode_pb2.SessionRequest(submit=submit),
        decode_pb2.SessionRequest(prompt_part=part),
    )
    return [request.SerializeToString() for request in requests]


async def read_all(messages: list[bytes]) -> None:
    """Has a Session read the messages `CALLS` times."""
    engine = Engine()
    session = Session(1, engine, "decode-0", lambda *given: None, 1.0)  # type: ignore[arg-type]

    async def arriving() -> AsyncIterator[decode_pb2.SessionRequest]:
        for _ in range(CALLS):
            for message in messages:
                yield decode_pb2.SessionRequest.FromString(message)

    await session.read(arriving())
    assert engine.num_submits == CALLS


def send_and_read(batch: GatewayBatch) -> None:
    """Sends an event's tokens and reads them `CALLS` times."""
    for _ in range(CALLS):
        for event in batch_to_proto(batch, "decode-0", 0.0):
            arrived = decode_pb2.SessionEvent.FromString(event.SerializeToString())
            assert sum(len(tokens.ids) for tokens in arrived.tokens) == SAMPLES


@harness.part
def submit(run: Run) -> None:
    """The worker's end of a submit."""
    messages = submit_messages()
    ways = {"submit": lambda: timed(lambda: asyncio.run(read_all(messages)), time.process_time)}
    found = in_turns(ways, run.options.repeats)
    run.row(message="submit, read", cpu_us=spread(found["submit"], 1e6 / CALLS))


@harness.part
def tokens(run: Run) -> None:
    """Both ends of a step's event."""
    columns = TokenColumns(
        [f"{number:016x}" for number in range(SAMPLES)],
        [1] * SAMPLES,
        [0] * SAMPLES,
        [100] * SAMPLES,
        [random.randrange(100_000) for _ in range(SAMPLES)],
        {},
    )
    batch = GatewayBatch(gateway=1, columns=[columns])
    ways = {"tokens": lambda: timed(partial(send_and_read, batch), time.process_time)}
    found = in_turns(ways, run.options.repeats)
    run.row(message=f"{SAMPLES} tokens", cpu_us=spread(found["tokens"], 1e6 / CALLS))


if __name__ == "__main__":
    sys.exit(harness.main())
