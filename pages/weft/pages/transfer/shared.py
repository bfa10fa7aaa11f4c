"""The transport between processes of one host that share memory, for pairs without NIXL.

An owner listens on an abstract Unix socket, whose name and secret are part of its handles. A filler
that connects is on the same host and in the same network namespace; that is the probe. It gets the
owner's memory over that connection, maps it and copies pages into it:

    host memory    a memory file (`shared_memory.py`); the filler's thread copies
    GPU memory     a CUDA IPC handle (`device_memory.py`); the filler's GPU copies

A copy ends in the filler's process, or with it: nothing is under way in a network. Thus the filler
says `written` after the bytes, and needs no fence of the owner's. Until a filler says that it has
stopped, or its process is gone, its destinations stay in quarantine, as over NIXL.

The connection stays open. Its end tells the filler that the owner is gone, so that it gives the
memory back.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from weft.contract.clock import Clock, monotonic
from weft.contract.handle import SHARE_SECRET_BYTES, SharedTargetInfo
from weft.pages.transfer.chunks import SLOT_BYTES
from weft.pages.transfer.device_memory import DeviceCopy, DeviceMemory, DeviceWriter
from weft.pages.transfer.nixl_peer import PeerKey
from weft.pages.transfer.nixl_wire import (
    PoolRegion,
    TransferError,
    TransportMismatch,
    check_pages,
)
from weft.pages.transfer.shared_memory import MemoryFile, map_file

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
"""Seconds in which the other side must answer. An owner answers in milliseconds."""
RETRY_S = 30.0
"""Seconds after which a filler tries again to reach an owner that it could not reach."""
MAX_PIECE_BYTES = 8 << 20
"""Most bytes that are copied between two looks at the lease."""
MAX_REMEMBERED_PEERS = 256
_OFFER = struct.Struct("<4sQI4s88s")
"""Magic, bytes of a page, pages, memory type, and the export of GPU memory."""
_MAGIC = b"WFS1"


class SharedPool:
    """Hands the memory of an owner's pool to fillers on this host. A thread answers them.

    Args:
        name: Role and worker, for logs.
        memory: The memory in which the pages lie, from its beginning on.

    Raises:
        TransferError: The system refuses a socket, or the memory cannot be exported.
    """

    def __init__(
        self, name: str, memory: MemoryFile | DeviceMemory, page_bytes: int, num_pages: int
    ) -> None:
        self._name = name
        self._memory = memory
        is_on_device = isinstance(memory, DeviceMemory)
        self._target = SharedTargetInfo(
            socket=f"weft-{secrets.token_hex(16)}",
            secret=secrets.token_bytes(SHARE_SECRET_BYTES),
            page_bytes=page_bytes,
            num_pages=num_pages,
            memory_type="VRAM" if is_on_device else "DRAM",
        )
        export = memory.export() if isinstance(memory, DeviceMemory) else b""
        kind = self._target.memory_type.encode()
        self._offer = _OFFER.pack(_MAGIC, page_bytes, num_pages, kind, export)
        self._callers: set[socket.socket] = set()
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(b"\0" + self._target.socket.encode())
            self._listener.listen()
        except OSError as error:
            raise TransferError(f"no socket to share memory: {error}") from error
        self._ends, end = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(end,), name="weft-share", daemon=True
        )
        self._thread.start()

    def target(self) -> SharedTargetInfo:
        """The description that fillers need to write into the pool."""
        return self._target

    @property
    def is_mapped(self) -> bool:
        """Whether some process has got the memory."""
        return bool(self._callers)

    def describe(self) -> str:
        """Describes the transport, for people."""
        kind = "GPU memory" if self._target.memory_type == "VRAM" else "memory"
        return f"{kind} shared with processes of this host: {len(self._callers)} have mapped it"

    def close(self) -> None:
        """Ends the thread and the connections. The memory stays with those who have mapped it."""
        self._ends.close()
        self._thread.join(CONNECT_TIMEOUT_S)

    def _run(self, end: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, end, self._listener:
            selector.register(end, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    found = key.fileobj
                    assert isinstance(found, socket.socket)
                    if found is end:
                        for known in self._callers:
                            known.close()
                        return
                    if found is not self._listener:  # A caller says no more: it has gone.
                        selector.unregister(found)
                        self._callers.discard(found)
                        found.close()
                    elif (caller := self._answer()) is not None:
                        selector.register(caller, selectors.EVENT_READ)
                        self._callers.add(caller)

    def _answer(self) -> socket.socket | None:
        caller: socket.socket | None = None
        try:
            caller, _ = self._listener.accept()
            caller.settimeout(CONNECT_TIMEOUT_S)
            if _user_of(caller) != os.geteuid():
                raise OSError("it is another user's")
            secret = caller.recv(SHARE_SECRET_BYTES + 1)
            if not hmac.compare_digest(secret, self._target.secret):
                raise OSError("it does not know the secret")
            files = [self._memory.number] if isinstance(self._memory, MemoryFile) else []
            socket.send_fds(caller, [self._offer], files)
            return caller
        except OSError as error:
            logger.warning("%s: a process that asked for memory got none: %s", self._name, error)
            if caller is not None:
                caller.close()
            return None


class OutgoingData(SharedPool):
    """Memory from which the server process of this worker sends data, in places of one chunk.

    Raises:
        TransferError: The system refuses the memory or a socket.
    """

    def __init__(self, name: str, num_slots: int) -> None:
        memory = MemoryFile(num_slots * SLOT_BYTES)
        self.bytes = memory.array
        super().__init__(name, memory, SLOT_BYTES, num_slots)


class WriteHandle(Protocol):
    """A write into an owner's memory, to be polled until it ends."""

    def poll(self) -> Literal["pending", "done"]:
        """Returns whether the bytes are in the owner's memory. Raises TransferError if it is not
        known, and `may_still_arrive` then says whether they may still come.
        """
        ...


class _Copied:
    """Implements `WriteHandle`: the copy was made when the write was posted."""

    def poll(self) -> Literal["pending", "done"]:
        return "done"


class SharedSenders:
    """A filler's side: writes pages of its exchange into the memory of owners on this host.

    One thread uses it at a time, but `describe` may be called by any.

    Args:
        region: The pool that pages are written from; must outlive this object.
    """

    def __init__(self, region: PoolRegion, clock: Clock = monotonic) -> None:
        self._region = region
        self._clock = clock
        self._pages: NDArray[np.uint8] | None = None
        self._writer: DeviceWriter | None = None
        if region.memory_type == "VRAM":
            self._writer = DeviceWriter(region)
        else:
            whole = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
            pages = np.ctypeslib.as_array(whole).reshape(region.num_pages, region.page_bytes)
            self._pages = pages
        self._peers: dict[PeerKey, SharedPeer] = {}
        self._unreached: dict[PeerKey, tuple[float, str]] = {}
        """When and why an owner could not be reached."""

    def connect(self, key: PeerKey, target: SharedTargetInfo) -> None:
        """Gets an owner's memory unless it is mapped.

        Raises:
            TransferError: The owner cannot be reached from here, or was not some seconds ago.
        """
        self._connected(key, target)

    def write(
        self,
        key: PeerKey,
        target: SharedTargetInfo,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        check: Callable[[], None],
    ) -> WriteHandle:
        """Copies pages into an owner's pool; between GPUs the copy is only enqueued.

        Args:
            local_pages: Source page numbers. Their content must not change before the write ends.
            remote_pages: Destination page numbers, as many, all different.
            check: Called before each piece; raises TransferError to end the write.

        Raises:
            TransferError: The owner cannot be reached, or `check` has raised it. No bytes arrive
                any more unless `may_still_arrive` says so.
        """
        sources, destinations = check_pages(
            local_pages,
            remote_pages,
            num_sources=self._region.num_pages,
            num_destinations=target.num_pages,
        )
        peer = self._connected(key, target)
        piece_pages = max(1, MAX_PIECE_BYTES // target.page_bytes)
        runs = _runs(sources.tolist(), destinations.tolist(), piece_pages)
        if peer.pages is not None:
            assert self._pages is not None
            for source, page, count in runs:
                check()
                # numpy releases the interpreter's lock meanwhile.
                np.copyto(peer.pages[page : page + count], self._pages[source : source + count])
            return _Copied()
        assert self._writer is not None
        assert peer.device is not None
        check()
        size = target.page_bytes
        copies = [(source * size, page * size, count * size) for source, page, count in runs]
        peer.copy = self._writer.copy(peer.device, copies)
        return peer.copy

    def close_peer(self, key: PeerKey) -> bool:
        """Gives an owner's memory back. Waits for the device's copies first. Returns whether bytes
        may still arrive, which is never so.

        Raises:
            TransferError: The device did not finish its copies.
        """
        if (peer := self._peers.get(key)) is not None:
            if peer.device is not None and self._writer is not None:
                self._writer.forget(peer.device)
            del self._peers[key]
            peer.connection.close()
        return False

    @property
    def is_used(self) -> bool:
        """Whether an owner has offered its memory."""
        return bool(self._peers or self._unreached)

    @property
    def has_peers(self) -> bool:
        """Whether memory of owners is mapped, so that `tidy` may have to give some back."""
        return bool(self._peers)

    def tidy(self) -> None:
        """Gives back the memory of owners that are gone."""
        for key, peer in list(self._peers.items()):
            if peer.is_gone:
                try:
                    self.close_peer(key)
                except TransferError as error:
                    logger.warning("memory of %s stays mapped: %s", key[0], error)

    def describe(self) -> str:
        """A one-line description of the lane to each peer, for people."""
        kind = "GPU memory" if self._region.memory_type == "VRAM" else "memory"
        lanes = [f"to {key[0]}: {kind} shared on this host" for key in list(self._peers)]
        lanes += [
            f"to {key[0]}: gRPC data messages ({why})"
            for key, (_, why) in list(self._unreached.items())
        ]
        return "; ".join(lanes) or "memory shared on one host: no peer connected"

    def close(self) -> None:
        """Gives all memory back."""
        for key in list(self._peers):
            self.close_peer(key)

    def _connected(self, key: PeerKey, target: SharedTargetInfo) -> SharedPeer:
        peer = self._peers.get(key)
        if peer is not None and peer.target == target:
            return peer
        tried_at, why = self._unreached.get(key, (-RETRY_S, ""))
        if self._clock() - tried_at < RETRY_S:
            raise TransportMismatch(why, worker_id=key[0])
        self.tidy()
        try:
            if peer is not None:
                self.close_peer(key)
            region = self._region
            if (target.memory_type, target.page_bytes) != (region.memory_type, region.page_bytes):
                raise TransportMismatch(
                    f"pages of {target.page_bytes} bytes in {target.memory_type} there, of "
                    f"{region.page_bytes} in {region.memory_type} here"
                )
            peer = SharedPeer(target, self._writer)
        except TransferError as error:
            self._unreached[key] = self._clock(), error.message
            while len(self._unreached) > MAX_REMEMBERED_PEERS:
                del self._unreached[next(iter(self._unreached))]
            raise
        self._unreached.pop(key, None)
        self._peers[key] = peer
        return peer


class SharedPeer:
    """Another process's memory as this process has mapped it. `writer` opens that of GPUs.

    Raises:
        TransferError: It cannot be reached from here.
    """

    def __init__(self, target: SharedTargetInfo, writer: DeviceWriter | None = None) -> None:
        self.target = target
        self.pages: NDArray[np.uint8] | None = None
        """Host memory, uint8 `[num_pages, page_bytes]`."""
        self.device: int | None = None
        """Address of GPU memory."""
        self.copy: DeviceCopy | None = None
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._open(writer)
        except BaseException:
            self.connection.close()
            raise

    @property
    def is_gone(self) -> bool:
        """Whether the owner's process has closed the connection."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _open(self, writer: DeviceWriter | None) -> None:
        target = self.target
        files: list[int] = []
        try:
            self.connection.settimeout(CONNECT_TIMEOUT_S)
            self.connection.connect(b"\0" + target.socket.encode())
            if _user_of(self.connection) != os.geteuid():
                raise OSError("the socket is another user's")
            self.connection.send(target.secret)
            offer, files, _, _ = socket.recv_fds(self.connection, _OFFER.size, 1)
            if len(offer) != _OFFER.size:
                raise OSError("the owner has refused")
            magic, page_bytes, num_pages, kind, export = _OFFER.unpack(offer)
            known = (_MAGIC, target.page_bytes, target.num_pages, target.memory_type.encode())
            if (magic, page_bytes, num_pages, kind) != known:
                raise TransportMismatch("the owner's memory is not what its handle says")
            if writer is not None:
                self.device = writer.open(export)
            elif files:
                pages = map_file(files[0], page_bytes * num_pages)
                self.pages = pages.reshape(num_pages, page_bytes)
            else:
                raise OSError("the owner has sent no memory")
            self.connection.setblocking(False)
        except OSError as error:
            raise TransportMismatch(f"no memory in common: {error}") from error
        finally:
            for number in files:
                os.close(number)


def _user_of(connection: socket.socket) -> int:
    credentials = struct.Struct("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    user: int = credentials.unpack(found)[1]
    return user


def _runs(
    sources: Sequence[int], destinations: Sequence[int], most: int
) -> list[tuple[int, int, int]]:
    """(source, destination, count) of neighbouring pages, at most `most` each: one copy."""
    runs: list[tuple[int, int, int]] = []
    for source, destination in zip(sources, destinations, strict=True):
        if runs:
            first, page, count = runs[-1]
            if (source, destination) == (first + count, page + count) and count < most:
                runs[-1] = first, page, count + 1
                continue
        runs.append((source, destination, 1))
    return runs
