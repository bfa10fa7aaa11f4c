"""Records the last plan of an engine in a file that outlives its process."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from weft.contract.clock import Clock, monotonic
from weft.engine.requests.request import Request
from weft.engine.scheduler.plan import Plan

MAX_ITEMS = 64
"""Most items recorded of a plan. Of a longer one, the rest shows only in its counts."""
MAX_SLOTS = 4096
_HEADER = struct.Struct("<QddII")
"""Header: steps begun, begin and end of the last one (monotonic seconds), its items, its tokens."""
_NAME = struct.Struct("<64siB")
"""Record of a slot: request id, sample, whether it is a fill."""
_ROW = "III"
"""Record of an item: slot, first token, tokens."""
_NAMES_AT = _HEADER.size + MAX_ITEMS * struct.calcsize(f"<{_ROW}")
_FILE_BYTES = _NAMES_AT + MAX_SLOTS * _NAME.size


@cache
def _rows(count: int) -> struct.Struct:
    return struct.Struct("<" + _ROW * count)


class FlightRecorder:
    """Writes each plan over the previous one. The file is mapped, so the kernel keeps it however
    the process ends.
    """

    def __init__(self, path: Path, clock: Clock = monotonic) -> None:
        path.write_bytes(bytes(_FILE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._clock = clock
        self._num_steps = 0
        self._last: tuple[float, int, int] = (0.0, 0, 0)
        self._arrivals: dict[int, int] = {}
        """Arrival number of the request whose name is in the file, by slot."""
        self._decodes: Sequence[Request] = ()

    def begin(self, plan: Plan) -> None:
        self._num_steps += 1
        num_decodes = min(len(plan.decodes), MAX_ITEMS)
        if plan.decodes is not self._decodes:  # Many successive steps have the same list object.
            self._decodes = plan.decodes
            for request in plan.decodes[:num_decodes]:
                self._name(request)
        rows = np.ones((num_decodes, 3), np.dtype("<u4"))
        rows[:, 0], rows[:, 1] = plan.slots[:num_decodes], plan.starts[:num_decodes]
        pieces_at = _HEADER.size + rows.nbytes
        self._map[_HEADER.size : pieces_at] = rows.tobytes()
        values: list[int] = []
        for request, start, count, *_ in islice(plan.pieces(), MAX_ITEMS - num_decodes):
            self._name(request)
            values += (request.slot, start, count)
        _rows(len(values) // 3).pack_into(self._map, pieces_at, *values)
        self._last = (self._clock(), len(plan), plan.num_tokens)
        began_at, num_items, num_tokens = self._last
        _HEADER.pack_into(self._map, 0, self._num_steps, began_at, 0.0, num_items, num_tokens)

    def end(self) -> None:
        began_at, num_items, num_tokens = self._last
        ended_at = self._clock()
        _HEADER.pack_into(self._map, 0, self._num_steps, began_at, ended_at, num_items, num_tokens)

    def _name(self, request: Request) -> None:
        slot = request.slot
        if self._arrivals.get(slot) == request.arrival:
            return
        self._arrivals[slot] = request.arrival
        at = _NAMES_AT + slot % MAX_SLOTS * _NAME.size
        name = request.key.request_id.encode()
        _NAME.pack_into(self._map, at, name, request.sample, request.is_fill)


def read_plan(path: Path) -> dict[str, Any] | None:
    """Reads what a recorder wrote last, as JSON-like values; None if it wrote nothing."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _FILE_BYTES:
        return None
    step, began_at, ended_at, num_items, num_tokens = _HEADER.unpack_from(content)
    if not step:
        return None
    values = _rows(min(num_items, MAX_ITEMS)).unpack_from(content, _HEADER.size)
    rows = [values[index : index + 3] for index in range(0, len(values), 3)]
    return {
        "step": step,
        "is_running": not ended_at,
        "duration_s": round(ended_at - began_at, 6) if ended_at else None,
        "running_for_s": None if ended_at else round(monotonic() - began_at, 3),
        "num_items": num_items,
        "num_tokens": num_tokens,
        "items": [_item(content, *row) for row in rows],
    }


def _item(content: bytes, slot: int, start_token: int, num_tokens: int) -> dict[str, Any]:
    at = _NAMES_AT + slot % MAX_SLOTS * _NAME.size
    name, sample, is_fill = _NAME.unpack_from(content, at)
    return {
        "request_id": name.rstrip(b"\0").decode(errors="replace"),
        "sample": sample,
        "slot": slot,
        "start_token": start_token,
        "num_tokens": num_tokens,
        "is_fill": bool(is_fill),
    }
