"""Breaks a gateway's invariants for `weft chaos --sabotage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from weft.chaos.sabotage.wrap import wrap
from weft.contract.faults import FaultPoint
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.generation.generation import Generation
from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.view import Column, PoolView, RoutingRequest

DELIVER = FaultPoint(
    "gateway.deliver", "the gateway hands out tokens: one of them twice", "sabotage"
)
RESUME = FaultPoint(
    "gateway.resume", "the gateway submits a request again: with another seed", "sabotage"
)
INDEX = FaultPoint(
    "gateway.index", "the gateway looks who holds a prompt: it finds nobody", "sabotage"
)


def install() -> None:
    """Makes the gateway's invariants breakable in this process."""
    wrap(Answer, "_take", DELIVER, _repeating)
    wrap(Generation, "start", RESUME, _reseeding)
    wrap(FleetPageIndex, "matches", INDEX, _forgetting)


def _repeating(whole: Callable[..., Any]) -> Callable[..., list[Delta]]:
    def take(stream: Answer) -> list[Delta]:
        deltas: list[Delta] = whole(stream)
        return [
            delta._replace(ids=[delta.ids[0], *delta.ids])
            if delta.ids and DELIVER.fire()
            else delta
            for delta in deltas
        ]

    return take


def _reseeding(whole: Callable[..., Any]) -> Callable[..., None]:
    def start(generation: Generation) -> None:
        if generation.attempt and RESUME.fire():
            generation.prompt.seed ^= 1
        whole(generation)

    return start


def _forgetting(whole: Callable[..., Any]) -> Callable[..., Column]:
    def matches(index: FleetPageIndex, view: PoolView, request: RoutingRequest) -> Column:
        if INDEX.fire():
            return np.zeros(len(view), np.int64)
        found: Column = whole(index, view, request)
        return found

    return matches
