"""The trace context of a client, as W3C writes it."""

from __future__ import annotations

import random
from typing import NamedTuple


class ClientTrace(NamedTuple):
    """A client's span, which is the parent of what its request causes."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def new_trace(is_sampled: bool) -> ClientTrace:
    return ClientTrace(random.randrange(1, 1 << 128), random.randrange(1, 1 << 64), is_sampled)


def read_traceparent(text: str) -> ClientTrace:
    _, trace_id, span_id, flags = text.split("-")
    return ClientTrace(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))
