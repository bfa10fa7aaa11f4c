"""Gives requests the tokens that a step sampled, and sends them to their gateways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import Int64Array
from weft.contract.request import TokenLogprob
from weft.contract.submits import TokenColumns, Tokens
from weft.engine.loop.draws import SampledTokens
from weft.engine.loop.outgoing import Outgoing
from weft.engine.requests.request import Request, State, end_of
from weft.engine.scheduler.columns import RequestColumns
from weft.engine.scheduler.plan import LaterScores, Plan, Run
from weft.engine.scheduler.running import RunningPlans


class End(NamedTuple):
    """A sample that ended with its newest token."""

    request: Request
    reason: str
    stop_token_id: int | None


class OutputProcessor:
    def __init__(self, out: Outgoing, running: RunningPlans) -> None:
        self._out = out
        self._running = running

    def take_runs(
        self, runs: Sequence[Run], on_accepted: Callable[[Request], None]
    ) -> tuple[list[End], int]:
        """Appends and sends the tokens of requests with drafts, any of which may end the request.
        Calls `on_accepted` with each request that had a draft accepted.

        Returns:
            Samples that end, and the number of surplus tokens: those of requests that had ended
                before, and those after the token that ends a sample.
        """
        ends: list[End] = []
        num_surplus, finished = 0, State.FINISHED
        gateway: int | None = None
        told: list[Tokens] = []
        for request, tokens, logprobs, num_drafts, is_tree in runs:
            if request.state is finished:
                num_surplus += max(1, len(tokens))
                continue
            first, count = request.num_generated, len(tokens)
            is_last = first + count >= request.max_tokens
            if is_last or not request.end_token_ids.isdisjoint(tokens):
                kept, end = _until_end(request, tokens)
                num_surplus += count - len(kept)
                tokens, logprobs, count = kept, logprobs[: len(kept)], len(kept)
                if end is not None:
                    ends.append(end)
            request.tokens += tokens
            key = request.key
            if key.gateway != gateway:
                gateway, told = key.gateway, self._out.gateway(key.gateway).tokens
            known = [found for found in logprobs if found is not None] if logprobs else []
            one = Tokens(key.request_id, key.attempt, request.sample, first, tokens, known)
            told.append(one)
            timeline = request.timeline
            timeline.num_drafted_tokens += num_drafts
            timeline.num_tree_steps += is_tree
            if count > 1:
                timeline.num_accepted_tokens += count - 1
                on_accepted(request)
        return ends, num_surplus

    def take(self, drawn: SampledTokens, plan: Plan) -> tuple[list[End], int]:
        """Appends and sends the tokens of requests without drafts, the plan's decodes first.
        Returns the samples that end by their tokens, and the number of tokens of requests that had
        ended before.
        """
        ends: list[End] = []
        num_surplus, count = 0, len(plan.decodes)
        positions = drawn.positions
        if plan.is_late is not None:
            # All earlier steps are committed, so `tokens` is complete.
            own = [len(request.tokens) for request in plan.decodes]
            positions = np.concatenate([np.array(own, np.int64), positions[count:]])
        if plan.columns is not None:
            num_surplus += self._take(plan.columns, drawn, positions[:count], 0, ends)
        if firsts := drawn.requests[count:]:
            for request in firsts:
                if request.state is not State.FINISHED:
                    self._out.gateway(request.key.gateway).has_first_tokens = True
            others = RequestColumns.of(firsts)
            num_surplus += self._take(others, drawn, positions[count:], count, ends)
        return ends, num_surplus

    def take_prompt(self, plan: Plan, scores: LaterScores) -> None:
        before = len(plan.decodes) + len(plan.verifies)
        for scored, logprobs in scores.wait():
            request, start, *_ = plan.chunks[scored.request - before]
            if request.state is not State.FINISHED:
                self._out.prompt_logprobs(request.key, start + 1, logprobs)
                if start + 1 + len(logprobs) == request.num_prompt_tokens:
                    request.prompt_logprobs = None

    def _take(
        self,
        columns: RequestColumns,
        drawn: SampledTokens,
        positions: Int64Array,
        begin: int,
        ends: list[End],
    ) -> int:
        """Takes the rows from `begin` on, one for each request of the columns. Appends to `ends`
        and returns the number of surplus tokens; those of beam searches count as such.
        """
        requests, end = columns.requests, begin + len(columns.requests)
        tokens, logprobs = drawn.tokens[begin:end], drawn.logprobs[begin:end]
        num_surplus = 0
        if columns.has_beams or not self._running.has_exactly(columns):
            finished = State.FINISHED
            left = [
                row
                for row, request in enumerate(requests)
                if request.state is not finished and request.beams is None
            ]
            num_surplus = len(requests) - len(left)
        if num_surplus:
            columns, positions = columns.of_rows(left), positions[left]
            tokens, logprobs = [tokens[row] for row in left], [logprobs[row] for row in left]
            requests = columns.requests
        self._emit(columns, (positions - columns.first_positions).tolist(), tokens, logprobs)
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        ending = set((positions >= columns.ends).nonzero()[0].tolist())
        end_token_ids = columns.end_token_ids
        if not end_token_ids.isdisjoint(tokens):
            ending.update(row for row, token in enumerate(tokens) if token in end_token_ids)
        for row in sorted(ending):
            request = requests[row]
            how = end_of(request, tokens[row], request.num_generated)
            if how is not None:
                ends.append(End(request, *how))
        return num_surplus

    def _emit(
        self,
        columns: RequestColumns,
        indices: list[int],
        tokens: list[int],
        logprobs: Sequence[TokenLogprob | None],
    ) -> None:
        known: dict[int, TokenLogprob] = {}
        if any(logprobs):
            known = {row: found for row, found in enumerate(logprobs) if found is not None}
        names = columns.request_ids, columns.attempts, columns.samples
        told = TokenColumns(*names, indices, tokens, known)
        gateways = dict.fromkeys(columns.gateways)
        for gateway in gateways:
            own = told
            if len(gateways) > 1:
                own = told.of_rows(
                    [r for r, other in enumerate(columns.gateways) if other == gateway]
                )
            self._out.columns(gateway, own)


def _until_end(request: Request, tokens: list[int]) -> tuple[list[int], End | None]:
    """New tokens of a request up to the token that ends it, and the end; None: no token ends it."""
    first = request.num_generated
    for count, token in enumerate(tokens, 1):
        how = end_of(request, token, first + count)
        if how is not None:
            return tokens[:count], End(request, *how)
    return tokens, None
