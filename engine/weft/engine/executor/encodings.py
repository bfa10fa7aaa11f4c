"""Encodings of a step: the host arrays that a `StepInput` becomes before it is copied to the
device.

The step's bucket decides which encoding it takes. Decodes are encoded by column, requests of few
rows by request (`ragged_columns.write_requests`), and all other steps by row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import NO_NUMBERS, Int32Array, Int64Array
from weft.engine.base.state_rows import StateRows
from weft.engine.executor.step_input import ON_DEVICE, StepInput
from weft.pages.memory.page_memory import NULL_PAGE
from weft.pages.memory.page_table import PageTable

DRAWN = -1
"""Placeholder for a token that the previous step draws, which the host does not know yet."""

_MIN_ROWS_OF_HEADS = 512
"""From this many rows per earlier position on, it pays to compute the keys and values of all heads
for positions before the step.

At DeepSeek-V3's sizes computing them takes 262,144 operations a head and position. A row's
attention takes 2,176 operations by latent and 640 by head. So it pays from 171 rows on, and from
230 on by measured rates of these operations.
"""
ALL_BEFORE = -1
"""Value of `ancestors` for a row that sees all earlier rows of its request, as outside trees."""


def _nothing() -> Int64Array:
    return np.zeros(0, np.int64)


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """The input of a step on the host, by row. T, R and L are as in `Step`."""

    token_ids: Int64Array
    """[T]; DRAWN where only the device knows the token, whose location is then in `sources`."""
    positions: Int64Array
    """[T]: absolute positions."""
    places: Int64Array
    """[T]: page * page_size + offset."""
    slots: Int64Array
    """[R]: each request's row of the page table."""
    cu_q_lens: Int32Array
    """[R + 1]: start of each request's rows."""
    kv_lens: Int32Array
    """[R]: length of each request's context."""
    logits_rows: Int64Array
    """[L]: numbers of the rows whose logits are wanted; all rows of a request with drafts."""
    max_q_len: int
    max_kv_len: int
    num_decodes: int = 0
    drawing_slots: Int64Array = field(default_factory=_nothing)
    """[L]: slot of each row of the logits; empty if no token is drawn."""
    drawing_positions: Int64Array = field(default_factory=_nothing)
    """[L]: positions of the tokens to be drawn."""
    verify_rows: Int64Array | None = None
    """[V, 1 + most drafts]: the row numbers of each request that is no prompt, decodes first; -1
    after a request's last row. None: no request has drafts.
    """
    sources: Int64Array = field(default_factory=_nothing)
    """[N]: location on the device of the token of each of the first N rows: decodes, and drafts
    made on the device (`weft.kernels.ops.step_rows.resolve_rows`).
    """
    owners: Int64Array = field(default_factory=_nothing)
    """[N]: number of the row's request if only the device knows where it starts, else -1."""
    adapter_slots: Int32Array | None = None
    """[T]: each row's slot of the LoRA tables; None: no row has an adapter."""
    ancestors: Int64Array | None = None
    """[T]: `AttentionMetadata.ancestors`; None: there are no trees. If only the device knows the
    trees, it writes this column before the step runs.
    """
    states: StateRows | None = None
    """Blocks of recurrent layers; None: the model has none."""

    @property
    def is_decode(self) -> bool:
        """Whether each request brings one token, at a position that the host knows, and wants its
        logits.
        """
        is_single = self.max_q_len == 1 and len(self.logits_rows) == len(self.token_ids)
        are_known = self.owners.max(initial=-1) < 0
        return is_single and are_known and len(self.sources) == self.num_decodes

    @property
    def _q_lens(self) -> Int32Array:
        return self.cu_q_lens[1:] - self.cu_q_lens[:-1]

    @property
    def first_several(self) -> int:
        """Number of requests of one row each that come first."""
        lens = self._q_lens
        return int(np.argmax(lens != 1)) if (lens != 1).any() else len(lens)

    @property
    def is_cold(self) -> bool:
        """Whether every request of several rows has no positions before this step."""
        q_lens = self._q_lens
        return bool(((q_lens <= 1) | (q_lens == self.kv_lens)).all())

    @property
    def num_earlier(self) -> int | None:
        q_lens = self._q_lens.astype(np.int64)
        before = np.where(q_lens > 1, self.kv_lens - q_lens, 0)
        total = int(before.sum())
        if not total or self.adapter_slots is not None or self.ancestors is not None:
            return None
        if self.owners.max(initial=-1) >= 0:
            return None  # The host knows only upper bounds of lengths.
        return total if int((before * q_lens).sum()) >= _MIN_ROWS_OF_HEADS * total else None

    @property
    def has_no_prompts(self) -> bool:
        """Whether each request of a step with drafts is among those of `verify_rows`."""
        return self.verify_rows is not None and len(self.verify_rows) == len(self.slots)

    @classmethod
    def of_step(cls, step: StepInput, table: PageTable, page_size: int) -> StepArrays:
        if step.is_decodes:
            return cls._of_decodes(step, table, page_size)
        num_decodes, num_requests = step.num_decodes, len(step.slots)
        num_behind = num_decodes + step.num_verified
        q_lens, token_ids = step.counts, step.tokens
        sources, owners = NO_NUMBERS, NO_NUMBERS
        num_kept = num_decodes if step.drafts is None else num_behind
        if step.decode_tokens is not None:
            assert step.drafts is None, "drafts follow tokens that the device has kept"
            num_kept, token_ids = 0, np.concatenate([step.decode_tokens, token_ids])
        if num_kept:
            sources, owners = _kept_rows(step, num_kept, table.null_row + 1)
            token_ids = np.concatenate([np.full(len(sources), DRAWN), token_ids])
        cu_q_lens = np.zeros(num_requests + 1, np.int32)
        np.cumsum(q_lens, out=cu_q_lens[1:])
        request_of = np.repeat(np.arange(num_requests), q_lens)
        positions = np.arange(len(token_ids)) + (step.max_starts - cu_q_lens[:-1])[request_of]
        row_of_token = step.slots[request_of]
        places = _places(table, row_of_token, positions, page_size)
        ancestors = None
        if step.has_trees:
            ancestors = np.full(len(token_ids), ALL_BEFORE, np.int64)
            if step.ancestor_masks is not None:
                # A tree's rows occupy a chain's places; their positions follow from their depths.
                rows = slice(int(cu_q_lens[num_decodes]), int(cu_q_lens[num_behind]))
                ancestors[rows] = step.ancestor_masks
                roots = np.repeat(
                    step.max_starts[num_decodes:num_behind], q_lens[num_decodes:num_behind]
                )
                positions[rows] = roots + np.bitwise_count(step.ancestor_masks) - 1
        for index in step.recomputed_rows.nonzero()[0].tolist():
            # Earlier steps wrote the KV of these rows, and their pages may be shared.
            first = int(cu_q_lens[num_behind + index])
            places[first : first + int(step.recomputed_rows[index])] = NULL_PAGE * page_size
        kv_lens = step.max_starts + q_lens
        logits_rows = np.arange(len(token_ids))
        drawing_slots, drawing_positions = row_of_token, positions + 1
        if num_behind < num_requests:
            # The last rows of each request draw: one row, or all rows of a request with drafts.
            of_each = (np.ones(num_decodes, np.int64), q_lens[num_decodes:num_behind], step.draws)
            num_drawing = np.concatenate(of_each)
            before = np.repeat(cu_q_lens[1:] - np.cumsum(num_drawing), num_drawing)
            logits_rows = (before + np.arange(len(before))).astype(np.int64)
            drawing_slots = row_of_token[logits_rows]
            drawing_positions = drawing_positions[logits_rows]
        return cls(
            token_ids=token_ids,
            positions=positions,
            places=places,
            slots=step.slots,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens.astype(np.int32),
            logits_rows=logits_rows,
            drawing_slots=drawing_slots,
            drawing_positions=drawing_positions,
            num_decodes=num_decodes if num_kept else 0,
            verify_rows=_verify_rows(cu_q_lens, num_behind) if step.num_verified else None,
            sources=sources,
            owners=owners,
            adapter_slots=step.row_adapters(),
            ancestors=ancestors,
            states=step.states,
            max_q_len=int(q_lens.max()),
            max_kv_len=int(kv_lens.max()),
        )

    @classmethod
    def _of_decodes(cls, step: StepInput, table: PageTable, page_size: int) -> StepArrays:
        num_rows, drawing_positions = len(step.slots), step.max_starts + 1
        known = step.decode_tokens
        return cls(
            token_ids=np.full(num_rows, DRAWN, np.int64) if known is None else known,
            positions=step.max_starts,
            places=_places(table, step.slots, step.max_starts, page_size),
            slots=step.slots,
            cu_q_lens=np.arange(num_rows + 1, dtype=np.int32),
            kv_lens=drawing_positions.astype(np.int32),
            logits_rows=np.arange(num_rows),
            max_q_len=1,
            max_kv_len=int(drawing_positions.max()),
            num_decodes=num_rows if known is None else 0,
            drawing_slots=step.slots,
            drawing_positions=drawing_positions,
            sources=step.slots if known is None else NO_NUMBERS,
            owners=np.full(num_rows if known is None else 0, -1, np.int64),
            adapter_slots=step.adapters,
            states=step.states,
        )


class StepDecodes(NamedTuple):
    """A step of requests that bring one token each, at positions that the host knows."""

    slots: Int64Array
    """[R]."""
    starts: Int64Array
    """[R]: positions of the tokens."""
    tokens: Int64Array | int
    """[R], or one value for all; DRAWN where only the device knows the token."""
    pages: Int64Array | int
    """[R], or one value for all: the page of each position that the device's page table lacks; -1
    where it lacks none.
    """
    adapter_slots: Int32Array | None
    """[R]: each request's slot of the LoRA tables; None: none has an adapter."""

    @classmethod
    def of_step(cls, step: StepInput) -> StepDecodes:
        """Takes a step for which `StepInput.is_decodes` holds."""
        pages = -1 if step.pages is None else step.pages
        tokens = DRAWN if step.decode_tokens is None else step.decode_tokens
        return cls(step.slots, step.max_starts, tokens, pages, step.adapters)

    @classmethod
    def of_arrays(cls, arrays: StepArrays) -> StepDecodes:
        """Takes a step for which `StepArrays.is_decode` holds; its pages are in the table."""
        return cls(arrays.slots, arrays.positions, arrays.token_ids, -1, arrays.adapter_slots)


def _places(
    table: PageTable, rows: Int64Array, positions: Int64Array, page_size: int
) -> Int64Array:
    """[T]: `StepArrays.places` of tokens at these positions of these rows of the table."""
    pages = table.pages[rows, positions // page_size].astype(np.int64)
    return pages * page_size + positions % page_size


def _kept_rows(step: StepInput, num_kept: int, num_slots: int) -> tuple[Int64Array, Int64Array]:
    """`StepArrays.sources` and `owners` for the first `num_kept` requests, whose tokens the device
    has. The page table has `num_slots` rows.
    """
    slots, counts = step.slots[:num_kept], step.counts[:num_kept]
    owners = np.where(step.starts[:num_kept] == ON_DEVICE, np.arange(num_kept), -1)
    if num_kept == step.num_decodes:
        return slots, owners
    firsts = np.cumsum(counts) - counts
    behind = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
    return np.repeat(slots, counts) + behind * num_slots, np.repeat(owners, counts)


def _verify_rows(cu_q_lens: Int32Array, end: int) -> Int64Array:
    firsts, ends = cu_q_lens[:end, None], cu_q_lens[1 : end + 1, None]
    rows = firsts + np.arange(int((ends - firsts).max()))
    return np.where(rows < ends, rows, -1).astype(np.int64)
