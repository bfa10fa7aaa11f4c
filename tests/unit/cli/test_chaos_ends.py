"""What chaos finds wrong with ends of services, and with requests that are given up for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from weft.chaos.checks import check_ends
from weft.chaos.inject import Injection
from weft.chaos.load import ChaosLoad, Known
from weft.chaos.mesh import AFTERMATH_S, FENCE_S, Absence
from weft.chaos.requests import ChaosRequest, Pace, Reply
from weft.chaos.schedule import Planned
from weft.cli.up.process import describe_status
from weft.common.rpc.server import QUARANTINE_STATUS
from weft.contract.errors import PeerUnavailable

ASK = ChaosRequest(number=0, prompt=(1, 2), max_tokens=4, temperature=0.0, seed=1, n=1)
WORKERS = ["decode-0", "decode-1"]
FENCE, KILLED = describe_status(QUARANTINE_STATUS), describe_status(-9)


def kill(name: str, started_s: float, ended_s: float | None) -> Injection:
    planned = Planned(number=1, gap_s=0.1, kind="kill", target=name, hold_s=1.0)
    return Injection(planned=planned, names=frozenset({name}), started_s=started_s, ended_s=ended_s)


def given_up(absences: list[Absence], injections: list[Injection]) -> list[str]:
    """What is wrong with a request that was given up between 100.0 and 101.0 s; the absences are
    known later.
    """
    mesh = SimpleNamespace(absences=[], named=lambda role: WORKERS)
    injector: Any = SimpleNamespace(mesh=mesh, done=injections)
    reply = Reply(
        tokens=[[]],
        texts=[""],
        reasons=[[]],
        error=PeerUnavailable("no decode worker is ready", stage="route"),
        is_typed=True,
        started_s=100.0,
        ended_s=101.0,
    )
    load = ChaosLoad({"gateway": ""}, Known("tiny", [ASK], {0: reply}), injector, 0)
    assert load._violations("gateway", ASK, Pace(20.0), reply) == []
    mesh.absences += absences
    return [found.what for found in load.unserved()]


@pytest.mark.parametrize(
    ("since_s", "until_s", "is_well"),
    [
        (95.0, None, False),
        (95.0, 100.5, False),
        (90.0, 100.0 - AFTERMATH_S / 2, False),
        (90.0, 99.9 - AFTERMATH_S, True),
        (101.0 + FENCE_S - 0.1, None, False),
        (101.0 + FENCE_S + 0.1, None, True),
    ],
)
def test_a_request_may_be_given_up_while_every_worker_is_away(
    since_s: float, until_s: float | None, is_well: bool
) -> None:
    """One was killed, the other ended for the quarantine that faults of its fillers had filled."""
    fence = Absence(name="decode-0", how=FENCE, since_s=since_s, until_s=until_s)
    found = given_up([fence], [kill("decode-1", 99.0, None)])
    assert bool(found) == is_well
    assert all("though decode-0 was well" in what for what in found)


def test_a_worker_that_was_killed_was_well_until_then() -> None:
    killed = Absence(name="decode-0", how=KILLED, since_s=101.1, until_s=None)
    (what,) = given_up([killed], [kill("decode-1", 99.0, None), kill("decode-0", 101.1, None)])
    assert "though decode-0 was well" in what


def test_a_service_that_ends_by_itself_is_found() -> None:
    def found(how: str, *injections: Injection) -> list[str]:
        absence = Absence(name="decode-0", how=how, since_s=50.0, until_s=60.0)
        return [violation.what for violation in check_ends([absence], injections)]

    assert found(FENCE) == []
    assert found(KILLED, kill("decode-0", 49.9, None)) == []
    (what,) = found(KILLED, kill("decode-1", 49.9, None), kill("decode-0", 30.0, 40.0))
    assert what == "decode-0 was killed by SIGKILL without a fault of its own"


def test_workers_that_share_experts_end_with_one_another_alone() -> None:
    absence = Absence(name="decode-0", how=KILLED, since_s=50.0, until_s=60.0)

    def found(name: str) -> int:
        return len(check_ends([absence], [kill(name, 49.9, None)], num_together=2))

    assert [found(f"decode-{number}") for number in range(4)] == [0, 0, 1, 1]
    assert found("prefill-1") == 1
