"""Client processes: each sends its share of the requests on time, and records the answers."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from serving.load import LoadError, Raw, new_runner
from serving.rest_client import RestClient, messages

from open_loop.workload import Turn, Visit, prompt_of

LEAD_S = 2.0
"""Time for the processes to start before the first request."""


@dataclass(slots=True)
class Target:
    """A server, and how requests are made to it."""

    url: str
    """Base URL without /v1."""
    vocabulary: int
    """Made-up prompts have token ids below this."""
    timeout_s: float
    wants_ids: bool = True
    """Ask for the answers' token ids (`return_token_ids`, which vLLM has too): a session's next
    turn then continues its answer; without, it continues made-up tokens in its place.
    """


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds since the start of the run."""

    due_s: float
    """Time at which the request was due."""
    sent_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    turn: int = 0
    """The request's number in its session, from 0."""
    events_s: list[float] = field(default_factory=list)
    """Arrival of each event with tokens."""
    cached_tokens: int = 0
    """Prompt tokens that the server reports as cached."""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time from when the request was due to its first token."""
        return self.events_s[0] - self.due_s

    @property
    def mean_itl_s(self) -> float:
        """Mean time between tokens; 0 with one token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.events_s[-1] - self.events_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between events."""
        return [b - a for a, b in zip(self.events_s, self.events_s[1:], strict=False)]


def run(visits: Sequence[Visit], target: Target, num_processes: int) -> list[Outcome]:
    """Sends all requests; returns their outcomes, in no order.

    Raises:
        OSError: No server answers at the URL.
    """
    RestClient(target.url)
    context = multiprocessing.get_context("spawn")
    shares = [list(visits[index::num_processes]) for index in range(num_processes)]
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        # Makes every process start before the start time is set.
        list(pool.map(time.sleep, [0.2] * num_processes))
        start = time.monotonic() + LEAD_S
        found = pool.map(_run_share, shares, [target] * num_processes, [start] * num_processes)
        return [outcome for outcomes in found for outcome in outcomes]


def _run_share(visits: list[Visit], target: Target, start: float) -> list[Outcome]:
    client = RestClient(target.url)
    offset = time.perf_counter() - time.monotonic()
    gc.disable()  # A collection would show up as a late event.
    try:
        with new_runner() as runner:
            return runner.run(_Share(client, target, start + offset).run(visits))
    finally:
        gc.enable()


class _Share:
    """The requests of one process."""

    def __init__(self, client: RestClient, target: Target, start: float) -> None:
        self._client = client
        self._target = target
        self._start = start
        self._outcomes: list[Outcome] = []

    async def run(self, visits: Sequence[Visit]) -> list[Outcome]:
        # First requests are made in advance, so that a burst is not delayed by making prompts.
        firsts = [
            self._encode(prompt_of(visit.turns[0], self._target.vocabulary), visit.turns[0])
            for visit in visits
        ]
        pairs = zip(visits, firsts, strict=True)
        await asyncio.gather(*(self._visit(visit, *first) for visit, first in pairs))
        return self._outcomes

    async def _visit(self, visit: Visit, history: list[int], body: bytes) -> None:
        due_s = visit.at_s
        for number, turn in enumerate(visit.turns):
            if number:
                due_s = self._now() + turn.pause_s
                new = [*history, *prompt_of(turn, self._target.vocabulary)]
                history, body = self._encode(new, turn)
            # Event loops count in milliseconds and may wake early.
            while (left_s := due_s - self._now()) > 0.0:
                await asyncio.sleep(left_s)
            outcome = Outcome(due_s, prompt_tokens=len(history), turn=number)
            self._outcomes.append(outcome)
            answer = await self._ask(body, turn, outcome)
            if outcome.error:
                return
            history = [*history, *answer]

    def _encode(self, prompt: list[int], turn: Turn) -> tuple[list[int], bytes]:
        more: dict[str, Any] = {"return_token_ids": True} if self._target.wants_ids else {}
        return prompt, self._client.encode(prompt, turn.output_tokens, **more)

    async def _ask(self, body: bytes, turn: Turn, outcome: Outcome) -> list[int]:
        """Sends one request; returns the tokens of its answer."""
        raw = Raw()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._client.exchange(body, raw, None)
            outcome.sent_s = raw.sent_s - self._start
            return self._read(raw, turn, outcome)
        except TimeoutError:
            outcome.error = f"no end within {self._target.timeout_s:g} s"
        except (LoadError, OSError, json.JSONDecodeError) as error:
            outcome.error = str(error) or type(error).__name__
        return []

    def _read(self, raw: Raw, turn: Turn, outcome: Outcome) -> list[int]:
        ids: list[int] = []
        for message, time_s in messages(raw):
            if "error" in message:
                raise LoadError(f"{message['error']}")
            if usage := message.get("usage"):
                outcome.output_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                outcome.cached_tokens = details.get("cached_tokens") or 0
            for choice in message.get("choices", []):
                new = choice.get("token_ids") or []
                ids += new
                if new or choice.get("text"):
                    outcome.events_s.append(time_s - self._start)
        if outcome.output_tokens != turn.output_tokens or not outcome.events_s:
            raise LoadError(f"{outcome.output_tokens} tokens, {turn.output_tokens} were wanted")
        return ids or prompt_of(Turn(turn.seed + 1, turn.output_tokens, 0), self._target.vocabulary)

    def _now(self) -> float:
        return time.perf_counter() - self._start
