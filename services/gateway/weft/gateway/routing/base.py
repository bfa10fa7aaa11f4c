"""The interface of routing policies: their questions and their choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from weft.contract.settings import setting
from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.view import Column, PoolView, RoutingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Settings of all policies; each uses those that concern it."""

    seed: int | None = None
    """Seed of policies that draw; None: a different one each time."""
    clock: Callable[[], float] = time.monotonic
    """Clock, seconds."""
    kv_events: bool = setting(
        "let cache_aware follow the workers' reports of cached pages; off: what they were sent",
        True,
    )
    index_pages: int = setting(
        "size limit of cache_aware's index of a pool, in pages", 1 << 20, ge=1
    )
    compute_weight: float = setting(
        "cache_aware: weight of a prompt token to be computed, in queued tokens",
        8.0,
        ge=0,
        le=1024,
    )
    spread_tokens: int = setting(
        "cache_aware: cost of a recently refilled cache where a new conversation may go, in "
        "queued tokens; 0 = caches may fill unevenly",
        80_000,
        ge=0,
        le=1 << 30,
    )
    request_tokens: int = setting(
        "cache_aware of decode workers: cost of a request for the following ones, in prompt tokens",
        512,
        ge=0,
        le=1 << 20,
    )
    balance_abs_threshold: int = setting(
        "loads are balanced within this difference, in requests", 32, ge=0
    )
    balance_rel_threshold: float = setting(
        "loads are balanced within this ratio of most to least", 1.0001, ge=1
    )
    cache_threshold: float = setting(
        "cache_aware without events: share of a prompt that a match must have", 0.5, ge=0, le=1
    )
    max_tree_pages: int = setting(
        "cache_aware without events: most pages remembered of a worker, in pages", 1 << 16, ge=1
    )
    eviction_interval_s: float = setting(
        "cache_aware without events: interval between evictions down to that limit, in seconds",
        60.0,
        gt=0,
        le=86400,
    )
    load_factor: float = setting(
        "prefix_hash: limit of a worker's requests, as a multiple of the mean", 1.25, ge=1, le=16
    )
    prefix_tokens: int = setting(
        "prefix_hash: length of the prefix that counts, in tokens", 256, ge=1
    )
    max_pins: int = setting("manual: number of routing keys remembered, in keys", 1 << 17, ge=1)
    pin_idle_s: float = setting(
        "manual: time after which an unused key is forgotten, in seconds", 14_400.0, gt=0
    )


class Choice(NamedTuple):
    """A worker that a policy chose."""

    position: int
    """Position in the view."""
    match_tokens: int = 0
    """Leading prompt tokens that the worker is believed to hold; 0 if the policy does not know."""


class Policy(ABC):
    """Chooses workers. One instance serves one pool, and may keep state."""

    def __init__(self, options: PolicyOptions | None = None) -> None:
        """Creates the policy without state; `options` default to their defaults."""
        self.options = options or PolicyOptions()
        self.index: FleetPageIndex | None = None
        """Prefix index, updated from the workers' KV events; None: the policy needs none."""
        self._turn = 0

    @abstractmethod
    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        """Chooses at most `count` different workers for a request, the best first; at least one.
        `view` has the pool's healthy workers and is not empty; `count` is at least 1.
        """

    def flush(self) -> int:
        """Forgets the pages sent to workers, since the workers were told to drop them; returns the
        number of entries.
        """
        return 0

    def least(self, view: PoolView, count: int, *columns: Column) -> list[int]:
        """Positions of the `count` workers with the least value of the first column, the best
        first. The next columns break ties, then the workers take turns.
        """
        turn, self._turn = self._turn, self._turn + 1
        return least(len(view), count, turn, *columns)


def least(size: int, count: int, turn: int, *columns: Column) -> list[int]:
    """Positions, of `size`, of the `count` workers with the least value of the first column, the
    best first. The next columns break ties; equal ones are taken in turn, beginning at `turn`.
    """
    first = columns[0]
    if count < size:
        limit = first.min() if count == 1 else np.partition(first, count - 1)[count - 1]
        found = np.flatnonzero(first <= limit)
    else:
        found = np.arange(size)
    if len(found) == 1:
        return [int(found[0])]
    # For one worker, the columns are compared one after the other, so that nothing large is sorted.
    if count == 1:
        for column in columns[1:]:
            values = column[found]
            found = found[values == values.min()]
            if len(found) == 1:
                return [int(found[0])]
        return [int(found[np.argmin((found - turn) % size)])]
    keys = [(found - turn) % size, *(column[found] for column in reversed(columns))]
    order: list[int] = found[np.lexsort(keys)][:count].tolist()
    return order
