"""Bounded admission: limits the prompts running and waiting, and refuses the rest at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from weft.contract.errors import DeadlineExceeded, Draining, Overloaded
from weft.gateway.admission.fair_queue import TenantFairQueue

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_SMOOTHING = 0.1
"""Weight of the newest prompt in the mean time for which a place is held."""


class AdmittedPrompts:
    """Prompts that may run. Their places are released at the end of the block, or earlier by
    `release`.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Releases the places; further calls do nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False, slots=True)
class _Waiter:
    num_prompts: int
    tenant: str
    place: asyncio.Future[None]


def shutting_down(stage: str) -> Draining:
    """The error for requests that this gateway will not finish because it shuts down."""
    return Draining(
        "the gateway is shutting down; send the request again",
        stage=stage,
        retry_after_s=_MIN_RETRY_S,
    )


class Admission:
    """Limits the number of running prompts. Places are shared fairly between waiting tenants, first
    come, first served within each.

    A request of several prompts is admitted as a whole, so that it never waits for itself. When
    the queue is full, the newest request of the tenant that has most in it is refused.
    """

    def __init__(self, max_running: int, max_queued: int) -> None:
        """Sets the limits, both in prompts."""
        self._max_running = max_running
        self._max_queued = max_queued
        self._waiters: TenantFairQueue[_Waiter] = TenantFairQueue()
        self._is_draining = False
        self._mean_hold_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        self.num_queued = 0

    async def admit(
        self, num_prompts: int, deadline: float, tenant: str = "", weight: float = 1.0
    ) -> AdmittedPrompts:
        """Waits for a place for each prompt. The caller gives the places back.

        Args:
            deadline: Event loop time at which waiting ends.
            weight: Weight of the tenant: its share of the places while others wait too.

        Raises:
            Overloaded: The queue is full.
            DeadlineExceeded: No place became free in time.
            Draining: The gateway is shutting down.
        """
        if self._is_draining:
            raise shutting_down("queue")
        if self._must_wait(num_prompts):
            await self._wait(num_prompts, deadline, tenant, weight)
        else:
            self._take(num_prompts)
        loop = asyncio.get_running_loop()
        taken_at = loop.time()

        def release() -> None:
            held_s = loop.time() - taken_at
            weight = _SMOOTHING if self._mean_hold_s else 1.0
            self._mean_hold_s += weight * (held_s - self._mean_hold_s)
            self._release(num_prompts)

        return AdmittedPrompts(release)

    def check(self, num_prompts: int, tenant: str = "", weight: float = 1.0) -> None:
        """Raises Overloaded or Draining if prompts would be refused now, and takes nothing."""
        if self._is_draining:
            raise shutting_down("queue")
        if self._must_wait(num_prompts):
            self._owed(num_prompts, tenant, weight)

    def retry_after_s(self) -> float:
        """Seconds until the requests that wait now will have been served at the present rate."""
        rounds = self.num_queued / self._max_running
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, rounds * self._mean_hold_s))

    def _must_wait(self, num_prompts: int) -> bool:
        return bool(self._waiters) or not self._fits(num_prompts)

    def _fits(self, num_prompts: int) -> bool:
        # A request larger than the bound runs alone.
        return not self.num_running or self.num_running + num_prompts <= self._max_running

    def _take(self, num_prompts: int) -> None:
        self.num_running += num_prompts
        self._idle.clear()

    async def _wait(self, num_prompts: int, deadline: float, tenant: str, weight: float) -> None:
        self._make_room(num_prompts, tenant, weight)
        waiter = _Waiter(num_prompts, tenant, asyncio.get_running_loop().create_future())
        self._waiters.push(waiter, tenant, num_prompts, weight)
        self.num_queued += num_prompts
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.place
        except BaseException as error:
            if self._waiters.remove(waiter, tenant):
                self.num_queued -= num_prompts
                self._wake()
            elif not waiter.place.cancelled() and waiter.place.exception() is None:
                self._release(num_prompts)  # The place was given at the moment of cancellation.
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    "the deadline passed while the request was queued", stage="queue"
                ) from None
            raise

    def _make_room(self, num_prompts: int, tenant: str, weight: float) -> None:
        """Drops waiting requests of others that exceed their share, as far as the queue lacks room
        for a new one.
        """
        refusal = self._refusal()
        for waiter in self._owed(num_prompts, tenant, weight):
            self._waiters.remove(waiter, waiter.tenant)
            self.num_queued -= waiter.num_prompts
            if not waiter.place.done():
                waiter.place.set_exception(refusal)

    def _owed(self, num_prompts: int, tenant: str, weight: float) -> list[_Waiter]:
        """The waiting requests that must leave so that a new one can wait. Raises Overloaded if the
        queue has no room for it.
        """
        missing = self.num_queued + num_prompts - self._max_queued
        if missing <= 0:
            return []
        owed = self._waiters.most_owed(tenant, num_prompts, weight, missing)
        if not owed:
            raise self._refusal()
        return owed

    def _refusal(self) -> Overloaded:
        return Overloaded(
            f"{self.num_queued} prompts are waiting already (the bound is "
            f"{self._max_queued}); send the request again later",
            stage="queue",
            retry_after_s=self.retry_after_s(),
        )

    def _release(self, num_prompts: int) -> None:
        self.num_running -= num_prompts
        if self.num_queued:
            self._wake()
        if not self.num_running and not self._waiters:
            self._idle.set()

    def _wake(self) -> None:
        while (waiter := self._waiters.head()) is not None and self._fits(waiter.num_prompts):
            self._waiters.pop()
            self.num_queued -= waiter.num_prompts
            if waiter.place.done():  # The waiter was cancelled, and its task has not run since.
                continue
            self._take(waiter.num_prompts)
            waiter.place.set_result(None)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    async def drain(self) -> None:
        """Refuses new requests from now on and returns once none is left."""
        self._is_draining = True
        await self._idle.wait()
