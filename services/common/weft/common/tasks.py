"""Helpers for asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

STANDSTILL_S = 2.0
"""Delay of the event loop that is logged."""
_LOOK_EVERY_S = 1.0


def is_ending() -> bool:
    """Whether the running task was cancelled. If not, a CancelledError comes from a gRPC call whose
    connection was closed, and must not end the task that waits for the call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines until the first ends or fails, cancels the others, and raises its error.

    Raises:
        ConnectionError: A call was cancelled because its connection was closed.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if task.cancelled():
            raise ConnectionError("its connection was closed")
        task.result()


def start_logged(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts a background task; a failure is logged when it happens, even if nobody awaits the
    task.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(log_failure)
    return task


async def tell_standstills() -> None:
    """Logs when this process's event loop stood still, since peers then seem silent without being
    so. The CPU time of the thread shows whether this process or the machine was busy.
    """
    loop = asyncio.get_running_loop()
    while True:
        due, before_s = loop.time() + _LOOK_EVERY_S, time.thread_time()
        await asyncio.sleep(_LOOK_EVERY_S)
        late_s = loop.time() - due
        if late_s > STANDSTILL_S:
            computed_s = time.thread_time() - before_s
            text = "this process stood still for %.1f s, in which its loop computed for %.1f s"
            _log.warning(text, late_s, computed_s)


def tasks_now() -> dict[str, object]:
    """Number of the event loop's tasks, in all and of each kind, so that a dump shows a leak."""
    kinds = Counter(
        getattr(task.get_coro(), "__qualname__", "other") for task in asyncio.all_tasks()
    )
    return {"tasks": kinds.total(), "tasks_of": dict(kinds.most_common())}


def has_returned(task: asyncio.Task[Any]) -> bool:
    """Whether a task has returned: it is not running, was not cancelled and did not fail."""
    return task.done() and not task.cancelled() and task.exception() is None


def log_failure(task: asyncio.Task[Any]) -> None:
    """Done-callback of background tasks: a failure is logged, never lost."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background task failed", exc_info=error)
