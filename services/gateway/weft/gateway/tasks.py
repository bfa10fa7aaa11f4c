"""Helpers for asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines until the first ends or fails, ends the others, and raises its failure."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def log_failure(task: asyncio.Task[None]) -> None:
    """Done-callback of background tasks: a failure is logged, never lost."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background task failed", exc_info=error)
