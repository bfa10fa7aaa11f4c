"""Chains of drafts as CUDA graphs, padded to a few sizes, with inputs in fixed memory.

Run one by one, a draft is some twenty launches, which take longer than the work; in a graph the
whole chain is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from weft.engine.runner.step import Int64Array, PageTable
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.speculative.captured import (
    LATE,
    Capture,
    DevicePageTable,
    StaticColumns,
    capture_each,
)
from weft.engine.speculative.draft_rows import AdapterRows
from weft.engine.speculative.drafted import DraftedModel
from weft.engine.speculative.gate import depths_up_to
from weft.kernels.draft_head import DraftChains
from weft.kernels.step_rows import SlotTokens, chain_places


class ChainArrays(NamedTuple):
    """Chains of drafts behind the last tokens of R requests, on the host."""

    slots: Int64Array
    """Slots of the requests, [R]."""
    starts: Int64Array
    """Positions of the last tokens, [R]; LATE: only the device knows."""
    limits: Int64Array
    """Positions from which on there are no pages, [R]."""
    adapter_slots: Int64Array
    """Slots of their adapters, [R]; 0: none."""

    @classmethod
    def of_items(cls, items: Sequence[VerifyItem], table: PageTable, page_size: int) -> ChainArrays:
        """Builds the arrays; enters the requests' pages into the table."""
        columns: list[tuple[int, int, int, int]] = []
        for item in items:
            request = item.request
            table.extend(request.slot, request.pages)
            last = request.num_prompt_tokens + request.max_tokens
            limit = min(len(request.pages) * page_size, last)
            start = LATE if item.starts_late else item.start
            columns.append((request.slot, start, limit, request.adapter_slot))
        return cls(*np.array(columns, np.int64).reshape(-1, 4).T)


class ChainShape(NamedTuple):
    """Number of requests and of drafts per request that a graph makes."""

    depth: int
    requests: int
    has_lora: bool = False
    """Whether requests may have draft adapters."""


def chain_shapes(max_drafts: int, max_requests: int, *, has_lora: bool = False) -> list[ChainShape]:
    """Lists the chains to capture: all numbers of drafts that the gate compares, powers of two of
    requests.

    Args:
        max_drafts: Most drafts of a request.
        max_requests: Most requests of a step.
        has_lora: Each is captured with draft adapters too.
    """
    sizes = [1 << power for power in range(max_requests.bit_length()) if 1 << power < max_requests]
    depths = [depth for depth in depths_up_to(max_drafts) if depth > 0]
    shapes = [ChainShape(depth, size) for depth in depths for size in [*sizes, max_requests]]
    return [*shapes, *(shape._replace(has_lora=True) for shape in shapes)] if has_lora else shapes


class StaticChains:
    """Runs a head's chains from inputs in fixed memory.

    Args:
        model: Target and head.
        pool: The target's.
        known: Device state of the slots; receives the drafts.
        pages: On the same device.
        page_size: Token positions a page.
        largest: Largest of the shapes to be captured.
        adapters: Columns of one row a request; None: no shape has any.
    """

    def __init__(
        self,
        model: DraftedModel,
        pool: torch.Tensor,
        known: SlotTokens,
        pages: DevicePageTable,
        page_size: int,
        largest: ChainShape,
        adapters: AdapterRows | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._known = known
        self._pages = pages
        self._page_size = page_size
        # Requests that do not exist are at position 0, where a head has no entries.
        self._columns = StaticColumns(pages, (0, 1), largest.requests)
        each = torch.arange(largest.requests + 1, dtype=torch.int32, device=pool.device)
        self._one_row_each = each
        self._adapters = adapters

    def needs_lora(self, arrays: ChainArrays) -> bool:
        """Whether any of these requests has a draft adapter."""
        return self._adapters is not None and self._adapters.are_used(arrays.adapter_slots)

    def send(self, arrays: ChainArrays, shape: ChainShape) -> None:
        """Sends inputs, padded to `shape`, without waiting."""
        *columns, adapter_slots = arrays
        self._columns.send(columns, shape.requests)
        if shape.has_lora:
            assert self._adapters is not None, "a shape has adapters, and there are none"
            self._adapters.send(adapter_slots, shape.requests)

    def send_nothing(self, shape: ChainShape) -> None:
        """Sends inputs of no request, for capture."""
        nothing = np.zeros(0, np.int64)
        self.send(ChainArrays(*[nothing] * 4), shape)

    def run(self, shape: ChainShape) -> torch.Tensor:
        """Drafts for the inputs sent last with this shape, [depth, requests] int64."""
        slots, starts, limits = self._columns.views(shape.requests)
        pages, known = self._pages.pages, self._known
        table = pages.index_select(0, slots)
        positions, places, kv_lens = chain_places(
            slots, starts, limits, known.starts, pages, shape.depth, self._page_size
        )
        lora = None
        if shape.has_lora and self._adapters is not None:
            (lora,) = self._adapters.steps(shape.requests)
        chains = DraftChains(
            positions=positions,
            slots=places,
            kv_lens=kv_lens,
            counts=[shape.requests] * shape.depth,
            page_table=table,
            one_row_each=self._one_row_each[: shape.requests + 1],
            max_kv_len=pages.shape[1] * self._page_size,
            lora=lora,
        )
        state = self._model.kept.index_select(0, slots)
        last = known.tokens[0].index_select(0, slots)
        found = self._model.head.chain(state, last, chains, self._pool)
        known.tokens[1 : 1 + shape.depth].index_copy_(1, slots, found)
        return found


class ChainGraphs:
    """Chains captured once for each shape.

    Args:
        chains: To capture.
        shapes: From `chain_shapes`.
        capture: Makes a graph.
    """

    def __init__(
        self, chains: StaticChains, shapes: Sequence[ChainShape], capture: Capture
    ) -> None:
        self._chains = chains
        self._graphs = capture_each(shapes, chains.send_nothing, chains.run, capture, "drafts")

    def shape_of(self, depth: int, requests: int, *, has_lora: bool = False) -> ChainShape:
        """The smallest captured shape with room for these chains."""
        return min(
            shape
            for shape in self._graphs
            if shape.depth >= depth and shape.requests >= requests and shape.has_lora == has_lora
        )

    def forward(self, arrays: ChainArrays, depth: int) -> torch.Tensor:
        """Starts chains of at least `depth` drafts.

        Returns:
            [depth, R] int64 on the device or larger, valid until the next chains or step.
        """
        has_lora = self._chains.needs_lora(arrays)
        shape = self.shape_of(depth, len(arrays.slots), has_lora=has_lora)
        self._chains.send(arrays, shape)
        graph, found = self._graphs[shape]
        graph.replay()
        return found
