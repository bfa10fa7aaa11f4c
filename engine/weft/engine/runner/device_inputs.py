"""A step's inputs on a GPU: one copy from the host per step; the page table is kept there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.device_copies import DeviceCopies
from weft.engine.lora.pool import LoraPool
from weft.engine.memory.kv_memory import NULL_PAGE
from weft.engine.runner.batch import ForwardBatch
from weft.engine.runner.lora_columns import LoraColumns
from weft.engine.runner.ragged_columns import RaggedColumns
from weft.engine.runner.step import Int32Array, PageChanges, PageTable, StepArrays
from weft.engine.sampling.device import RowsOnDevice
from weft.kernels.lora import LoraSegments, LoraStep, sort_tokens
from weft.kernels.step_rows import SlotTokens, StepRows, resolve_rows

_ALIGNMENT_BYTES = 16
_MAX_STATIC_CHANGES = 4096
"""Most new pages in the static inputs of a decode step."""


class DeviceInputs:
    """Builds batches on the device.

    Args:
        table: the host's page table; its changes are taken with each step.
        page_size: token positions a page.
        max_decode_rows: requests of the largest decode step with static inputs.
        known: what the device knows of each slot; of the step behind drafts, all there is.
        lora: adapters on the device; None: steps have none.
        max_tokens: of the largest step with static inputs.
    """

    def __init__(
        self,
        table: PageTable,
        page_size: int,
        max_decode_rows: int,
        known: SlotTokens,
        lora: LoraPool | None = None,
        max_tokens: int = 0,
    ) -> None:
        device = known.tokens.device
        self._known = known
        self._host_table = table
        self._page_size = page_size
        self._copies = DeviceCopies(device)
        self._table = torch.from_numpy(table.pages).to(device)
        self._static = _StaticColumns(max_decode_rows, device)
        self._ragged: torch.Tensor | None = None
        self._lora = lora
        if lora is not None:
            columns = LoraColumns.of(max(max_tokens, max_decode_rows), lora.max_slots)
            self._lora_bytes = torch.zeros(columns.num_bytes, dtype=torch.uint8, device=device)
        self._one_row_each = torch.arange(max_decode_rows + 1, dtype=torch.int32, device=device)
        self._static_rows = torch.arange(max_decode_rows, device=device)
        self.drawing_slots = self._static_rows[:0]
        """[L] int64: the slot of each row of the logits of the step sent last."""
        self.step: StepRows | None = None
        """The step sent last, in the memory that it runs from. Values written there by earlier
        device work, such as the positions and ancestors of trees, are preserved.
        """
        self.verify_rows = self._static_rows[:0]
        """[V, 1 + most drafts] int64: `StepArrays.verify_rows` of that step, where it has any."""

    @property
    def pages(self) -> torch.Tensor:
        """[slots + 1, max_pages] int32: the page table on the device; the last row contains only
        the null page.
        """
        return self._table

    def send_pages(self) -> None:
        """Sends the changes of the host's page table; steps do this by themselves."""
        changes = self._host_table.take_changes()
        if len(changes.indices):
            self._apply(*self._copies.send(changes))

    def batch(self, arrays: StepArrays) -> ForwardBatch:
        """Copies the input of a step to the device."""
        changes = self._host_table.take_changes()
        columns: tuple[npt.NDArray[np.generic], ...] = (
            arrays.token_ids,
            arrays.positions,
            arrays.slots,
            arrays.logits_rows,
            arrays.rows,
            arrays.cu_q_lens,
            arrays.kv_lens,
            *self._of_the_device(arrays, changes),
        )
        words = () if arrays.ancestors is None else (arrays.ancestors,)
        token_ids, positions, slots, logits_rows, rows, cu_q_lens, kv_lens, *rest = (
            self._copies.send((*columns, *words))
        )
        ancestors = rest.pop() if words else None
        step = StepRows(token_ids, positions, slots, cu_q_lens, kv_lens, ancestors)
        self._resolve(arrays, step, rest)
        num_columns = -(-arrays.max_kv_len // self._page_size)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            page_table=self._table[:, :num_columns].index_select(0, rows),
            slots=slots,
            logits_rows=logits_rows,
            max_q_len=arrays.max_q_len,
            max_kv_len=arrays.max_kv_len,
            lora=self._lora_step(arrays),
            request_slots=rows,
            ancestors=ancestors,
        )

    def _lora_step(self, arrays: StepArrays) -> LoraStep | None:
        """The adapters of a step without static inputs."""
        return None if arrays.adapter_slots is None else self.lora_of(arrays.adapter_slots)

    def lora_of(self, token_slots: Int32Array) -> LoraStep:
        """Sends the adapters of some tokens ([T]), as `batch` does for a whole step."""
        assert self._lora is not None, "a step has adapters, and there is no memory for them"
        return self._lora.step(LoraSegments(*self._copies.send(sort_tokens(token_slots))))

    @property
    def changes_logits(self) -> bool:
        """Whether adapters may change the LM head."""
        return self._lora is not None and self._lora.changes_logits

    def _send_lora(self, arrays: StepArrays, num_tokens: int) -> None:
        """Sends the adapters, if any, of a step padded to `num_tokens`."""
        if arrays.adapter_slots is None:
            return
        assert self._lora is not None, "a step has adapters, and there is no memory for them"
        columns = LoraColumns.of(num_tokens, self._lora.max_slots)
        buffer = self._copies.pinned.take(columns.num_bytes)
        columns.write(buffer.numpy(), arrays.adapter_slots)
        size = columns.num_bytes
        self._lora_bytes[:size].copy_(buffer[:size], non_blocking=True)
        self._copies.pinned.sent()

    def _static_lora(self, num_tokens: int, *, has_lora: bool) -> LoraStep | None:
        """The columns that `_send_lora` sent last."""
        if not has_lora:
            return None
        assert self._lora is not None
        columns = LoraColumns.of(num_tokens, self._lora.max_slots)
        step = self._lora.step(columns.views(self._lora_bytes))
        return replace(step, are_given=True)  # It comes by a copy, ahead of all kernels.

    def decode_batch(self, num_rows: int, *, has_lora: bool = False) -> ForwardBatch:
        """The inputs of a decode step of `num_rows` requests, as `send_decode` sent them last.

        To be called while a graph is captured: only the copy of the page table's rows is made
        anew when it is replayed.
        """
        token_ids, positions, slots, rows, kv_lens = self._static.views(num_rows)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            cu_q_lens=self._one_row_each[: num_rows + 1],
            kv_lens=kv_lens,
            page_table=self._table.index_select(0, rows),
            slots=slots,
            logits_rows=self._static_rows[:num_rows],
            max_q_len=1,
            max_kv_len=self._table.shape[1] * self._page_size,
            lora=self._static_lora(num_rows, has_lora=has_lora),
            request_slots=rows,
        )

    def send_decode(self, arrays: StepArrays, num_rows: int) -> None:
        """Sends a decode step padded to `num_rows`; padding rows write to the null page."""
        self._send_lora(arrays, num_rows)
        changes = self._host_table.take_changes()
        if len(changes.indices) > _MAX_STATIC_CHANGES:
            self._apply(*self._copies.send(changes))
            changes = PageChanges(changes.indices[:0], changes.pages[:0])
        buffer = self._copies.pinned.take(self._static.num_bytes)
        host = buffer.numpy()
        used = self._static.write(host, arrays, num_rows, self._host_table.null_row)
        change_views, used = self._static.write_changes(host, changes, used)
        self._static.device_bytes[:used].copy_(buffer[:used], non_blocking=True)
        self._copies.pinned.sent()
        self._apply(*change_views)
        token_ids, positions, places, rows, kv_lens = self._static.views(len(arrays.rows))
        self.drawing_slots = rows
        self.step = StepRows(
            token_ids, positions, places, self._one_row_each[: len(rows) + 1], kv_lens
        )
        if count := arrays.num_decodes:
            torch.index_select(self._known.tokens[0], 0, rows[:count], out=token_ids[:count])
        if arrays.verify_rows is not None:
            (sent,) = self._copies.send((arrays.verify_rows,))
            self.verify_rows = sent.view(arrays.verify_rows.shape)

    def ragged_batch(self, columns: RaggedColumns, *, has_lora: bool = False) -> ForwardBatch:
        """The inputs of a step of that size, as `send_ragged` sent them last with the same
        `columns`; see `decode_batch`.
        """
        flat = self._ragged_bytes(columns.num_bytes)
        token_ids, positions, slots, rows, logits_rows, cu_q_lens, kv_lens = columns.views(flat)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            page_table=self._table.index_select(0, rows),
            slots=slots,
            logits_rows=logits_rows,
            max_q_len=columns.num_tokens,
            max_kv_len=self._table.shape[1] * self._page_size,
            lora=self._static_lora(columns.num_tokens, has_lora=has_lora),
            request_slots=rows,
            ancestors=columns.ancestors(flat),
        )

    def send_ragged(self, arrays: StepArrays, columns: RaggedColumns) -> None:
        """Sends a step padded to the size of `columns`: padding rows write to the null page, and
        padding requests have no rows.
        """
        self._send_lora(arrays, columns.num_tokens)
        changes = self._host_table.take_changes()
        rest = self._copies.send(self._of_the_device(arrays, changes))
        buffer = self._copies.pinned.take(columns.num_bytes)
        columns.write(buffer.numpy(), arrays, self._host_table.null_row, self._page_size)
        sent = self._ragged_bytes(columns.num_bytes)
        sent.copy_(buffer[: columns.num_bytes], non_blocking=True)
        self._copies.pinned.sent()
        token_ids, positions, places, _, _, cu_q_lens, kv_lens = columns.views(sent)
        ancestors = columns.ancestors(sent)
        step = StepRows(token_ids, positions, places, cu_q_lens, kv_lens, ancestors)
        self._resolve(arrays, step, rest)

    def _of_the_device(
        self, arrays: StepArrays, changes: PageChanges
    ) -> tuple[npt.NDArray[np.generic], ...]:
        """Columns that `_resolve` needs for tokens and positions known only to the device."""
        rows = arrays.verify_rows
        verify_rows = np.zeros(0, np.int64) if rows is None else rows
        return (arrays.drawing_slots, arrays.sources, arrays.owners, verify_rows, *changes)

    def _resolve(self, arrays: StepArrays, step: StepRows, columns: Sequence[torch.Tensor]) -> None:
        """Enters new pages, and the values of a step that only the device knows."""
        self.drawing_slots, sources, owners, verify_rows, indices, pages = columns
        self._apply(indices, pages)
        if arrays.verify_rows is not None:
            self.verify_rows = verify_rows.view(arrays.verify_rows.shape)
        self.step = step
        resolve_rows(step, sources, owners, self._known, self._table, self._page_size)

    def drawing_rows(self, arrays: StepArrays, *, has_slots: bool) -> RowsOnDevice:
        """Returns slots, if they are wanted, and positions of the tokens drawn in the step sent
        last: without a copy from the host where all of its rows are drawn from."""
        if not arrays.is_decode:
            return RowsOnDevice(None, self.drawing_positions(arrays))
        assert self.step is not None
        positions = self.step.positions[: len(arrays.positions)] + 1
        return RowsOnDevice(self.drawing_slots if has_slots else None, positions)

    def drawing_positions(self, arrays: StepArrays) -> torch.Tensor:
        """[L] int64: positions of the tokens drawn in the step sent last.

        All of its first rows are drawn from; those behind start where the host says.
        """
        assert self.step is not None
        count = len(arrays.sources)
        (others,) = self._copies.send((arrays.drawing_positions[count:],))
        return torch.cat([self.step.positions[:count] + 1, others])

    def keep_ragged(self, num_bytes: int) -> None:
        """Allocates a fixed buffer for ragged steps of this many bytes."""
        self._ragged_bytes(num_bytes)

    def _ragged_bytes(self, num_bytes: int) -> torch.Tensor:
        """The buffer for ragged steps; the largest size must be requested first, since the buffer
        stays.
        """
        if self._ragged is None:
            self._ragged = torch.zeros(num_bytes, dtype=torch.uint8, device=self._table.device)
        if num_bytes > self._ragged.numel():
            raise ValueError(f"{num_bytes} bytes of a ragged step, {self._ragged.numel()} are kept")
        return self._ragged[:num_bytes]

    def _apply(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        if indices.shape[0]:
            self._table.view(-1).index_copy_(0, indices, pages)


class _StaticColumns:
    """Fixed memory on the device that captured graphs read: int64 columns, then int32 ones.

    After them come the step's new pages, as many as there are.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = -(-max_rows // 4) * 4
        self._changes_at = self._max_rows * (4 * 8 + 4)
        self.num_bytes = self._changes_at + _MAX_STATIC_CHANGES * (8 + 4) + _ALIGNMENT_BYTES
        self.device_bytes = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        at = 4 * 8 * self._max_rows
        wide = self.device_bytes[:at].view(torch.int64).view(4, self._max_rows)
        self._columns = (*wide, self.device_bytes[at : self._changes_at].view(torch.int32))

    def views(self, num_rows: int) -> list[torch.Tensor]:
        """token_ids, positions, slots, rows (int64) and kv_lens (int32), each [num_rows]."""
        return [column[:num_rows] for column in self._columns]

    def write(
        self, host: npt.NDArray[np.uint8], arrays: StepArrays, num_rows: int, null_row: int
    ) -> int:
        """Writes the columns of a decode step into `host`; returns the bytes used."""
        at, count = 4 * 8 * self._max_rows, len(arrays.token_ids)
        wide = host[:at].view(np.int64).reshape(4, self._max_rows)
        narrow = host[at : self._changes_at].view(np.int32)
        values = (arrays.token_ids, arrays.positions, arrays.slots, arrays.rows)
        padding = (0, 0, NULL_PAGE, null_row)
        for column, value, pad in zip(wide, values, padding, strict=True):
            column[:count] = value
            column[count:num_rows] = pad
        narrow[:count] = arrays.kv_lens
        narrow[count:num_rows] = 0
        return self._changes_at

    def write_changes(
        self, host: npt.NDArray[np.uint8], changes: PageChanges, begin: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        """Appends the step's new pages; returns their location and the bytes used."""
        middle = begin + changes.indices.nbytes
        end = middle + changes.pages.nbytes
        host[begin:middle] = changes.indices.view(np.uint8)
        host[middle:end] = changes.pages.view(np.uint8)
        indices = self.device_bytes[begin:middle].view(torch.int64)
        return (indices, self.device_bytes[middle:end].view(torch.int32)), end
