"""Requests that wait for their adapter, and the interface of an engine's adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cmp_to_key
from typing import Protocol

from weft.contract.adapters import AdapterOrder, AdapterState
from weft.contract.errors import AdapterNotFound, ConfigError, WeftError
from weft.contract.submits import Submit
from weft.engine.requests.request import Request
from weft.engine.scheduler.policies.base import AdmissionQueue


class AdapterResidency(Protocol):
    """The adapters that are on the device, and their users."""

    def begin(self, digest: bytes) -> None:
        """Registers a request that will need the adapter. `end` must follow."""
        ...

    def end(self, digest: bytes) -> None: ...

    def is_here(self, digest: bytes) -> bool:
        """Whether requests with the adapter may be admitted."""
        ...

    def enter(self, digest: bytes) -> int:
        """Admits a request: the adapter stays on the device until `leave`. Returns its slot."""
        ...

    def leave(self, digest: bytes) -> None:
        """Ends a request's use. Steps that have begun may still use the adapter."""
        ...

    def step_began(self, number: int) -> None:
        """Numbers increase."""
        ...

    def step_ended(self, number: int) -> None:
        """The step, and all before it, have ended on the device too."""
        ...


class AdapterWaitlist:
    """Requests whose adapter is not on the device. They wait outside the admission queue, so they
    delay no other request.

    Args:
        waiting: The queue that they enter when their adapter is loaded.
        adapters: Loads adapters; None: no request has one.
    """

    def __init__(self, waiting: AdmissionQueue, adapters: AdapterResidency | None) -> None:
        self._waiting = waiting
        self._adapters = adapters
        self._requests: dict[bytes, list[Request]] = {}
        self.is_changed = False
        """Whether the set of waiting requests has changed since this was reset."""

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def __iter__(self) -> Iterator[Request]:
        for requests in self._requests.values():
            yield from requests

    @property
    def _loader(self) -> AdapterResidency:
        assert self._adapters is not None, "a request has an adapter, and no adapters are served"
        return self._adapters

    # -- one request -----------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        if request.adapter:
            self._loader.begin(request.adapter)

    def end(self, request: Request) -> None:
        if request.adapter:
            self._loader.end(request.adapter)

    def enqueue(self, request: Request) -> None:
        """Queues a request, at once or when its adapter is loaded."""
        if request.adapter and not self._loader.is_here(request.adapter):
            self._requests.setdefault(request.adapter, []).append(request)
            self.is_changed = True
        else:
            self._waiting.add(request)

    def remove(self, request: Request) -> None:
        requests = self._requests.get(request.adapter, [])
        if request not in requests:
            self._waiting.remove(request)
            return
        self.is_changed = True
        requests.remove(request)
        if not requests:
            del self._requests[request.adapter]

    def admit(self, request: Request) -> None:
        """Gives an admitted request its adapter's slot. The adapter stays on the device until
        `leave`.
        """
        if request.adapter:
            request.adapter_slot = self._loader.enter(request.adapter)

    def leave(self, request: Request) -> None:
        """Ends a request's use of its adapter. Steps that have begun may still use the adapter."""
        if request.adapter:
            self._loader.leave(request.adapter)
            request.adapter_slot = 0

    def step_began(self, number: int) -> None:
        if self._adapters is not None:
            self._adapters.step_began(number)

    def step_ended(self, number: int) -> None:
        if self._adapters is not None:
            self._adapters.step_ended(number)

    # -- all of an adapter -----------------------------------------------------------------------

    def wanted(self) -> list[bytes]:
        """The adapters that are waited for, ordered by the admission of their first request."""
        precedes = self._waiting.precedes

        def compare(one: Request, other: Request) -> int:
            return -1 if precedes(one, other) else int(precedes(other, one))

        by_order = cmp_to_key(compare)
        firsts = [min(requests, key=by_order) for requests in self._requests.values()]
        return [request.adapter for request in sorted(firsts, key=by_order)]

    def came(self, adapter: bytes) -> None:
        """Queues the requests that wait for an adapter that has been loaded."""
        for request in self._requests.pop(adapter, ()):
            self._waiting.add(request)

    def goes(self, adapter: bytes) -> None:
        self.is_changed = True
        for request in [request for request in self._waiting if request.adapter == adapter]:
            self._waiting.remove(request)
            self._requests.setdefault(adapter, []).append(request)

    def waiting_for(self, adapter: bytes) -> list[Request]:
        return list(self._requests.get(adapter, ()))


Reply = Callable[[int, WeftError | None], None]
"""Takes an order's number and its error; None: it succeeded."""
Fail = Callable[[Request, WeftError], None]


class Adapters:
    """The adapters of an engine that serves none. A manager (`weft.engine.features.lora.manager`)
    overrides the methods.
    """

    residency: AdapterResidency | None = None
    """Which adapters are on the device; None: none are served."""

    def attach(self, waitlist: AdapterWaitlist, reply: Reply, fail: Fail) -> None:
        """Connects the adapters with the scheduler and the engine, before the first turn.

        Args:
            waitlist: Holds requests back until their adapter is loaded.
        """
        self._waitlist, self._reply, self._fail = waitlist, reply, fail

    def check(self, submit: Submit) -> None:
        """Raises AdapterNotFound if a request names an adapter that is not served here."""
        if submit.adapter:
            raise not_loaded(submit.adapter)

    def holds(self, digest: bytes) -> bool:
        """Whether requests that began with the adapter elsewhere may continue here."""
        return False

    def order(self, order: AdapterOrder) -> None:
        """Loads or unloads an adapter; `reply` is called with the outcome."""
        error = ConfigError("this worker serves no adapters: its enable_lora is off")
        self._reply(order.query, error)

    def turn(self) -> None:
        """Continues loading and evicting; called twice a turn."""

    def hold(self) -> None:
        """Begins no write to the device, until `let_go`: its memory is about to sleep."""

    def let_go(self) -> None:
        """The device may be written again."""

    @property
    def is_still(self) -> bool:
        """Whether no write to the device is under way."""
        return True

    def states(self) -> list[AdapterState]:
        return []

    def take_changes(self) -> tuple[list[AdapterState], list[bytes]]:
        """States that have changed since the last call, and digests of adapters that are gone."""
        return [], []

    def counters(self) -> dict[str, int]:
        return {}

    def sizes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Stops the threads, if any, after their current work."""


def not_loaded(digest: bytes) -> AdapterNotFound:
    """The error of a request whose adapter this worker does not serve."""
    message = f"adapter {digest.hex()[:16]} is not loaded on this worker"
    return AdapterNotFound(message, stage="validate", param="model")
