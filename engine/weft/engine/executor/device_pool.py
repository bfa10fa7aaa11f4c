"""Access of tiers to a pool in device memory: pages are copied through pinned host memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.errors import ConfigError
from weft.engine.base.device_copies import on_host, on_stream
from weft.engine.transfer.device_pages import DevicePages, Pages
from weft.engine.transfer.staging_memory import register, unpin
from weft.kernels.ops.pages import page_index
from weft.pages.transfer.digest import digest_pages

_NULL_PAGE = 0


class PinnedRows:
    """Host memory that a pool's device copies from and to directly, until `close`.

    CUDA remembers pinned addresses, so memory must be unpinned before it is given back.

    Args:
        rows: [num_rows, page_bytes].
        pool: [num_pages, ...], contiguous, or its pages; unused until now, since a trial writes the
            null page.

    Raises:
        ConfigError: CUDA refuses, or a trial gave other bytes or digests than the host computes.
    """

    def __init__(self, rows: NDArray[np.uint8], pool: Pages) -> None:
        memory = torch.from_numpy(rows)
        if (status := register(memory)) != 0:
            raise ConfigError(
                f"{memory.nbytes:,} bytes of host memory cannot be pinned (CUDA error {status}); "
                "lower host_cache_bytes",
                param="host_cache_bytes",
            )
        # The memory stays referenced until it is unpinned, or until this object ends.
        self._release = weakref.finalize(self, unpin, memory, pool.device)
        self._release.atexit = False
        if not _is_right(DevicePool(pool), rows):
            self.close()
            raise ConfigError(
                f"pages do not come back from {pool.device} as they went there",
                param="host_cache_bytes",
            )

    def close(self) -> None:
        """Unpins the memory. No copy may be under way."""
        self._release()


class CopyRows:
    """Rows of host memory through which pages are copied, and the stream of these copies.

    Args:
        priority: Of the stream; below 0 it precedes steps.
    """

    def __init__(self, device: torch.device, page_bytes: int, priority: int = 0) -> None:
        self._page_bytes = page_bytes
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self.rows = self._new_rows(1)
        """[rows, page_bytes] uint8; pinned for a GPU."""

    def row(self, index: int) -> NDArray[np.uint8]:
        """A row as an array, created if need be. The earlier rows keep their content."""
        if index >= len(self.rows):
            larger = self._new_rows(max(index + 1, 2 * len(self.rows)))
            larger[: len(self.rows)] = self.rows
            self.rows = larger
        row: NDArray[np.uint8] = self.rows[index].numpy()
        return row

    def on_stream(self) -> AbstractContextManager[object]:
        return on_stream(self._stream)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _new_rows(self, count: int) -> torch.Tensor:
        size, is_pinned = (count, self._page_bytes), self._stream is not None
        return torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)


class DevicePool:
    """`PagePool` for one thread, on a separate stream. Copies are complete when their call returns.

    It waits for no step. Pages that are copied out were computed by steps that have ended. Pages
    that are copied in belong to their load alone: a page that a step still uses is not free, and
    the engine waits until pages are zeroed.

    Args:
        pool: [num_pages, ...], contiguous, or its pages.
    """

    def __init__(self, pool: Pages) -> None:
        self._pages = DevicePages.of(pool)
        # These short operations have priority over steps, because a request waits for them.
        self._copies = CopyRows(pool.device, self._pages.page_bytes, priority=-1)

    def read(self, page: int) -> NDArray[np.uint8]:
        with self._copies.on_stream():
            self._pages.read(page, self._copies.rows[0])
        self._copies.wait()
        return self._copies.row(0)

    def target(self, index: int, page: int) -> NDArray[np.uint8]:
        return self._copies.row(index)

    def commit(self, pages: Sequence[int]) -> None:
        with self._copies.on_stream():
            for row, page in zip(self._copies.rows, pages, strict=False):
                self._pages.write(page, row)
        self._copies.wait()

    def copy_in(self, rows: Sequence[NDArray[np.uint8]], pages: Sequence[int]) -> list[int]:
        with self._copies.on_stream():
            for row, page in zip(rows, pages, strict=True):
                self._pages.write(page, torch.from_numpy(row))
            return self._digests(pages)

    def copy_out(self, page: int, row: NDArray[np.uint8]) -> int:
        with self._copies.on_stream():
            self._pages.read(page, torch.from_numpy(row))
            (digest,) = self._digests([page])
            return digest

    def _digests(self, pages: Sequence[int]) -> list[int]:
        numbers = page_index(pages, self._pages.device)
        found: list[int] = on_host(self._pages.digests(numbers)).numpy().view(np.uint64).tolist()
        return found


def _is_right(pool: DevicePool, rows: NDArray[np.uint8]) -> bool:
    first, last = rows[0], rows[-1]
    sent = np.random.default_rng().integers(0, 256, first.size, dtype=np.uint8)
    first[:] = sent
    (digest,) = pool.copy_in([first], [_NULL_PAGE])
    first[:] = 0
    found = (digest, pool.copy_out(_NULL_PAGE, last))
    expected = int(digest_pages(rows, [len(rows) - 1])[0])
    is_right = found == (expected, expected) and bool((last == sent).all())
    first[:] = last[:] = 0
    pool.copy_in([first], [_NULL_PAGE])
    return is_right
