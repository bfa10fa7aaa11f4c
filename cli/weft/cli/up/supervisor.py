"""Starts services, restarts those that die, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from weft.cli.up.liveness import IsAlive, wait_stalled
from weft.cli.up.process import (
    ExitedEarly,
    ServiceProcess,
    ServiceSpec,
    describe_status,
)

ExitReporter = Callable[[str, int], Awaitable[None]]
"""Informs the other workers that incarnation `epoch` of worker `worker_id` is gone."""

_KILL_MARGIN_S = 2.0


class Reporter:
    """Receives events of the services. Subclasses override those that they report."""

    def starting(self, name: str) -> None:
        """Called when a process was started."""

    def loading(self, name: str, done: int, total: int, what: str) -> None:
        """Called with the progress of a phase of the start, such as loading the model; total 0:
        unknown.
        """

    def ready(self, name: str, seconds: float) -> None:
        """Called when a service serves, `seconds` after its start."""

    def died(self, name: str, how: str) -> None:
        """Called when a process ended without an order."""

    def stalled(self, name: str, seconds: float) -> None:
        """Called when a service was not alive for so long that it is killed, to be restarted."""

    def restarting(self, name: str, delay_s: float) -> None:
        """Called when a service will be restarted after a delay."""

    def failed(self, name: str, how: str) -> None:
        """Called when a service ended before it was ready for the first time."""

    def stopping(self, grace_s: float) -> None:
        """Called when a signal ends the mesh. Running requests have `grace_s` to end."""

    def killed(self, name: str, *, is_late: bool) -> None:
        """Called when a process was killed. `is_late`: it did not stop in time; else the user asked
        to end at once.
        """


class RestartBackoff:
    """Delays between restarts, with jitter. Each death soon after a start doubles the delay."""

    def __init__(self, first_s: float = 0.5, most_s: float = 30.0, calm_s: float = 60.0) -> None:
        """A service that ran for `calm_s` begins again at `first_s`."""
        self._first_s, self._most_s, self._calm_s = first_s, most_s, calm_s
        self._next_s = first_s

    def after(self, uptime_s: float) -> float:
        """Delay before the next start of a service that ran for `uptime_s`."""
        if uptime_s >= self._calm_s:
            self._next_s = self._first_s
        delay_s = self._next_s * random.uniform(0.8, 1.2)
        self._next_s = min(self._most_s, 2 * self._next_s)
        return delay_s


class Supervisor:
    """Owns the child processes of a mesh, from `start` to `stop`.

    Args:
        report_exit: Called for workers that are certainly gone.
        make_backoff: Makes the delays of one service's restarts.
        is_alive: Returns whether a service is alive; None: running processes are never killed.
        stall_timeout_s: A service that was not alive for longer is killed; None: never.
        ready_timeout_s: A service that does not serve within this time of its start is killed;
            None: never.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        reporter: Reporter,
        report_exit: ExitReporter,
        make_backoff: Callable[[], RestartBackoff] = RestartBackoff,
        *,
        is_alive: IsAlive | None = None,
        stall_timeout_s: float | None = None,
        ready_timeout_s: float | None = None,
    ) -> None:
        self._specs = list(specs)
        self._reporter = reporter
        self._report_exit = report_exit
        self._make_backoff = make_backoff
        self._is_alive = is_alive
        self._stall_timeout_s = stall_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._running: dict[str, ServiceProcess] = {}
        self._keepers: asyncio.TaskGroup | None = None
        """Group of the tasks of `watch`; None: it does not run."""
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self.deaths: Counter[str] = Counter()
        """Times that each service ended without an order."""

    def process(self, name: str) -> ServiceProcess | None:
        """The running incarnation of a service; None between two of them."""
        return self._running.get(name)

    async def start(self) -> None:
        """Starts everything at once and returns when all services are ready. Raises ExitedEarly if
        a service ended before it was ready, or was not ready in time; the caller must still call
        `stop`.
        """
        ready = [asyncio.create_task(self._start(spec)) for spec in self._specs]
        try:
            await asyncio.gather(*ready)
        except ExitedEarly as error:
            self._reporter.failed(error.name, error.how)
            raise
        finally:
            await _cancel(ready)

    async def _start(self, spec: ServiceSpec) -> None:
        process = ServiceProcess(spec)
        self._running[spec.name] = process
        self._reporter.starting(spec.name)
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await process.wait_ready(partial(self._reporter.loading, spec.name))
        except ExitedEarly:
            del self._running[spec.name]
            raise
        except TimeoutError:
            process.kill()
            await process.gone()
            del self._running[spec.name]
            how = f"was not ready after {self._ready_timeout_s:g} s and is killed"
            raise ExitedEarly(spec.name, how) from None
        self._reporter.ready(spec.name, process.uptime_s)

    async def watch(self) -> None:
        """Restarts services that die; runs until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as self._keepers:
                for spec in self._specs:
                    self._keep(spec)
                await asyncio.Event().wait()
        finally:
            self._keepers = None

    @property
    def is_watching(self) -> bool:
        """Whether services may come and go."""
        return self._keepers is not None

    def _keep(self, spec: ServiceSpec, *, is_new: bool = False) -> None:
        assert self._keepers is not None, "services come and go while they are watched"
        self._keeping[spec.name] = self._keepers.create_task(self._keep_alive(spec, is_new=is_new))

    def add(self, spec: ServiceSpec) -> None:
        """Starts one more service, while `watch` runs. It is restarted as the others are."""
        self._specs.append(spec)
        self._keep(spec, is_new=True)

    async def remove(self, name: str, grace_s: float) -> None:
        """Stops a service for good, and returns when its process is gone. It is killed if that
        takes longer than `grace_s`.
        """
        self._specs = [spec for spec in self._specs if spec.name != name]
        if (keeper := self._keeping.pop(name, None)) is not None:
            await _cancel([keeper])
        process = self._running.get(name)
        if process is None:
            return
        process.send(signal.SIGTERM)
        await self._wait_or_kill([process], grace_s + _KILL_MARGIN_S, asyncio.Event())
        self._running.pop(name, None)
        await self._tell(process)

    async def _keep_alive(self, spec: ServiceSpec, *, is_new: bool) -> None:
        backoff = self._make_backoff()
        if is_new:
            await self._try_start(spec)
        while True:
            uptime_s = 0.0
            if (process := self._running.get(spec.name)) is not None:
                status = await self._until_gone(process)
                uptime_s = process.uptime_s
                del self._running[spec.name]
                why = process.last_error() if status > 0 else ""
                self._died(spec.name, ": ".join(filter(None, (describe_status(status), why))))
                await self._tell(process)
            delay_s = backoff.after(uptime_s)
            self._reporter.restarting(spec.name, delay_s)
            await asyncio.sleep(delay_s)
            await self._try_start(spec)

    async def _try_start(self, spec: ServiceSpec) -> None:
        try:
            await self._start(spec)
        except ExitedEarly as error:
            self._died(spec.name, error.how)

    def _died(self, name: str, how: str) -> None:
        self.deaths[name] += 1
        self._reporter.died(name, how)

    async def _until_gone(self, process: ServiceProcess) -> int:
        stalling = asyncio.create_task(self._kill_stalled(process))
        try:
            return await process.gone()
        finally:
            await _cancel([stalling])

    async def _kill_stalled(self, process: ServiceProcess) -> None:
        ask, timeout_s, ready = self._is_alive, self._stall_timeout_s, process.ready
        if ask is None or timeout_s is None or ready is None or not process.spec.tells_health:
            return
        await wait_stalled(partial(ask, process.spec.name, ready.address), timeout_s)
        self._reporter.stalled(process.spec.name, timeout_s)
        # SIGKILL: on SIGTERM the service would drain and wait for its stalled engine.
        process.kill()

    async def _tell(self, process: ServiceProcess) -> None:
        """Workers that know of the end send the worker no more writes."""
        ready = process.ready
        if ready is not None and ready.worker_id is not None and ready.epoch is not None:
            await self._report_exit(ready.worker_id, ready.epoch)

    async def stop(self, grace_s: float, at_once: asyncio.Event) -> None:
        """Stops everything, phase by phase, and returns when every process is gone. Each phase has
        `grace_s` before its processes are killed. Once `at_once` is set, the remaining processes
        are killed at once.
        """
        for phase in sorted({spec.stop_phase for spec in self._specs}):
            processes = [p for p in self._running.values() if p.spec.stop_phase == phase]
            for process in processes:
                process.send(signal.SIGTERM)
            await self._wait_or_kill(processes, grace_s + _KILL_MARGIN_S, at_once)
        self._running.clear()

    async def _wait_or_kill(
        self, processes: Sequence[ServiceProcess], timeout_s: float, at_once: asyncio.Event
    ) -> None:
        async def wait_all() -> None:
            await asyncio.gather(*(process.gone() for process in processes))

        all_gone = asyncio.create_task(wait_all())
        hurry = asyncio.create_task(at_once.wait())
        waits: list[asyncio.Task[Any]] = [all_gone, hurry]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        late = [process for process in processes if not process.is_gone]
        for process in late:
            process.kill()
        for process in late:
            self._reporter.killed(process.spec.name, is_late=not at_once.is_set())
        await all_gone


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
