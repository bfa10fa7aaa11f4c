"""A record of a pool's policy for replay: a line for each input and each choice.

A policy is a function of its inputs: the order of choices, the loads at each of them, the updates
of the index in between, the time, and its seed. The record has exactly these, so the same classes
choose the same workers from it (`bench/routing.py --replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import msgspec
from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.view import (
    LOADS,
    SPEEDS,
    UNREPORTED,
    PoolView,
    RoutingRequest,
    WorkerView,
)

COLUMNS = (*LOADS, *UNREPORTED, *SPEEDS)
"""Columns of a view that are recorded; the others follow from its workers."""


class RecordLine(msgspec.Struct, kw_only=True, tag_field="kind", omit_defaults=True):
    """One event of one pool."""

    pool: str
    """Name of the pool, MODEL/ROLE."""


class Started(RecordLine, tag="began"):
    """Creation of the policy; the first line of each pool."""

    policy: str
    """Name of the policy in the settings."""
    options: dict[str, Any]
    """`PolicyOptions` without the clock."""


class Members(RecordLine, tag="members"):
    """The workers among which the following choices are made."""

    workers: list[WorkerView]


class Queried(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A recorded `RoutingRequest`."""

    request_id: str
    prompt_ids: list[int]
    cache_salt: str = ""
    routing_key: str = ""
    prefill_host: str = ""
    first_token_s: float | None = None
    adapter: bytes = b""


class Routed(RecordLine, tag="chose"):
    """A recorded choice."""

    now: float
    """Time on the policy's clock."""
    request: Queried
    count: int
    columns: dict[str, list[float]]
    """Columns of the view by name, if not 0 throughout."""
    chosen: list[tuple[int, int]]
    """Positions and matched tokens, best first."""


class PagesReported(RecordLine, tag="told"):
    """An update of the index for one worker."""

    how: str
    """Method of `FleetPageIndex`: replace, add, remove or forget."""
    worker_id: str
    epoch: int = 0
    keys: list[int] = []


class Cleared(RecordLine, tag="cleared"):
    """Clearing of the index."""


class Flushed(RecordLine, tag="flushed"):
    """A flush of the pages that workers were sent."""


AnyLine = Started | Members | Routed | PagesReported | Cleared | Flushed
Write = Callable[[AnyLine], None]


class RecordingIndex(FleetPageIndex):
    """A page index that records every call.

    A line is written after its call, so lines of calls that it makes itself come first. `write`
    takes the lines, which name `pool`.
    """

    def __init__(self, max_pages: int, pool: str, write: Write) -> None:
        super().__init__(max_pages)
        self._pool = pool
        self._write = write

    def replace(self, worker_id: str, epoch: int, keys: Iterable[int]) -> None:
        told = self._told("replace", worker_id, epoch, keys)
        super().replace(worker_id, epoch, told.keys)
        self._write(told)

    def add(self, worker_id: str, epoch: int, keys: Iterable[int]) -> None:
        told = self._told("add", worker_id, epoch, keys)
        super().add(worker_id, epoch, told.keys)
        self._write(told)

    def remove(self, worker_id: str, epoch: int, keys: Iterable[int]) -> None:
        told = self._told("remove", worker_id, epoch, keys)
        super().remove(worker_id, epoch, told.keys)
        self._write(told)

    def forget(self, worker_id: str) -> int:
        count = super().forget(worker_id)
        self._write(self._told("forget", worker_id, 0, ()))
        return count

    def clear(self) -> int:
        count = super().clear()
        self._write(Cleared(pool=self._pool))
        return count

    def _told(self, how: str, worker_id: str, epoch: int, keys: Iterable[int]) -> PagesReported:
        return PagesReported(
            pool=self._pool, how=how, worker_id=worker_id, epoch=epoch, keys=list(keys)
        )


class RecordingPolicy(Policy):
    """A policy that records its inputs and choices. For the policy that `make` makes, time stands
    still during a choice.

    Args:
        name: Name of the recorded policy.
        options: The policy's options. A policy that draws gets a seed here if it has none.
        pool: Name in the lines, MODEL/ROLE.
        write: Takes the lines.
    """

    def __init__(
        self,
        make: Callable[[str, PolicyOptions], Policy],
        name: str,
        options: PolicyOptions,
        pool: str,
        write: Write,
    ) -> None:
        super().__init__(options)
        self._pool = pool
        self._write = write
        self._now = options.clock()
        self._view: PoolView | None = None
        self._inner = make(name, replace(options, clock=lambda: self._now))
        given = {key: value for key, value in asdict(options).items() if key != "clock"}
        write(Started(pool=pool, policy=name, options=given))
        if self._inner.index is not None:
            self._inner.index = RecordingIndex(options.index_pages, pool, write)
        self.index = self._inner.index

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        if view is not self._view:
            self._view = view
            self._write(Members(pool=self._pool, workers=list(view.workers)))
        self._now = self.options.clock()
        columns = {name: values for name in COLUMNS if any(values := _values(view, name))}
        chosen = self._inner.choose(view, request, count)
        self._write(
            Routed(
                pool=self._pool,
                now=self._now,
                request=_queried(request),
                count=count,
                columns=columns,
                chosen=[(choice.position, choice.match_tokens) for choice in chosen],
            )
        )
        return chosen

    def flush(self) -> int:
        count = self._inner.flush()
        self._write(Flushed(pool=self._pool))
        return count


def _values(view: PoolView, name: str) -> list[float]:
    values: list[float] = getattr(view, name).tolist()
    return values


def _queried(request: RoutingRequest) -> Queried:
    return Queried(
        request_id=request.request_id,
        prompt_ids=list(request.prompt_ids),
        cache_salt=request.cache_salt,
        routing_key=request.routing_key,
        prefill_host=request.prefill_host,
        first_token_s=request.first_token_s,
        adapter=request.adapter,
    )
