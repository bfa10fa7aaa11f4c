"""Access to a pool in device memory for tiers: pages travel through pinned host memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from weft.engine.base.errors import ConfigError
from weft.engine.transfer.device_pages import DevicePages
from weft.engine.transfer.digest import digest_pages
from weft.engine.transfer.staging_memory import register, unpin

_NULL_PAGE = 0


class PinnedRows:
    """Host memory that a pool's device copies from and to directly, until `close`.

    CUDA remembers pinned addresses, so memory is unpinned before it is given back.

    Args:
        rows: `[num_rows, page_bytes]`.
        pool: `[num_pages, ...]`, contiguous, or its pages; nobody uses it yet.

    Raises:
        ConfigError: CUDA refuses, or a trial gave other bytes or digests than the host finds.
    """

    def __init__(self, rows: NDArray[np.uint8], pool: torch.Tensor | DevicePages) -> None:
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
        """Unpins the memory; no copy may be under way."""
        self._release()


class DevicePool:
    """Implements `weft.engine.transfer.page_pool.PagePool` for one thread, on a stream of its own.

    It waits for no step: pages that are copied out were computed by steps that have ended, and
    pages that are copied in belong to their load alone, since pages that a step still uses are not
    free, and the engine waits until pages are zeroed. Copies are complete when their call returns.

    Args:
        pool: `[num_pages, ...]`, contiguous, or its pages.
    """

    def __init__(self, pool: torch.Tensor | DevicePages) -> None:
        self._pages = DevicePages.of(pool)
        self._is_cuda = pool.device.type == "cuda"
        self._stream = self._new_stream(pool.device) if self._is_cuda else None
        self._staging = self._new_rows(1)

    def read(self, page: int) -> NDArray[np.uint8]:
        """See `PagePool.read`."""
        with self._on_stream():
            self._pages.read(page, self._staging[0])
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
        with self._on_stream():
            for row, page in zip(self._staging, pages, strict=False):
                self._pages.write(page, row)
        self._wait()

    def copy_in(self, rows: Sequence[NDArray[np.uint8]], pages: Sequence[int]) -> list[int]:
        """See `PagePool.copy_in`; the device computes the digests."""
        with self._on_stream():
            for row, page in zip(rows, pages, strict=True):
                self._pages.write(page, torch.from_numpy(row))
            return self._digests(pages)

    def copy_out(self, page: int, row: NDArray[np.uint8]) -> int:
        """See `PagePool.copy_out`."""
        with self._on_stream():
            self._pages.read(page, torch.from_numpy(row))
            (digest,) = self._digests([page])
            return digest

    def _digests(self, pages: Sequence[int]) -> list[int]:
        """Waits for the earlier work of the stream and returns the digests."""
        numbers = torch.tensor(pages, dtype=torch.int64, device=self._pages.device)
        found: list[int] = self._pages.digests(numbers).cpu().numpy().view(np.uint64).tolist()
        return found

    @staticmethod
    def _new_stream(device: torch.device) -> torch.cuda.Stream:
        # These short operations have priority over steps, because a request waits for them.
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def _new_rows(self, count: int) -> torch.Tensor:
        size = (count, self._pages.page_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)

    def _on_stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _is_right(pool: DevicePool, rows: NDArray[np.uint8]) -> bool:
    """Sends random bytes into the null page and back, and compares bytes and digests."""
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
