"""Pools into which tiers load pages layer by layer, while a step computes the first layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.layout import CacheLayout, LayerSlices
from weft.engine.base.device_copies import on_host
from weft.engine.base.layer_waits import DeviceWaits, HostWaits, layer_groups
from weft.engine.executor.device_pool import DevicePool
from weft.engine.model.interface import Model, waits_for_layers
from weft.engine.transfer.device_pages import DevicePages, rows_of_pool
from weft.kernels.ops.pages import copy_parts, page_index
from weft.pages.tiers.tier import PageLoad
from weft.pages.transfer.digest import digest_pages

logger = logging.getLogger(__name__)

HOST_TIMEOUT_S = 1.0
"""Longest time between two groups of layers of a load on a CPU: the engine's loop stands still
meanwhile, and must not count as stalled.
"""


class HostLayers:
    """Implements `LayerPool` over a pool in host memory.

    Args:
        rows: [num_pages, page_bytes] uint8.
    """

    needs_rows = False
    is_enqueued = False

    def __init__(self, rows: NDArray[np.uint8], slices: LayerSlices) -> None:
        self._rows = rows
        self.waits = HostWaits(layer_groups(slices.layers), HOST_TIMEOUT_S)
        self.parts = [slices.part(group) for group in self.waits.groups]
        self.num_groups = len(self.parts)

    @property
    def was_left(self) -> bool:
        return self.waits.was_left

    def begin(self) -> None:
        self.waits.close()

    def copy(self, group: int, loads: Sequence[PageLoad], pages: Sequence[int]) -> bool:
        part = self.parts[group]
        found = zip(loads, pages, strict=True)
        return all(load.run_part(self._rows[page], part) for load, page in found)

    def open(self, group: int) -> None:
        self.waits.open(group)

    def open_all(self) -> None:
        self.waits.open(self.num_groups - 1)

    def digests(self, pages: Sequence[int]) -> list[int]:
        digests: list[int] = digest_pages(self._rows, pages).tolist()
        return digests


class DeviceLayers:
    """Implements `LayerPool` over a pool on a GPU, whose kernels read pinned host memory.

    A stream of its own copies; the steps' graphs wait for its events. The pool must be unused until
    now, since a trial writes the null page.

    Raises:
        RuntimeError: In the trial, other bytes came than were sent.
    """

    needs_rows = True
    is_enqueued = True
    was_left = False

    def __init__(self, pool: torch.Tensor, slices: LayerSlices) -> None:
        self._pool = pool
        self._pages = DevicePages.of(pool)
        self.waits = DeviceWaits(layer_groups(slices.layers), pool.device)
        self.parts = [slices.part(group) for group in self.waits.groups]
        self.num_groups = len(self.parts)
        # Copies precede steps: until they end, steps wait.
        self._stream = torch.cuda.Stream(pool.device, priority=-1)  # type: ignore[no-untyped-call]
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None
        """Addresses of the load's rows, and its pages, once its first group has been copied."""
        self._try()

    def begin(self) -> None:
        """Does nothing but forget the load before: no step waits for what is not enqueued."""
        self._sent = None

    def copy(self, group: int, loads: Sequence[PageLoad], pages: Sequence[int]) -> bool:
        if self._sent is None:
            rows = [load.direct() for load in loads]
            if any(row is None for row in rows):
                return False
            self._send([row for row in rows if row is not None], pages)
        self._copy(group)
        return True

    def open(self, group: int) -> None:
        with torch.cuda.stream(self._stream):
            self.waits.record(group)

    def open_all(self) -> None:
        # No step needs to be let go on: steps wait only for enqueued copies, which always end. But
        # the copies of a load that was given up must end before others get its pages and rows.
        self._stream.synchronize()

    def digests(self, pages: Sequence[int]) -> list[int]:
        with torch.cuda.stream(self._stream):
            numbers = page_index(pages, self._pool.device)
            found = on_host(self._pages.digests(numbers)).numpy()
        digests: list[int] = found.view(np.uint64).tolist()
        return digests

    def _send(self, rows: Sequence[NDArray[np.uint8]], pages: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            addresses = page_index([row.ctypes.data for row in rows], self._pool.device)
            self._sent = addresses, page_index(pages, self._pool.device)

    def _copy(self, group: int) -> None:
        assert self._sent is not None
        with torch.cuda.stream(self._stream):
            copy_parts(*self._sent, self._pool, self.parts[group])

    def _try(self) -> None:
        """Sends random bytes into the null page and back, which also compiles the kernel."""
        page_bytes = self._pages.page_bytes
        sent = torch.randint(0, 256, (2, page_bytes), dtype=torch.uint8).pin_memory()
        rows = sent.numpy()
        came = DevicePool(self._pool)
        for row in (rows[1], np.zeros_like(rows[0])):
            sent[0] = torch.from_numpy(row)
            self._send([rows[0]], [0])
            for group in range(self.num_groups):
                self._copy(group)
            self._stream.synchronize()
            if not (came.read(0) == row).all():
                raise RuntimeError(f"pages do not come to {self._pool.device} layer by layer")
        self._sent = None


def layer_pool(
    model: Model, layout: CacheLayout, pool: torch.Tensor
) -> HostLayers | DeviceLayers | None:
    """How pages come to a pool layer by layer; None: the model needs them whole, or this GPU does
    not read the host's memory.
    """
    slices = layout.groups[0].layer_slices(layout.page_size)
    is_simple = len(layout.groups) == 1 and layout.states is None
    if slices is None or not is_simple or not waits_for_layers(model):
        return None
    if pool.device.type != "cuda":
        return HostLayers(rows_of_pool(pool).numpy(), slices)
    try:
        return DeviceLayers(pool, slices)
    except RuntimeError as error:
        logger.warning("loads of KV pages are not by layer: %s", error)
        return None
