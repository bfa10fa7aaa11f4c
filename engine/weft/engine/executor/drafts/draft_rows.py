"""Draft adapters as rows of the device's adapter memory, and as inputs of captured drafting.

Where drafting is captured, a draft adapter lies in the same slot of the tables as the adapter that
brought it, and is loaded and evicted with it. One graph serves requests with any mix of draft
adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from weft.checkpoint.adapters.projections import Projection
from weft.contract.arrays import Int32Array, Int64Array
from weft.contract.errors import AdapterError
from weft.engine.base.device_copies import PinnedBuffers
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.lora_columns import LoraColumns
from weft.engine.model.adapters.adapter import LoraPair
from weft.engine.model.heads.draft_adapter import MODULES, read_draft_pairs
from weft.kernels.ops.lora.spec import LoraStep

logger = logging.getLogger(__name__)

_NAMES = {module: "draft_" + module.rpartition(".")[2].removesuffix("_proj") for module in MODULES}
"""Projection names by module. The prefix `draft_` separates them from the target's."""


class DraftAdapterFiles:
    """`DraftParts` of a head.

    Args:
        shapes: [out, in] of each module that may be changed (`adaptable_shapes`).
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._shapes = shapes
        inner = shapes["mlp.gate_proj"][0]
        places = {
            "self_attn.q_proj": ("qkv", 0),
            "self_attn.o_proj": ("o", 0),
            "mlp.gate_proj": ("gate_up", 0),
            "mlp.up_proj": ("gate_up", inner),
            "mlp.down_proj": ("down", 0),
        }
        self.projections = tuple(
            Projection(
                name=_NAMES[module],
                kind=_NAMES[module],
                group=group,
                in_features=shapes[module][1],
                out_features=shapes[module][0],
                column=column,
                num_layers=1,
                is_draft=True,
            )
            for module, (group, column) in places.items()
        )

    def read(self, folder: Path, max_rank: int) -> Mapping[str, LoraPair]:
        try:
            if not folder.is_dir():
                return {}
            pairs = read_draft_pairs(folder, self._shapes, max_rank)
        except (AdapterError, OSError, RuntimeError, ValueError) as error:
            logger.warning("drafts go without %s: %s", folder, error)
            return {}
        return {_NAMES[module]: pair for module, pair in pairs.items()}


class AdapterRows:
    """The draft adapter of each row of captured drafting, in fixed memory.

    Args:
        rows_each: Rows per request in each kind of forward pass of the head.
    """

    def __init__(
        self,
        adapters: LoraPool,
        device: torch.device,
        max_requests: int,
        rows_each: Sequence[int],
    ) -> None:
        self._adapters = adapters
        self._rows_each = tuple(rows_each)
        size = sum(columns.num_bytes for columns in self._columns(max_requests))
        self._flat = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pinned = PinnedBuffers(device)

    def are_used(self, adapter_slots: Int32Array | Int64Array) -> bool:
        return bool(self._adapters.has_drafts[adapter_slots].any())

    def send(self, adapter_slots: Int32Array | Int64Array, requests: int) -> None:
        # Adapters without a draft adapter do not change the head; slot 0 costs least.
        used = np.where(self._adapters.has_drafts[adapter_slots], adapter_slots, 0)
        all_columns = self._columns(requests)
        size = sum(columns.num_bytes for columns in all_columns)
        (buffer, host), begin = self._pinned.take(size), 0
        for columns, count in zip(all_columns, self._rows_each, strict=True):
            columns.write(host[begin:], np.repeat(used, count).astype(np.int32))
            begin += columns.num_bytes
        self._flat[:size].copy_(buffer[:size], non_blocking=True)
        self._pinned.sent()

    def steps(self, requests: int) -> list[LoraStep]:
        """The inputs that were sent last for this number of requests, for each kind of forward
        pass.
        """
        steps, begin = [], 0
        for columns in self._columns(requests):
            step = self._adapters.draft_step(columns.views(self._flat[begin:]))
            # A copy brings the columns before any kernel of the graph.
            steps.append(replace(step, are_given=True))
            begin += columns.num_bytes
        return steps

    def _columns(self, requests: int) -> list[LoraColumns]:
        most = self._adapters.max_slots
        return [LoraColumns.of(requests * count, most) for count in self._rows_each]
