"""Chains of drafts padded to a few sizes, with inputs in fixed places, as CUDA graphs.

Run one by one, a draft is some twenty launches, which take longer than the work; in a graph the
whole chain is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.device_copies import PinnedBuffers
from weft.engine.runner.step import Int64Array, PageTable
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.speculative.drafted import DraftedModel
from weft.engine.speculative.gate import depths_up_to
from weft.kernels.draft_head import DraftChains
from weft.kernels.step_rows import SlotTokens, chain_places

logger = logging.getLogger(__name__)

LATE = -1
"""As a start: where the step under way ends, which only the device knows."""


class ChainArrays(NamedTuple):
    """Chains of drafts behind the last tokens of R requests, on the host."""

    slots: Int64Array
    """[R]."""
    starts: Int64Array
    """[R]: positions of the last tokens; LATE: where the device knows."""
    limits: Int64Array
    """[R]: positions from which on there are no pages."""

    @classmethod
    def of_items(cls, items: Sequence[VerifyItem], table: PageTable, page_size: int) -> ChainArrays:
        """Enters the requests' pages into the table."""
        columns: list[tuple[int, int, int]] = []
        for request, start, *_ in items:
            table.extend(request.slot, request.pages)
            last = request.num_prompt_tokens + request.max_tokens
            limit = min(len(request.pages) * page_size, last)
            columns.append((request.slot, LATE if request.starts_late else start, limit))
        return cls(*np.array(columns, np.int64).reshape(-1, 3).T)


class ChainShape(NamedTuple):
    """How many drafts of how many requests a graph makes, and where its inputs lie."""

    depth: int
    requests: int

    @property
    def num_bytes(self) -> int:
        """Of all columns."""
        return 3 * self.requests * 8

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The columns of `ChainArrays` in `flat`, [num_bytes] uint8, aligned to 8 bytes."""
        return list(flat[: self.num_bytes].view(torch.int64).view(3, self.requests))

    def write(self, host: npt.NDArray[np.uint8], arrays: ChainArrays, null_slot: int) -> None:
        """Lays chains out, of as many requests or fewer.

        Requests that do not exist are at position 0, where a head has no entries.

        Args:
            host: At least [num_bytes].
            arrays: The chains.
            null_slot: Nobody's, whose page is the null page.
        """
        columns = host[: self.num_bytes].view(np.int64).reshape(3, self.requests)
        count = len(arrays.slots)
        for column, values, pad in zip(columns, arrays, (null_slot, 0, 1), strict=True):
            column[:count] = values
            column[count:] = pad


def chain_shapes(max_drafts: int, max_requests: int) -> list[ChainShape]:
    """Chains that are captured, smallest first: for all numbers of drafts that the gate compares,
    and powers of two of requests."""
    sizes = [1 << power for power in range(max_requests.bit_length()) if 1 << power < max_requests]
    depths = [depth for depth in depths_up_to(max_drafts) if depth > 0]
    return [ChainShape(depth, size) for depth in depths for size in [*sizes, max_requests]]


class DevicePages(Protocol):
    """The page table as steps read it on the device."""

    @property
    def pages(self) -> torch.Tensor:
        """[max_requests + 1, max_pages] int32; the last row names the null page only."""

    def send_pages(self) -> None:
        """Sends what was entered on the host since."""


class StaticChains:
    """Runs a head's chains from inputs that stay where they are.

    Args:
        model: Target and head.
        pool: The target's.
        known: Of the slots; gets the drafts.
        pages: On the same device.
        page_size: Token positions a page.
        largest: Of the shapes to come.
    """

    def __init__(
        self,
        model: DraftedModel,
        pool: torch.Tensor,
        known: SlotTokens,
        pages: DevicePages,
        page_size: int,
        largest: ChainShape,
    ) -> None:
        self._model = model
        self._pool = pool
        self._known = known
        self._pages = pages
        self._page_size = page_size
        self._pinned = PinnedBuffers(pool.device)
        self._bytes = torch.zeros(largest.num_bytes, dtype=torch.uint8, device=pool.device)
        each = torch.arange(largest.requests + 1, dtype=torch.int32, device=pool.device)
        self._one_row_each = each

    def send(self, arrays: ChainArrays, shape: ChainShape) -> None:
        """Sends inputs, padded to `shape`, without waiting; in one copy unless there are new
        pages."""
        self._pages.send_pages()
        buffer = self._pinned.take(shape.num_bytes)
        shape.write(buffer.numpy(), arrays, self._pages.pages.shape[0] - 1)
        sent = self._bytes[: shape.num_bytes]
        sent.copy_(buffer[: shape.num_bytes], non_blocking=True)
        self._pinned.sent()

    def send_nothing(self, shape: ChainShape) -> None:
        """Inputs of no request, to capture with."""
        nothing = np.zeros(0, np.int64)
        self.send(ChainArrays(nothing, nothing, nothing), shape)

    def run(self, shape: ChainShape) -> torch.Tensor:
        """[depth, requests] int64: drafts for what was sent last, with this shape."""
        slots, starts, limits = shape.views(self._bytes)
        pages, known = self._pages.pages, self._known
        table = pages.index_select(0, slots)
        positions, places, kv_lens = chain_places(
            slots, starts, limits, known.starts, pages, shape.depth, self._page_size
        )
        chains = DraftChains(
            positions=positions,
            slots=places,
            kv_lens=kv_lens,
            counts=[shape.requests] * shape.depth,
            page_table=table,
            one_row_each=self._one_row_each[: shape.requests + 1],
            max_kv_len=pages.shape[1] * self._page_size,
        )
        state = self._model.kept.index_select(0, slots)
        last = known.tokens[0].index_select(0, slots)
        found = self._model.head.chain(state, last, chains, self._pool)
        known.tokens[1 : 1 + shape.depth].index_copy_(1, slots, found)
        return found


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Does it again."""


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Graph, torch.Tensor]]
"""`StepGraphs.capture`."""


class ChainGraphs:
    """Chains captured once for each shape.

    They share the memory of the steps' graphs, which are larger, so that each adds little more than
    its list of launches; no plan of the device's memory counts them.

    Args:
        chains: To capture.
        shapes: From `chain_shapes`.
        capture: Makes a graph.
    """

    def __init__(
        self, chains: StaticChains, shapes: Sequence[ChainShape], capture: Capture
    ) -> None:
        self._chains = chains
        self._graphs: dict[ChainShape, tuple[Graph, torch.Tensor]] = {}
        began = time.perf_counter()
        for shape in sorted(shapes, reverse=True):
            chains.send_nothing(shape)
            self._graphs[shape] = capture(lambda shape=shape: chains.run(shape))  # type: ignore[misc]
        logger.info(
            "captured %d CUDA graphs of drafts in %.1f s", len(shapes), time.perf_counter() - began
        )

    def shape_of(self, depth: int, requests: int) -> ChainShape:
        """The smallest that has room for chains."""
        return min(s for s in self._graphs if s.depth >= depth and s.requests >= requests)

    def forward(self, arrays: ChainArrays, depth: int) -> torch.Tensor:
        """Starts chains of `depth` drafts or more.

        Returns:
            [depth, R] int64 on the device or larger, valid until the next chains or step.
        """
        shape = self.shape_of(depth, len(arrays.slots))
        self._chains.send(arrays, shape)
        graph, found = self._graphs[shape]
        graph.replay()
        return found
