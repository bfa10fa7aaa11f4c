"""Makes one trace of several: `python -m weft.common.telemetry.merge_profile ORDER.json`.

A process of its own does this, since it takes seconds. Each part is a trace as PyTorch's profiler
writes it, or one that this program has made. Processes, threads and arrows get numbers that no
other part uses. All times are Unix times of the hosts' clocks, less one base, so parts of several
hosts are as far apart as their clocks. The result is a gzip file in Chrome's JSON format, which
Perfetto opens.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from weft.v1 import trace_pb2

BASE, EVENTS, ABOUT = "baseTimeNanoseconds", "traceEvents", "otherData"
MAX_PART_BYTES = 2 << 30
AROUND_S = 1.0
"""Spans are shown from this long before the profile to this long after it."""
_COMPRESSION = 3
_MOST_NICE = 19

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    path: str
    label: str = ""
    """Of whom it is, put before the names of its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOrder:
    out: str
    parts: Sequence[Part]
    began_s: float
    """Unix time, as `ended_s`."""
    ended_s: float
    spans: str = ""
    """File with a ListSpansResponse; empty: there are no spans."""
    notes: Sequence[str] = ()
    """What is missing, in words."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the trace's metadata."""


def write_order(order: MergeOrder, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(order))


def merge(order: MergeOrder) -> None:
    """Writes `order.out` under another name first, so that it is whole when it is there.

    Raises:
        OSError, msgspec.DecodeError: A part cannot be read, or the file cannot be written.
    """
    base_ns = int((order.began_s - AROUND_S) * 1e9)
    unfinished = Path(f"{order.out}.part")
    try:
        with gzip.open(unfinished, "wb", compresslevel=_COMPRESSION) as file:
            _write(file, order, base_ns, _all_events(order, base_ns))
        unfinished.replace(order.out)
    finally:
        unfinished.unlink(missing_ok=True)


def _write(file: gzip.GzipFile, order: MergeOrder, base_ns: int, events: Iterable[Event]) -> None:
    about = {**order.about, "notes": list(order.notes)}
    head = {"displayTimeUnit": "ms", BASE: base_ns, ABOUT: about}
    file.write(msgspec.json.encode(head)[:-1] + b',"%s":[' % EVENTS.encode())
    encoder, separator = msgspec.json.Encoder(), b"\n"
    for event in events:
        file.write(separator + encoder.encode(event))
        separator = b",\n"
    file.write(b"\n]}\n")


def _all_events(order: MergeOrder, base_ns: int) -> Iterator[Event]:
    numbers = itertools.count(1)
    for note in order.notes:
        yield {"ph": "i", "s": "g", "name": f"note: {note}", "ts": AROUND_S * 1e6, "pid": 0}
    for part in order.parts:
        yield from part_events(part, base_ns, numbers)
    if order.spans:
        found = trace_pb2.ListSpansResponse.FromString(Path(order.spans).read_bytes())
        end_us = (order.ended_s - order.began_s + 2 * AROUND_S) * 1e6
        yield from span_events(found.spans, base_ns, end_us, numbers)


def part_events(part: Part, base_ns: int, numbers: Iterator[int]) -> Iterator[Event]:
    """The events of a part with times since `base_ns`, and with processes and arrows numbered
    anew. What belongs to no process, such as the profiler's own marks, is left out, and so are GPUs
    without events: the profiler names all that there might be.
    """
    trace = _read(Path(part.path))
    shift_us = (trace.get(BASE, 0) - base_ns) / 1e3
    events = [event for event in trace[EVENTS] if isinstance(event.get("pid"), int)]
    busy = {event["pid"] for event in events if event["ph"] != "M"}
    labels = {
        event["pid"]: event["args"]["labels"]
        for event in events
        if event["name"] == "process_labels"
    }
    pids, arrows = _Numbers(numbers), _Numbers(numbers)
    for event in events:
        pid = event["pid"]
        if pid not in busy and labels.get(pid, "CPU") != "CPU":
            continue
        if event["name"] == "process_name" and part.label:
            label = labels.get(pid, "CPU")
            event["args"] = {"name": f"{part.label}: {'host' if label == 'CPU' else label}"}
        event["pid"] = pids.of(pid)
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift_us, 3)
        if "id" in event:
            event["id"] = arrows.of((event.get("cat"), event["id"]))
        yield event


class _Numbers:
    """New numbers of a part's own ones, the same for the same."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._known: dict[object, int] = {}

    def of(self, own: object) -> int:
        if own not in self._known:
            self._known[own] = next(self._numbers)
        return self._known[own]


def _read(path: Path) -> dict[str, Any]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read(MAX_PART_BYTES + 1)
    if len(content) > MAX_PART_BYTES:
        raise OSError(f"{path.name} has more than {MAX_PART_BYTES:,} bytes")
    trace: dict[str, Any] = msgspec.json.decode(content, type=dict)
    return trace


def span_events(
    spans: Iterable[trace_pb2.Span], base_ns: int, end_us: float, numbers: Iterator[int]
) -> Iterator[Event]:
    """The spans that overlap the time from 0 to `end_us`, cut to it, by service. Within a service
    each row shows spans that lie within one another, of one request at a time. Arrows lead from a
    span to those of other services that it has caused.
    """
    drawn: dict[bytes, Event] = {}
    rows = _Rows(numbers)
    shown = [(*_times(span, base_ns), span) for span in spans]
    for start_us, stop_us, span in sorted(shown, key=lambda one: (one[0], -one[1])):
        if stop_us < 0.0 or start_us > end_us:
            continue
        begin_us, stop_us = max(0.0, start_us), min(end_us, stop_us)
        facts = MessageToDict(span.attributes) | {
            "request": span.request_id,
            "trace": span.trace_id.hex(),
        }
        if (begin_us, stop_us) != _times(span, base_ns):
            facts["whole_ms"] = span.duration.ToNanoseconds() / 1e6
        if span.error:
            facts["error"] = span.error
        pid, tid, named = rows.place(span, begin_us, stop_us)
        yield from named
        event = {"ph": "X", "cat": "weft", "name": span.name, "pid": pid, "tid": tid}
        event |= {"ts": round(begin_us, 3), "dur": round(stop_us - begin_us, 3), "args": facts}
        yield event
        drawn[span.span_id] = event
        cause = drawn.get(span.parent_span_id)
        if cause is not None and cause["pid"] != pid:
            yield from _arrow(cause, event, next(numbers))


def _times(span: trace_pb2.Span, base_ns: int) -> tuple[float, float]:
    begin_us = (span.start_time.ToNanoseconds() - base_ns) / 1e3
    return begin_us, begin_us + span.duration.ToNanoseconds() / 1e3


def _arrow(cause: Event, event: Event, number: int) -> Iterator[Event]:
    arrow = {"cat": "weft", "name": "causes", "id": number}
    at_us = min(max(event["ts"], cause["ts"]), cause["ts"] + cause["dur"])
    yield arrow | {"ph": "s", "pid": cause["pid"], "tid": cause["tid"], "ts": at_us}
    yield arrow | {
        "ph": "f",
        "bp": "e",
        "pid": event["pid"],
        "tid": event["tid"],
        "ts": event["ts"],
    }


class _Rows:
    """Rows of spans by service: in a row each span lies within the one before it, or after it."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._pids: dict[str, int] = {}
        self._rows: dict[str, list[tuple[int, str, list[float]]]] = {}
        """Of each service: number, request and the ends of the open spans of each row."""

    def place(
        self, span: trace_pb2.Span, begin_us: float, stop_us: float
    ) -> tuple[int, int, list[Event]]:
        """Process and row of a span that begins no earlier than those before it, and the events
        that name them, if they are new.
        """
        who, named = span.instance or span.service, list[Event]()
        if who not in self._pids:
            self._pids[who] = next(self._numbers)
            named.append(_name("process_name", self._pids[who], 0, f"{who}: requests"))
        pid, rows = self._pids[who], self._rows.setdefault(who, [])
        for at, (tid, request, ends) in enumerate(rows):
            while ends and ends[-1] <= begin_us:
                ends.pop()
            if not ends or (request == span.request_id and ends[-1] >= stop_us):
                ends.append(stop_us)
                rows[at] = (tid, span.request_id, ends)
                return pid, tid, named
        tid = next(self._numbers)
        rows.append((tid, span.request_id, [stop_us]))
        named.append(_name("thread_name", pid, tid, f"row {len(rows)}"))
        return pid, tid, named


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def main(argv: Sequence[str]) -> int:
    os.nice(_MOST_NICE)
    order = msgspec.json.decode(Path(argv[0]).read_bytes(), type=MergeOrder)
    try:
        merge(order)
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        sys.stderr.write(json.dumps({"problem": f"{type(error).__name__}: {error}"}) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
