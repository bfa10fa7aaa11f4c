"""Writes between engines of one process: one copy a chunk and a notification behind it, as NIXL."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

from weft.contract.handle import NixlTargetInfo
from weft.engine.loop.engine import Engine
from weft.engine.transfer.exchange import PageExchange
from weft.pages.transfer.chunks import LeaseTerm
from weft.pages.transfer.lanes import FillerLanes
from weft.pages.transfer.nixl import Notification
from weft.pages.transfer.nixl_wire import MAX_NOTIFIED_DIGESTS

VERSION = "local"


class LocalReceiver:
    """Plays `ReceiveAgent` over an owner's window."""

    def __init__(self, window: PageExchange) -> None:
        self.pages = window.pages
        region = window.region()
        self._arrived: deque[Notification] = deque()
        self._target = NixlTargetInfo(
            version=VERSION,
            agent_name="local",
            agent_metadata=b"",
            agent_metadata_digest=b"",
            base_address=region.address,
            page_bytes=region.page_bytes,
            num_pages=region.num_pages,
            memory_type=region.memory_type,
            max_notified_digests=MAX_NOTIFIED_DIGESTS,
        )

    def target(self) -> NixlTargetInfo:
        return self._target

    def arrived(self, notification: Notification) -> None:
        self._arrived.append(notification)

    def poll(self) -> list[Notification]:
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def reopen(self) -> NixlTargetInfo:
        return self._target

    def describe(self) -> str:
        return "copies in one process"

    def close(self) -> None:
        """Does nothing: nothing is open."""


class LocalSenders:
    """Plays `SendAgents` from a filler's window into owners' windows."""

    def __init__(self, window: PageExchange, receivers: dict[int, LocalReceiver]) -> None:
        self._pages = window.pages
        self._receivers = receivers

    def connect(self, owner: object, target: NixlTargetInfo) -> None:
        """Does nothing: there is nothing to connect."""

    def write(
        self,
        owner: object,
        target: NixlTargetInfo,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        notification: bytes,
        term: LeaseTerm,
    ) -> SimpleNamespace:
        term.check("owner")
        receiver = self._receivers[target.base_address]
        for local, remote in zip(local_pages, remote_pages, strict=True):
            receiver.pages[remote] = self._pages[local]
        parsed = Notification.parse(notification)
        assert parsed is not None
        receiver.arrived(parsed)
        return SimpleNamespace(poll=lambda: "done")

    def describe(self) -> str:
        return "copies in one process"

    def close(self) -> None:
        """Does nothing: nothing is open."""


def join_planes(owner: Engine, fillers: Sequence[Engine]) -> None:
    """Lets fillers write into the owner's window; the engines have transport `data` and were not
    used yet.
    """
    plane = owner.parts.transport
    receiver = LocalReceiver(plane._exchange)
    plane._receiver = receiver  # type: ignore[assignment]
    for filler in fillers:
        receivers = {receiver.target().base_address: receiver}
        senders = LocalSenders(filler.parts.transport._exchange, receivers)
        filler.parts.transport._senders = senders  # type: ignore[assignment]
        filler.parts.transport.shipper._agents = senders  # type: ignore[assignment]
        filler.filler._lanes = FillerLanes(
            nixl_version=VERSION, memory_type=receiver.target().memory_type
        )
