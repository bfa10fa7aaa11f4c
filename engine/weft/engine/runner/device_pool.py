"""A pool in a device's memory, as tiers see it: pages travel through pinned memory of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class DevicePool:
    """Implements `weft.engine.tiers.pool.PagePool` for one thread, on a stream of its own.

    It waits for no step. Pages that are copied out were computed by steps that have ended. Pages
    that are copied in are nobody's but their load's: a step that still used them would have kept
    them, and the engine waits for their wipes. Copies are complete when their call returns.

    Args:
        pool: `[num_pages, ...]`, contiguous.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._rows = pool.view(torch.uint8).reshape(pool.shape[0], -1)
        self._is_cuda = pool.device.type == "cuda"
        self._stream = self._new_stream(pool.device) if self._is_cuda else None
        self._staging = self._new_rows(1)

    def read(self, page: int) -> NDArray[np.uint8]:
        """See `PagePool.read`."""
        self._copy(self._staging[0], self._rows[page])
        self._wait()
        row: NDArray[np.uint8] = self._staging[0].numpy()
        return row

    def target(self, index: int, page: int) -> NDArray[np.uint8]:
        """See `PagePool.target`."""
        if index >= len(self._staging):
            larger = self._new_rows(max(index + 1, 2 * len(self._staging)))
            larger[: len(self._staging)] = self._staging
            self._staging = larger
        row: NDArray[np.uint8] = self._staging[index].numpy()
        return row

    def commit(self, pages: Sequence[int]) -> None:
        """See `PagePool.commit`."""
        for row, page in zip(self._staging, pages, strict=False):
            self._copy(self._rows[page], row)
        self._wait()

    @staticmethod
    def _new_stream(device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _new_rows(self, count: int) -> torch.Tensor:
        size = (count, self._rows.shape[1])
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            destination.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
