"""Finds requests whose deadline has passed, without looking at every request every time."""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.contract.errors import DeadlineExceeded
from weft.engine.requests.request import Request


class Deadlines:
    """Remembers the earliest deadline of all requests."""

    def __init__(self) -> None:
        self._next = math.inf

    def watch(self, request: Request) -> None:
        self._next = min(self._next, request.first_token_deadline, request.deadline)

    def late(
        self, now: float, requests: Iterable[Request]
    ) -> list[tuple[Request, DeadlineExceeded]]:
        """Returns the requests whose time is over, each with its error.

        Args:
            requests: All requests that are not finished; walked only when one may be late.
        """
        if now < self._next:
            return []
        self._next, late = math.inf, []
        for request in requests:
            if now >= request.deadline:
                late.append((request, _exceeded("total", request)))
            elif not request.awaits_first_token:
                self._next = min(self._next, request.deadline)
            elif now >= request.first_token_deadline:
                late.append((request, _exceeded("first-token", request)))
            else:
                self.watch(request)
        return late


def _exceeded(which: str, request: Request) -> DeadlineExceeded:
    message = f"the {which} deadline passed while the request was {request.state.value}"
    return DeadlineExceeded(message, stage=request.state.value)
