"""The life of a mesh: start, readiness, watch, end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from weft.cli.up.liveness import IsAlive
from weft.cli.up.process import ServiceSpec
from weft.cli.up.supervisor import ExitReporter, Reporter, RestartBackoff, Supervisor
from weft.common.rpc.server import SECOND_SIGNAL_AFTER_S

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_mesh(
    services: Sequence[ServiceSpec],
    reporter: Reporter,
    report_exit: ExitReporter,
    wait_ready: Callable[[], Awaitable[None]],
    on_ready: Callable[[Supervisor], None],
    stop_grace_s: float,
    *,
    is_alive: IsAlive | None = None,
    stall_timeout_s: float | None = None,
    max_restart_delay_s: float,
    ready_timeout_s: float | None = None,
) -> None:
    """Runs the services until SIGINT, SIGTERM or SIGHUP (unless it is ignored, as under nohup). A
    second signal cuts draining short. Returns or raises only when every process is gone.

    Args:
        report_exit: Called for workers that are certainly gone.
        wait_ready: Returns once the mesh as a whole answers.
        on_ready: Called once the mesh is ready, and watched.
        stop_grace_s: Time that the services of a phase get at the end.
        is_alive: Returns whether a service is alive; None: running processes are never killed.
        stall_timeout_s: A service that was not alive for longer is killed; None: never.
        max_restart_delay_s: Longest delay before a service that died soon after its start is
            started again.
        ready_timeout_s: A service that does not serve within this time of its start is killed;
            None: never.

    Raises:
        ExitedEarly: A service ended before it was ready for the first time, or was not ready in
            time.
        TimeoutError: From `wait_ready`.
    """
    stop, at_once = asyncio.Event(), asyncio.Event()
    supervisor = Supervisor(
        services,
        reporter,
        report_exit,
        partial(RestartBackoff, most_s=max_restart_delay_s),
        is_alive=is_alive,
        stall_timeout_s=stall_timeout_s,
        ready_timeout_s=ready_timeout_s,
    )

    async def serve() -> None:
        watch = asyncio.create_task(supervisor.watch())
        try:
            await wait_ready()
            on_ready(supervisor)
            await watch
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    with _signals(stop, at_once):
        try:
            if await _until(stop, supervisor.start()):
                await _until(stop, serve())
        finally:
            if stop.is_set():
                reporter.stopping(stop_grace_s)
            await supervisor.stop(stop_grace_s, at_once)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """True: `work` has ended. False: `stop` was set first, and `work` is cancelled."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


@contextlib.contextmanager
def _signals(stop: asyncio.Event, at_once: asyncio.Event) -> Iterator[None]:
    """The first signal sets `stop`, the next one `at_once`. Signals that come together count as
    one.
    """
    loop = asyncio.get_running_loop()
    first_at: float | None = None
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [one for one in _SIGNALS if not (is_nohup and one is signal.SIGHUP)]

    def received() -> None:
        nonlocal first_at
        stop.set()
        first_at = loop.time() if first_at is None else first_at
        if loop.time() - first_at >= SECOND_SIGNAL_AFTER_S:
            at_once.set()

    for number in numbers:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
