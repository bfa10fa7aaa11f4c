"""Inputs of steps on a CPU, which reads the host's arrays where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from weft.contract.arrays import Int32Array, Int64Array
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.device_inputs import group_step
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.states import StateMemory
from weft.engine.model.step import RouteMemory, Step
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora.spec import LoraSegments, LoraStep
from weft.kernels.ops.step_rows import resolve_rows
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows
from weft.pages.memory.page_table import PageTable


class HostInputs:
    """Builds batches as `DeviceInputs` does.

    Args:
        table: The first page group's page table.
        known: Last tokens and positions of each slot.
        lora: None: steps have no adapters.
        windows: Page table and pool of each further page group.
        states: None: the model has no recurrent layers.
        routes: None: experts of rows are not recorded.
    """

    def __init__(
        self,
        table: PageTable,
        page_size: int,
        known: SlotTokens,
        lora: LoraPool | None,
        windows: Sequence[tuple[PageTable, torch.Tensor]],
        states: StateMemory | None,
        routes: RouteMemory | None = None,
    ) -> None:
        self._table = table
        self._page_size = page_size
        self._known = known
        self._lora = lora
        self._windows = windows
        self._states = states
        self._routes = routes
        self._segments: LoraSegments | None = None
        """Segments of the last step that had adapters. Steps of decodes that follow often have the
        same.
        """
        self.drawing_slots = known.starts[:0]
        """[L] int64: the slot of each row of logits of the last step."""
        self.step: StepRows | None = None
        self.verify_rows = known.starts[:0]
        """[V, 1 + most drafts] int64: `StepArrays.verify_rows` of the last step, if it has drafts.
        """

    def send(self, arrays: Sequence[Int64Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def batch(self, arrays: StepArrays) -> Step:
        num_columns = -(-arrays.max_kv_len // self._page_size)
        self.drawing_slots = torch.from_numpy(arrays.drawing_slots)
        if arrays.verify_rows is not None:
            self.verify_rows = torch.from_numpy(arrays.verify_rows)
        self.step = step = StepRows(
            token_ids=torch.from_numpy(arrays.token_ids),
            positions=torch.from_numpy(arrays.positions),
            places=torch.from_numpy(arrays.places),
            cu_q_lens=torch.from_numpy(arrays.cu_q_lens),
            kv_lens=torch.from_numpy(arrays.kv_lens),
            ancestors=None if arrays.ancestors is None else torch.from_numpy(arrays.ancestors),
        )
        resolve_rows(
            step,
            torch.from_numpy(arrays.sources),
            torch.from_numpy(arrays.owners),
            self._known,
            torch.from_numpy(self._table.pages),
            self._page_size,
        )
        group = AttentionMetadata(
            page_table=torch.from_numpy(self._table.pages[arrays.slots, :num_columns]),
            places=step.places,
            cu_q_lens=step.cu_q_lens,
            kv_lens=step.kv_lens,
            max_q_len=arrays.max_q_len,
            max_kv_len=arrays.max_kv_len,
            ancestors=step.ancestors,
        )
        groups = [group]
        for host_table, pool in self._windows:
            table = torch.from_numpy(host_table.pages[arrays.slots, :num_columns])
            groups.append(group_step(group, table, pool, step.positions, self._page_size))
        states = None
        if self._states is not None:
            starts, counts = arrays.positions[arrays.cu_q_lens[:-1]], np.diff(arrays.cu_q_lens)
            states = self._states.step(arrays.slots, starts, counts, arrays.states)
        slots = arrays.adapter_slots
        return Step(
            routes=self._routes,
            token_ids=step.token_ids,
            positions=step.positions,
            groups=tuple(groups),
            states=states,
            logits_rows=torch.from_numpy(arrays.logits_rows),
            lora=None if slots is None else self.lora_of(slots),
            slots=torch.from_numpy(arrays.slots),
        )

    @property
    def changes_logits(self) -> bool:
        return self._lora is not None and self._lora.changes_logits

    def lora_of(self, token_slots: Int32Array) -> LoraStep:
        assert self._lora is not None, "a step has adapters, and there is no memory for them"
        segments = self._segments
        if segments is None or not np.array_equal(segments.token_slots.numpy(), token_slots):
            self._segments = segments = LoraSegments.of(sort_tokens(token_slots))
        return self._lora.step(segments)
