"""Frames from rank 0 to the other ranks: a step, the tokens drawn in a step, or an order, as plain
arrays.

    header      kind and counts; of a step also the length of each array (-1: None, -2: `starts`
                is `max_starts`)
    arrays      int64, one after another, in the order of the header
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import NO_NUMBERS, Int32Array, Int64Array
from weft.engine.base.state_rows import StateRows
from weft.engine.executor.drafts.chains import LaterChains
from weft.engine.executor.drafts.eager_chains import LastTokens
from weft.engine.executor.orders import Order, decode_order, encode_order
from weft.engine.executor.step_input import InsertedRows, StepInput, TurnedRows
from weft.engine.sampling.device_draws import WAYS, Way
from weft.engine.sampling.prompt_scores import ScoredRows
from weft.pages.memory.page_table import PageTable

_STEP, _TOKENS, _ORDER, _DRAW, _SHARED, _CHAINS, _BARRIER = range(7)
_ARRAYS = (
    *("slots", "starts", "max_starts", "counts", "draws", "recomputed_rows", "tokens"),
    *("ancestor_masks", "draft_limits", "pages", "adapters", "decode_tokens"),
)
_arrays_of = attrgetter(*_ARRAYS)
_NONE, _SAME = -1, -2
Frame = Sequence[Int64Array | Int32Array]
"""The arrays of one frame, in order."""


class NewPages(NamedTuple):
    """Entries of the page table that the other ranks lack, by slot."""

    slots: Int64Array
    """[K]."""
    firsts: Int64Array
    """[K]: index of each slot's first new entry."""
    ends: Int64Array
    """[K]: index after each slot's last new entry."""
    pages: Int64Array
    """The new entries of all slots, slot after slot."""

    def enter(self, table: PageTable) -> None:
        begin = 0
        for slot, first, end in zip(*(a.tolist() for a in self[:3]), strict=True):
            table.enter(slot, first, self.pages[begin : begin + end - first])
            begin += end - first


NO_PAGES = NewPages(*[NO_NUMBERS] * 4)


class NewWindows(NamedTuple):
    """Entries of the page tables of window groups that the other ranks lack."""

    entries: Int64Array
    """[K]: indices into the tables, flattened and one after another."""
    pages: Int64Array
    """[K]."""

    def enter(self, tables: Sequence[PageTable]) -> None:
        left = self.entries
        for table in tables:
            size = table.pages.size
            is_here = (left >= 0) & (left < size)
            table.pages.reshape(-1)[left[is_here]] = self.pages[is_here]
            left = left - size


NO_WINDOWS = NewWindows(NO_NUMBERS, NO_NUMBERS)


class Step(NamedTuple):
    step: StepInput
    pages: NewPages
    draft_limits: Int64Array | None
    """[V]: `StepInput.draft_limits` of the verified requests, if the device makes their drafts for
    this step; else None.
    """
    windows: NewWindows = NO_WINDOWS


class DraftOrder(NamedTuple):
    """Order to make chains of a head's drafts; `lasts` and `counts` are the arguments of
    `Chains.run`.
    """

    lasts: LastTokens
    counts: Int64Array
    pages: NewPages


class Tokens(NamedTuple):
    """Tokens drawn in the last step, the argument of `Executor.keep`."""

    tokens: Int64Array


class Draw(NamedTuple):
    """Order to take part while rank 0 draws from the last step by a graph, in this way."""

    way: Way


class SharedTokens(NamedTuple):
    """Order to keep tokens that come from rank 0's device; `num_tokens` is their number."""

    num_tokens: int


class Barrier(NamedTuple):
    """Order to make the devices of all ranks wait for one another."""


_NUM_STATES = 4
"""Arrays of `StateRows` in a frame."""
_NOT_INSERTED = (None,) * len(InsertedRows._fields)


def encode_step(step: StepInput, pages: NewPages, windows: NewWindows = NO_WINDOWS) -> Frame:
    """Encodes a step. Drafts made on the device must be chains."""
    made: Int64Array | None = None
    if step.drafts is not None:
        assert isinstance(step.drafts, LaterChains), "drafts of another rank's device"
        assert step.drafts.requests is not None, "the step is not encoded"
        made = step.drafts.requests.draft_limits
    scores = NO_NUMBERS
    if step.scores:
        told = [
            (one.request, one.num_top, one.first_row, len(one.tokens), *one.tokens)
            for one in step.scores
        ]
        scores = np.array([number for one in told for number in one], np.int64)
    rows = step.states
    of_states: Sequence[Int64Array | None] = [None] * _NUM_STATES
    if rows is not None:
        of_states = rows.borders, rows.blocks, rows.writes.reshape(-1), rows.table.reshape(-1)
    media: list[Int64Array | None] = [*(step.inserted or _NOT_INSERTED), None, None]
    if step.turned is not None:
        media[-2:] = step.turned.rows, step.turned.axes.reshape(-1)
    pooled = [(one.request, one.wanted.start, one.wanted.stop) for one in step.pooled]
    made_of = np.array(pooled, np.int64).reshape(-1) if pooled else NO_NUMBERS
    arrays = [*_arrays_of(step), scores, made_of, made, *pages, *of_states, *media, *windows]
    lengths = [_NONE if array is None else len(array) for array in arrays]
    if step.starts is step.max_starts:
        lengths[_ARRAYS.index("starts")] = _SAME
    num_few = 0 if rows is None else rows.num_few
    header = (_STEP, step.num_decodes, step.num_verified, int(step.has_trees), num_few, *lengths)
    found = [array for array, length in zip(arrays, lengths, strict=True) if length > 0]
    return [np.array(header, np.int64), *found]


_DRAWS = {way: (np.array([_DRAW, number]),) for number, way in enumerate(WAYS)}
_BEFORE_TOKENS, _BEFORE_ORDER = np.array([_TOKENS]), np.array([_ORDER])
_BARRIERS = (np.array([_BARRIER]),)


def encode_tokens(tokens: Int64Array) -> Frame:
    return _BEFORE_TOKENS, tokens


def encode_draw(way: Way) -> Frame:
    return _DRAWS[way]


def encode_shared(count: int) -> Frame:
    return (np.array([_SHARED, count]),)


def encode_barrier() -> Frame:
    return _BARRIERS


def frame_of_order(order: Order) -> Frame:
    return _BEFORE_ORDER, encode_order(order)


def encode_chains(lasts: LastTokens, counts: Int64Array, pages: NewPages) -> Frame:
    return np.array([_CHAINS, len(counts), len(pages.slots)]), *lasts, counts, *pages


def decode(
    numbers: Int64Array,
) -> Step | Tokens | Draw | SharedTokens | DraftOrder | Barrier | Order:
    """The content of a frame, as views of `numbers`."""
    kind, behind = int(numbers[0]), numbers[1:]
    if kind == _TOKENS:
        return Tokens(behind)
    if kind == _DRAW:
        return Draw(WAYS[behind[0]])
    if kind == _SHARED:
        return SharedTokens(int(behind[0]))
    if kind == _CHAINS:
        requests, slots = behind[:2].tolist()
        cuts = np.cumsum([requests] * 4 + [slots] * 3)
        *lasts, counts, new, firsts, ends, pages = np.split(behind[2:], cuts)
        return DraftOrder(LastTokens(*lasts), counts, NewPages(new, firsts, ends, pages))
    if kind == _BARRIER:
        return Barrier()
    return _step(numbers) if kind == _STEP else decode_order(behind)


def _step(numbers: Int64Array) -> Step:
    num_pages = len(NewPages._fields)
    num_media = len(_NOT_INSERTED) + len(TurnedRows._fields)
    num_windows = len(NewWindows._fields)
    num_lengths = len(_ARRAYS) + 3 + num_pages + _NUM_STATES + num_media + num_windows
    _, num_decodes, num_verified, has_trees, num_few = numbers[:5].tolist()
    at, arrays = 5 + num_lengths, list[Int64Array | None]()
    for length in numbers[5:at].tolist():
        arrays.append(None if length < 0 else numbers[at : at + length])
        at += max(0, length)
    (
        slots,
        starts,
        max_starts,
        counts,
        draws,
        recomputed_rows,
        tokens,
        ancestor_masks,
        draft_limits,
        added,
        adapters,
        decode_tokens,
    ) = arrays[: len(_ARRAYS)]
    assert slots is not None
    assert max_starts is not None
    assert counts is not None
    assert draws is not None
    assert recomputed_rows is not None
    assert tokens is not None
    scores, made_of, made, *rest = arrays[len(_ARRAYS) :]
    assert made_of is not None
    of_pages, rest = rest[:num_pages], rest[num_pages:]
    (borders, blocks, writes, table), media = rest[:_NUM_STATES], rest[_NUM_STATES:]
    *media, entries, of_windows = media
    assert entries is not None
    assert of_windows is not None
    rows, sources, ends, turned_rows, axes = media
    states: StateRows | None = None
    if borders is not None:
        assert blocks is not None
        assert writes is not None
        assert table is not None
        of_blocks = writes.reshape(3, -1), num_few, table.reshape(-1, 3)
        states = StateRows(borders, blocks, *of_blocks)
    step = StepInput(
        slots=slots,
        starts=max_starts if starts is None else starts,
        max_starts=max_starts,
        counts=counts,
        num_decodes=num_decodes,
        num_verified=num_verified,
        draws=draws,
        recomputed_rows=recomputed_rows,
        tokens=tokens,
        decode_tokens=decode_tokens,
        ancestor_masks=ancestor_masks,
        has_trees=bool(has_trees),
        draft_limits=draft_limits,
        pages=added,
        adapters=None if adapters is None else adapters.astype(np.int32),
        scores=_scores([] if scores is None else scores.tolist()),
        pooled_elsewhere=[
            (request, range(first, end)) for request, first, end in made_of.reshape(-1, 3).tolist()
        ],
        states=states,
        inserted=None if rows is None or sources is None else InsertedRows(rows, sources, ends),
        turned=(
            None
            if turned_rows is None or axes is None
            else TurnedRows(turned_rows, axes.reshape(len(turned_rows), -1))
        ),
    )
    new_pages = NewPages(*(part for part in of_pages if part is not None))
    return Step(step, new_pages, made, NewWindows(entries, of_windows))


def _scores(numbers: Sequence[int]) -> list[ScoredRows]:
    found, at = [], 0
    while at < len(numbers):
        request, num_top, first_row, count = numbers[at : at + 4]
        at += 4
        found.append(ScoredRows(request, num_top, first_row, list(numbers[at : at + count])))
        at += count
    return found
