"""The interface of admission policies, and the sorted queue that most of them use."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Protocol

from weft.engine.requests.request import Request

Key = tuple[float, int]


class AdmissionQueue(Protocol):
    """WAITING and PREEMPTED requests, in the order of admission.

    No request may starve: one that waits long enough must become the first candidate.
    """

    def add(self, request: Request) -> None:
        """Queues a request, new or preempted."""
        ...

    def remove(self, request: Request) -> None: ...

    def candidates(self, now: float) -> Iterator[Request]:
        """Requests in the order of admission. Nothing may be added or removed while iterating.
        `now` is on the engine's clock.
        """
        ...

    def precedes(self, one: Request, other: Request) -> bool:
        """Whether one request would be admitted before the other if both waited."""
        ...

    def rank(self, request: Request) -> float:
        """Rank of an admitted prompt among those that are computed, lowest first. Equals go in the
        order of admission.
        """
        ...

    def observe(self, running: Iterable[Request]) -> None:
        """Called before candidates are requested, with the requests that get tokens."""
        ...

    def on_admitted(self, request: Request) -> None:
        """Called after a candidate was admitted and removed, when its tokens to compute
        are known.
        """
        ...

    def on_ended(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Iterates over all requests, roughly in the order of admission."""
        ...


class SortedQueue:
    """A queue ordered by keys that do not change while requests wait.

    Subclasses may define another `key` and override the notifications.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Request]] = []

    def key(self, request: Request) -> Key:
        """Sort key in the queue, lowest first; by default the order of submission.

        Samples of one submit, and preempted requests, keep the place of their submit: before
        requests that were submitted later.
        """
        return (request.timeline.submitted_at, request.arrival)

    def add(self, request: Request) -> None:
        insort(self._entries, (self.key(request), request), key=_key_of)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._entries, self.key(request), key=_key_of)
        assert self._entries[index][1] is request, "the request is not queued"
        del self._entries[index]

    def candidates(self, now: float) -> Iterator[Request]:
        return iter(self)

    def precedes(self, one: Request, other: Request) -> bool:
        return self.key(one) < self.key(other)

    def rank(self, request: Request) -> float:
        return 0.0

    def observe(self, running: Iterable[Request]) -> None: ...

    def on_admitted(self, request: Request) -> None: ...

    def on_ended(self, request: Request) -> None: ...

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)


def _key_of(entry: tuple[Key, Request]) -> Key:
    return entry[0]
