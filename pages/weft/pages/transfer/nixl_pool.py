"""Agents of many peers: created on first use, limited in number, closed when idle."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from weft.contract.clock import Clock, monotonic
from weft.contract.handle import NixlTargetInfo
from weft.pages.transfer.nixl_binding import load_binding
from weft.pages.transfer.nixl_peer import Operation, Peer, PeerKey, TransferHandle
from weft.pages.transfer.nixl_wire import PoolRegion, TransferError, check_target


class PeerPool:
    """One agent per peer, created on first use and closed when idle. Thread-safe.

    Calls may take milliseconds and copy megabytes, so they must not be made in an event loop.
    """

    operation: ClassVar[Operation]

    def __init__(
        self,
        name: str,
        region: PoolRegion,
        *,
        max_peers: int = 64,
        idle_s: float = 300.0,
        clock: Clock = monotonic,
    ) -> None:
        """Agents are created on first use.

        Args:
            name: Role and worker, for logs; without spaces.
            region: The pool that pages are written from or read into; must outlive this object.
            max_peers: Most agents at once. The longest unused idle one makes room for a new one.
            idle_s: `close_idle` closes agents that were not used for this long.

        Raises:
            TransportMismatch: NIXL is not usable here.
        """
        self._binding = load_binding()
        self._name = name
        self._region = region
        self._max_peers = max_peers
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()  # Over the dict alone; never held during a NIXL call.
        self._peers: dict[PeerKey, Peer] = {}

    def check(self, target: NixlTargetInfo) -> None:
        """Checks a peer's description of its pool, without connecting.

        Raises:
            TransportMismatch: It does not fit.
        """
        check_target(target, version=self._binding.version, page_bytes=self._region.whole_bytes)

    def connect(self, peer_key: PeerKey, target: NixlTargetInfo) -> None:
        """Connects to a peer ahead of transfers (some 32 ms; the first 0.5 s).

        Raises:
            TransportMismatch: The target cannot be reached from here.
            TransferError: NIXL failed, or all `max_peers` agents are busy.
        """
        self.check(target)
        while not self._peer(peer_key).connect(target):
            pass  # The peer was closed between the look-up and the call: take a new one.

    def post(
        self,
        peer_key: PeerKey,
        target: NixlTargetInfo,
        pages: tuple[NDArray[np.int32], NDArray[np.int32]],
        notification: bytes,
        check: Callable[[], None] | None = None,
    ) -> TransferHandle:
        """Posts a transfer of (local, remote) pages, which the caller has checked."""
        self.check(target)
        while True:
            transfer = self._peer(peer_key).post(target, pages, notification, check)
            if transfer is not None:
                return transfer

    def num_pending(self, peer_key: PeerKey) -> int:
        """Number of incomplete transfers of a peer. 0: all that were posted have ended."""
        with self._lock:
            peer = self._peers.get(peer_key)
        return peer.num_pending() if peer else 0

    def close_peer(self, peer_key: PeerKey, *, timeout_s: float = 10.0) -> bool:
        """Destroys the agent of a peer, which ends all transfers with it. Returns whether a
        transfer was unfinished or had failed.

        After such a write, bytes that the kernel or the network has taken can still arrive until
        the owner reopens its receive agent, and pages must stay in quarantine. After reads nothing
        arrives in either case.

        Raises:
            TransferError: A post did not return within `timeout_s`, or the agent could not be
                destroyed. Its transfers may continue; call again, or end the process.
        """
        with self._lock:
            peer = self._peers.get(peer_key)
        if peer is None:
            return False
        had_unfinished = peer.close(timeout_s)
        self._forget(peer)
        return had_unfinished

    def close_idle(self) -> int:
        """Closes agents without pending transfers that were unused for `idle_s`. Returns their
        number.
        """
        return self._close_unused(self._clock() - self._idle_s, most=self._max_peers)

    def close_unused(self) -> None:
        """Closes all agents, of which a new use makes others. Raises TransferError if one has
        pending transfers.
        """
        self._close_unused(math.inf, most=self._max_peers)
        with self._lock:
            if self._peers:
                raise TransferError("transfers are pending")

    def close(self) -> bool:
        """Closes all peers. Returns whether closing any of them returned True."""
        with self._lock:
            keys = list(self._peers)
        outcomes = [self.close_peer(key) for key in keys]  # Close all, even if one fails.
        return any(outcomes)

    def describe(self) -> str:
        """A one-line description of the transport and the lanes to each peer, for people."""
        with self._lock:
            peers = list(self._peers.values())
        direction = "to" if self.operation == "WRITE" else "from"
        lanes = "; ".join(f"{direction} {peer.key[0]}: {peer.lanes()}" for peer in peers)
        return f"NIXL {self._binding.version} over UCX, {lanes or 'no peer connected'}"

    def _peer(self, key: PeerKey) -> Peer:
        """Creates the entry if necessary. Its agent is created later, without the lock."""
        while True:
            with self._lock:
                peer = self._peers.get(key)
                if peer is not None and peer.is_fenced:
                    raise TransferError(
                        f"the agent towards {key[0]} is being closed", worker_id=key[0]
                    )
                if peer is not None and peer.is_closed:  # It was unused; a new one may follow.
                    peer = None
                is_new = peer is None
                if is_new and (key in self._peers or len(self._peers) < self._max_peers):
                    peer = Peer(key, self.operation, self._name, self._region, self._binding)
                    self._peers[key] = peer
                if peer is not None:
                    peer.last_used_s = self._clock()
            if peer is not None:
                if is_new:
                    self._close_earlier(key)
                return peer
            if not self._close_unused(self._clock(), most=1):
                raise TransferError(f"all {self._max_peers} agents are busy")

    def _close_earlier(self, key: PeerKey) -> None:
        """Agents of earlier processes of the same worker stay while they have pending transfers,
        until they are idle.
        """
        with self._lock:
            others = [p for p in self._peers.values() if p.key[0] == key[0] and p.key != key]
        for peer in others:
            if peer.close_if_idle(self._clock()):
                self._forget(peer)

    def _close_unused(self, since_s: float, *, most: int) -> int:
        with self._lock:
            peers = sorted(self._peers.values(), key=lambda peer: peer.last_used_s)
        closed = 0
        for peer in peers:
            if closed < most and peer.close_if_idle(since_s):
                self._forget(peer)
                closed += 1
        return closed

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            if self._peers.get(peer.key) is peer:
                del self._peers[peer.key]
