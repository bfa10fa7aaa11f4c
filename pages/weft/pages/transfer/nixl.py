"""The transport over NIXL: an owner's receive agent, a filler's send agents, a store's readers.

NIXL offers a WRITE of scattered pages with a notification that arrives after the bytes, and a READ
of scattered pages. Its limits shape this module:

- No cancel. Releasing the handle of an incomplete transfer does not stop the transfer. Destroying
  the agent does, so there is one agent per peer, and `close_peer` destroys it.
- No fence past the network. Over TCP the kernel delivers the bytes that it has taken even after
  the agent is destroyed or its process killed (2 to 42 MB to a receiver that was stopped and runs
  again). `close_peer` tells whether that can happen. Only closing the connection on the *owner's*
  side ends it for certain: by `ReceiveAgent.reopen`, or by the owner's exit. (The sender's process
  makes shared-memory copies, CMA; they end with the agent.) A READ needs no such fence: the
  reader's own agent writes the bytes, so nothing lands once it is destroyed.
- No time-out. Transfers with a peer that is stopped or cut off stay pending for ever; the caller
  must set deadlines.
- No protection of deregistered memory: a pool is registered once and outlives its agents' peers.

Importing this module does not import nixl.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from weft.contract.handle import NixlTargetInfo
from weft.pages.transfer.chunks import LeaseTerm
from weft.pages.transfer.nixl_binding import is_destroyed, load_binding, nixl_available
from weft.pages.transfer.nixl_peer import PeerKey, TransferHandle, new_agent_name
from weft.pages.transfer.nixl_pool import PeerPool
from weft.pages.transfer.nixl_wire import (
    MAX_NOTIFIED_DIGESTS,
    NoOneSidedLane,
    Notification,
    PoolRegion,
    TransferError,
    TransportMismatch,
    check_pages,
    encode_notification,
    metadata_digest,
)

__all__ = [
    "NoOneSidedLane",
    "Notification",
    "PeerKey",
    "PoolRegion",
    "ReadAgents",
    "ReceiveAgent",
    "SendAgents",
    "TransferError",
    "TransferHandle",
    "TransportMismatch",
    "encode_notification",
    "nixl_available",
]

logger = logging.getLogger(__name__)


class ReceiveAgent:
    """The owner's agent: registers the pool and describes it to fillers. It never posts transfers.

    One thread at a time may use it.
    """

    def __init__(self, name: str, region: PoolRegion) -> None:
        """Creates the agent and registers the pool.

        Args:
            name: Role and worker, for logs; without spaces.
            region: The pool that peers may write to. Its memory must stay mapped until this agent
                and every peer's agent are closed.

        Raises:
            TransportMismatch: NIXL is not usable here.
            TransferError: The agent cannot be created, or the memory cannot be registered.
        """
        self.num_garbage = 0
        """Number of notifications that were dropped because they were not Weft's."""
        self._binding = load_binding()
        self._name = name
        self._region = region
        self._agent: Any = None
        self._target = self._open()

    def target(self) -> NixlTargetInfo:
        """The description that fillers need to write into the pool. `reopen` changes it."""
        return self._target

    def poll(self) -> list[Notification]:
        """Notifications since the last call, in order of arrival for each sender. Never waits.

        The pool has the bytes of the write to which a notification was bound. The notification
        comes from the network, so the caller must check its epoch and lease.

        Raises:
            TransferError: NIXL failed, or the agent is closed.
        """
        if self._agent is None:
            raise TransferError("the receive agent is closed")
        with self._binding.calls("receiving notifications"):
            messages = self._agent.get_new_notifs()
        found = []
        for sender, payloads in messages.items():
            for payload in payloads:
                notification = Notification.parse(payload)
                if notification is None:
                    self.num_garbage += 1
                    logger.warning("dropped %d bytes of garbage from %r", len(payload), sender)
                else:
                    found.append(notification)
        return found

    def reopen(self) -> NixlTargetInfo:
        """Closes every connection and registers the pool again: nothing sent before can arrive.

        This is the owner's half of a fence. The other half is that the sender's agent was
        destroyed or its process is gone. Writes of all other peers fail as well, and fillers need
        the new target.
        """
        self.close()
        self._target = self._open()
        return self._target

    def describe(self) -> str:
        """A one-line description of the transport, for people."""
        lanes = self._binding.lanes(self._target.agent_name)
        return f"NIXL {self._binding.version} over UCX, {lanes or 'lanes unknown'}"

    def close(self) -> None:
        """Destroys the agent and its connections. Idempotent.

        Raises:
            TransferError: The agent could not be destroyed, because an object still refers to it.
        """
        if self._agent is None:
            return
        reference = weakref.ref(self._agent.agent)
        self._agent = None
        if not is_destroyed(reference):
            raise TransferError("the receive agent cannot be destroyed: something holds it")

    def _open(self) -> NixlTargetInfo:
        region = self._region
        name = new_agent_name(self._name)
        with self._binding.calls("registering the pool"):
            agent = self._binding.create_agent(name, has_device=region.has_device)
            agent.register_memory(
                [(region.address, region.num_bytes, region.device_id, "")], region.memory_type
            )
            metadata = agent.get_agent_metadata()
        self._agent = agent
        return NixlTargetInfo(
            version=self._binding.version,
            agent_name=name,
            agent_metadata=metadata,
            agent_metadata_digest=metadata_digest(metadata),
            base_address=region.address,
            page_bytes=region.page_bytes,
            num_pages=region.num_pages,
            device_id=region.device_id,
            memory_type=region.memory_type,
            max_notified_digests=MAX_NOTIFIED_DIGESTS,
        )


class SendAgents(PeerPool):
    """A filler's agents, which write to owners' pools."""

    operation = "WRITE"

    def write(
        self,
        peer_key: PeerKey,
        target: NixlTargetInfo,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        notification: bytes,
        term: LeaseTerm | None = None,
    ) -> TransferHandle:
        """Posts one write of pages with its notification. May copy the bytes before it returns.

        The caller must poll the handle until the write ends, since polling sends the notification.
        `poll` also reports a failure of the post itself.

        Args:
            peer_key: Owner and epoch; one agent each.
            target: The owner's pool, from its handle.
            local_pages: Source page numbers. Their content must not change before the write is
                done.
            remote_pages: Destination page numbers, as many, all different.
            notification: Arrives at the owner after the bytes; empty: none does.
            term: Checked right before NIXL is told to write.

        Raises:
            TransportMismatch: Target or page numbers do not fit; nothing was posted.
            TransferError: The term is over, NIXL refused before posting, or all `max_peers` agents
                are busy.
        """
        pages = check_pages(
            local_pages,
            remote_pages,
            num_sources=self._region.num_pages,
            num_destinations=target.num_pages,
        )
        check = None if term is None else partial(term.check, peer_key[0])
        return self.post(peer_key, target, pages, notification, check)


class ReadAgents(PeerPool):
    """A store's agents, which read other processes' pools."""

    operation = "READ"

    def read(
        self,
        peer_key: PeerKey,
        target: NixlTargetInfo,
        remote_pages: Sequence[int],
        local_pages: Sequence[int],
    ) -> TransferHandle:
        """Posts one read of pages. May copy the bytes before it returns.

        The caller must poll the handle until the read ends. The read returns the content of the
        memory at that time: NIXL does not report that the source has changed or now holds other
        pages.

        Args:
            peer_key: Source and its epoch; one agent each.
            target: The source's pool.
            remote_pages: Source page numbers.
            local_pages: Destination page numbers, as many, all different. Nothing else may use
                these pages until the handle says "done" or `close_peer` has returned.

        Raises:
            TransportMismatch: Target or page numbers do not fit; nothing was posted.
            NoOneSidedLane: No lane reads without the source's help; nothing was posted.
            TransferError: NIXL refused before posting, or all `max_peers` agents are busy.
        """
        remote, local = check_pages(
            remote_pages,
            local_pages,
            num_sources=target.num_pages,
            num_destinations=self._region.num_pages,
        )
        return self.post(peer_key, target, (local, remote), b"")
