"""The last plan of an engine that died, as its supervisor reads it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from weft.engine.loop.flight import MAX_ITEMS, FlightRecorder, read_plan
from weft.engine.scheduler.plan import Plan, PlanItem

ARRIVALS = itertools.count()


def item(name: str, start: int = 0, count: int = 1, slot: int = 0, fill: bool = False) -> PlanItem:
    request: Any = SimpleNamespace(
        key=SimpleNamespace(request_id=name),
        slot=slot,
        sample=0,
        is_fill=fill,
        arrival=next(ARRIVALS),
    )
    return PlanItem(request, start, count, True)


NAMES = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=64)
ITEMS = st.lists(st.tuples(NAMES, st.integers(0, 2**31), st.integers(1, 4096)), max_size=100)


@given(ITEMS, st.booleans())
def test_a_plan_comes_back_as_it_was(
    tmp_path_factory: Any, rows: list[tuple[str, int, int]], is_over: bool
) -> None:
    path = tmp_path_factory.mktemp("flight") / "plan"
    recorder = FlightRecorder(path)
    recorder.begin(Plan(chunks=[item("earlier", count=7)] * 3))
    recorder.end()
    recorder.begin(Plan(chunks=[item(*row, slot=slot) for slot, row in enumerate(rows)]))
    if is_over:
        recorder.end()
    plan = read_plan(path)
    assert plan is not None
    assert (plan["step"], plan["is_running"]) == (2, not is_over)
    assert (plan["num_items"], plan["num_tokens"]) == (len(rows), sum(row[2] for row in rows))
    told = [(i["request_id"], i["start_token"], i["num_tokens"]) for i in plan["items"]]
    assert told == rows[:MAX_ITEMS]


@given(ITEMS, st.integers(0, 100), st.integers(1, 3))
def test_decodes_come_before_chunks(
    tmp_path_factory: Any, rows: list[tuple[str, int, int]], most: int, num_steps: int
) -> None:
    """Step after step the same ones, each a token further."""
    path = tmp_path_factory.mktemp("flight") / "plan"
    recorder = FlightRecorder(path)
    items = [item(*row, slot=slot) for slot, row in enumerate(rows)]
    decodes = [each.request for each in items[:most]]
    chunks = items[len(decodes) :]
    starts = np.array([each.start for each in items[: len(decodes)]], np.int64)
    for step in range(num_steps):
        recorder.begin(Plan(decodes, np.arange(len(decodes)), starts + step, chunks))
    plan = read_plan(path)
    assert plan is not None
    expected = [(row[0], row[1] + num_steps - 1, 1) for row in rows[: len(decodes)]]
    expected += rows[len(decodes) :]
    told = [(i["request_id"], i["start_token"], i["num_tokens"]) for i in plan["items"]]
    assert told == expected[:MAX_ITEMS]
    assert (plan["step"], plan["num_items"]) == (num_steps, len(rows))


def test_nothing_was_written(tmp_path: Path) -> None:
    assert read_plan(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"x")
    assert read_plan(tmp_path / "short") is None
    FlightRecorder(tmp_path / "empty")
    assert read_plan(tmp_path / "empty") is None


def test_the_plan_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    program = f"""
import os, signal
from pathlib import Path
import test_flight
recorder = test_flight.FlightRecorder(Path({str(path)!r}))
item = test_flight.item("cmpl-1", start=32, count=16, slot=3, fill=True)
recorder.begin(test_flight.Plan(chunks=[item]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": here}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    plan = read_plan(path)
    assert plan is not None
    assert plan["is_running"]
    assert plan["items"] == [
        {
            "request_id": "cmpl-1",
            "sample": 0,
            "slot": 3,
            "start_token": 32,
            "num_tokens": 16,
            "is_fill": True,
        }
    ]
