"""Fault points: off costs nothing and changes nothing, on does exactly what a spec says."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from weft.chaos.sabotage import gateway as of_gateways
from weft.chaos.sabotage import worker as of_workers
from weft.contract.errors import FaultsDisabled, InjectedFault, InvalidRequest
from weft.contract.faults import BOARD, KINDS, FaultBoard, FaultPoint, FaultSpec

ROOT = Path(__file__).resolve().parents[3]


def point() -> FaultPoint:
    return FaultPoint("a.b", "somewhere", "drop", "duplicate", "corrupt", "error")


def test_nothing_is_armed_without_the_flag() -> None:
    board = FaultBoard(point())
    with pytest.raises(FaultsDisabled, match="--enable-faults"):
        board.arm(FaultSpec(point="a.b", kind="drop"))
    board.enable()
    board.arm(FaultSpec(point="a.b", kind="drop"))
    assert [state.spec.kind for state in board.states()] == ["drop"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"point": "c.d"},
        {"kind": "sabotage"},
        {"kind": ""},
        {"probability": 0.0},
        {"probability": 1.5},
        {"count": -1},
        {"skip": -1},
        {"delay_s": 1e6},
    ],
)
def test_what_cannot_be_armed_is_refused(wrong: dict[str, object]) -> None:
    board = FaultBoard(point())
    board.enable()
    values: dict[str, object] = {"point": "a.b", "kind": "drop", **wrong}
    with pytest.raises(InvalidRequest):
        board.arm(FaultSpec(**values))  # type: ignore[arg-type]
    assert not board.states()


def test_a_fault_happens_as_often_as_it_says() -> None:
    here = point()
    here.arm(FaultSpec(point="a.b", kind="drop", skip=2, count=3))
    assert [here.fire() for _ in range(8)] == ["", "", *["drop"] * 3, "", "", ""]
    (state,) = here.states()
    assert (state.reached, state.fired) == (8, 3)
    here.arm(FaultSpec(point="a.b", kind="duplicate", count=0))
    assert [list(here.repeat(1)) for _ in range(50)] == [[1, 1]] * 50


def test_the_same_seed_makes_the_same_choices() -> None:
    runs = []
    for seed in (7, 7, 8):
        here = point()
        here.arm(FaultSpec(point="a.b", kind="drop", probability=0.3, count=0, seed=seed))
        runs.append([len(here.repeat("x")) for _ in range(200)])
    assert runs[0] == runs[1] != runs[2]
    assert 30 < runs[0].count(0) < 90


def test_one_bit_is_flipped_in_one_of_the_pages() -> None:
    here, pool = point(), np.zeros((5, 64), np.uint8)
    here.arm(FaultSpec(point="a.b", kind="corrupt", seed=3))
    for _ in range(4):
        here.flip_bit(pool, [1, 3])
    assert np.unpackbits(pool).sum() == np.unpackbits(pool[[1, 3]]).sum() == 1


def test_errors_are_typed_and_clearing_ends_stalls() -> None:
    here = point()
    here.arm(FaultSpec(point="a.b", kind="error"))
    with pytest.raises(InjectedFault, match=r"a\.b"):
        here.fire()
    here.clear()
    here.arm(FaultSpec(point="a.b", kind="stall", delay_s=120))
    stalled = threading.Thread(target=here.fire)
    stalled.start()
    time.sleep(0.05)
    assert stalled.is_alive()
    assert here.clear() == 1
    stalled.join(30)
    assert not stalled.is_alive()
    assert not here.is_armed


async def test_stalls_on_a_loop_leave_the_loop_free() -> None:
    here = point()
    here.arm(FaultSpec(point="a.b", kind="stall", delay_s=120))
    stalled = asyncio.create_task(here.fire_async())
    await asyncio.sleep(0.05)
    assert not stalled.done()
    here.clear()
    assert await asyncio.wait_for(stalled, 30) == "stall"


def test_every_point_is_passed_somewhere_and_every_kind_is_used() -> None:
    text = "\n".join(
        path.read_text()
        for folder in ("pages", "engine", "services")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "faults.py"
    )
    source = (ROOT / "contract/weft/contract/faults.py").read_text()
    names = dict(re.findall(r'^([A-Z_]+) = FaultPoint\(\s*"([a-z.]+)"', source, re.M))
    assert sorted(names.values()) == sorted(point.name for point in BOARD.points)
    assert [name for name in names if f"faults.{name}" not in text] == []
    sabotages = [point for one in (of_workers, of_gateways) for point in vars(one).values()]
    points = [*BOARD.points, *(one for one in sabotages if isinstance(one, FaultPoint))]
    assert {kind for point in points for kind in point.kinds} == set(KINDS)
