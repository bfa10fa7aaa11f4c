"""Makes the input of a step from its plan. This is the last code that sees both requests and
arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from weft.contract.arrays import NO_NUMBERS, Int32Array, Int64Array
from weft.contract.spans import Media, spans_within
from weft.engine.base.drafts import LaterDrafts
from weft.engine.base.token_trees import parents_of
from weft.engine.executor.drafts.chains import LaterChains
from weft.engine.executor.orders import EncodeMedia
from weft.engine.executor.step_input import (
    ON_DEVICE,
    InsertedRows,
    PooledRows,
    StepInput,
    TurnedRows,
)
from weft.engine.requests.media_rows import FilledMedia, MediaRows
from weft.engine.sampling.prompt_scores import ScoredRows
from weft.engine.scheduler.plan import Plan, PlanItem, VerifyItem
from weft.pages.memory.page_table import PageTable

_Columns = tuple[Int64Array, Int64Array, Int64Array, Int64Array]
"""Four fields of `StepInput` with a number for each request: slots, starts, largest
starts, counts.
"""


def step_input(
    plan: Plan,
    table: PageTable,
    page_size: int,
    media: MediaRows | FilledMedia | None = None,
    *,
    brings_tokens: bool = False,
) -> StepInput:
    """Makes the input of a started plan, whose drafts are known or being made. Enters the requests'
    new pages into the page table.

    Args:
        media: The rows of its prompts' media; None: they have none.
        brings_tokens: Whether the step has the tokens of its decodes, which are all known.
    """
    if not (plan.verifies or plan.chunks) and plan.is_late is None:
        made = _decodes(plan, table, page_size)
        made.decode_tokens = _last_tokens(plan) if brings_tokens else None
        return made
    drafts = plan.drafts if isinstance(plan.drafts, LaterDrafts) else None
    groups, draft_limits = list[_Columns](), list[Int64Array]()
    ancestor_masks, tokens, draws, recomputed_rows = None, list[int](), NO_NUMBERS, NO_NUMBERS
    if plan.decodes:
        _enter_pages(plan, table, page_size)
        late, ones = plan.is_late, _ones(len(plan.decodes))
        starts = plan.starts if late is None else np.where(late, ON_DEVICE, plan.starts)
        groups.append((plan.slots, starts, plan.starts, ones))
        draft_limits.append(ones)
    if plan.verifies and drafts is not None:
        found = verified_input(plan.verifies, drafts.counts, table, page_size)
        assert found.draft_limits is not None
        if isinstance(drafts, LaterChains):
            drafts.requests = found
        groups.append((found.slots, found.starts, found.max_starts, found.counts))
        draft_limits.append(found.draft_limits)
    elif plan.verifies:
        columns, tokens, ancestor_masks = _known_verifies(plan, table)
        groups.append(columns)
    if plan.chunks:
        own, firsts, rows, draws, recomputed_rows = _pieces(plan.chunks, table, page_size, tokens)
        groups.append((own, firsts, firsts, rows))
    slots, starts, max_starts, counts = map(_joined, zip(*groups, strict=True))
    inserted, turned = None, None
    if media is not None and plan.chunks:
        at = int(counts[: -len(plan.chunks)].sum())
        inserted, turned = _inserted(plan, media, at), _turned(plan, at)
    is_on_device = not plan.chunks and len(draft_limits) == len(groups)
    return StepInput(
        slots=slots,
        starts=starts,
        max_starts=max_starts,
        counts=counts,
        num_decodes=len(plan.decodes),
        num_verified=len(plan.verifies),
        draws=draws,
        recomputed_rows=recomputed_rows,
        tokens=np.array(tokens, np.int64),
        decode_tokens=_last_tokens(plan) if brings_tokens and plan.decodes else None,
        ancestor_masks=ancestor_masks,
        has_trees=plan.has_trees,
        draft_limits=_joined(draft_limits) if is_on_device else None,
        adapters=_adapters(plan),
        drafts=drafts,
        scores=_scores(plan) if plan.chunks else (),
        pooled=_pooled(plan) if plan.chunks else (),
        waits_for_layers=any(item.request.held.incoming is not None for item in plan.chunks),
        inserted=inserted,
        turned=turned,
    )


def verified_input(
    items: Sequence[VerifyItem], counts: Sequence[int], table: PageTable, page_size: int
) -> StepInput:
    """Makes the input of requests whose drafts are on the device, or will be made there. Enters
    their new pages into the page table.
    """
    requests = [item.request for item in items]
    lasts = [request.num_prompt_tokens + request.max_tokens for request in requests]
    found = (
        [request.slot for request in requests],
        [len(request.held.pages) for request in requests],
        [item.start for item in items],
        [item.starts_late for item in items],
        [last if count else 1 for last, count in zip(lasts, counts, strict=True)],
        counts,
    )
    slots, num_pages, max_starts, is_late, draft_limits, num_drafts = np.array(found, np.int64)
    for index in table.is_short(slots, num_pages - 1).nonzero()[0].tolist():
        table.extend(requests[index].slot, requests[index].held.pages)
    adapters = [request.adapter_slot for request in requests]
    return StepInput(
        slots=slots,
        starts=np.where(is_late, ON_DEVICE, max_starts),
        max_starts=max_starts,
        counts=1 + num_drafts,
        num_verified=len(items),
        has_trees=items[0].tree is not None,
        draft_limits=np.minimum(draft_limits, num_pages * page_size),
        adapters=np.array(adapters, np.int32) if any(adapters) else None,
    )


def _last_tokens(plan: Plan) -> Int64Array:
    return np.array([request.tokens[-1] for request in plan.decodes], np.int64)


@lru_cache(maxsize=256)
def _ones(count: int) -> Int64Array:
    ones = np.ones(count, np.int64)
    ones.flags.writeable = False
    return ones


def _joined(columns: Sequence[Int64Array]) -> Int64Array:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _decodes(plan: Plan, table: PageTable, page_size: int) -> StepInput:
    """The plan has decodes alone, at positions that the host knows."""
    slots, columns = plan.slots, plan.starts // page_size
    pages, is_short = None, table.is_short(slots, columns)
    if is_short.any():
        (rows,) = table.ends_at(slots, columns).nonzero()
        pages, own = np.full(len(columns), -1, np.int64), columns[rows]
        pages[rows] = [
            plan.decodes[row].held.pages[column]
            for row, column in zip(rows.tolist(), own.tolist(), strict=True)
        ]
        table.append(slots[rows], own, pages[rows])
        if np.count_nonzero(is_short) > len(rows):
            _enter_pages(plan, table, page_size)  # Rows that lack more than one page.
    adapters = None if plan.columns is None else plan.columns.adapter_slots
    return StepInput(
        slots=slots,
        starts=plan.starts,
        max_starts=plan.starts,
        counts=_ones(len(slots)),
        num_decodes=len(slots),
        draws=NO_NUMBERS,
        recomputed_rows=NO_NUMBERS,
        tokens=NO_NUMBERS,
        pages=pages,
        adapters=None if adapters is None else adapters.astype(np.int32),
    )


def _enter_pages(plan: Plan, table: PageTable, page_size: int) -> None:
    (rows,) = table.is_short(plan.slots, plan.starts // page_size).nonzero()
    for index in rows.tolist():
        table.extend(int(plan.slots[index]), plan.decodes[index].held.pages)


def _known_verifies(plan: Plan, table: PageTable) -> tuple[_Columns, list[int], Int64Array | None]:
    """The requests whose drafts the host has. Enters their pages into the table. Returns their
    columns (starts are known, so the largest starts equal them), the tokens of their rows, and
    `StepInput.ancestor_masks` if drafts form trees.
    """
    tokens, ancestor_masks, has_trees = list[int](), list[int](), plan.has_trees
    for item, drafts in zip(plan.verifies, plan.drafts, strict=True):
        request = item.request
        tokens += [request.tokens[item.start], *drafts]
        table.extend(request.slot, request.held.pages)
        if has_trees:
            own = [1]
            for row, parent in enumerate(parents_of(drafts), 1):
                own.append(own[parent] | 1 << row)
            ancestor_masks += own
    slots, starts = [i.request.slot for i in plan.verifies], [i.start for i in plan.verifies]
    counts = [1 + len(drafts) for drafts in plan.drafts]
    columns = np.array((slots, starts, counts), np.int64)
    of_trees = np.array(ancestor_masks, np.int64) if has_trees else None
    return (columns[0], columns[1], columns[1], columns[2]), tokens, of_trees


def _pieces(
    chunks: Sequence[PlanItem], table: PageTable, page_size: int, tokens: list[int]
) -> Int64Array:
    """[5, C]: slot, first position, rows, sampled rows and recomputed rows of each chunk. Appends
    their tokens, and enters their pages into the table.
    """
    pieces = []
    for request, start, num_tokens, samples, has_lead in chunks:
        first, count = start - has_lead, num_tokens + has_lead
        # Published pages may belong to others too, and have the KV of their tokens.
        num_known = min(count, request.held.num_published * page_size - first)
        recomputed_rows = max(int(has_lead), num_known)
        pieces.append((request.slot, first, count, int(samples), recomputed_rows))
        tokens += request.tokens[first : start + num_tokens]
        table.extend(request.slot, request.held.pages)
    return np.ascontiguousarray(np.array(pieces, np.int64).T)


def media_order(due: Sequence[tuple[Media, Int64Array]]) -> EncodeMedia:
    """Encodes media, each with the places of its rows."""
    return EncodeMedia(
        rows=np.concatenate([places for _, places in due]).tolist(),
        shapes=[size for media, _ in due for size in media.shape],
        data=b"".join(media.data for media, _ in due),
    )


def _inserted(plan: Plan, media: MediaRows | FilledMedia, at: int) -> InsertedRows | None:
    """Rows of a step that come from media; its chunks begin at row `at`."""
    rows, sources, ends = [], [], []
    for request, start, num_tokens, _, has_lead in plan.chunks:
        first, end = start - has_lead, start + num_tokens
        for behind, places in media.places_in(request, first, end):
            rows.append(at + behind)
            sources.append(places)
        for span, begin, last in spans_within(request.uncut_spans, first, end):
            ends.append(np.full(last - begin, span.end))
        at += num_tokens + has_lead
    if not rows:
        return None
    columns = map(np.concatenate, (rows, sources, *([ends] if ends else ())))
    return InsertedRows(*columns)


def _turned(plan: Plan, at: int) -> TurnedRows | None:
    """Rows of chunks up to the end of the last medium of their prompt."""
    rows, axes = [], []
    for request, start, num_tokens, _, has_lead in plan.chunks:
        first, end = start - has_lead, start + num_tokens
        if request.axes is not None and first < request.axes.end:
            own = request.axes.of(first, min(end, request.axes.end))
            rows.append(at + np.arange(len(own)))
            axes.append(own)
        at += end - first
    return TurnedRows(np.concatenate(rows), np.concatenate(axes)) if rows else None


def _adapters(plan: Plan) -> Int32Array | None:
    """[R]: each request's slot of the LoRA tables; None: no request has an adapter."""
    of_pieces = [item.request.adapter_slot for item in plan.verifies]
    of_pieces += [item.request.adapter_slot for item in plan.chunks]
    of_decodes = None if plan.columns is None else plan.columns.adapter_slots
    if of_decodes is None:
        if not any(of_pieces):
            return None
        of_decodes = np.zeros(len(plan.decodes), np.int64)
    return np.concatenate([of_decodes, np.array(of_pieces, np.int64)]).astype(np.int32)


def _scores(plan: Plan) -> list[ScoredRows]:
    """The chunks whose prompts want log-probabilities, without those that no token follows."""
    found = []
    for number, item in enumerate(plan.chunks, len(plan.decodes) + len(plan.verifies)):
        num_top, first = item.request.prompt_logprobs, item.start + 1
        count = _num_scored(item)
        if num_top is not None and count > 0:
            tokens = item.request.tokens[first : first + count]
            found.append(ScoredRows(number, num_top, int(item.has_lead), tokens))
    return found


def _pooled(plan: Plan) -> list[PooledRows]:
    before = len(plan.decodes) + len(plan.verifies)
    return [
        PooledRows(
            request=number,
            slot=item.request.slot,
            pool=item.request.pool,
            prompt_length=item.request.num_prompt_tokens,
            start=item.start,
            num_tokens=item.num_tokens,
            lead=int(item.has_lead),
        )
        for number, item in enumerate(plan.chunks, before)
        if item.request.pool is not None
    ]


def _num_scored(item: PlanItem) -> int:
    last_scored = item.request.num_prompt_tokens - 1
    return min(item.start + item.num_tokens, last_scored) - item.start
