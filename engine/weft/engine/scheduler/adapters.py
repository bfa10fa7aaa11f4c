"""Requests that wait for their adapter, and what the scheduler asks of those who load it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cmp_to_key
from typing import Protocol

from weft.engine.scheduler.policies.base import AdmissionQueue
from weft.engine.scheduler.state import Request


class Adapters(Protocol):
    """Which adapters are on the device, and who uses them (`weft.engine.lora.residency`)."""

    def begin(self, digest: bytes) -> None:
        """One more request needs the adapter; `end` follows."""
        ...

    def end(self, digest: bytes) -> None:
        """A request that needed it is over."""
        ...

    def is_here(self, digest: bytes) -> bool:
        """Requests may be admitted with it."""
        ...

    def enter(self, digest: bytes) -> int:
        """A request is admitted: the adapter stays on the device until `leave`. Its slot."""
        ...

    def leave(self, digest: bytes) -> None:
        """A request gives its place back; steps that have begun may still use the adapter."""
        ...

    def step_began(self, number: int) -> None:
        """A step has begun. Numbers grow."""
        ...

    def step_ended(self, number: int) -> None:
        """A step has ended, on the device too, and so have those before it."""
        ...


class AdapterDoor:
    """The door to the queue: requests whose adapter is not on the device wait before it.

    They delay nobody. Requests without an adapter pass.

    Args:
        waiting: The queue.
        adapters: Who loads them; None: no request has one.
    """

    def __init__(self, waiting: AdmissionQueue, adapters: Adapters | None) -> None:
        self._waiting = waiting
        self._adapters = adapters
        self._requests: dict[bytes, list[Request]] = {}
        self.is_changed = False
        """Others wait than when this was reset."""

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def __iter__(self) -> Iterator[Request]:
        for requests in self._requests.values():
            yield from requests

    @property
    def _loader(self) -> Adapters:
        assert self._adapters is not None, "a request has an adapter, and nobody loads any"
        return self._adapters

    # -- one request -----------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """A new request."""
        if request.adapter:
            self._loader.begin(request.adapter)

    def end(self, request: Request) -> None:
        """The request is over."""
        if request.adapter:
            self._loader.end(request.adapter)

    def enqueue(self, request: Request) -> None:
        """Queues a request, now or when its adapter has come."""
        if request.adapter and not self._loader.is_here(request.adapter):
            self._requests.setdefault(request.adapter, []).append(request)
            self.is_changed = True
        else:
            self._waiting.add(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, of the queue or from before it."""
        requests = self._requests.get(request.adapter, [])
        if request not in requests:
            self._waiting.remove(request)
            return
        self.is_changed = True
        requests.remove(request)
        if not requests:
            del self._requests[request.adapter]

    def admit(self, request: Request) -> None:
        """The request leaves the queue for the device: its adapter stays there until `leave`."""
        if request.adapter:
            request.adapter_slot = self._loader.enter(request.adapter)

    def leave(self, request: Request) -> None:
        """The request is no more on the device; steps that have begun may still be."""
        if request.adapter:
            self._loader.leave(request.adapter)
            request.adapter_slot = 0

    # -- all of an adapter -----------------------------------------------------------------------

    def wanted(self) -> list[bytes]:
        """The adapters that are waited for, first the one whose request would be admitted first."""
        precedes = self._waiting.precedes

        def compare(one: Request, other: Request) -> int:
            return -1 if precedes(one, other) else int(precedes(other, one))

        by_order = cmp_to_key(compare)
        firsts = [min(requests, key=by_order) for requests in self._requests.values()]
        return [request.adapter for request in sorted(firsts, key=by_order)]

    def came(self, adapter: bytes) -> None:
        """Requests may be admitted with it: those that wait for it are queued in their places."""
        for request in self._requests.pop(adapter, ()):
            self._waiting.add(request)

    def goes(self, adapter: bytes) -> None:
        """No more requests may be admitted with it until it comes again."""
        self.is_changed = True
        for request in [request for request in self._waiting if request.adapter == adapter]:
            self._waiting.remove(request)
            self._requests.setdefault(adapter, []).append(request)

    def waiting_for(self, adapter: bytes) -> list[Request]:
        """Requests that wait for an adapter."""
        return list(self._requests.get(adapter, ()))
