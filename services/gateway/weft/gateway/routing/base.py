"""What a routing policy is asked and decides."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from weft.engine.memory.keys import ShortKeys, namespace_digest
from weft.gateway.routing.page_index import PageIndex
from weft.gateway.routing.view import Column, PoolView, WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Settings of all policies; each takes what it knows."""

    seed: int | None = None
    """Of those that draw; absent = another one each time."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    kv_events: bool = True
    """`cache_aware` follows the workers' own word; else what was sent to them."""
    index_pages: int = 1 << 20
    """Pages that an index over all workers may have."""
    request_tokens: int = 0
    """What one request on a worker counts for in `cache_aware`, in prompt tokens."""
    compute_weight: float = 8.0
    """What a prompt token that is to be computed counts for in `cache_aware`, in queued ones."""
    spread_tokens: int = 80_000
    """What a cache that was filled anew lately counts for in `cache_aware`, in queued tokens, where
    a prompt may go anywhere."""
    balance_abs_threshold: int = 32
    """Approximate `cache_aware`: difference in requests up to which loads are balanced."""
    balance_rel_threshold: float = 1.0001
    """Likewise: most requests divided by least."""
    cache_threshold: float = 0.5
    """Likewise: share of the prompt that a match must have to decide."""
    max_tree_pages: int = 1 << 16
    """Likewise: pages remembered of each worker."""
    eviction_interval_s: float = 60.0
    """Likewise: between looks for what is to be forgotten."""
    load_factor: float = 1.25
    """`prefix_hash`: requests that a worker may have, as a multiple of the mean."""
    prefix_tokens: int = 256
    """`prefix_hash`: leading tokens that decide."""
    max_pins: int = 1 << 17
    """`manual`: keys remembered."""
    pin_idle_s: float = 14_400.0
    """`manual`: a key that nobody used for so long is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What of a request matters for its place."""

    request_id: str
    prompt_ids: Sequence[int]
    cache_salt: str = ""
    routing_key: str = ""
    """Requests of one key belong together; empty = this one belongs to none."""
    prefill_host: str = ""
    """Machine of the prefill worker that will fill it; empty = not known."""
    first_token_s: float | None = None
    """Target: time to its first token, from when it is sent; absent = none."""
    adapter: bytes = b""
    """Digest of its adapter's content; empty = the base model. Pages of others are not its own."""
    _keys: dict[tuple[bytes, str, int], ShortKeys] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def page_keys(self, worker: WorkerView) -> ShortKeys:
        """Keys of the prompt's full pages on a worker, which must have a page size."""
        keys = self._keys.get(worker.naming)
        if keys is None:
            namespace = _namespace(
                worker.model_digest, worker.kv_layout, self.adapter, self.cache_salt
            )
            keys = ShortKeys(self.prompt_ids, worker.page_size, namespace)
            self._keys[worker.naming] = keys
        return keys

    def beside(self, host: str) -> RoutingRequest:
        """The same request, whose prefill worker is on a host."""
        placed = replace(self, prefill_host=host)
        object.__setattr__(placed, "_keys", self._keys)  # they need not be computed again
        return placed

    def num_useful_pages(self, page_size: int) -> int:
        """Full pages that others may fill: the owner always runs the last token."""
        return max(0, len(self.prompt_ids) - 1) // page_size


@lru_cache(maxsize=1024)
def _namespace(model_digest: bytes, layout: str, adapter: bytes, cache_salt: str) -> bytes:
    return namespace_digest(model_digest, layout, adapter_digest=adapter, cache_salt=cache_salt)


class Choice(NamedTuple):
    """A worker that a policy chose."""

    position: int
    """In the view."""
    match_tokens: int = 0
    """Leading prompt tokens that it is believed to hold; 0 where the policy does not know."""


class Policy(ABC):
    """Chooses workers. One instance serves one pool, so it may keep state of its own."""

    def __init__(self, options: PolicyOptions | None = None) -> None:
        """Begins knowing nothing; `options` default to their defaults."""
        self.options = options or PolicyOptions()
        self.index: PageIndex | None = None
        """Whoever follows the workers' KV events keeps it right; None: it needs none."""
        self._turn = 0

    @abstractmethod
    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        """Chooses workers for a request.

        Args:
            view: The pool's healthy workers; not empty.
            request: What is to be placed.
            count: Workers wanted, at least 1.

        Returns:
            At most `count` different workers, the best first; at least one.
        """

    def flush(self) -> int:
        """Forgets what workers were sent, since they were told to drop it.

        Returns:
            Entries forgotten.
        """
        return 0

    def least(self, view: PoolView, count: int, *columns: Column) -> list[int]:
        """The workers with the least of the first column, then of the next ones, then in turn.

        Args:
            view: The pool.
            count: Wanted.
            columns: The most important one first.

        Returns:
            Positions, the best first.
        """
        turn, self._turn = self._turn, self._turn + 1
        return least(len(view), count, turn, *columns)


def least(size: int, count: int, turn: int, *columns: Column) -> list[int]:
    """See `Policy.least`; equal ones are taken in turn, beginning at `turn`."""
    first = columns[0]
    if count < size:
        limit = first.min() if count == 1 else np.partition(first, count - 1)[count - 1]
        found = np.flatnonzero(first <= limit)
    else:
        found = np.arange(size)
    if len(found) == 1:
        return [int(found[0])]
    # Of equal ones few are wanted: look at them column by column, so that nothing large is sorted.
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
