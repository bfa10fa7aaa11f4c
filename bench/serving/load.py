"""The load generator: requests at once, or some that arrive while others run.

It shares the cores with what it measures, so while a run lasts it only keeps bytes and the times
of their arrival; they are read afterwards. What it costs is measured and printed.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from serving.answers import Answer, Arrivals, Outcome

TIMEOUT_S = 300.0
T = TypeVar("T")


class LoadError(Exception):
    """The server's answer is not what was asked for."""


@dataclass(slots=True)
class Raw:
    """One raw answer. Times are seconds of `time.perf_counter`."""

    sent_s: float = 0.0
    pieces: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Times at which pieces arrived."""


class Client(Protocol):
    """A client of one of the mesh's faces."""

    def encode(self, prompt: list[int], num_tokens: int) -> bytes:
        """A greedy streamed completion of exactly `num_tokens`."""
        ...

    async def exchange(self, body: bytes, raw: Raw, on_piece: Callable[[], None] | None) -> None:
        """Sends a request and collects its answer to the end.

        Args:
            body: From `encode`.
            raw: Filled.
            on_piece: Called after each piece that comes.

        Raises:
            LoadError, OSError: It broke.
        """
        ...

    def decode(self, raw: Raw, num_tokens: int) -> Answer:
        """Decodes an answer.

        Raises:
            LoadError: It is an error, broke off, or has not `num_tokens` tokens.
        """
        ...


def new_runner() -> asyncio.Runner:
    """An event loop for clients, the fast kind where there is one."""
    with suppress(ImportError):
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


class LoadSystem:
    """A face of the mesh under load.

    Args:
        name: In tables.
        client: How to talk to it.
        executor: Where its connections live.
    """

    def __init__(self, name: str, client: Client, executor: asyncio.Runner) -> None:
        self.name = name
        self._client = client
        self._executor = executor
        self.cpu_s = 0.0
        """CPU seconds of this process while it waited for answers."""
        self.wall_s = 0.0
        """Wall-clock seconds of that waiting."""

    def close(self) -> None:
        """Does nothing: nothing is held."""

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Outcome:
        bodies = [self._client.encode(prompt, num_tokens) for prompt in prompts]
        raws = [Raw() for _ in bodies]

        async def run() -> None:
            pairs = zip(bodies, raws, strict=True)
            await asyncio.gather(*(self._client.exchange(b, raw, None) for b, raw in pairs))

        wall_s = self._timed(run())
        return Outcome(wall_s, [self._client.decode(raw, num_tokens) for raw in raws])

    def run_with_arrivals(
        self, prompts: Sequence[list[int]], num_tokens: int, arrivals: Arrivals
    ) -> tuple[Outcome, list[Answer]]:
        bodies = [self._client.encode(prompt, num_tokens) for prompt in prompts]
        late_bodies = [self._client.encode(prompt, 1) for prompt in arrivals.prompts]
        raws, late_raws = [Raw() for _ in bodies], [Raw() for _ in late_bodies]
        num_arrived = 0

        async def run() -> None:
            nonlocal num_arrived
            all_began = asyncio.Event()

            def on_piece() -> None:
                if min(len(raw.pieces) for raw in raws) >= arrivals.num_events_before:
                    all_began.set()

            pairs = zip(bodies, raws, strict=True)
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._client.exchange(body, raw, on_piece))
                    for body, raw in pairs
                ]
                for task in running:
                    task.add_done_callback(lambda _: all_began.set())
                await all_began.wait()
                send_s = time.perf_counter()
                for body, raw in zip(late_bodies, late_raws, strict=True):
                    await asyncio.sleep(max(0.0, send_s - time.perf_counter()))
                    if any(task.done() for task in running):
                        break
                    num_arrived += 1
                    tasks.create_task(self._client.exchange(body, raw, None))
                    send_s += arrivals.interval_s

        wall_s = self._timed(run())
        answers = [self._client.decode(raw, num_tokens) for raw in raws]
        late = [self._client.decode(raw, 1) for raw in late_raws[:num_arrived]]
        return Outcome(wall_s, answers), late

    def _timed(self, work: Coroutine[Any, Any, None]) -> float:
        """Runs it without pauses for garbage; wall time in seconds."""

        async def bounded() -> None:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await work
            except TimeoutError:
                raise LoadError(f"no end after {TIMEOUT_S:.0f} s") from None

        gc.collect()
        gc.disable()
        cpu_s, started_s = time.process_time(), time.perf_counter()
        try:
            self._executor.run(bounded())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            wall_s = time.perf_counter() - started_s
            self.cpu_s += time.process_time() - cpu_s
            self.wall_s += wall_s
            gc.enable()
        return wall_s
