"""The interface of routing policies: their questions and their choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from weft.contract.keys import PromptMedia, RecentPages, ShortKeys, namespace_digest
from weft.contract.settings import setting
from weft.contract.spans import MediaSpan
from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.view import Column, PoolView, WorkerView


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """The part of a request that matters for routing."""

    request_id: str
    prompt_ids: Sequence[int]
    context_tokens: int = 0
    """Most tokens that prompt and answer may come to; 0: unknown."""
    cache_salt: str = ""
    routing_key: str = ""
    """Routing key; empty: none."""
    worker_id: str = ""
    """Decode worker that the client has named; empty: any."""
    prefill_host: str = ""
    """Machine of the prefill worker that will fill the request's pages; empty: unknown."""
    first_token_s: float | None = None
    """Target for the time from sending to the first token; None: none."""
    adapter: bytes = b""
    """Content digest of its adapter; empty: the base model. Pages of other adapters do not match.
    """
    is_computed_anew: bool = False
    """Whether the owner computes the whole prompt, no matter who holds or could fill it."""
    spans: Sequence[MediaSpan] = ()
    """Media of the prompt, which the keys of its pages name."""
    recent: RecentPages | None = field(default=None, repr=False, compare=False)
    """Prompts of earlier requests, which need not be hashed again; None: nothing is remembered."""
    _keys: dict[tuple[bytes, str, int, bytes], ShortKeys] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def separator(self) -> bytes:
        """Requests whose pages match have equal separators."""
        return self.adapter + self.cache_salt.encode() + b"\0"

    def page_keys(self, worker: WorkerView) -> ShortKeys:
        """Keys of the prompt's full pages on a worker, whose page size must be known."""
        encoder = worker.encoder_digest if self.spans else b""
        naming = (*worker.naming, encoder)
        keys = self._keys.get(naming)
        if keys is None:
            namespace = _namespace(
                worker.model_digest, worker.kv_layout, self.adapter, self.cache_salt
            )
            media = PromptMedia(self.spans, encoder)
            size = worker.page_size
            keys = ShortKeys(self.prompt_ids, size, namespace, self.recent, media)
            self._keys[naming] = keys
        return keys

    def beside(self, host: str) -> RoutingRequest:
        """The same request, with its prefill worker's host."""
        placed = replace(self, prefill_host=host)
        object.__setattr__(placed, "_keys", self._keys)  # they need not be computed again
        return placed

    def num_useful_pages(self, page_size: int) -> int:
        """Number of full pages that others may fill: the owner always runs the last token."""
        return max(0, len(self.prompt_ids) - 1) // page_size


@lru_cache(maxsize=1024)
def _namespace(model_digest: bytes, layout: str, adapter: bytes, cache_salt: str) -> bytes:
    return namespace_digest(model_digest, layout, adapter_digest=adapter, cache_salt=cache_salt)


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
