"""Helpers for streams of requests, shared by all services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
from weft.contract.errors import DeadlineExceeded

FIRST_MESSAGE_TIMEOUT_S = 10.0
"""Seconds to wait for the first message of a stream, which callers send at once."""
_SECOND_LOOK_S = 1.0
"""Seconds to wait beyond them: a process that stood still has the message, but has not read it."""
WRITE_AFTER_END = (grpc.aio.UsageError, asyncio.InvalidStateError)
"""Errors that gRPC raises for a write to a stream that has just ended."""
T = TypeVar("T")


async def first_message(requests: AsyncIterator[T]) -> T | None:
    """The first message of a stream; None: it ended without one.

    Raises:
        DeadlineExceeded: The message does not come in time.
    """
    reading = asyncio.ensure_future(anext(aiter(requests), None))
    try:
        for wait_s in (FIRST_MESSAGE_TIMEOUT_S, _SECOND_LOOK_S):
            await asyncio.wait((reading,), timeout=wait_s)
            if reading.done():
                return reading.result()
    finally:
        reading.cancel()
    message = f"the first message did not come within {FIRST_MESSAGE_TIMEOUT_S:g} s"
    raise DeadlineExceeded(message, stage="stream")
