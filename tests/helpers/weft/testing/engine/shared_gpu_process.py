"""An owner's process whose pool is GPU memory that it shares, for tests."""

from __future__ import annotations

import multiprocessing.connection

import torch
from weft.engine.transfer.staging_memory import DeviceStagingPages
from weft.kernels.ops.page_digest import page_digests
from weft.pages.transfer.shared import SharedPool

PAGES, PAGE_BYTES = 160, 1 << 21
Connection = multiprocessing.connection.Connection


def own(connection: Connection, device: str) -> None:
    """An owner's process: tells the digests of the pages that it is asked about."""
    torch.cuda.set_device(device)
    memory = DeviceStagingPages(PAGES, PAGE_BYTES, torch.device(device), is_shared=True)
    assert memory.shared is not None
    sharer = SharedPool("owner", memory.shared, PAGE_BYTES, PAGES)
    connection.send(sharer.target())
    while (pages := connection.recv()) is not None:
        connection.send(digests_of(memory.tensor, pages))
    sharer.close()


def digests_of(pool: torch.Tensor, pages: list[int]) -> list[int]:
    numbers = torch.tensor(pages, dtype=torch.int64, device=pool.device)
    found: list[int] = page_digests(pool, numbers, 0).tolist()
    return found
