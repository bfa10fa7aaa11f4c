"""A process with memory that others read over NIXL. It imports no PyTorch, to begin soon."""

from __future__ import annotations

from typing import Any

import numpy as np
from weft.pages.transfer.nixl_ranges import MemoryRange, SharedRanges

NUM_PAGES = 512


def serve(connection: Any, page_bytes: int) -> None:
    """Tells where the arena is, then writes the pages that it is told."""
    arena = np.zeros((NUM_PAGES, page_bytes), np.uint8)
    pool = MemoryRange(arena.ctypes.data, arena.nbytes, "DRAM", 0)
    shared = SharedRanges("arena", [pool])
    target = shared.target
    connection.send((pool.address, target.agent_name, target.metadata))
    while (told := connection.recv()) is not None:
        page, data = told
        arena[page] = np.frombuffer(data, np.uint8)
        connection.send(page)
    shared.close()
