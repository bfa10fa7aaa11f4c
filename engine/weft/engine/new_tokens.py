"""Gives requests the tokens that they drew, and tells their sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from weft.engine.drawing import Drawn
from weft.engine.intake import end_of
from weft.engine.messages import TokenColumns
from weft.engine.outgoing import Outgoing
from weft.engine.request import TokenLogprob
from weft.engine.scheduler.columns import RequestColumns
from weft.engine.scheduler.plan import Plan
from weft.engine.scheduler.state import Request, State


class End(NamedTuple):
    """A sample ended with the token that it drew."""

    request: Request
    reason: str
    stop_token_id: int | None


class NewTokens:
    """Takes what steps draw, a token a request.

    Args:
        out: Outbox that is told of the tokens.
    """

    def __init__(self, out: Outgoing) -> None:
        self._out = out

    def take(self, drawn: Drawn, plan: Plan) -> tuple[list[End], int]:
        """Appends and emits the tokens of requests without drafts.

        Args:
            drawn: What the step drew.
            plan: Plan of the step, whose decodes are the first that drew.

        Returns:
            Samples that end by their tokens, and the number of tokens of requests that had ended
            before.
        """
        ends: list[End] = []
        num_surplus, count = 0, len(plan.decodes)
        if plan.columns is not None:
            num_surplus += self._take(plan.columns, drawn, 0, ends)
        if len(drawn.requests) > count:
            others = RequestColumns.of(drawn.requests[count:])
            num_surplus += self._take(others, drawn, count, ends)
        return ends, num_surplus

    def _take(self, columns: RequestColumns, drawn: Drawn, begin: int, ends: list[End]) -> int:
        """Takes the rows from `begin` on; appends ends, returns the number of surplus tokens."""
        requests, end = columns.requests, begin + len(columns.requests)
        positions, tokens = drawn.positions[begin:end], drawn.tokens[begin:end]
        logprobs = drawn.logprobs[begin:end]
        finished = State.FINISHED
        left = [row for row, request in enumerate(requests) if request.state is not finished]
        num_surplus = len(requests) - len(left)
        if num_surplus:
            columns, positions = columns.of_rows(left), positions[left]
            tokens, logprobs = [tokens[row] for row in left], [logprobs[row] for row in left]
            requests = columns.requests
        self._emit(columns, (positions - columns.first_positions).tolist(), tokens, logprobs)
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        ending = set(np.flatnonzero(positions >= columns.ends).tolist())
        if end_token_ids := columns.end_token_ids:
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
        """Tells each session of its own requests' tokens."""
        told = TokenColumns(
            columns.request_ids,
            columns.attempts,
            columns.samples,
            indices,
            tokens,
            {row: found for row, found in enumerate(logprobs) if found is not None},
        )
        sessions = dict.fromkeys(columns.sessions)
        for session in sessions:
            own = told
            if len(sessions) > 1:
                own = told.of_rows(
                    [r for r, other in enumerate(columns.sessions) if other == session]
                )
            self._out.columns(session, own)
