"""Trees of drafts grown in CUDA graphs, with inputs in fixed memory as for chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from weft.contract.arrays import Int64Array
from weft.engine.base.drafts import DraftShape
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.drafts.captured import Capture, StaticColumns, capture_each
from weft.engine.executor.drafts.draft_rows import AdapterRows
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.heads.eagle3 import Eagle3Head
from weft.kernels.ops.draft_tree.spec import DraftTrees
from weft.kernels.ops.slot_rows import take_rows
from weft.kernels.ops.step_rows import chain_places
from weft.kernels.ops.step_rows.spec import SlotTokens


class TreeArrays(NamedTuple):
    """On the host: the last tokens of R requests, after which trees grow."""

    slots: Int64Array
    starts: Int64Array
    """[R]: positions of the last tokens; ON_DEVICE: only the device knows."""
    limits: Int64Array
    """[R]: first positions without a page."""
    max_depths: Int64Array
    """[R]: most drafts that may be accepted at once."""
    adapter_slots: Int64Array
    """[R]: slots of the adapters; 0: none."""


class TreeBucket(NamedTuple):
    """The number of requests and the tree shape that a graph is captured for."""

    shape: DraftShape
    requests: int
    has_lora: bool = False
    """Whether requests may have draft adapters."""


class StaticTrees:
    """Grows a head's trees from inputs in fixed memory.

    Args:
        model: Target and an EAGLE-3 head.
        pool: The target's.
        known: State of the slots on the device; receives the trees.
        inputs: Inputs of the steps, on the same device.
        adapters: Draft adapters of the requests' rows, for one row per request and for as many as
            trees are wide; None: no bucket has any.
    """

    def __init__(
        self,
        model: DraftedModel,
        pool: torch.Tensor,
        known: SlotTokens,
        inputs: DeviceInputs,
        page_size: int,
        max_requests: int,
        adapters: AdapterRows | None = None,
    ) -> None:
        assert isinstance(model.head, Eagle3Head), "only EAGLE-3 heads grow trees"
        self._head = model.head
        self._kept = model.kept
        self._pool = pool
        self._known = known
        self._inputs = inputs
        self._page_size = page_size
        # Padding requests are at position 0, where a head has no KV.
        self._columns = StaticColumns(inputs, (0, 1, 0), max_requests)
        self._each = torch.arange(max_requests + 1, dtype=torch.int32, device=pool.device)
        self._adapters = adapters

    def needs_lora(self, arrays: TreeArrays) -> bool:
        return self._adapters is not None and self._adapters.are_used(arrays.adapter_slots)

    def send(self, arrays: TreeArrays, bucket: TreeBucket) -> None:
        *columns, adapter_slots = arrays
        self._columns.send(columns, bucket.requests)
        if bucket.has_lora:
            assert self._adapters is not None, "a bucket has adapters, and there are none"
            self._adapters.send(adapter_slots, bucket.requests)

    def send_nothing(self, bucket: TreeBucket) -> None:
        nothing = np.zeros(0, np.int64)
        self.send(TreeArrays(*[nothing] * 5), bucket)

    def run(self, bucket: TreeBucket) -> torch.Tensor:
        """Grows trees for the inputs that were sent last with this bucket: tokens and ancestor
        masks (`draft_tree`), [2, nodes, requests] int64.
        """
        slots, starts, limits, max_depths = self._columns.views(bucket.requests)
        pages, known, shape = self._inputs.pages, self._known, bucket.shape
        num_places = 1 + shape.width * (shape.depth - 1)
        positions, places, _ = chain_places(
            slots, starts, limits, known.starts, pages, num_places, self._page_size
        )
        table, state, last = take_rows(slots, pages, self._kept, known.tokens[0])
        # Nodes without a place in the request's pages write to the null page.
        lacking = num_places // self._page_size + 1 - table.shape[1]
        if lacking > 0:
            table = functional.pad(table, (0, lacking))
        root_lora = lora = None
        if bucket.has_lora and self._adapters is not None:
            root_lora, lora = self._adapters.steps(bucket.requests)
        trees = DraftTrees(
            width=shape.width,
            depth=shape.depth,
            num_nodes=shape.num_drafts,
            starts=positions[0],
            slots=places,
            is_whole=positions[0] + num_places <= limits,
            max_depths=max_depths,
            page_table=table,
            cu_q_lens=self._each[: bucket.requests + 1],
            max_kv_len=table.shape[1] * self._page_size,
            root_lora=root_lora,
            lora=lora,
        )
        tokens, words = self._head.tree(state, last, trees, self._pool)
        assert known.words is not None, "trees are kept with their words"
        known.tokens[1 : 1 + len(tokens)].index_copy_(1, slots, tokens)
        known.words[1 : 1 + len(words)].index_copy_(1, slots, words)
        return torch.stack((tokens, words))


class TreeGraphs:
    """Trees, each captured for one bucket, in the memory shared with the steps' graphs."""

    def __init__(self, trees: StaticTrees, buckets: Sequence[TreeBucket], capture: Capture) -> None:
        self._trees = trees
        self._graphs = capture_each(buckets, trees.send_nothing, trees.run, capture)

    def bucket_of(self, shape: DraftShape, requests: int, *, has_lora: bool = False) -> TreeBucket:
        """The smallest bucket with room for these trees. No bucket with fewer nodes is deeper."""
        return min(
            bucket
            for bucket in self._graphs
            if bucket.requests >= requests
            and bucket.shape.num_drafts >= shape.num_drafts
            and bucket.shape.width == shape.width
            and bucket.has_lora == has_lora
        )

    def forward(self, arrays: TreeArrays, shape: DraftShape) -> torch.Tensor:
        """Starts trees of at least this many nodes. Returns [2, nodes, R] int64 or larger on the
        device, as from `StaticTrees.run`; valid until the next drafts or step.
        """
        has_lora = self._trees.needs_lora(arrays)
        bucket = self.bucket_of(shape, len(arrays.slots), has_lora=has_lora)
        self._trees.send(arrays, bucket)
        graph, found = self._graphs[bucket]
        graph.replay()
        return found
