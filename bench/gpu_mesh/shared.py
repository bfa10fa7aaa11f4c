"""Staging areas that another process of this host writes to by plain copies, in place of NIXL.

The memory is an anonymous file, which the writer maps through the owner's process.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from weft.contract.handle import NixlTargetInfo
from weft.engine.transfer.nixl import Notification, PoolRegion
from weft.engine.transfer.staging_memory import pin

VERSION = "copies"


class SharedPages:
    """Stands in for `PinnedStagingPages`, in memory that other processes can map."""

    path = ""
    """Path of the memory created last."""
    is_of_device = False

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        size = num_pages * page_bytes
        file = os.memfd_create("weft-staging")
        os.ftruncate(file, size)
        SharedPages.path = f"/proc/{os.getpid()}/fd/{file}"
        memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        if device.type == "cuda":
            pin(memory)
        self.tensor = memory.view(num_pages, page_bytes)
        self.pages = self.tensor.numpy()

    def region(self) -> PoolRegion:
        """See `StagingMemory.region`."""
        return PoolRegion.of_array(self.pages)

    def describe(self) -> str:
        """See `StagingMemory.describe`."""
        return "shared host memory"

    def close(self) -> None:
        """Does nothing: the process ends soon."""


class CopyReceiver:
    """Stands in for `ReceiveAgent`: its owner passes notifications to it."""

    def __init__(self, pages: np.ndarray, path: str) -> None:
        self._arrived: deque[Notification] = deque()
        self._target = NixlTargetInfo(
            version=VERSION,
            agent_name=path,
            agent_metadata=b"",
            agent_metadata_digest=b"",
            base_address=0,
            page_bytes=pages.shape[1],
            num_pages=pages.shape[0],
        )

    def target(self) -> NixlTargetInfo:
        """Where to write; the agent's name is the path of the memory."""
        return self._target

    def arrived(self, payload: bytes) -> None:
        """Handles a writer's notification."""
        notification = Notification.parse(payload)
        assert notification is not None
        self._arrived.append(notification)

    def poll(self) -> list[Notification]:
        """Notifications since the last call."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def describe(self) -> str:
        """Describes the transport."""
        return VERSION

    def close(self) -> None:
        """Does nothing: nothing is open."""


class CopySenders:
    """Stands in for `SendAgents`: copies pages in some threads, then notifies.

    Args:
        pages: The pool to copy from.
        num_threads: Number of copying threads.
        notify: Called with a notification once its pages have arrived.
    """

    def __init__(
        self, pages: np.ndarray, num_threads: int, notify: Callable[[bytes], None]
    ) -> None:
        self._pages = pages
        self._threads = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._notify = notify
        self._mapped: dict[str, np.ndarray] = {}

    def connect(self, owner: object, target: NixlTargetInfo) -> None:
        """Maps the owner's memory."""
        path = target.agent_name
        if path not in self._mapped:
            shape = (target.num_pages, target.page_bytes)
            with Path(path).open("r+b") as file:
                memory = mmap.mmap(file.fileno(), shape[0] * shape[1])
            self._mapped[path] = np.frombuffer(memory, np.uint8).reshape(shape)

    def write(
        self,
        owner: object,
        target: NixlTargetInfo,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        notification: bytes,
        check: Callable[[], None],
    ) -> SimpleNamespace:
        """Copies the pages at once."""
        check()
        self.connect(owner, target)
        remote = self._mapped[target.agent_name]
        pairs = list(zip(local_pages, remote_pages, strict=True))

        def copy(part: int) -> None:
            for source, destination in pairs[part :: self._num_threads]:
                np.copyto(remote[destination], self._pages[source])

        list(self._threads.map(copy, range(self._num_threads)))
        self._notify(notification)
        return SimpleNamespace(poll=lambda: "done")

    def describe(self) -> str:
        """Describes the transport."""
        return VERSION

    def close(self) -> None:
        """Stops the threads."""
        self._threads.shutdown()
