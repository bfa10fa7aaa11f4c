"""A step's plan as host arrays, and the page table that all steps share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from weft.engine.memory.page_memory import NULL_PAGE
from weft.engine.scheduler.plan import LaterDrafts, Plan, PlanItem, VerifyItem, parents_of

DRAWN = -1
"""Placeholder for a token that the previous step draws for the slot and the host does not know yet.
"""

LATE = -1
"""Start position that only the device knows: the end of the step under way."""

ALL_BEFORE = -1
"""Word of `ancestors` for a row that sees all earlier rows of its request, as outside trees."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class PageChanges(NamedTuple):
    """Changed entries of the page table."""

    indices: Int64Array
    """Indices into the flattened table."""
    pages: Int32Array


_NO_CHANGES = PageChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))


class PageTable:
    """Page numbers by slot. The row after the last slot contains only the null page.

    Args:
        max_requests: slots.
        max_pages: pages of the longest request.
        keeps_changes: remember what was set for `take_changes`, which must then be called.
    """

    def __init__(self, max_requests: int, max_pages: int, *, keeps_changes: bool) -> None:
        self.pages: Int32Array = np.full((max_requests + 1, max_pages), NULL_PAGE, np.int32)
        """[max_requests + 1, max_pages]; entries beyond a request's pages are stale."""
        self.null_row = max_requests
        self._num_set = np.zeros(max_requests, np.int64)
        self._changed: list[tuple[int, int, int]] | None = [] if keeps_changes else None

    def clear(self, slot: int) -> None:
        """Clears the slot's row for its next request."""
        self._num_set[slot] = 0

    def is_short(self, slots: Int64Array, indices: Int64Array) -> npt.NDArray[np.bool_]:
        """For each slot, whether its row lacks the page of this index."""
        return self._num_set[slots] <= indices

    def ends_at(self, slots: Int64Array, indices: Int64Array) -> npt.NDArray[np.bool_]:
        """For each slot, whether this index follows the last page of its row."""
        ends: npt.NDArray[np.bool_] = self._num_set[slots] == indices
        return ends

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Sets the slot's row to `pages`, of which it already has the first ones."""
        known, count = int(self._num_set[slot]), len(pages)
        if known < count:
            self.pages[slot, known:count] = pages[known:]
            self._num_set[slot] = count
            if self._changed is not None:
                self._changed.append((slot, known, count))

    def append(self, slots: Int64Array, indices: Int64Array, pages: Int64Array) -> None:
        """Sets one page of each of some slots' rows, behind all that they have. A step brings these
        to the device itself: `take_changes` omits them.
        """
        self.pages[slots, indices] = pages
        self._num_set[slots] = indices + 1

    def take_changes(self) -> PageChanges:
        """The entries set since the last call."""
        assert self._changed is not None
        if not self._changed:
            return _NO_CHANGES
        changed, self._changed = self._changed, []
        width = self.pages.shape[1]
        runs = [np.arange(slot * width + a, slot * width + b) for slot, a, b in changed]
        indices = np.concatenate(runs)
        return PageChanges(indices, self.pages.reshape(-1)[indices])


def _nothing() -> Int64Array:
    return np.zeros(0, np.int64)


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """The input of a step on the host, before it becomes a `ForwardBatch`. T, R and L as there."""

    token_ids: Int64Array
    """Token ids, [T]; DRAWN where only the device knows them (see `sources`)."""
    positions: Int64Array
    """Absolute positions, [T]."""
    slots: Int64Array
    """[T]: page * page_size + offset."""
    rows: Int64Array
    """[R]: each request's row of the page table."""
    cu_q_lens: Int32Array
    """Start of each request's rows, [R + 1]."""
    kv_lens: Int32Array
    """Length of each request's context, [R]."""
    logits_rows: Int64Array
    """Rows of T whose logits are wanted, [L]; for a request with drafts all of its rows."""
    max_q_len: int
    max_kv_len: int
    num_decodes: int = 0
    drawing_slots: Int64Array = field(default_factory=_nothing)
    """Slot of each row of the logits, [L]; empty if no token is drawn."""
    drawing_positions: Int64Array = field(default_factory=_nothing)
    """Positions of the tokens to be drawn, [L]."""
    verify_rows: Int64Array | None = None
    """[V, 1 + longest drafts]: rows of T of each request that is no prompt, decodes first; -1
    behind its last row. None: none has drafts.
    """
    sources: Int64Array = field(default_factory=_nothing)
    """[N]: location on the device of the token of each of the first rows: decodes, and drafts made
    on the device (`weft.kernels.step_rows.resolve_rows`).
    """
    owners: Int64Array = field(default_factory=_nothing)
    """[N]: the request of each such row if it starts late, else -1."""
    adapter_slots: Int32Array | None = None
    """[T]: each token's slot of the LoRA tables; None: no token has an adapter."""
    ancestors: Int64Array | None = None
    """[T]: `ForwardBatch.ancestors`; None: there are no trees. For trees known only to the device,
    the device writes them into `DeviceInputs.step` before the step runs.
    """

    @property
    def is_decode(self) -> bool:
        """Whether each request brings one token, at a position that the host knows, and wants its
        logits.
        """
        is_single = self.max_q_len == 1 and len(self.logits_rows) == len(self.token_ids)
        are_known = self.owners.max(initial=-1) < 0
        return is_single and are_known and len(self.sources) == self.num_decodes

    @property
    def is_cold(self) -> bool:
        """Whether requests of several rows have nothing before the step."""
        q_lens = np.diff(self.cu_q_lens)
        return bool(((q_lens <= 1) | (q_lens == self.kv_lens)).all())

    @property
    def has_no_prompts(self) -> bool:
        """Whether each request of a step with drafts is among those of `verify_rows`."""
        return self.verify_rows is not None and len(self.verify_rows) == len(self.rows)

    @classmethod
    def of_plan(cls, plan: Plan, table: PageTable, page_size: int) -> StepArrays:
        """Flattens a started plan, and enters its requests' new pages into the table."""
        num_decodes = len(plan.decodes)
        _enter_pages(plan, table, page_size)
        if not (plan.verifies or plan.chunks) and plan.is_late is None:
            return cls._of_decodes(plan, table, page_size)
        sources, owners = plan.slots, np.full(num_decodes, -1, np.int64)
        if plan.is_late is not None:
            owners = np.where(plan.is_late, np.arange(num_decodes), -1)
        verified, tokens = np.zeros((4, 0), np.int64), _nothing()
        if plan.verifies and isinstance(plan.drafts, LaterDrafts):
            late = StepRequests.of_items(plan.verifies, plan.drafts.counts, table, page_size)
            late_sources, late_owners = _late_rows(late, num_decodes, table.null_row + 1)
            sources = np.concatenate([sources, late_sources])
            owners = np.concatenate([owners, late_owners])
            verified = np.stack([late.slots, late.bounds, late.counts, late.counts])
            tokens = np.full(late.num_rows, DRAWN)
        elif plan.verifies:
            verified, tokens = _known_verifies(plan, table)
        pieces, chunk_tokens = _pieces(plan.chunks, table)
        pieces = np.concatenate([verified, pieces], axis=1)
        slots, piece_starts, lengths, drawing = pieces
        rows = np.concatenate([plan.slots, slots])
        starts = np.concatenate([plan.starts, piece_starts])
        one_each = np.ones(num_decodes, np.int64)
        q_lens = np.concatenate([one_each, lengths])
        num_drawing = np.concatenate([one_each, drawing])
        token_ids = np.concatenate([DRAWN * one_each, tokens, chunk_tokens])
        cu_q_lens = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(q_lens, out=cu_q_lens[1:])
        request_of = np.repeat(np.arange(len(rows)), q_lens)
        positions = np.arange(len(token_ids)) + (starts - cu_q_lens[:-1])[request_of]
        row_of_token = rows[request_of]
        adapter_slots = _adapter_slots(plan)
        slot_of_token = _places(table, row_of_token, positions, page_size)
        ancestors = None
        if plan.has_trees:
            ancestors = np.full(len(token_ids), -1, np.int64)
            if not isinstance(plan.drafts, LaterDrafts):
                _enter_trees(plan, cu_q_lens, positions, ancestors)
        for index, item in enumerate(plan.chunks, len(rows) - len(plan.chunks)):
            if item.has_lead:
                # Its page may be shared; what it would write is there.
                slot_of_token[cu_q_lens[index]] = NULL_PAGE * page_size
        kv_lens = starts + q_lens
        # The last rows of each request draw: one, or of drafts all.
        before = np.repeat(cu_q_lens[1:] - np.cumsum(num_drawing), num_drawing)
        logits_rows = (before + np.arange(len(before))).astype(np.int64)
        return cls(
            token_ids=token_ids,
            positions=positions,
            slots=slot_of_token,
            rows=rows,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens.astype(np.int32),
            logits_rows=logits_rows,
            drawing_slots=row_of_token[logits_rows],
            drawing_positions=positions[logits_rows] + 1,
            num_decodes=num_decodes,
            verify_rows=_verify_rows(plan, cu_q_lens),
            sources=sources,
            owners=owners,
            adapter_slots=None if adapter_slots is None else np.repeat(adapter_slots, q_lens),
            ancestors=ancestors,
            max_q_len=int(q_lens.max()),
            max_kv_len=int(kv_lens.max()),
        )

    @classmethod
    def _of_decodes(cls, plan: Plan, table: PageTable, page_size: int) -> StepArrays:
        """`of_plan` of one row each, without what follows for longer ones."""
        num_rows, drawing_positions = len(plan.decodes), plan.starts + 1
        return cls(
            token_ids=np.full(num_rows, DRAWN, np.int64),
            positions=plan.starts,
            slots=_places(table, plan.slots, plan.starts, page_size),
            rows=plan.slots,
            cu_q_lens=np.arange(num_rows + 1, dtype=np.int32),
            kv_lens=drawing_positions.astype(np.int32),
            logits_rows=np.arange(num_rows),
            max_q_len=1,
            max_kv_len=int(drawing_positions.max()),
            num_decodes=num_rows,
            drawing_slots=plan.slots,
            drawing_positions=drawing_positions,
            sources=plan.slots,
            owners=np.full(num_rows, -1, np.int64),
            adapter_slots=_adapter_slots(plan),
        )


class StepDecodes(NamedTuple):
    """A step of requests that bring one token each, at positions that the host knows."""

    slots: Int64Array
    """[R]."""
    starts: Int64Array
    """[R]: positions of the tokens."""
    tokens: Int64Array | int
    """[R], or the same for all: `StepArrays.token_ids`."""
    pages: Int64Array | int
    """[R], or the same for all: the page of each position, where the device's page table lacks it;
    elsewhere -1.
    """
    adapter_slots: Int32Array | None
    """[R]: each request's slot of the LoRA tables; None: none has an adapter."""

    @classmethod
    def of_plan(cls, plan: Plan, table: PageTable, page_size: int) -> StepDecodes:
        """The decodes of a started plan that has nothing else; enters their pages into the table,
        of which `pages` brings those that follow the ones that the device has.
        """
        slots, columns = plan.slots, plan.starts // page_size
        pages: Int64Array | int = -1
        if table.is_short(slots, columns).any():
            rows = np.flatnonzero(table.ends_at(slots, columns))
            pages, own = np.full(len(columns), -1, np.int64), columns[rows]
            pages[rows] = [
                plan.decodes[row].pages[column]
                for row, column in zip(rows.tolist(), own.tolist(), strict=True)
            ]
            table.append(slots[rows], own, pages[rows])
            _enter_pages(plan, table, page_size)  # Of rows that lack more than one.
        adapters = plan.adapter_slots
        narrow = None if adapters is None else adapters.astype(np.int32)
        return cls(plan.slots, plan.starts, DRAWN, pages, narrow)

    @classmethod
    def of_arrays(cls, arrays: StepArrays) -> StepDecodes:
        """A step for which `StepArrays.is_decode`; its pages are in the table."""
        return cls(arrays.rows, arrays.positions, arrays.token_ids, -1, arrays.adapter_slots)


class StepRequests(NamedTuple):
    """Requests that bring their last tokens, and drafts that are on the device: all of a step, or
    those to draft for.
    """

    slots: Int64Array
    """[R]: those without drafts first."""
    starts: Int64Array
    """[R]: positions of the last tokens; -1: only the device knows."""
    counts: Int64Array
    """[R]: rows of each."""
    limits: Int64Array
    """[R]: positions from which on a chain of drafts has no pages; 1, the least: it has none, since
    no drafts are wanted.
    """
    bounds: Int64Array
    """[R]: the largest that `starts` can be."""
    num_rows: int
    """T."""
    max_count: int
    """Most rows of a request."""
    adapter_slots: Int32Array | None
    """[R]: each request's slot of the LoRA tables; None: none has an adapter."""
    has_trees: bool

    @classmethod
    def of_plan(cls, plan: Plan, table: PageTable, page_size: int) -> StepRequests | None:
        """The requests of a started plan, whose new pages are entered into the table; None if it
        brings more.
        """
        drafts = plan.drafts
        if plan.chunks:
            return None
        if not plan.verifies:
            return None if plan.is_late is None else cls._of_decodes(plan, table, page_size)
        if not isinstance(drafts, LaterDrafts):
            return None
        found = cls.of_items(plan.verifies, drafts.counts, table, page_size)
        if plan.decodes:
            found = cls._of_decodes(plan, table, page_size)._before(found)
        return found

    @classmethod
    def of_items(
        cls, items: Sequence[VerifyItem], counts: Sequence[int], table: PageTable, page_size: int
    ) -> StepRequests:
        """Requests with these numbers of drafts; their new pages are entered into the table."""
        requests = [item.request for item in items]
        lasts = [request.num_prompt_tokens + request.max_tokens for request in requests]
        found = (
            [request.slot for request in requests],
            [len(request.pages) for request in requests],
            [item.start for item in items],
            [item.starts_late for item in items],
            [last if count else 1 for last, count in zip(lasts, counts, strict=True)],
            counts,
        )
        slots, num_pages, bounds, is_late, limits, num_drafts = np.array(found, np.int64)
        for index in table.is_short(slots, num_pages - 1).nonzero()[0].tolist():
            table.extend(requests[index].slot, requests[index].pages)
        adapter_slots = [request.adapter_slot for request in requests]
        return cls(
            slots=slots,
            starts=np.where(is_late, LATE, bounds),
            counts=1 + num_drafts,
            limits=np.minimum(limits, num_pages * page_size),
            bounds=bounds,
            num_rows=len(items) + sum(counts),
            max_count=1 + max(counts),
            adapter_slots=np.array(adapter_slots, np.int32) if any(adapter_slots) else None,
            has_trees=items[0].tree is not None,
        )

    @classmethod
    def _of_decodes(cls, plan: Plan, table: PageTable, page_size: int) -> StepRequests:
        """A plan's decodes, whose new pages are entered into the table."""
        _enter_pages(plan, table, page_size)
        starts, ones, adapters = plan.starts, np.ones_like(plan.starts), plan.adapter_slots
        if plan.is_late is not None:
            starts = np.where(plan.is_late, LATE, starts)
        return cls(
            slots=plan.slots,
            starts=starts,
            counts=ones,
            limits=ones,
            bounds=plan.starts,
            num_rows=len(plan.decodes),
            max_count=1,
            adapter_slots=None if adapters is None else adapters.astype(np.int32),
            has_trees=False,
        )

    def _before(self, others: StepRequests) -> StepRequests:
        """These requests, and others behind them."""
        pairs = zip(self[:5], others[:5], strict=True)
        slots, starts, counts, limits, bounds = (np.concatenate(pair) for pair in pairs)
        adapters, own, theirs = None, self.adapter_slots, others.adapter_slots
        if own is not None or theirs is not None:
            own = np.zeros(len(self.slots), np.int32) if own is None else own
            theirs = np.zeros(len(others.slots), np.int32) if theirs is None else theirs
            adapters = np.concatenate([own, theirs])
        return StepRequests(
            slots=slots,
            starts=starts,
            counts=counts,
            limits=limits,
            bounds=bounds,
            num_rows=self.num_rows + others.num_rows,
            max_count=max(self.max_count, others.max_count),
            adapter_slots=adapters,
            has_trees=others.has_trees,
        )

    def token_adapter_slots(self) -> Int32Array | None:
        """`StepArrays.adapter_slots` of the rows."""
        if self.adapter_slots is None:
            return None
        return np.repeat(self.adapter_slots, self.counts)

    def rows(self) -> tuple[Int64Array, Int64Array]:
        """[T]: slots, and the largest positions that there may be, of chains."""
        behind = np.arange(self.num_rows)
        firsts = np.cumsum(self.counts) - self.counts
        positions = behind + np.repeat(self.bounds - firsts, self.counts)
        return np.repeat(self.slots, self.counts), positions


def _enter_pages(plan: Plan, table: PageTable, page_size: int) -> None:
    """Enters new pages of a plan's decodes into the table."""
    for index in np.flatnonzero(table.is_short(plan.slots, plan.starts // page_size)).tolist():
        table.extend(int(plan.slots[index]), plan.decodes[index].pages)


def _places(
    table: PageTable, rows: Int64Array, positions: Int64Array, page_size: int
) -> Int64Array:
    """[T]: `StepArrays.slots` of tokens at these positions of these rows of the table."""
    pages = table.pages[rows, positions // page_size].astype(np.int64)
    return pages * page_size + positions % page_size


def _known_verifies(plan: Plan, table: PageTable) -> tuple[Int64Array, Int64Array]:
    """Like `_pieces`, of requests whose drafts the host has."""
    pieces, tokens = [], []
    for (request, start, *_), drafts in zip(plan.verifies, plan.drafts, strict=True):
        count = 1 + len(drafts)
        pieces.append((request.slot, start, count, count))
        tokens += [request.tokens[start], *drafts]
        table.extend(request.slot, request.pages)
    return np.array(pieces, np.int64).reshape(-1, 4).T, np.array(tokens, np.int64)


def _pieces(chunks: Sequence[PlanItem], table: PageTable) -> tuple[Int64Array, Int64Array]:
    """[4, C]: slot, first position, tokens and drawing rows of each chunk; and all their tokens.
    Enters their pages into the table.
    """
    pieces, tokens = [], []
    for request, start, num_tokens, samples, has_lead in chunks:
        pieces.append((request.slot, start - has_lead, num_tokens + has_lead, int(samples)))
        tokens += request.tokens[start - has_lead : start + num_tokens]
        table.extend(request.slot, request.pages)
    return np.array(pieces, np.int64).reshape(-1, 4).T, np.array(tokens, np.int64)


def _enter_trees(
    plan: Plan, cu_q_lens: Int32Array, positions: Int64Array, ancestors: Int64Array
) -> None:
    """Enters the positions and ancestors of known trees, in place of a chain's."""
    firsts = cu_q_lens[len(plan.decodes) :].tolist()
    for first, item, drafts in zip(firsts, plan.verifies, plan.drafts, strict=False):
        depths, words = [0], [1]
        for row, parent in enumerate(parents_of(drafts), 1):
            depths.append(depths[parent] + 1)
            words.append(words[parent] | 1 << row)
        rows = slice(first, first + len(words))
        positions[rows] = item.start + np.array(depths)
        ancestors[rows] = words


def _late_rows(
    requests: StepRequests, num_before: int, num_slots: int
) -> tuple[Int64Array, Int64Array]:
    """`StepArrays.sources` and `owners` of verified requests whose drafts are all on the device.

    Args:
        requests: Which.
        num_before: Number of requests of the step before them.
        num_slots: Rows of the page table.
    """
    firsts = np.cumsum(requests.counts) - requests.counts
    behind = np.arange(requests.num_rows) - np.repeat(firsts, requests.counts)
    numbers = num_before + np.arange(len(requests.slots))
    owners = np.where(requests.starts == LATE, numbers, -1)
    sources = np.repeat(requests.slots, requests.counts) + behind * num_slots
    return sources, np.repeat(owners, requests.counts)


def _verify_rows(plan: Plan, cu_q_lens: Int32Array) -> Int64Array | None:
    """See `StepArrays.verify_rows`."""
    if not plan.verifies:
        return None
    end = len(plan.decodes) + len(plan.verifies)
    firsts, ends = cu_q_lens[:end, None], cu_q_lens[1 : end + 1, None]
    rows = firsts + np.arange(int((ends - firsts).max()))
    return np.where(rows < ends, rows, -1).astype(np.int64)


def _adapter_slots(plan: Plan) -> Int32Array | None:
    """[R]: each request's slot of the LoRA tables; None: none has an adapter."""
    of_pieces = [item.request.adapter_slot for item in plan.verifies]
    of_pieces += [item.request.adapter_slot for item in plan.chunks]
    if plan.adapter_slots is None and not any(of_pieces):
        return None
    of_decodes = plan.adapter_slots
    if of_decodes is None:
        of_decodes = np.zeros(len(plan.decodes), np.int64)
    return np.concatenate([of_decodes, np.array(of_pieces, np.int64)]).astype(np.int32)
