"""Helpers for streams of requests, shared by all services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
from weft.contract.errors import DeadlineExceeded

FIRST_MESSAGE_TIMEOUT_S = 10.0
"""Seconds to wait for the first message of a stream, which callers send at once."""
WRITE_AFTER_END = (grpc.aio.UsageError, asyncio.InvalidStateError)
"""Errors that gRPC raises for a write to a stream that has just ended."""
T = TypeVar("T")


async def first_message(requests: AsyncIterator[T]) -> T | None:
    """The first message of a stream; None: it ended without one.

    Raises:
        DeadlineExceeded: The message does not come in time.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            return await anext(aiter(requests), None)
    except TimeoutError:
        message = f"the first message did not come within {FIRST_MESSAGE_TIMEOUT_S:g} s"
        raise DeadlineExceeded(message, stage="stream") from None
