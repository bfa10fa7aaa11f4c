"""The latency gate on an event loop: requests wait at it as tasks."""

from __future__ import annotations

import asyncio

from weft.contract.errors import DeadlineExceeded
from weft.gateway.admission.slo.gate import LatencyGate, SloTicket

_LOOK_EVERY_S = 0.02
"""Interval of checks while requests are held, since workers' loads change without notice."""


class LatencyAdmission:
    """Lets tasks through the gate, which decides."""

    def __init__(self, gate: LatencyGate) -> None:
        self.gate = gate
        self._waiters: dict[SloTicket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, ticket: SloTicket, deadline: float) -> None:
        """Waits until a request may be sent; `gate.began` and `ended` follow. The request's times
        and `deadline`, at which waiting ends, are event loop time.

        Raises:
            TargetUnattainable: A target would be missed.
            DeadlineExceeded: It was held for too long.
        """
        loop = asyncio.get_running_loop()
        if self.gate.offer(ticket, loop.time()):
            return
        waiter = self._waiters[ticket] = loop.create_future()
        self._look_later()
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except BaseException as error:
            if self._waiters.pop(ticket, None) is not None:
                self.gate.withdraw(ticket)
            elif ticket.is_sending:  # The request was released at the same moment.
                self.gate.ended(ticket, None, 0)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    "the deadline passed while the request was held for others' latency targets",
                    stage="admit",
                ) from None
            raise

    def ended(self, ticket: SloTicket, first_token_at: float | None, num_generated: int) -> None:
        """Notes that a request which had entered is over, like `LatencyGate.ended`."""
        self.gate.ended(ticket, first_token_at, num_generated)
        self.look()

    def look(self) -> None:
        """Wakes the gate after a change: held requests may be able to go."""
        if not self._waiters:
            return
        for ticket, error in self.gate.release(asyncio.get_running_loop().time()):
            waiter = self._waiters.pop(ticket)
            if waiter.done():  # The waiter was cancelled, and its task has not run since.
                if error is None:
                    self.gate.ended(ticket, None, 0)
            elif error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def close(self) -> None:
        """Stops the gate's task."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_and_stay)

    def _look_and_stay(self) -> None:
        self._timer = None
        self.look()
        if self._waiters:
            self._look_later()
