"""Processes that share memory: an owner's and a filler's, for tests."""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os

import numpy as np
from weft.contract.handle import SharedTargetInfo
from weft.pages.transfer import shared
from weft.pages.transfer.nixl_wire import PoolRegion, TransferError
from weft.pages.transfer.shared import SharedPool, SharedSenders
from weft.pages.transfer.shared_memory import MemoryFile

PAGES, PAGE_BYTES = 24, 40_960
KEY = ("owner", 7)
Connection = multiprocessing.connection.Connection


class Owner:
    """A pool that is shared, and its bytes."""

    def __init__(self) -> None:
        memory = MemoryFile(PAGES * PAGE_BYTES)
        self.pages = memory.array.reshape(PAGES, PAGE_BYTES)
        self.sharer = SharedPool("owner", memory, PAGE_BYTES, PAGES)
        self.target = self.sharer.target()


def fill(connection: Connection, target: SharedTargetInfo) -> None:
    """A filler's process: writes the pages that it is told to, and asks before each piece."""
    pool = np.random.default_rng().integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)
    shared.MAX_PIECE_BYTES = PAGE_BYTES
    senders = SharedSenders(PoolRegion.of_array(pool))
    connection.send(pool)

    def check() -> None:
        connection.send("piece")
        if not connection.recv():
            raise TransferError("the lease ran out")

    while (pages := connection.recv()) is not None:
        try:
            handle = senders.write(KEY, target, *pages, check)
            connection.send(handle.poll())
        except TransferError as error:
            connection.send(error.may_still_arrive)


def fill_apart(connection: Connection, target: SharedTargetInfo, namespaces: int) -> None:
    """A filler's process in namespaces of its own, as clone(2) names them. It first says whether
    the system lets it have them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    is_apart = libc.unshare(namespaces) == 0
    connection.send(is_apart or os.strerror(ctypes.get_errno()))
    if is_apart:
        fill(connection, target)


def own(connection: Connection) -> None:
    """An owner's process."""
    owner = Owner()
    connection.send(owner.target)
    connection.recv()
