"""Traces of several processes as one: numbers, names, the clock, and rows of spans."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from weft.common.telemetry.merge_profile import AROUND_S, MergeOrder, Part, merge
from weft.common.telemetry.profile_folder import ProfileFolder, discard
from weft.contract.errors import Internal, InvalidRequest, ProfilesDisabled
from weft.contract.profiles import check_id
from weft.v1 import trace_pb2

BEGAN_S = 1_790_000_000.0
ENDED_S = BEGAN_S + 2.0


def part_of_rank(path: Path, pid: int, base_ns: int, steps: Sequence[float]) -> Path:
    """What PyTorch's profiler writes of a rank on a GPU: a step, its kernel and their arrow."""
    events: list[dict[str, Any]] = []
    for number, label in ((pid, "CPU"), (0, "GPU 0"), (1, "GPU 1")):
        events.append(meta("process_name", number, {"name": "python"}))
        events.append(meta("process_labels", number, {"labels": label}))
    for index, at_s in enumerate(steps):
        ts = (at_s * 1e9 - base_ns) / 1e3
        step = {"ph": "X", "cat": "user_annotation", "name": f"step {index}", "ts": ts, "dur": 9.0}
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": ts + 20, "dur": 5.0}
        arrow = {"cat": "ac2g", "name": "ac2g", "id": index}
        events += [
            step | {"pid": pid, "tid": pid},
            kernel | {"pid": 0, "tid": 7},
            arrow | {"ph": "s", "pid": pid, "tid": pid, "ts": ts},
            arrow | {"ph": "f", "pid": 0, "tid": 7, "ts": ts + 20, "bp": "e"},
        ]
    events.append({"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 0})
    path.write_text(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events}))
    return path


def meta(name: str, pid: int, args: dict[str, str]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "ts": 0.0, "pid": pid, "tid": 0, "args": args}


def span(service: str, name: str, begin_s: float, end_s: float, **more: Any) -> trace_pb2.Span:
    made = trace_pb2.Span(service=service, instance=f"{service}-0", name=name, **more)
    made.start_time.FromNanoseconds(int(begin_s * 1e9))
    made.duration.FromNanoseconds(int((end_s - begin_s) * 1e9))
    return made


def merged(folder: Path, parts: list[Part], **more: Any) -> dict[str, Any]:
    out = folder / "out.json.gz"
    merge(MergeOrder(out=str(out), parts=parts, began_s=BEGAN_S, ended_s=ENDED_S, **more))
    found: dict[str, Any] = json.loads(gzip.decompress(out.read_bytes()))
    return found


def named(trace: dict[str, Any]) -> dict[str, int]:
    names = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    return {event["args"]["name"]: event["pid"] for event in names}


def unix_s(trace: dict[str, Any], event: dict[str, Any]) -> float:
    return float(trace["baseTimeNanoseconds"] / 1e9 + event["ts"] / 1e6)


def test_parts_keep_their_times_and_share_no_number(tmp_path: Path) -> None:
    """Merged by each worker, then of all workers; ranks in containers have the same pids."""
    bases = [int(BEGAN_S * 1e9) - random.randrange(10**15) for _ in range(2)]
    steps = [[BEGAN_S + 0.5, BEGAN_S + 1.25], [BEGAN_S + 0.75]]
    workers = []
    for number, (base, at) in enumerate(zip(bases, steps, strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        rank = part_of_rank(folder / "rank-0.json", 41, base, at)
        merged(folder, [Part(path=str(rank), label=f"decode-{number} rank 0")])
        workers.append(Part(path=str(folder / "out.json.gz")))
    trace = merged(tmp_path, workers, notes=["decode-2: gone"])
    processes = named(trace)
    assert processes.keys() == {
        f"decode-{number} rank 0: {what}"
        for number in (0, 1)
        for what in ("host", "GPU 0")  # Nothing ran on GPU 1.
    }
    assert len(set(processes.values())) == 4
    for number, at in enumerate(steps):
        for what, name, later_s in (("host", "step", 0.0), ("GPU 0", "gemm", 20e-6)):
            pid = processes[f"decode-{number} rank 0: {what}"]
            events = [e for e in trace["traceEvents"] if e["pid"] == pid and e["ph"] == "X"]
            assert [event["name"].split()[0] for event in events] == [name] * len(at)
            for event, at_s in zip(events, at, strict=True):
                assert unix_s(trace, event) == pytest.approx(at_s + later_s, abs=2e-6)
    for kind in ("s", "f"):
        ids = [event["id"] for event in trace["traceEvents"] if event["ph"] == kind]
        assert len(set(ids)) == len(ids) == 3
    assert trace["otherData"]["notes"] == ["decode-2: gone"]
    assert any(event["name"] == "note: decode-2: gone" for event in trace["traceEvents"])


def test_spans_are_cut_to_the_profile_and_lie_in_rows(tmp_path: Path) -> None:
    spans = [
        span("gateway", "chat", BEGAN_S - 100, ENDED_S + 100, span_id=b"12345678", request_id="a"),
        span("decode", "request", BEGAN_S + 0.1, ENDED_S, parent_span_id=b"12345678"),
        span("decode", "before", BEGAN_S - 9, BEGAN_S - 8),
        span("decode", "after", ENDED_S + 8, ENDED_S + 9, error="LATE: x"),
    ]
    for number in range(100):
        begin_s = BEGAN_S + random.uniform(0, 2)
        end_s = begin_s + random.uniform(0, 0.5)
        spans.append(span("decode", "some", begin_s, end_s, request_id=str(number % 7)))
    found = trace_pb2.ListSpansResponse(spans=spans)
    (tmp_path / "spans.pb").write_bytes(found.SerializeToString())
    trace = merged(tmp_path, [], spans=str(tmp_path / "spans.pb"))
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(shown) == len(spans) - 2
    (chat,) = [event for event in shown if event["name"] == "chat"]
    assert unix_s(trace, chat) == pytest.approx(BEGAN_S - AROUND_S)
    assert chat["dur"] == pytest.approx((2 + 2 * AROUND_S) * 1e6)
    assert chat["args"]["whole_ms"] == pytest.approx(202e3)
    assert chat["args"]["request"] == "a"
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(shown, key=lambda one: (one["ts"], -one["dur"])):
        row = rows.setdefault(event["tid"], [])
        while row and row[-1]["ts"] + row[-1]["dur"] <= event["ts"]:
            row.pop()
        if row:
            assert event["ts"] + event["dur"] <= row[-1]["ts"] + row[-1]["dur"]
            assert event["args"]["request"] == row[-1]["args"]["request"]
        row.append(event)
    (begin,) = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    (end,) = [event for event in trace["traceEvents"] if event["ph"] == "f"]
    (request,) = [event for event in shown if event["name"] == "request"]
    assert begin["id"] == end["id"]
    assert (begin["pid"], begin["tid"]) == (chat["pid"], chat["tid"])
    assert (end["pid"], end["tid"], end["ts"]) == (request["pid"], request["tid"], request["ts"])


async def test_a_folder_keeps_the_newest_and_says_what_failed(tmp_path: Path) -> None:
    folder = ProfileFolder(tmp_path / "profiles", max_profiles=2)
    times = {"began_s": BEGAN_S, "ended_s": ENDED_S}
    for name in ("one", "two", "three"):
        working = folder.make_working(name)
        await folder.merge(MergeOrder(out=str(folder.path_of(name)), parts=[], **times), working)
        discard(working)
    assert sorted(path.name for path in folder.root.iterdir()) == ["three.json.gz", "two.json.gz"]
    working = folder.make_working("four")
    broken = working / "rank-0.json"
    broken.write_text("{")
    order = MergeOrder(out=str(folder.path_of("four")), parts=[Part(path=str(broken))], **times)
    with pytest.raises(Internal, match="DecodeError"):
        await folder.merge(order, working)
    assert not folder.path_of("four").exists()
    assert working.stat().st_mode & 0o077 == 0
    with pytest.raises(ProfilesDisabled, match="--profile-dir"):
        ProfileFolder(None, 2).make_working("five")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ProfilesDisabled, match="file"):
        ProfileFolder(file, 2).make_working("five")


@pytest.mark.parametrize("name", ["", "..", ".x", "a/b", "a" * 65, "é"])
def test_names_that_are_no_files_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_id(name, "profile_prefix")
    assert refused.value.param == "profile_prefix"
