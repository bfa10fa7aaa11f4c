"""Streams whose decode workers are killed, and their outcomes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
from weft.v1 import common_pb2, gateway_pb2

Kind = Literal["worker", "engine", "server"]
KINDS: tuple[Kind, ...] = ("worker", "engine", "server")
"""Processes of a worker to kill: both, or one (the other follows by itself)."""
TIMEOUT_S = 240.0
REGEX = "([a-f0-9]{4,12} ){30,200}"
"""Matches are so long that the constraint holds for the whole stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for one or more samples."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    num_samples: int = 1
    stop: str = ""
    """A stop string; empty = none."""
    regex: str = ""
    """Regular expression that the text must match; empty: none."""
    speculate: bool = True
    """Workers may draft for it, if they draft."""


@dataclass(slots=True)
class Outcome:
    """Result of one stream."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """Token ids by sample."""
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    error: str = ""
    lost: list[common_pb2.LostAttempt] = field(default_factory=list)
    """Lost attempts, from the timeline."""

    def is_same(self, other: Outcome) -> bool:
        """Whether the client got the same."""
        return (self.ids, self.texts, self.reasons) == (other.ids, other.texts, other.reasons)


def make_asks(
    count: int, max_tokens: int, vocabulary: range, draw: random.Random, stops: Sequence[str] = ()
) -> list[Ask]:
    """Greedy and seeded, alone and in pairs, with and without stop strings and constraints.

    Args:
        count: Number of requests.
        max_tokens: Of each sample.
        vocabulary: Token ids of prompts.
        draw: Source of all draws.
        stops: Stop strings to choose from.
    """
    return [
        Ask(
            prompt=tuple(draw.choices(vocabulary, k=draw.randint(3, 150))),
            max_tokens=max_tokens,
            temperature=0.0 if number % 2 else 1.0,
            seed=draw.getrandbits(60),
            num_samples=2 if number % 4 == 0 else 1,
            stop=draw.choice(stops) if stops and number % 3 == 0 else "",
            regex=REGEX if number % 8 == 5 else "",
        )
        for number in range(count)
    ]


async def stream(stub: Any, ask: Ask, on_tokens: Callable[[int], None]) -> Outcome:
    """Sends a request over gRPC and reads its stream to the end.

    Args:
        stub: Of a GatewayService.
        ask: What is asked.
        on_tokens: Told how many tokens came.
    """
    outcome = Outcome()
    stop = common_pb2.StopCriteria(max_tokens=ask.max_tokens, ignore_eos=True)
    if ask.stop:
        stop.stop.append(ask.stop)
    request = gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=ask.prompt),
        sampling=common_pb2.SamplingParams(
            temperature=ask.temperature,
            seed=ask.seed,
            n=ask.num_samples,
            speculate=ask.speculate,
        ),
        stop=stop,
        stream=True,
    )
    if ask.regex:
        request.sampling.constraint.regex = ask.regex
    try:
        async for message in stub.Complete(request, timeout=TIMEOUT_S):
            for choice in message.choices:
                outcome.ids.setdefault(choice.index, []).extend(choice.token_ids)
                outcome.texts[choice.index] = outcome.texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    outcome.reasons[choice.index] = choice.finish_reason
                on_tokens(len(choice.token_ids))
            outcome.lost += message.timeline.lost_attempts
    except grpc.aio.AioRpcError as error:
        outcome.error = f"{error.code().name}: {error.details()}"
    return outcome


async def stream_all(
    stub: Any,
    asks: Sequence[Ask],
    at_tokens: int | None = None,
    act: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Runs all streams at once.

    Args:
        stub: Of a GatewayService.
        asks: One stream each.
        at_tokens: Number of tokens over all streams after which `act` is called.
        act: Called once.
    """
    num_tokens = 0
    is_done = False

    def on_tokens(count: int) -> None:
        nonlocal num_tokens, is_done
        num_tokens += count
        if act is not None and at_tokens is not None and num_tokens >= at_tokens and not is_done:
            is_done = True
            act()

    return await asyncio.gather(*(stream(stub, ask, on_tokens) for ask in asks))


def kill(ready: Mapping[str, Any], kind: Kind) -> None:
    """Sends SIGKILL to processes of a worker.

    Args:
        ready: Content of its ready file.
        kind: Which processes.
    """
    names = {"worker": ("pid", "engine_pid"), "engine": ("engine_pid",), "server": ("pid",)}[kind]
    for name in names:
        os.kill(ready[name], signal.SIGKILL)
