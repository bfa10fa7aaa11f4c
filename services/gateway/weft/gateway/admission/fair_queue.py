"""A queue of many tenants in which none can hold up the others."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")
_FEW = 64
"""The heap may keep this many removed entries in addition to as many as wait."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    tenant: str
    item: T
    cost: float
    start: float
    number: int
    is_gone: bool = False

    def __lt__(self, other: _Entry[T]) -> bool:
        return (self.start, self.number) < (other.start, other.number)


@dataclass(slots=True, eq=False)
class _Tenant(Generic[T]):
    entries: deque[_Entry[T]] = field(default_factory=deque)
    cost: float = 0.0
    """Cost of all entries."""
    finish: float = 0.0
    """Virtual time at which its last entry will have been served."""
    weight: float = 1.0


class TenantFairQueue(Generic[T]):
    """Start-time fair queueing (Goyal, Vin, Cheng 1996): waiting tenants are served by weight.

    Each item starts in virtual time where the item before it of the same tenant finishes, or now if
    there is none; the least start leaves first. So a tenant with few items waits for few items of
    others, however many those have, and a tenant that was away has saved up no credit. Within a
    tenant the order is first come, first served.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self._tenants: dict[str, _Tenant[T]] = {}
        """Tenants with waiting items, and tenants whose last item has left but whose virtual finish
        is still to come.
        """
        self._now = 0.0
        self._numbers = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, item: T, tenant: str = "", cost: float = 1.0, weight: float = 1.0) -> None:
        """Queues an item, which equals no waiting one. Costs are above 0, in a unit that is the
        same for all items. The tenant's weight is above 0: with twice the weight it gets twice the
        service.
        """
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
        known.weight = weight
        start = max(self._now, known.finish)
        known.finish = start + cost / weight
        entry = _Entry(tenant, item, cost, start, next(self._numbers))
        known.entries.append(entry)
        known.cost += cost
        heapq.heappush(self._heap, entry)
        self._size += 1

    def head(self) -> T | None:
        """The item that leaves next; None if the queue is empty."""
        while self._heap and self._heap[0].is_gone:
            heapq.heappop(self._heap)
        return self._heap[0].item if self._heap else None

    def pop(self) -> T:
        """Removes the head, which must exist."""
        if self.head() is None:
            raise IndexError("nothing waits")
        entry = heapq.heappop(self._heap)
        self._now = max(self._now, entry.start)
        self._take_out(entry)
        if not self._size:
            self._forget_paid()
        return entry.item

    def remove(self, item: T, tenant: str = "") -> bool:
        """Removes an item wherever it is; False if it is not waiting."""
        known = self._tenants.get(tenant)
        for entry in () if known is None else known.entries:
            if entry.item is item:
                self._take_out(entry)
                self._give_back(entry)
                return True
        return False

    def most_owed(self, tenant: str, cost: float, weight: float, missing: float) -> list[T]:
        """Items of others that would have to leave so that an item of a tenant has room. They are
        not removed.

        Step by step it takes the newest item of the tenant that has the most waiting for its
        weight, as long as that is no less than the new item's tenant would have. `missing` is the
        cost for which there is no room. Returns items of at least that cost; empty if there are not
        enough.
        """
        own = (self.cost_of(tenant) + cost) / weight
        shares = {name: known.cost / known.weight for name, known in self._tenants.items()}
        newest = {name: reversed(known.entries) for name, known in self._tenants.items()}
        found: list[T] = []
        while missing > 0:
            name = max(shares, key=shares.__getitem__, default=tenant)
            entry = None if name == tenant or shares[name] < own else next(newest[name], None)
            if entry is None:
                return []
            shares[name] -= entry.cost / self._tenants[name].weight
            missing -= entry.cost
            found.append(entry.item)
        return found

    def cost_of(self, tenant: str) -> float:
        """Total cost of a tenant's waiting items."""
        known = self._tenants.get(tenant)
        return 0.0 if known is None else known.cost

    def cost_before(self, tenant: str, cost: float, weight: float = 1.0) -> float:
        """Approximate cost of the items that would leave before a new one, as if all were served at
        once.

        While the tenant's own items are served, every other tenant is served in proportion to its
        weight, up to what it has waiting.
        """
        own = self.cost_of(tenant)
        share = (own + cost) / weight
        others = sum(
            min(known.cost, share * known.weight)
            for name, known in self._tenants.items()
            if name != tenant
        )
        return own + others

    def _take_out(self, entry: _Entry[T]) -> None:
        entry.is_gone = True
        known = self._tenants[entry.tenant]
        known.entries.remove(entry)
        known.cost -= entry.cost
        self._size -= 1

    def _give_back(self, entry: _Entry[T]) -> None:
        known = self._tenants[entry.tenant]
        shift = entry.cost / known.weight
        known.finish = max(self._now, known.finish - shift)
        has_shifted = False
        for later in known.entries:
            if later.number > entry.number:
                later.start = max(self._now, later.start - shift)
                has_shifted = True
        # Removed entries leave the heap at its head, or here once they outnumber the others.
        are_many = len(self._heap) > 2 * self._size + _FEW
        if are_many:
            self._heap = [one for one in self._heap if not one.is_gone]
        if has_shifted or are_many:
            heapq.heapify(self._heap)

    def _forget_paid(self) -> None:
        """Clears all debts once the queue is empty: a new busy period begins."""
        self._tenants.clear()
        self._heap.clear()
        self._now = 0.0
