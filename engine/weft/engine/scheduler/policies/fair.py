"""Fair scheduling between tenants, by the tokens that each was served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from weft.engine.requests.request import Request
from weft.engine.scheduler.policies.base import SortedQueue

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""Cost of a generated token relative to a computed prompt token."""
MAX_IDLE_TENANTS = 4096


class _Tenant:
    def __init__(self) -> None:
        self.served = 0
        self.queue = SortedQueue()


class FairQueue:
    """Admits the request of the waiting tenant that was served the fewest tokens.

    This is the virtual token counter of Sheng et al. (2024). Computed prompt tokens count when a
    request is admitted; generated tokens count as they come, twice. A tenant that comes back is
    lifted to the level of the tenant served last (as in start-time fair queueing, Goyal et al.,
    1996), so that it cannot save up credit while it is away. Counters grow only for tenants that
    are served, so no tenant starves. Requests without a tenant belong to one tenant together.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._level = 0
        self._count = 0

    def add(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            if len(self._tenants) >= MAX_IDLE_TENANTS:
                self._forget_idle()
            tenant = self._tenants[request.tenant] = _Tenant()
        if not len(tenant.queue):
            tenant.served = max(tenant.served, self._level)
        tenant.queue.add(request)
        self._count += 1

    def remove(self, request: Request) -> None:
        self._tenants[request.tenant].queue.remove(request)
        self._count -= 1

    def candidates(self, now: float) -> Iterator[Request]:
        return iter(self)

    def precedes(self, one: Request, other: Request) -> bool:
        first, second = (self._tenants.get(request.tenant) for request in (one, other))
        if first is second or first is None or second is None:
            return one.arrival < other.arrival
        return first.served < second.served

    def rank(self, request: Request) -> float:
        return 0.0

    def observe(self, running: Iterable[Request]) -> None:
        for request in running:
            self._charge_output(request)

    def on_admitted(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        self._level = max(self._level, tenant.served)
        if request.awaits_first_token:
            tenant.served += PROMPT_WEIGHT * request.num_pending
            # Tokens that it generated on another worker were charged there.
            request.num_charged_tokens = request.num_generated

    def on_ended(self, request: Request) -> None:
        self._charge_output(request)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        waiting = [tenant for tenant in self._tenants.values() if len(tenant.queue)]
        waiting.sort(key=lambda tenant: tenant.served)
        return chain.from_iterable(tenant.queue for tenant in waiting)

    def _charge_output(self, request: Request) -> None:
        count = request.num_generated - request.num_charged_tokens
        tenant = self._tenants.get(request.tenant)
        if count > 0 and tenant is not None:
            request.num_charged_tokens += count
            tenant.served += OUTPUT_WEIGHT * count

    def _forget_idle(self) -> None:
        """Forgets idle tenants at or below the level, where a new tenant would start too.

        The level is first raised to the median of the idle tenants. Otherwise tenants that never
        come back, and were served a little more than the level, would be kept for ever.
        """
        idle = sorted(one.served for one in self._tenants.values() if not len(one.queue))
        if idle:
            self._level = max(self._level, idle[len(idle) // 2])
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if len(tenant.queue) or tenant.served > self._level
        }
