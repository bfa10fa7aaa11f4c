"""An engine's LoRA adapters: load orders, adapters named by requests, and what load reports say."""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.base.errors import AdapterNotFound, ConfigError, WeftError
from weft.engine.loop.outgoing import Outgoing
from weft.engine.protocol.adapters import AdapterOrder, AdapterState
from weft.engine.protocol.submits import Submit
from weft.engine.scheduler.adapters import Adapters, AdapterWaitlist
from weft.engine.scheduler.ports import AdapterResidency
from weft.engine.scheduler.state import Request


class EngineAdapters:
    """The adapter manager of an engine; every method also works without one.

    Args:
        manager: The engine's adapters; None: it serves none.
        out: Takes answers.
        fail: Ends a request.
    """

    def __init__(
        self,
        manager: Adapters | None,
        out: Outgoing,
        fail: Callable[[Request, WeftError], None],
    ) -> None:
        self.manager = manager
        self._out = out
        self._fail = fail
        self._waitlist: AdapterWaitlist | None = None

    @property
    def places(self) -> AdapterResidency | None:
        """The residency that tells the scheduler which adapters are on the device."""
        return self.manager.residency if self.manager is not None else None

    def attach(self, waitlist: AdapterWaitlist) -> None:
        """Takes the scheduler's waitlist, before the first turn."""
        self._waitlist = waitlist
        if self.manager is not None:
            self.manager.attach(waitlist, self)

    def holds(self, digest: bytes) -> bool:
        """Whether a request that was started with the adapter may continue here."""
        return self.manager is not None and self.manager.holds(digest)

    def check(self, submit: Submit) -> None:
        """Checks that a request's adapter is served here.

        Raises:
            AdapterNotFound: It is not.
        """
        digest = submit.adapter
        if not digest or (self.manager is not None and self.manager.serves(digest)):
            return
        # A request that another worker began may end here while this worker still has the adapter.
        if submit.attempt == 1 or not self.holds(digest):
            message = f"adapter {digest.hex()[:16]} is not loaded on this worker"
            raise AdapterNotFound(message, stage="validate", param="model")

    def order(self, order: AdapterOrder) -> None:
        """See `AdapterOrder`."""
        if self.manager is not None:
            self.manager.order(order)
        else:
            error = ConfigError("this worker serves no adapters: its enable_lora is off")
            self.adapter_ordered(order.query, error)

    def adapter_ordered(self, query: int, error: WeftError | None) -> None:
        """See `AdapterOwner.adapter_ordered`."""
        self._out.adapter_reply(query, error)

    def adapter_failed(self, digest: bytes, error: WeftError) -> None:
        """See `AdapterOwner.adapter_failed`."""
        assert self._waitlist is not None
        for request in self._waitlist.waiting_for(digest):
            self._fail(request, error)

    def turn(self) -> None:
        """See `Adapters.turn`."""
        if self.manager is not None:
            self.manager.turn()

    def close(self) -> None:
        """Ends the manager's threads."""
        if self.manager is not None:
            self.manager.close()

    def states(self) -> list[AdapterState]:
        """See `Adapters.states`."""
        return self.manager.states() if self.manager is not None else []

    def take_changes(self) -> tuple[list[AdapterState], list[bytes]]:
        """See `Adapters.take_changes`."""
        return self.manager.take_changes() if self.manager is not None else ([], [])

    def counters(self) -> dict[str, int]:
        """See `Adapters.counters`."""
        return self.manager.counters() if self.manager is not None else {}

    def sizes(self) -> dict[str, int]:
        """See `Adapters.sizes`."""
        return self.manager.sizes() if self.manager is not None else {}
