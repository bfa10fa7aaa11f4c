"""Facts about running requests as columns, so that Python touches a single request only when it
changes.

Columns are never changed in place, except `RunningColumns.limits`: a change makes new ones, and
plans under way keep those that they refer to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from weft.contract.arrays import BoolArray, Int64Array
from weft.engine.requests.request import Request

_MANY_END_TOKENS = 4096
"""Size of `end_token_ids` from which on the tokens of requests that have left are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumns:
    """Facts about requests with a slot that do not change while they run, by column."""

    requests: Sequence[Request]
    gateways: list[int]
    request_ids: list[str]
    attempts: list[int]
    samples: list[int]
    end_token_ids: frozenset[int]
    """Tokens that may end one of the requests. Some may belong to requests that have left."""
    has_beams: bool
    """Whether one of the requests is of a beam search. It may have left."""
    numbers: Int64Array
    """[4, len(requests)]: slots, first positions, ends and adapter slots."""

    @classmethod
    def of(cls, requests: Sequence[Request]) -> RequestColumns:
        keys = [request.key for request in requests]
        numbers = np.zeros((4, len(requests)), np.int64)
        numbers[0] = [request.slot for request in requests]
        numbers[1] = [request.num_prompt_tokens for request in requests]
        numbers[2] = [r.num_prompt_tokens + r.max_tokens - 1 for r in requests]
        numbers[3] = [request.adapter_slot for request in requests]
        return cls(
            requests=list(requests),
            gateways=[key.gateway for key in keys],
            request_ids=[key.request_id for key in keys],
            attempts=[key.attempt for key in keys],
            samples=[request.sample for request in requests],
            end_token_ids=frozenset().union(*{request.end_token_ids for request in requests}),
            has_beams=any(request.beams is not None for request in requests),
            numbers=numbers,
        )

    @property
    def slots(self) -> Int64Array:
        """[len(requests)]; negative where a request has no slot."""
        slots: Int64Array = self.numbers[0]
        return slots

    @property
    def first_positions(self) -> Int64Array:
        """[len(requests)]: positions of the first generated tokens."""
        positions: Int64Array = self.numbers[1]
        return positions

    @property
    def ends(self) -> Int64Array:
        """[len(requests)]: positions of the last tokens that the requests may have."""
        ends: Int64Array = self.numbers[2]
        return ends

    @property
    def adapter_slots(self) -> Int64Array | None:
        """[len(requests)]; None: no request has an adapter."""
        slots: Int64Array = self.numbers[3]
        return slots if slots.any() else None

    def joined(self, request: Request) -> RequestColumns:
        key, end_token_ids = request.key, self.end_token_ids | request.end_token_ids
        if len(end_token_ids) > _MANY_END_TOKENS:
            # The set still contains tokens of requests that have left.
            present = (one.end_token_ids for one in (*self.requests, request))
            end_token_ids = frozenset[int]().union(*present)
        return RequestColumns(
            requests=[*self.requests, request],
            gateways=[*self.gateways, key.gateway],
            request_ids=[*self.request_ids, key.request_id],
            attempts=[*self.attempts, key.attempt],
            samples=[*self.samples, request.sample],
            end_token_ids=end_token_ids,
            has_beams=self.has_beams or request.beams is not None,
            numbers=np.concatenate([self.numbers, RequestColumns.of([request]).numbers], axis=1),
        )

    def without(self, row: int) -> RequestColumns:
        return RequestColumns(
            requests=[*self.requests[:row], *self.requests[row + 1 :]],
            gateways=self.gateways[:row] + self.gateways[row + 1 :],
            request_ids=self.request_ids[:row] + self.request_ids[row + 1 :],
            attempts=self.attempts[:row] + self.attempts[row + 1 :],
            samples=self.samples[:row] + self.samples[row + 1 :],
            end_token_ids=self.end_token_ids,
            has_beams=self.has_beams,
            numbers=np.delete(self.numbers, row, axis=1),
        )

    def of_rows(self, rows: Sequence[int]) -> RequestColumns:
        return RequestColumns(
            requests=[self.requests[row] for row in rows],
            gateways=[self.gateways[row] for row in rows],
            request_ids=[self.request_ids[row] for row in rows],
            attempts=[self.attempts[row] for row in rows],
            samples=[self.samples[row] for row in rows],
            end_token_ids=self.end_token_ids,
            has_beams=self.has_beams,
            numbers=np.take(self.numbers, rows, axis=1),
        )


@dataclass(frozen=True, slots=True)
class RunningColumns:
    """Columns of RUNNING requests, and how far each of them is."""

    fixed: RequestColumns
    starts: Int64Array
    """Positions of the tokens that they bring to the next step."""
    limits: Int64Array
    """Numbers of positions that they have pages for. This column alone changes in place."""

    @classmethod
    def of(cls, fixed: RequestColumns, page_size: int) -> RunningColumns:
        starts = [request.num_computed + request.num_launched for request in fixed.requests]
        limits = [len(request.held.pages) * page_size for request in fixed.requests]
        return cls(fixed, np.array(starts, np.int64), np.array(limits, np.int64))

    def joined(self, request: Request, page_size: int) -> RunningColumns:
        start = request.num_computed + request.num_launched
        return RunningColumns(
            self.fixed.joined(request),
            np.append(self.starts, start),
            np.append(self.limits, len(request.held.pages) * page_size),
        )

    def without(self, request: Request) -> RunningColumns:
        row = self.fixed.requests.index(request)
        starts, limits = np.delete(self.starts, row), np.delete(self.limits, row)
        return RunningColumns(self.fixed.without(row), starts, limits)

    def launched(self, chosen: BoolArray) -> RunningColumns:
        """Columns after a step in which the requests `chosen` bring a token each."""
        return RunningColumns(self.fixed, self.starts + chosen, self.limits)
