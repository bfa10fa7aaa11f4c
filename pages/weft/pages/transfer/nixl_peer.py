"""One peer: its agent, created on first use, and the transfers posted through it.

A filler writes to its peers, and a store reads from them. An agent does only one of the two.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from weft.contract.handle import NixlTargetInfo
from weft.pages.transfer.nixl_binding import Binding, is_destroyed
from weft.pages.transfer.nixl_wire import (
    MAX_PAGES,
    NoOneSidedLane,
    PoolRegion,
    TransferError,
    TransportMismatch,
    descriptor_numbers,
    strided_rows,
)

PeerKey = tuple[str, int]
"""Id and epoch of the peer process."""
Operation = Literal["WRITE", "READ"]
_DOING = {"WRITE": "writing to", "READ": "reading from"}

ONE_SIDED_READ_LANES = {
    "cma",
    "knem",
    "xpmem",
    "rc_verbs",
    "rc_mlx5",
    "dc_mlx5",
    "cuda_ipc",
    "rocm_ipc",
}
"""UCX transports that read remote memory without the help of the process that owns it. Over the
others UCX asks that process to send the bytes, and it *aborts* the process ("Fatal: unexpected
error: Endpoint timeout", UCX 1.23 over tcp) when the reader goes away in the middle."""


def new_agent_name(name: str) -> str:
    """Creates a unique agent name. The unique part comes first, since UCX's log truncates names."""
    return f"{uuid.uuid4().hex[:16]}-{name}"


class _PeerAgent:
    """A NIXL agent connected to one target. It describes both pools to NIXL once."""

    def __init__(
        self,
        binding: Binding,
        name: str,
        region: PoolRegion,
        target: NixlTargetInfo,
        operation: Operation,
    ) -> None:
        own, whole = region.ranges()
        self._num_ranges = len(own)
        if self._num_ranges * max(region.num_pages, target.num_pages) > MAX_PAGES:
            raise TransportMismatch("pools have too many pages for NIXL's numbers")
        self.target = target
        self.region = region
        self.reads_one_sided = False
        """Whether reads are known to use ONE_SIDED_READ_LANES alone."""
        self.name = new_agent_name(name)
        # Reads go over one-sided lanes and are polled to their end, so they need no thread.
        self.agent: Any = binding.create_agent(
            self.name, has_device=region.has_device, has_thread=operation == "WRITE"
        )
        agent = self.agent
        agent.register_memory(
            [(region.address, region.num_bytes, region.device_id, "")], region.memory_type
        )
        peer = agent.add_remote_agent(target.agent_metadata)
        peer = peer.decode() if isinstance(peer, bytes) else peer
        if peer != target.agent_name:
            raise TransportMismatch("agent_metadata is of another agent than agent_name says")
        self.piece_bytes = sum(one.size for one in own)
        """Bytes of a page that a transfer moves."""
        here = (region.address, region.page_bytes, region.num_pages, region.device_id)
        there = (target.base_address, target.page_bytes, target.num_pages, target.device_id)
        self.local_pages: Any = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", strided_rows(*here, own), region.memory_type
        )
        self.remote_pages: Any = agent.prep_xfer_dlist(
            peer, strided_rows(*there, whole), target.memory_type
        )

    def descriptors(
        self, pages: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Numbers of the descriptors of (local, remote) pages."""
        counts = self.region.num_pages, self.target.num_pages
        local, remote = (
            descriptor_numbers(numbers, count, self._num_ranges)
            for numbers, count in zip(pages, counts, strict=True)
        )
        return local, remote

    def drop(self) -> None:
        """Drops the agent here, since an exception may still hold a frame that refers to this
        object.
        """
        self.agent = self.local_pages = self.remote_pages = None


class TransferHandle:
    """A posted write or read, to be polled until it ends, from any thread.

    NIXL sends the notification of a write when a poll finds that the bytes have arrived. Without
    polls, the owner never learns of the write.
    """

    def __init__(self, peer: Peer, handle: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._peer = peer
        self._handle = handle
        self._is_done = False
        self._failure: str | None = None

    def poll(self) -> Literal["pending", "done"]:
        """Returns the state of the transfer without waiting. "done": its bytes are in the
        destination's pool.

        Raises:
            TransferError: It failed or its agent was closed; may_still_arrive is true. The
                state is final.
        """
        if not self._is_done and self._failure is None:
            self._peer.poll(self)
        if self._failure is not None:
            raise TransferError(self._failure, may_still_arrive=True, worker_id=self._peer.key[0])
        return "done" if self._is_done else "pending"

    def _finish(self, failure: str | None) -> None:
        """Settles the state and drops the NIXL handle, which must not be touched afterwards."""
        self._failure, self._is_done = failure, failure is None
        handle, self._handle = self._handle, None
        handle.release()


class Peer:
    """The agent of one peer. All NIXL calls of an agent are made under one lock.

    Two threads that post through one agent gain nothing. A poll must not wait for a post that
    copies bytes; it returns "pending" instead.
    """

    def __init__(
        self, key: PeerKey, operation: Operation, name: str, region: PoolRegion, binding: Binding
    ) -> None:
        self.key = key
        self.is_closed = False
        """Whether the peer takes no more transfers and its agent is or will be destroyed. Never
        unset.
        """
        self.is_fenced = False
        """Whether `close` closed the peer. A peer that is closed because it is unused may be
        replaced.
        """
        self.last_used_s = 0.0
        self._operation = operation
        self._doing = f"{_DOING[operation]} {key[0]}"
        self._name = name
        self._region = region
        self._binding = binding
        self._lock = threading.Lock()
        self._agent: _PeerAgent | None = None
        self._undead: weakref.ref[Any] | None = None
        """An agent that was dropped but is still alive."""
        self._transfers: set[TransferHandle] = set()
        self._is_broken = False
        self._may_still_arrive = False
        self._is_unsettled = False
        """Whether the device may still execute copies of an agent that is gone."""

    def connect(self, target: NixlTargetInfo) -> bool:
        """Creates the agent unless it exists. False: the peer was closed meanwhile."""
        with self._lock:
            if self.is_closed:
                return False
            self._connected(target)
            return True

    def post(
        self,
        target: NixlTargetInfo,
        pages: tuple[NDArray[np.int32], NDArray[np.int32]],
        notification: bytes,
        check: Callable[[], None] | None,
    ) -> TransferHandle | None:
        """Posts a transfer of (local, remote) pages; with some lanes this performs the copy.

        None: the peer was closed meanwhile. Only writes carry a notification. `check` may raise
        TransferError at the last moment.
        """
        with self._lock:
            if self.is_closed:
                return None
            agent = self._connected(target)
            if self._operation == "READ":
                self._require_one_sided_reads(agent)
            local, remote = agent.descriptors(pages)
            # NIXL's handle refers to the agent. In a local variable it would keep another thread
            # from destroying the agent once the lock is free.
            with self._binding.calls(f"preparing {self._doing}"):
                transfer = TransferHandle(
                    self,
                    agent.agent.make_prepped_xfer(
                        self._operation,
                        agent.local_pages,
                        local,
                        agent.remote_pages,
                        remote,
                        notification,
                    ),
                    len(pages[0]) * agent.piece_bytes,
                )
            if check is not None:
                try:
                    check()
                except TransferError as error:
                    self._settle(transfer, error.message)
                    raise
            self._transfers.add(transfer)
            self._update(transfer, lambda: agent.agent.transfer(transfer._handle))
            return transfer

    def poll(self, transfer: TransferHandle) -> None:
        """Updates a transfer's state, unless a post is running on this agent."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._poll_locked(transfer)
        finally:
            self._lock.release()

    def close(self, timeout_s: float) -> bool:
        """Destroys the agent. Returns whether transfers were unfinished or had failed.

        Raises:
            TransferError: The agent may still exist, since a post is running or an object refers to
                it. Call again.
        """
        self.is_closed = self.is_fenced = True
        if not self._lock.acquire(timeout=timeout_s):
            raise TransferError(
                f"a post to {self.key[0]} has not returned for {timeout_s:.0f} s: its agent lives",
                may_still_arrive=True,
                worker_id=self.key[0],
            )
        try:
            return self._destroy()
        finally:
            self._lock.release()

    def close_if_idle(self, unused_since_s: float) -> bool:
        """Closes the peer unless it was used since, a transfer is pending or a post is running."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.last_used_s > unused_since_s or self._num_pending():
                return False
            self.is_closed = True
            self._destroy()
            return True
        finally:
            self._lock.release()

    def num_pending(self) -> int:
        """Number of incomplete transfers. Waits for a running post."""
        with self._lock:
            return self._num_pending()

    def lanes(self) -> str:
        """Lanes over which bytes travel to this peer."""
        agent = self._agent
        lanes = self._binding.lanes(agent.name) if agent else None
        return lanes or "lanes unknown"

    def _require_one_sided_reads(self, agent: _PeerAgent) -> None:
        if agent.reads_one_sided:
            return
        lanes = self._binding.lanes(agent.name)
        names = {lane.partition("/")[0] for lane in (lanes or "").split()}
        agent.reads_one_sided = not names.isdisjoint(ONE_SIDED_READ_LANES)
        if not agent.reads_one_sided:
            raise NoOneSidedLane(
                f"{self._doing} would need that process's help, and could end it: "
                f"{lanes or 'lanes unknown'}"
            )

    def _num_pending(self) -> int:
        for transfer in list(self._transfers):
            self._poll_locked(transfer)
        return len(self._transfers)

    def _poll_locked(self, transfer: TransferHandle) -> None:
        agent = self._agent
        if agent is not None and transfer in self._transfers:
            self._update(transfer, lambda: agent.agent.check_xfer_state(transfer._handle))

    def _update(self, transfer: TransferHandle, call: Any) -> None:
        failure = None
        try:
            with self._binding.calls(self._doing):
                state = call()
        except TransferError as error:
            state, failure = "ERR", error.message
        if state == "PROC":
            return
        if state != "DONE":
            failure = failure or f"{self._doing}: NIXL answered {state}"
            self._is_broken = True
        self._settle(transfer, failure)

    def _settle(self, transfer: TransferHandle, failure: str | None) -> None:
        self._transfers.discard(transfer)
        with contextlib.suppress(*self._binding.errors):
            transfer._finish(failure)

    def _connected(self, target: NixlTargetInfo) -> _PeerAgent:
        """The existing agent, or a new one after a failure or a change of target."""
        agent = self._agent
        if agent is not None and (self._is_broken or agent.target != target):
            if self._num_pending():
                raise TransferError(
                    f"{self._doing}: transfers are pending on an agent that cannot be used again",
                    worker_id=self.key[0],
                )
            self._destroy()
            agent = None
        if agent is None:
            with self._binding.calls(f"connecting to {self.key[0]}"):
                agent = _PeerAgent(self._binding, self._name, self._region, target, self._operation)
            self._agent, self._is_broken = agent, False
        return agent

    def _destroy(self) -> bool:
        """Only this stops the agent's transfers. Returns whether some were unfinished."""
        if self._agent is not None:
            had_pending = self._num_pending() > 0
            for transfer in list(self._transfers):
                self._settle(transfer, f"the agent towards {self.key[0]} was closed")
            self._is_unsettled |= had_pending or self._is_broken
            self._may_still_arrive |= self._is_unsettled
            self._undead = weakref.ref(self._agent.agent.agent)
            self._agent.drop()
            self._agent = None
        if self._undead is not None and not is_destroyed(self._undead):
            self._may_still_arrive = True
            raise TransferError(
                f"the agent towards {self.key[0]} cannot be destroyed: something holds it",
                may_still_arrive=True,
                worker_id=self.key[0],
            )
        self._undead = None
        if self._is_unsettled and self._region.settle is not None:
            self._region.settle()
        self._is_unsettled = False
        return self._may_still_arrive
