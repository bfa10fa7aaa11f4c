"""Events of the scheduler, for code that copies, offers or pins the pages of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.engine.requests.request import Request

OnPages = Callable[[Request, int, int], None]
"""Takes a request, and the range [first, end) of its full pages."""
OnRequest = Callable[[Request], None]


@dataclass(slots=True)
class SchedulerEvents:
    """Callbacks by event, called on the engine's thread in the order in which they were added."""

    computed: list[OnPages] = field(default_factory=list)
    """Pages were computed here, or are cached here and missing in the KV store."""
    published: list[OnPages] = field(default_factory=list)
    """Pages of a request entered the prefix cache, whether computed here or filled."""
    matched: list[OnRequest] = field(default_factory=list)
    """A request was admitted for the first time, with its prefix match."""
    computing: list[OnRequest] = field(default_factory=list)
    """From now on this engine computes a request's prompt, or what is left of it."""
    leaving: list[OnRequest] = field(default_factory=list)
    """A request of a session ends without an error; it still has its pages."""


class FillEvents(NamedTuple):
    """What sources of pages tell the scheduler of an admitted request."""

    arrived: OnRequest
    """New pages at the end of its own are complete; they enter the prefix cache."""
    completed: OnRequest
    """A source has done its part. Another source or this engine does the rest."""
    failed: OnRequest
    """A source gave no pages, or not all: the request waits again with the candidates left."""
    lost: OnRequest = lambda request: None
    """Pages that the request has, and that it would have computed on, did not come whole."""
