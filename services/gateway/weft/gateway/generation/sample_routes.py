"""Collects the experts of a sample's tokens, as its owner sends them at the sample's end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from weft.contract.submits import MAX_ROUTE_BYTES
from weft.v1 import decode_pb2


class SampleRoutes:
    """Args:
    begin: Position of the first token whose experts are wanted; 0 is the prompt's first.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._shape = (0, 0, 0)

    def add(self, event: decode_pb2.SessionEvent.Routes) -> str:
        """Takes the next ones; the first position starts anew. Returns what is wrong with them, of
        which then none is taken; empty if they were taken.
        """
        shape = event.layers, event.top_k, event.number_bytes
        each = event.layers * event.top_k * event.number_bytes
        told = f"routes from position {event.first_position} on, of shape {shape}"
        if event.number_bytes not in (1, 2) or not each or len(event.numbers) % each:
            return f"{told} in {len(event.numbers)} bytes"
        if event.first_position == self._begin:
            self._parts, self._num_bytes, self._shape = [], 0, shape
        if shape != self._shape or event.first_position != self._begin + self._num_bytes // each:
            return f"{told}, after {self._num_bytes} bytes of {self._shape}"
        if self._num_bytes + len(event.numbers) > MAX_ROUTE_BYTES:
            return f"{told}: more than {MAX_ROUTE_BYTES} bytes"
        self._parts.append(event.numbers)
        self._num_bytes += len(event.numbers)
        return ""

    def array(self, num_tokens: int) -> NDArray[np.generic] | None:
        """Experts of all positions but the last of prompt and sample, which have `num_tokens`:
        [positions, layers, k] uint8 or uint16. None: not all of them have come.
        """
        layers, top_k, number_bytes = self._shape
        count = num_tokens - 1 - self._begin
        if count < 0 or count * layers * top_k * number_bytes > self._num_bytes or not layers:
            return None
        numbers = np.frombuffer(b"".join(self._parts), f"<u{number_bytes}")
        return numbers.reshape(-1, layers, top_k)[:count]
