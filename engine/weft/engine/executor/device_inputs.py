"""Inputs of steps on a GPU, where a copy of the page table lies. The host sends one copy per step.

The device fills in values that only it knows: the tokens that the step before drew, and the start
positions of requests whose drafts that step verified. It does so within the captured step, or right
after the copy if the step is not captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.arrays import Int32Array, Int64Array
from weft.engine.base.device_copies import DeviceCopies, PinnedBuffer
from weft.engine.base.state_rows import StateRows
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.encodings import StepArrays, StepDecodes
from weft.engine.executor.lora_columns import LoraColumns
from weft.engine.executor.ragged_columns import (
    NOTHING,
    RaggedColumns,
    requests_size,
    write_requests,
)
from weft.engine.executor.states import DeviceStates
from weft.engine.executor.step_input import StepInput
from weft.engine.model.state_step import StateStep
from weft.engine.model.step import ChosenMemory, RouteMemory, Step
from weft.engine.sampling.device_draws import RowsOnDevice
from weft.kernels.ops.attention.spec import AttentionMetadata, SeveralRows
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora.spec import LoraSegments, LoraStep
from weft.kernels.ops.step_requests import expand_decodes, expand_requests
from weft.kernels.ops.step_requests.spec import DecodeColumns, StepColumns
from weft.kernels.ops.step_rows import group_places, resolve_rows
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.pages.memory.page_table import PageChanges, PageTable

_ALIGNMENT_BYTES = 16
_MAX_STATIC_CHANGES = 4096
"""Most new pages that are sent with static inputs."""
_CHANGES_BYTES = _MAX_STATIC_CHANGES * (8 + 4) + _ALIGNMENT_BYTES


class DeviceInputs:
    """Sends steps to the GPU and builds their batches there. Static inputs lie in fixed memory,
    which captured steps read.

    Args:
        table: The host's page table, whose changes each step takes along.
        max_decode_rows: Requests of the largest decode step with static inputs.
        known: Last tokens, positions and drafts of each slot, as the device knows them.
        lora: None: steps have no adapters.
        max_tokens: Rows of the largest step with static inputs.
        windows: Page table and pool of each further page group.
        states: None: the model has no recurrent layers.
        routes: None: experts of rows are not recorded.
        chosen: What steps write to be counted; None: nothing.
    """

    def __init__(
        self,
        table: PageTable,
        page_size: int,
        max_decode_rows: int,
        known: SlotTokens,
        lora: LoraPool | None = None,
        max_tokens: int = 0,
        windows: Sequence[tuple[PageTable, torch.Tensor]] = (),
        states: DeviceStates | None = None,
        routes: RouteMemory | None = None,
        chosen: ChosenMemory | None = None,
    ) -> None:
        device = known.tokens.device
        self._known = known
        self._host_table = table
        self._page_size = page_size
        self._copies = DeviceCopies(device)
        self._table = torch.from_numpy(table.pages).to(device)
        self._windows = [
            (host, torch.from_numpy(host.pages).to(device), pool) for host, pool in windows
        ]
        self._one_row_each = torch.arange(max_decode_rows + 1, dtype=torch.int32, device=device)
        self._decodes = _DecodeMemory(max_decode_rows, self._one_row_each)
        self._max_requests = max_decode_rows
        self._ragged: torch.Tensor | None = None
        self._ragged_views: dict[RaggedColumns, StepColumns] = {}
        self._states = states
        self._routes, self._chosen = routes, chosen
        self._lora = lora
        if lora is not None:
            columns = LoraColumns.of(max(max_tokens, max_decode_rows), lora.max_slots)
            self._lora_bytes = torch.zeros(columns.num_bytes, dtype=torch.uint8, device=device)
        self._static_rows = torch.arange(max_decode_rows, device=device)
        self.drawing_slots = self._static_rows[:0]
        """[L] int64: the slot of each row of logits of the step that was sent last."""
        self.step: StepRows | None = None
        """The step that was sent last, in the memory that it runs from. Sending preserves what
        earlier device work wrote there, such as the positions and ancestors of trees.
        """
        self.verify_rows = self._static_rows[:0]
        """[V, 1 + most drafts] int64: `StepArrays.verify_rows` of that step, if it has drafts.
        Captured steps may have further columns of -1.
        """

    @property
    def pages(self) -> torch.Tensor:
        """[slots + 1, max_pages] int32: the page table on the device. The last row contains only
        the null page.
        """
        return self._table

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
        """Copies arrays to separate memory on the device, without waiting."""
        return self._copies.send(arrays)

    @property
    def null_row(self) -> int:
        """The dummy slot: a row of the page table that names only the null page."""
        return self._host_table.null_row

    def send_pages(self) -> None:
        """Sends changes of the host's page table outside a step. Each step sends such changes
        itself.
        """
        self._send_windows()
        changes = self._host_table.take_changes()
        if len(changes.indices):
            self._apply(*self._copies.send(changes))

    def _send_windows(self) -> None:
        for host, table, _ in self._windows:
            changes = host.take_changes()
            if len(changes.indices):
                indices, pages = self._copies.send(changes)
                table.view(-1).index_copy_(0, indices, pages)

    def _groups(
        self, group: AttentionMetadata, positions: torch.Tensor, rows: torch.Tensor
    ) -> tuple[AttentionMetadata, ...]:
        num_columns, size = group.page_table.shape[1], self._page_size
        windows = (
            group_step(group, table[:, :num_columns].index_select(0, rows), pool, positions, size)
            for _, table, pool in self._windows
        )
        return (group, *windows)

    def batch(self, arrays: StepArrays) -> Step:
        """Sends a step that is not captured and builds its batch."""
        rows_of = arrays.verify_rows
        columns: tuple[npt.NDArray[np.generic], ...] = (
            arrays.token_ids,
            arrays.positions,
            arrays.places,
            arrays.logits_rows,
            arrays.slots,
            arrays.cu_q_lens,
            arrays.kv_lens,
            np.array([arrays.first_several], np.int32),
            arrays.drawing_slots,
            arrays.sources,
            arrays.owners,
            np.zeros((0, 1), np.int64) if rows_of is None else rows_of,
            *self._host_table.take_changes(),
        )
        self._send_windows()
        words = () if arrays.ancestors is None else (arrays.ancestors,)
        token_ids, positions, slots, logits_rows, rows, cu_q_lens, kv_lens, first, *rest = (
            self._copies.send((*columns, *words))
        )
        ancestors = rest.pop() if words else None
        self.drawing_slots, sources, owners, verify_rows, *changes = rest
        self._apply(*changes)
        self.verify_rows = verify_rows if rows_of is None else verify_rows.view(rows_of.shape)
        self.step = step = StepRows(token_ids, positions, slots, cu_q_lens, kv_lens, ancestors)
        self._resolve(step, sources, owners)
        num_columns = -(-arrays.max_kv_len // self._page_size)
        group = AttentionMetadata(
            page_table=self._table[:, :num_columns].index_select(0, rows),
            places=slots,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            max_q_len=arrays.max_q_len,
            max_kv_len=arrays.max_kv_len,
            ancestors=ancestors,
            is_cold=arrays.is_cold and arrays.adapter_slots is None,
            num_earlier=arrays.num_earlier,
            several=SeveralRows(first, len(arrays.slots) - arrays.first_several),
        )
        return Step(
            routes=self._routes,
            chosen=self._chosen,
            token_ids=token_ids,
            positions=positions,
            groups=self._groups(group, positions, rows),
            logits_rows=logits_rows,
            lora=self._lora_step(arrays),
            slots=rows,
            states=None
            if self._states is None
            else self._states.batch(arrays, rows, cu_q_lens, positions),
        )

    def _lora_step(self, arrays: StepArrays) -> LoraStep | None:
        return None if arrays.adapter_slots is None else self.lora_of(arrays.adapter_slots)

    def lora_of(self, token_slots: Int32Array) -> LoraStep:
        """Sends the adapter slots of these tokens, [T], as `batch` does for a whole step."""
        assert self._lora is not None, "a step has adapters, and there is no memory for them"
        return self._lora.step(LoraSegments(*self._copies.send(sort_tokens(token_slots))))

    @property
    def changes_logits(self) -> bool:
        """Whether adapters may change the LM head."""
        return self._lora is not None and self._lora.changes_logits

    def _send_lora(self, token_slots: Int32Array | None, num_tokens: int) -> None:
        if token_slots is None:
            return
        assert self._lora is not None, "a step has adapters, and there is no memory for them"
        columns = LoraColumns.of(num_tokens, self._lora.max_slots)
        buffer, host = self._copies.pinned.take(columns.num_bytes)
        columns.write(host, token_slots)
        size = columns.num_bytes
        self._lora_bytes[:size].copy_(buffer[:size], non_blocking=True)
        self._copies.pinned.sent()

    def _static_lora(self, num_tokens: int, *, has_lora: bool) -> LoraStep | None:
        if not has_lora:
            return None
        assert self._lora is not None
        columns = LoraColumns.of(num_tokens, self._lora.max_slots)
        step = self._lora.step(columns.views(self._lora_bytes))
        # A copy brings the columns before any kernel of the step.
        return replace(step, are_given=True)

    def decode_batch(self, num_rows: int, *, has_lora: bool = False) -> Step:
        """The inputs of a decode step of `num_rows` requests in the memory that `send_decodes`
        writes. Call it while a graph is captured: each replay then fills in values that only the
        device knows, enters new pages and copies the page table's rows.
        """
        given, step = self._decodes.views(num_rows)
        expand_decodes(given, step, self._known, self._table, self._page_size)
        group = AttentionMetadata(
            page_table=self._table.index_select(0, given.slots),
            places=step.places,
            cu_q_lens=step.cu_q_lens,
            kv_lens=step.kv_lens,
            max_q_len=1,
            max_kv_len=self._table.shape[1] * self._page_size,
        )
        return Step(
            routes=self._routes,
            chosen=self._chosen,
            token_ids=step.token_ids,
            positions=step.positions,
            groups=self._groups(group, step.positions, given.slots),
            logits_rows=self._static_rows[:num_rows],
            lora=self._static_lora(num_rows, has_lora=has_lora),
            slots=given.slots,
            states=self._captured_states(given.slots, step.cu_q_lens, step.positions),
        )

    def send_decodes(self, decodes: StepDecodes, num_rows: int) -> None:
        """Sends a decode step padded to `num_rows`. Padding rows write to the null page."""
        self._send_lora(decodes.adapter_slots, num_rows)
        changes = self._few_changes()
        memory = self._decodes
        buffer = self._copies.pinned.take(memory.num_bytes)
        memory.write(buffer.host, decodes, num_rows, self._host_table.null_row)
        self._send_static(memory.device_bytes, buffer, memory.used, changes)
        (self.drawing_slots, *_), self.step = memory.views(len(decodes.slots))

    def send_states(self, rows: StateRows | None, num_requests: int) -> None:
        """Sends the blocks of a captured step, padded to `num_requests`. Does nothing if the model
        has no recurrent layers.
        """
        if self._states is not None:
            self._states.send(rows, num_requests)

    def _captured_states(
        self, slots: torch.Tensor, cu_q_lens: torch.Tensor, positions: torch.Tensor
    ) -> StateStep | None:
        if self._states is None:
            return None
        return self._states.captured(slots, cu_q_lens, positions)

    def send_verify_rows(self, rows: Int64Array) -> None:
        """Sends `StepArrays.verify_rows` of a decode step, in which no request has drafts."""
        (sent,) = self._copies.send((rows,))
        self.verify_rows = sent.view(rows.shape)

    def ragged_batch(self, columns: RaggedColumns, *, has_lora: bool = False) -> Step:
        """The inputs of a ragged step in the memory that `send_ragged` writes for the same
        `columns`. Call it while a graph is captured, as `decode_batch`.
        """
        views = self.ragged_views(columns)
        if views.requests is not None:
            expand_requests(views, self._table, self._page_size, len(self._table))
        self._resolve(_step_of(views), views.sources, views.owners)
        group = AttentionMetadata(
            page_table=self._table.index_select(0, views.rows),
            places=views.slots,
            cu_q_lens=views.cu_q_lens,
            kv_lens=views.kv_lens,
            max_q_len=columns.num_tokens,
            max_kv_len=self._table.shape[1] * self._page_size,
            ancestors=views.ancestors,
            several=None
            if views.first_several is None
            else SeveralRows(views.first_several, columns.max_several),
        )
        return Step(
            routes=self._routes,
            chosen=self._chosen,
            token_ids=views.token_ids,
            positions=views.positions,
            groups=self._groups(group, views.positions, views.rows),
            logits_rows=views.logits_rows,
            lora=self._static_lora(columns.num_tokens, has_lora=has_lora),
            slots=views.rows,
            states=self._captured_states(views.rows, views.cu_q_lens, views.positions),
        )

    def drawing_step(self, num_rows: int) -> tuple[StepRows, torch.Tensor]:
        """The fixed memory of a decode step of `num_rows`, and the slot that each row draws for."""
        given, step = self._decodes.views(num_rows)
        return step, given.slots

    def ragged_step(self, columns: RaggedColumns) -> tuple[StepRows, Verified, torch.Tensor]:
        """The fixed memory of a ragged step, its requests with drafts, and the numbers of its rows
        that draw.
        """
        views = self.ragged_views(columns)
        return _step_of(views), Verified(views.verify_rows, views.drawing_slots), views.logits_rows

    def send_ragged(self, arrays: StepArrays, columns: RaggedColumns) -> None:
        """Sends a step padded to the size of `columns`. Padding rows write to the null page, and
        padding requests have no rows.
        """
        self._send_lora(arrays.adapter_slots, columns.num_tokens)
        views, changes = self.ragged_views(columns), self._few_changes()
        buffer = self._copies.pinned.take(columns.num_bytes + _CHANGES_BYTES)
        columns.write(buffer.host, arrays, self._host_table.null_row, self._page_size)
        assert self._ragged is not None
        self._send_static(self._ragged, buffer, columns.num_bytes, changes)
        self.drawing_slots = views.drawing_slots[: len(arrays.drawing_slots)]
        if arrays.verify_rows is not None:
            self.verify_rows = views.verify_rows[: len(arrays.verify_rows)]
        self.step = _step_of(views)

    def send_requests(self, requests: StepInput, columns: RaggedColumns) -> None:
        """Sends a step by its requests. The device expands them to the rows that `send_ragged`
        would send.
        """
        self._send_lora(requests.row_adapters(), columns.num_tokens)
        views = self.ragged_views(columns)
        self.send_drafting(requests, columns.max_requests)
        self.drawing_slots = views.drawing_slots[: requests.num_rows]
        self.verify_rows = views.verify_rows[: len(requests.slots)]
        self.step = _step_of(views)

    def send_drafting(self, requests: StepInput, num_requests: int) -> None:
        """Sends only the requests to draft for, padded to `num_requests`. The next step that is
        sent overwrites them.
        """
        changes, size = self._few_changes(), 8 * requests_size(num_requests)
        buffer = self._copies.pinned.take(size + _CHANGES_BYTES)
        used = write_requests(buffer.host, requests, num_requests, self._host_table.null_row)
        # Graphs overwrite the memory of new pages with other columns once the pages are entered.
        self.keep_ragged(0)
        assert self._ragged is not None
        self._send_static(self._ragged, buffer, used, changes)

    def request_rows(self, num_requests: int) -> tuple[torch.Tensor, ...]:
        """Slots, starts, counts and draft limits, [num_requests] int64 each, of the step or the
        requests that were sent last. They must have been padded to this number of requests.
        """
        self.keep_ragged(0)
        assert self._ragged is not None
        given = self._ragged[: 8 * requests_size(num_requests)].view(torch.int64)
        return given[1:].view(4, num_requests).unbind()

    def _few_changes(self) -> PageChanges:
        """Takes the page table's changes. It sends them at once if they are too many for static
        inputs.
        """
        self._send_windows()
        changes = self._host_table.take_changes()
        if len(changes.indices) <= _MAX_STATIC_CHANGES:
            return changes
        self._apply(*self._copies.send(changes))
        return PageChanges(changes.indices[:0], changes.pages[:0])

    def _send_static(
        self, device_bytes: torch.Tensor, buffer: PinnedBuffer, used: int, changes: PageChanges
    ) -> None:
        """Copies the first `used` bytes of the pinned buffer that was taken last, followed by new
        pages, to fixed memory. Enters the pages into the table.
        """
        if not len(changes.indices):
            device_bytes[:used].copy_(buffer.tensor[:used], non_blocking=True)
            self._copies.pinned.sent()
            return
        host, begin = buffer.host, -(-used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        middle = begin + changes.indices.nbytes
        end = middle + changes.pages.nbytes
        host[begin:middle] = changes.indices.view(np.uint8)
        host[middle:end] = changes.pages.view(np.uint8)
        device_bytes[:end].copy_(buffer.tensor[:end], non_blocking=True)
        self._copies.pinned.sent()
        indices = device_bytes[begin:middle].view(torch.int64)
        self._apply(indices, device_bytes[middle:end].view(torch.int32))

    def _resolve(self, step: StepRows, sources: torch.Tensor, owners: torch.Tensor) -> None:
        resolve_rows(step, sources, owners, self._known, self._table, self._page_size)

    def drawing_rows(self, arrays: StepArrays, *, has_slots: bool) -> RowsOnDevice:
        """Slots (if wanted) and positions of the tokens drawn in the step that was sent last.
        Copies nothing from the host if all rows of the step draw.
        """
        if not arrays.is_decode:
            return RowsOnDevice(None, self.drawing_positions(arrays))
        assert self.step is not None
        positions = self.step.positions[: len(arrays.positions)] + 1
        return RowsOnDevice(self.drawing_slots if has_slots else None, positions)

    def drawing_rows_of(self, num_rows: int, *, has_slots: bool) -> RowsOnDevice:
        """`drawing_rows` for a step of `num_rows` rows, all of which draw."""
        assert self.step is not None
        positions = self.step.positions[:num_rows] + 1
        return RowsOnDevice(self.drawing_slots if has_slots else None, positions)

    def drawing_positions(self, arrays: StepArrays) -> torch.Tensor:
        """[L] int64: positions of the tokens drawn in the step that was sent last. All rows of its
        first requests draw, and only the device knows their positions; the later requests start
        where the host says.
        """
        assert self.step is not None
        count = len(arrays.sources)
        (others,) = self._copies.send((arrays.drawing_positions[count:],))
        return torch.cat([self.step.positions[:count] + 1, others])

    def keep_ragged(self, num_bytes: int) -> None:
        """Allocates fixed memory for ragged steps if there is none yet. The first call must ask for
        the largest size.
        """
        num_bytes = max(num_bytes, 8 * requests_size(self._max_requests)) + _CHANGES_BYTES
        if self._ragged is None:
            self._ragged = torch.zeros(num_bytes, dtype=torch.uint8, device=self._table.device)
        if num_bytes > self._ragged.numel():
            raise ValueError(f"{num_bytes} bytes of a ragged step, {self._ragged.numel()} are kept")

    def ragged_views(self, columns: RaggedColumns) -> StepColumns:
        views = self._ragged_views.get(columns)
        if views is None:
            self.keep_ragged(columns.num_bytes)
            assert self._ragged is not None
            views = self._ragged_views[columns] = columns.views(self._ragged)
        return views

    def _apply(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        if indices.shape[0]:
            self._table.view(-1).index_copy_(0, indices, pages)


def group_step(
    first: AttentionMetadata,
    page_table: torch.Tensor,
    pool: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> AttentionMetadata:
    """A step as a further page group sees it.

    Args:
        page_table: [R, max_pages] int32: the further group's, one row per request of the step.
        positions: [T] int64, with the values that only the device knows filled in.
    """
    places = group_places(positions, first.cu_q_lens, page_table, page_size, first.places)
    return first._replace(page_table=page_table, places=places, pool=pool)


class _DecodeMemory:
    """Fixed memory on the device that captured decode steps read, and the rows that they compute
    from it. `one_row_each` is [max_rows + 1] int32: 0, 1, 2 and so on.
    """

    def __init__(self, max_rows: int, one_row_each: torch.Tensor) -> None:
        self._max_rows = max_rows
        self._one_row_each, device = one_row_each, one_row_each.device
        self.used = max_rows * 8 * len(DecodeColumns._fields)
        """Bytes of the columns. The step's new pages follow them."""
        self.num_bytes = self.used + _CHANGES_BYTES
        self.device_bytes = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        self._given = self.device_bytes[: self.used].view(torch.int64).view(-1, max_rows)
        self._tokens_and_places = torch.zeros((2, max_rows), dtype=torch.int64, device=device)
        self._kv_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._views: dict[int, tuple[DecodeColumns, StepRows]] = {}

    def views(self, num_rows: int) -> tuple[DecodeColumns, StepRows]:
        """The columns that a step of `num_rows` sends, and the rows that the device expands them
        to.
        """
        views = self._views.get(num_rows)
        if views is None:
            given = DecodeColumns._make(self._given[:, :num_rows].unbind())
            token_ids, places = self._tokens_and_places[:, :num_rows].unbind()
            one_row_each, kv_lens = self._one_row_each[: num_rows + 1], self._kv_lens[:num_rows]
            step = StepRows(token_ids, given.positions, places, one_row_each, kv_lens)
            views = self._views[num_rows] = given, step
        return views

    def write(
        self, host: npt.NDArray[np.uint8], decodes: StepDecodes, num_rows: int, null_row: int
    ) -> None:
        columns = host[: self.used].view(np.int64).reshape(-1, self._max_rows)
        count = len(decodes.slots)
        given = decodes.slots, decodes.starts, decodes.tokens, decodes.pages
        for column, values in zip(columns, given, strict=True):
            column[:count] = values
        if count < num_rows:
            columns[:, count:num_rows] = ((null_row,), (0,), (0,), (NOTHING,))


def _step_of(views: StepColumns) -> StepRows:
    return StepRows(
        views.token_ids,
        views.positions,
        views.slots,
        views.cu_q_lens,
        views.kv_lens,
        views.ancestors,
    )
