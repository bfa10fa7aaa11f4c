"""Chains of drafts as CUDA graphs, padded to a few sizes, with inputs in fixed memory.

Without a graph a draft takes some twenty launches, which take longer than their work. A graph makes
the whole chain one launch. The chain reads its inputs from the same memory as the step that
verifies the drafts, so one copy serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from weft.contract.arrays import NO_NUMBERS, Int32Array
from weft.engine.base.device_copies import HostCopies
from weft.engine.base.drafts import LaterDrafts, depths_up_to
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.drafts.captured import Capture, capture_each
from weft.engine.executor.drafts.draft_rows import AdapterRows
from weft.engine.executor.rotations import SlotRotations
from weft.engine.executor.step_input import StepInput
from weft.engine.model.heads.drafted import DraftedModel
from weft.kernels.ops.draft_head.spec import DraftChains
from weft.kernels.ops.slot_rows import take_rows
from weft.kernels.ops.step_rows import chain_places
from weft.kernels.ops.step_rows.spec import SlotTokens

_NO_REQUESTS = StepInput(
    slots=NO_NUMBERS,
    starts=NO_NUMBERS,
    max_starts=NO_NUMBERS,
    counts=NO_NUMBERS,
    draft_limits=NO_NUMBERS,
)


class ChainShape(NamedTuple):
    """Number of drafts per request, and of requests, that a graph makes."""

    depth: int
    requests: int
    has_lora: bool = False
    """Whether requests may have draft adapters."""


def chain_shapes(max_drafts: int, max_requests: int, *, has_lora: bool = False) -> list[ChainShape]:
    """Lists the chains to capture: all numbers of drafts that the gate compares, with powers of two
    of requests.

    Args:
        has_lora: Whether each is also captured with draft adapters.
    """
    sizes = [1 << power for power in range(max_requests.bit_length()) if 1 << power < max_requests]
    depths = [depth for depth in depths_up_to(max_drafts) if depth > 0]
    shapes = [ChainShape(depth, size) for depth in depths for size in [*sizes, max_requests]]
    return [*shapes, *(shape._replace(has_lora=True) for shape in shapes)] if has_lora else shapes


class StaticChains:
    """Runs a head's chains from inputs in fixed memory.

    Args:
        pool: The target's.
        known: State of the slots on the device; receives the drafts.
        adapters: Draft adapters of the requests' rows; None: no shape has any.
        rotations: Rotations of slots with images; None: there are none.
    """

    def __init__(
        self,
        model: DraftedModel,
        pool: torch.Tensor,
        known: SlotTokens,
        inputs: DeviceInputs,
        page_size: int,
        largest: ChainShape,
        adapters: AdapterRows | None = None,
        rotations: SlotRotations | None = None,
    ) -> None:
        self._rotations = rotations
        self._model = model
        self._pool = pool
        self._known = known
        self._inputs = inputs
        self._page_size = page_size
        each = torch.arange(largest.requests + 1, dtype=torch.int32, device=pool.device)
        self._one_row_each = each
        self._adapters = adapters

    def needs_lora(self, adapter_slots: Int32Array | None) -> bool:
        """Whether one of these adapters, [R], brings a draft adapter."""
        if self._adapters is None or adapter_slots is None:
            return False
        return self._adapters.are_used(adapter_slots)

    def send(self, requests: StepInput, shape: ChainShape) -> None:
        """Sends inputs, padded to `shape`, without waiting."""
        self._inputs.send_drafting(requests, shape.requests)
        self.send_adapters(requests.adapters, shape)

    def send_adapters(self, adapter_slots: Int32Array | None, shape: ChainShape) -> None:
        """Sends the part of `send` that a step does not bring: draft adapters, if `shape` has any.

        Args:
            adapter_slots: [R]; None: no request has an adapter.
        """
        if shape.has_lora:
            assert self._adapters is not None, "a shape has adapters, and there are none"
            used = np.zeros(0, np.int32) if adapter_slots is None else adapter_slots
            self._adapters.send(used, shape.requests)

    def send_nothing(self, shape: ChainShape) -> None:
        """Sends inputs of no request, for capture."""
        self.send(_NO_REQUESTS, shape)

    def run(self, shape: ChainShape) -> torch.Tensor:
        """Drafts for the inputs that were sent last with this shape, [depth, requests] int64."""
        # Padding requests are at position 0, where a head has no KV.
        slots, starts, _, draft_limits = self._inputs.request_rows(shape.requests)
        pages, known = self._inputs.pages, self._known
        table, state, last = take_rows(slots, pages, self._model.kept, known.tokens[0])
        positions, places, kv_lens = chain_places(
            slots, starts, draft_limits, known.starts, pages, shape.depth, self._page_size
        )
        lora = None
        if shape.has_lora and self._adapters is not None:
            (lora,) = self._adapters.steps(shape.requests)
        turned_by = None
        if self._rotations is not None:
            turned_by = self._rotations.of_chains(positions, slots)
        chains = DraftChains(
            positions=positions,
            slots=places,
            kv_lens=kv_lens,
            counts=[shape.requests] * shape.depth,
            page_table=table,
            one_row_each=self._one_row_each[: shape.requests + 1],
            max_kv_len=pages.shape[1] * self._page_size,
            turned_by=turned_by,
            lora=lora,
        )
        found = self._model.head.chain(state, last, chains, self._pool)
        known.tokens[1 : 1 + shape.depth].index_copy_(1, slots, found)
        return found


class ChainGraphs:
    """Chains, each captured for one shape."""

    def __init__(
        self, chains: StaticChains, shapes: Sequence[ChainShape], capture: Capture
    ) -> None:
        self._chains = chains
        self._graphs = capture_each(shapes, chains.send_nothing, chains.run, capture)
        largest = max((found for _, found in self._graphs.values()), key=torch.Tensor.numel)
        self._copies = HostCopies(largest.device, largest.numel(), number=2)
        self._found: dict[ChainShape, ChainShape] = {}

    def shape_of(self, depth: int, requests: int, *, has_lora: bool = False) -> ChainShape:
        """The smallest captured shape that has room for these chains."""
        key = ChainShape(depth, requests, has_lora)
        if key not in self._found:
            self._found[key] = min(
                shape
                for shape in self._graphs
                if shape.has_lora == has_lora
                if shape.depth >= depth and shape.requests >= requests
            )
        return self._found[key]

    def forward(self, requests: StepInput, depth: int) -> torch.Tensor:
        """Starts chains of at least `depth` drafts. Returns [depth or more, requests or more]
        int64, valid until the next drafts are made.
        """
        has_lora = self._chains.needs_lora(requests.adapters)
        shape = self.shape_of(depth, len(requests.slots), has_lora=has_lora)
        self._chains.send(requests, shape)
        return self._replay(shape)

    def forward_sent(
        self, depth: int, num_requests: int, adapter_slots: Int32Array | None
    ) -> torch.Tensor:
        """`forward` for the requests of the step that was sent last.

        Args:
            depth: Number of drafts wanted; more may be made.
            num_requests: Number of requests that the step is padded to.
            adapter_slots: [R], without padding; None: no request has an adapter.
        """
        has_lora = self._chains.needs_lora(adapter_slots)
        shape = self.shape_of(depth, num_requests, has_lora=has_lora)
        assert shape.requests == num_requests, "chains are captured for the sizes of steps"
        self._chains.send_adapters(adapter_slots, shape)
        return self._replay(shape)

    def fetch(self, found: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to copy the newest drafts to the host. Returns a function that waits for them;
        they are valid until the drafts of the step after the next one are fetched.
        """
        return self._copies.begin(found)

    def _replay(self, shape: ChainShape) -> torch.Tensor:
        graph, found = self._graphs[shape]
        graph.replay()
        return found


class LaterChains(LaterDrafts):
    """Chains of drafts by graphs, which the executor starts before the step that verifies them.

    Args:
        to_host: Whether the drafts are copied to the host before the verifying step has run, so
            that masks can be made meanwhile.
    """

    def __init__(
        self,
        graphs: ChainGraphs,
        counts: Sequence[int],
        requests: StepInput | None = None,
        *,
        to_host: bool,
    ) -> None:
        super().__init__(counts)
        self._graphs = graphs
        self.requests = requests
        """The verified requests of the step, which its encoder sets; unused if the step sends them
        by itself (`begin_within`).
        """
        self._to_host = to_host
        self._depth = max(self.counts, default=0)

    def begin(self) -> None:
        if self._depth:
            assert self.requests is not None, "the step is not encoded"
            self._fetch_if_needed(self._graphs.forward(self.requests, self._depth), 0)

    def begin_within(
        self, num_requests: int, adapter_slots: Int32Array | None, num_before: int
    ) -> None:
        if self._depth:
            found = self._graphs.forward_sent(self._depth, num_requests, adapter_slots)
            self._fetch_if_needed(found, num_before)

    def _fetch_if_needed(self, found: torch.Tensor, first: int) -> None:
        if self._to_host:
            wait_for_drafts = self._graphs.fetch(found)
            self.come_with(lambda: self._chains_in(wait_for_drafts(), first))

    def _chains_in(self, found: torch.Tensor, first: int) -> list[list[int]]:
        columns: list[list[int]] = found[:, first : first + len(self.counts)].t().tolist()
        return [chain[:count] for chain, count in zip(columns, self.counts, strict=True)]
