"""Samples the next tokens of running requests, with their sampler rows and constraint masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import InvalidRequest, WeftError
from weft.contract.request import TokenLogprob
from weft.engine.base.device_copies import Fetched
from weft.engine.base.drafts import LaterDrafts
from weft.engine.base.token_trees import TokenTree, parents_of
from weft.engine.executor.drafts.trees import tree_of
from weft.engine.executor.port import Logits
from weft.engine.requests.request import Request, end_of
from weft.engine.sampling.device_draws import RowsBehindDrafts
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.engine.sampling.sampler import Sampler, SamplerRow
from weft.engine.scheduler.plan import Plan, Run, VerifyItem
from weft.engine.scheduler.ports import Masks, MaskSource

Rows = Callable[[], Int64Array]
"""Waits for the tokens and the ancestor masks of a step's rows, [2, T]."""


class SampledTokens(NamedTuple):
    """Tokens sampled in one step: one for each of `requests`, and `runs` for requests
    with drafts.
    """

    requests: Sequence[Request]
    tokens: list[int]
    """Token ids; undefined for requests with an error."""
    positions: Int64Array
    logprobs: Sequence[TokenLogprob | None]
    errors: list[tuple[Request, WeftError]]
    runs: Sequence[Run] = ()
    """Tokens of the requests with drafts."""

    def without(self, lost: Sequence[Request]) -> SampledTokens:
        """Without these requests, which bring no drafts."""
        kept = [row for row, request in enumerate(self.requests) if request not in lost]
        return SampledTokens(
            [self.requests[row] for row in kept],
            [self.tokens[row] for row in kept],
            self.positions[kept],
            [self.logprobs[row] for row in kept],
            [(request, error) for request, error in self.errors if request not in lost],
            self.runs,
        )


def wait_for_tokens(
    plan: Plan, requests: Sequence[Request], pending: PendingTokens
) -> SampledTokens:
    """Waits for the tokens of a step.

    Args:
        requests: Requests that get a token in this step, in row order: running requests without
            drafts, requests with drafts (one row for each drafted token and one more), then prompts
            that end here.
    """
    sampled, positions = pending.wait(), pending.positions
    tokens, logprobs, errors = sampled.token_ids.tolist(), sampled.logprobs, sampled.errors
    if not plan.verifies:
        found = [_cause(requests[row], error) for row, error in errors.items()]
        return SampledTokens(requests, tokens, positions, logprobs, found)
    begin, behind = len(plan.decodes), len(plan.decodes) + len(plan.verifies)
    firsts = first_rows(plan, len(requests))
    end = int(firsts[behind])
    runs = _runs(plan, tokens, logprobs, firsts[begin : behind + 1], pending)
    # An error in a row that follows drafts is ignored: it occurs again when the request reaches
    # that position.
    owners = dict(zip(firsts.tolist(), requests, strict=False)) if errors else {}
    failed = [_cause(owners[row], error) for row, error in errors.items() if row in owners]
    return SampledTokens(
        [*requests[:begin], *requests[behind:]],
        tokens[:begin] + tokens[end:],
        np.concatenate([positions[:begin], positions[end:]]),
        logprobs[:begin] + logprobs[end:],
        failed,
        runs,
    )


def _runs(
    plan: Plan,
    tokens: list[int],
    logprobs: list[TokenLogprob | None],
    firsts: Int64Array,
    pending: PendingTokens,
) -> list[Run]:
    """`firsts` has the first row of each request with drafts, and the index after the last row."""
    if plan.has_trees:
        return [
            _run_of_tree(item, drafts, tokens[first:], logprobs[first:])
            for item, drafts, first in zip(
                plan.verifies, plan.drafts, firsts.tolist(), strict=False
            )
        ]
    if not any(logprobs):
        logprobs = []
    begins, runs = firsts.tolist(), []
    if pending.rows is not None:
        drafted = pending.rows()[0].tolist()
    else:
        drafted = [-1] * begins[0]
        for drafts in plan.drafts:
            drafted += [-1, *drafts]
    columns = zip(plan.verifies, begins, begins[1:], plan.draft_counts, strict=False)
    for item, first, behind, count in columns:
        end = first + (tokens[first] >= 0)
        # A negative token is an error, and no draft after it counts.
        while first < end < behind and tokens[end - 1] == drafted[end] and tokens[end] >= 0:
            end += 1
        runs.append(Run(item.request, tokens[first:end], logprobs[first:end], count))
    return runs


def _cause(request: Request, error: WeftError) -> tuple[Request, WeftError]:
    """If a constrained row allows no token, its constraint has come to its end, since `min_tokens`
    excludes nothing from such a row.
    """
    if error.param == "min_tokens" and request.params.constraint is not None:
        message = "no text satisfies it that goes on from here"
        error = InvalidRequest(message, stage="sample", param="constraint")
    return request, error


def first_rows(plan: Plan, num_drawing: int) -> Int64Array:
    """[num_drawing + 1]: the first row of the logits of each request that gets a token in a step
    with drafts, and the number of rows.
    """
    counts, begin = np.ones(1 + num_drawing, np.int64), 1 + len(plan.decodes)
    counts[0] = 0
    counts[begin : begin + len(plan.verifies)] += plan.draft_counts
    return counts.cumsum()


def _depths(drafts: Sequence[int]) -> list[int]:
    """Number of drafts from the last token to each row of a request; 0 for the last token's row."""
    depths = [0]
    for parent in parents_of(drafts):
        depths.append(depths[parent] + 1)
    return depths


def _run_of_tree(
    item: VerifyItem,
    drafts: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
) -> Run:
    """`tokens` and `logprobs` begin with the request's rows; others follow."""
    path = drawn_rows(tokens[: 1 + len(drafts)], drafts)
    assert len(path) <= 1 + item.max_accepted, "more drafts are right than there may be"
    return Run(
        item.request,
        [tokens[row] for row in path],
        [logprobs[row] for row in path],
        len(drafts),
        is_tree=isinstance(drafts, TokenTree),
    )


def drawn_rows(tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The row of the last token and those of accepted drafts. `tokens` are sampled from each row, 1
    + len(drafts), negative where there is none.
    """
    if tokens[0] < 0:
        return []
    parents, path = parents_of(drafts), [0]
    # Children have higher row numbers than their parents.
    for row, (draft, parent) in enumerate(zip(drafts, parents, strict=True), 1):
        if parent == path[-1] and tokens[parent] == draft and tokens[row] >= 0:
            path.append(row)
    return path


def _follow(plan: Plan, index: int, path: list[int], tokens: Int64Array) -> bool:
    """Extends `path`, the rows of a request so far, by the draft that equals its newest token, if
    there is one and the request continues. Returns whether it did. `index` counts the requests with
    drafts; `tokens` are by row.
    """
    drafts, last = plan.drafts[index], path[-1]
    token = int(tokens[last])
    if _is_end(plan.verifies[index].request, token, len(path)):
        return False
    for row, (draft, parent) in enumerate(zip(drafts, parents_of(drafts), strict=True), 1):
        if parent == last and draft == token:
            path.append(row)
            return True
    return False


def _is_end(request: Request, token: int, num_drawn: int) -> bool:
    """Whether `token`, the last of `num_drawn` tokens of one step, ends the request."""
    if token not in request.end_token_ids:
        return False
    return end_of(request, token, request.num_generated + num_drawn) is not None


def _fetch_rows(logits: Logits) -> Rows:
    assert logits.rows is not None, "the step verifies no drafts"
    fetched = Fetched(logits.rows())
    return lambda: fetched.wait().numpy()


def _kept(wait_for_rows: Rows) -> Rows:
    """A copy of the fetched rows that stays valid after the next step."""
    return cache(lambda: wait_for_rows().copy())


def _needs_drafts(item: VerifyItem) -> bool:
    """Whether the host needs a request's drafts before the tokens of their rows are sampled."""
    return item.max_drafts > 0 and item.request.params.constraint is not None


def _await_drafts(plan: Plan, logits: Logits) -> None:
    if isinstance(plan.drafts, LaterDrafts) and not plan.drafts.is_coming:
        plan.drafts.come_with(partial(_drafts_of, plan, _fetch_rows(logits)))


def _drafts_of(plan: Plan, rows: Rows) -> list[list[int]]:
    tokens, words = rows()
    found, row = [], len(plan.decodes)
    for item, count in zip(plan.verifies, plan.draft_counts, strict=True):
        own = slice(row + 1, row + 1 + count)
        drafts = tokens[own].tolist()
        found.append(drafts if item.tree is None else tree_of(drafts, words[own].tolist()))
        row += 1 + count
    return found


class StepSampler:
    """Samples the tokens of a step; keeps a sampler row for each slot."""

    def __init__(self, sampler: Sampler, constraints: MaskSource) -> None:
        self._sampler = sampler
        self._constraints = constraints
        self._has_masks = False
        self._has_row = np.zeros(sampler.null_slot + 1, np.bool_)
        self._has_row[sampler.null_slot] = True
        self.num_slots = 0
        """Number of slots that have a sampler row."""
        self._prepared = np.zeros(0, np.int64)
        """Slots of the requests given to `prepare` last."""

    def prepare(
        self,
        plan: Plan,
        requests: Sequence[Request],
        slots: Int64Array | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        """Prepares everything that sampling needs in addition to the logits.

        Args:
            plan: Plan of the step, whose drafts may not be there yet.
            requests: The requests that get a token; their tokens up to now are known.
            slots: The requests' slots, if no request has ended; None: they are read from the
                requests.
            is_late: Whether `begin` follows at once.
        """
        self._prepared = slots = self._slots(requests) if slots is None else slots
        for row in (~self._has_row[slots]).nonzero()[0].tolist():
            self._take_slot(requests[row])
        if self._awaits_drafts(plan):
            begin, behind = len(plan.decodes), len(plan.decodes) + len(plan.verifies)
            others = [item.request for item in plan.verifies if not _needs_drafts(item)]
            requests = [*requests[:begin], *others, *requests[behind:]]
        self._has_masks = bool(self._constraints.grammars)
        if self._has_masks:
            rows = self._sampler.mask_memory
            self._constraints.begin_masks(requests, rows=rows, is_awaited=is_late)

    def begin(self, plan: Plan, requests: Sequence[Request], logits: Logits) -> PendingTokens:
        """Samples one token for each request; with drafts, one for each accepted draft and one
        more.

        Args:
            requests: Requests given to `prepare` last. Tokens of those that have ended since are
                undefined.
            logits: Of decodes, of requests with drafts (a row for each token), of chunks.
        """
        if not plan.verifies:
            errors = self._take_masks(requests)
            pending = self._begin(logits)
            pending.errors = errors
            return pending
        firsts = first_rows(plan, len(requests))
        if not self._sampler.is_on_device and any(
            item.request.draws_in_turn for item in plan.verifies if item.max_drafts
        ):
            _await_drafts(plan, logits)
            return self._draw_in_turn(plan, requests, firsts, logits)
        failed, slot_override = self._take_masks(requests), None
        if self._awaits_drafts(plan):
            _await_drafts(plan, logits)
            more, slot_override = self._take_masks_behind_drafts(plan, firsts)
            failed |= more
        pending = self._begin(logits, firsts, slot_override, has_trees=plan.has_trees)
        pending.errors = {int(firsts[index]): error for index, error in failed.items()}
        if isinstance(plan.drafts, LaterDrafts):
            pending.rows = _kept(pending.rows or _fetch_rows(logits))
            plan.drafts.come_with(partial(_drafts_of, plan, pending.rows))
        else:
            pending.rows = None
        return pending

    def _begin(
        self,
        logits: Logits,
        firsts: Int64Array | None = None,
        slot_override: Int64Array | None = None,
        *,
        has_trees: bool = False,
    ) -> PendingTokens:
        """`firsts` None: each request has one row. `slot_override` has slots by row if some rows
        have separate masks; else None.
        """
        positions = logits.positions
        if logits.captured is not None:
            # Rows of requests that have ended since are sampled too: their slots are not reused
            # yet.
            own = logits.slots
            way = self._sampler.common_way(own)
            if way is not None:
                return self._sampler.begin_captured(logits.captured, way, own, slot_override)
        slots, drafted = self._prepared, None
        if firsts is not None:
            if self._sampler.is_on_device and self._sampler.counts_tokens(slots):
                assert logits.rows is not None, "the step verifies no drafts"
                of_rows = np.repeat(firsts[:-1], firsts[1:] - firsts[:-1])
                drafted = RowsBehindDrafts(of_rows, logits.rows(), has_trees)
            slots = np.repeat(slots, firsts[1:] - firsts[:-1])
        if logits.on_device is None:
            return self._sampler.begin(
                logits.compute(), slots, positions, drafted=drafted, slot_override=slot_override
            )
        # Rows of requests that have ended since are sampled with a slot that no request has.
        has_slots = slot_override is None and np.array_equal(slots, logits.slots)
        on_device = partial(logits.on_device, has_slots=has_slots)
        return self._sampler.begin(
            logits.compute(), slots, positions, on_device, drafted, slot_override
        )

    def continue_beams(
        self, requests: Sequence[Request], parents: Sequence[Request], token_ids: Sequence[int]
    ) -> None:
        """`Sampler.continue_beams` for these requests."""
        slots = [request.slot for request in requests]
        self._sampler.continue_beams(slots, [parent.slot for parent in parents], token_ids)

    def take_lost_s(self) -> float:
        """Seconds for which this step waited for masks (`MaskSource.lost_s`). Sets them
        back to 0.
        """
        lost_s, self._constraints.lost_s = self._constraints.lost_s, 0.0
        return lost_s

    def _take_masks(self, requests: Sequence[Request]) -> dict[int, WeftError]:
        errors: dict[int, WeftError] = {}
        if not self._has_masks:
            return errors
        written: list[Request] = []
        for request, masks in self._constraints.take_masks():
            if masks is None:
                written.append(request)
            elif isinstance(masks, WeftError):
                errors[requests.index(request)] = masks
            else:
                self._set_mask(request, masks)
        if written:
            slots = np.array([request.slot for request in written], np.int64)
            counts = [request.num_generated for request in written]
            self._sampler.set_masks(slots, counts)
        return errors

    def _awaits_drafts(self, plan: Plan) -> bool:
        """Whether rows that follow drafts need masks, so that the host needs the drafts."""
        if not (self._sampler.is_on_device and self._constraints.grammars):
            return False
        return any(map(_needs_drafts, plan.verifies))

    def _set_mask(self, request: Request, masks: Masks) -> None:
        if self._sampler.is_on_device:
            # The sampler counts a request's tokens, but only the host knows how many drafts of
            # earlier steps were accepted.
            self._sampler.advance(request.slot, request.num_generated)
        self._sampler.set_mask(request.slot, masks[0])

    def _take_masks_behind_drafts(
        self, plan: Plan, firsts: Int64Array
    ) -> tuple[dict[int, WeftError], Int64Array | None]:
        """Computes a mask for each row of the constrained requests with drafts, whose drafts must
        be on their way to the host. Returns errors by index of the request, and the slots that rows
        are sampled with; None: no row has a separate mask, since all those requests have ended.
        """
        indices = {
            item.request: index
            for index, item in enumerate(plan.verifies, len(plan.decodes))
            if _needs_drafts(item)
        }
        drafts = [plan.drafts[index - len(plan.decodes)] for index in indices.values()]
        self._constraints.begin_masks([*indices], ahead=drafts, is_awaited=True)
        errors: dict[int, WeftError] = {}
        rows: list[int] = []
        counts: list[int] = []
        behind: Masks = []
        for request, masks in self._constraints.take_masks():
            index = indices[request]
            if isinstance(masks, WeftError):
                errors[index] = masks
                continue
            assert masks is not None, "these are not written to rows of slots"
            self._set_mask(request, masks)
            first, depths = int(firsts[index]), _depths(plan.drafts[index - len(plan.decodes)])
            rows += range(first + 1, first + len(masks))
            counts += [request.num_generated + depth for depth in depths[1 : len(masks)]]
            behind += masks[1:]
        if not rows:
            return errors, None
        slot_override = np.repeat(self._prepared, np.diff(firsts))
        slot_override[rows] = self._sampler.mask_rows(slot_override[rows], behind, counts)
        return errors, slot_override

    def _draw_in_turn(
        self,
        plan: Plan,
        requests: Sequence[Request],
        first_row_of: Int64Array,
        logits: Logits,
    ) -> PendingTokens:
        """Samples the first token of each request, then the second of those whose draft was
        accepted, and so on: each may depend on the tokens before it (penalties, constraints).
        """
        num_rows, rows = int(first_row_of[-1]), first_row_of[:-1]
        output = SampledRows(np.full(num_rows, -1, np.int64), [None] * num_rows)
        begin = len(plan.decodes)
        firsts = rows[begin:]
        mask_errors, tensor = self._take_masks(requests), logits.compute()
        self._draw_rows(requests, rows, tensor, logits.positions, output)
        paths = [[0] for _ in plan.verifies]
        going_on = [i for i in range(len(plan.verifies)) if begin + i not in mask_errors]
        while going_on := [
            index
            for index in going_on
            if _follow(plan, index, paths[index], output.token_ids[firsts[index] :])
        ]:
            left = [plan.verifies[index].request for index in going_on]
            accepted = [[plan.drafts[i][row - 1] for row in paths[i][1:]] for i in going_on]
            self._constraints.begin_masks(left, accepted, is_awaited=True)
            if lost := self._take_masks(left):
                going_on = [index for i, index in enumerate(going_on) if i not in lost]
                left = [plan.verifies[index].request for index in going_on]
            if going_on:
                reached = np.array([paths[index][-1] for index in going_on], np.int64)
                at = firsts[going_on] + reached
                self._draw_rows(left, at, tensor, logits.positions, output)
        tokens = torch.from_numpy(output.token_ids)
        pending = PendingTokens(tokens, logits.positions, lambda: output)
        pending.errors = {int(rows[index]): error for index, error in mask_errors.items()}
        return pending

    def _draw_rows(
        self,
        requests: Sequence[Request],
        rows: Int64Array,
        logits: torch.Tensor,
        positions: Int64Array,
        output: SampledRows,
    ) -> None:
        chosen, slots = logits[torch.from_numpy(rows)], self._slots(requests)
        drawn = self._sampler.draw(chosen, slots, positions[rows])
        output.token_ids[rows] = drawn.token_ids
        for index, row in enumerate(rows.tolist()):
            output.logprobs[row] = drawn.logprobs[index]
            if index in drawn.errors:
                output.errors[row] = drawn.errors[index]

    def _slots(self, requests: Sequence[Request]) -> Int64Array:
        slots = np.array([request.slot for request in requests], np.int64)
        slots[slots < 0] = self._sampler.null_slot
        return slots

    def give_up(self) -> None:
        """Drops the masks of a step that failed after `prepare`."""
        self._constraints.take_masks()

    def free(self, slot: int) -> None:
        if self._has_row[slot]:
            self._has_row[slot] = False
            self.num_slots -= 1
            self._sampler.remove(slot)

    def _take_slot(self, request: Request) -> None:
        row = SamplerRow(
            params=request.params,
            stop=request.stop,
            seed=request.seed,
            eos_token_ids=tuple(request.eos_token_ids),
            top_logprobs=request.top_logprobs,
            scales_logprobs=request.scales_logprobs,
        )
        prompt = request.tokens[: request.num_prompt_tokens]
        # Set before `add`, so that the slot is freed if `add` fails.
        self._has_row[request.slot] = True
        self.num_slots += 1
        self._sampler.add(request.slot, row, prompt, request.tokens[request.num_prompt_tokens :])
