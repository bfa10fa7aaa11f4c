"""Simulated meshes of `bench/fleet/serving.py` under overload: what the gate is for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
SECONDS = 20.0


@pytest.fixture
def slo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("slo")


@pytest.mark.full_after(1)
@pytest.mark.parametrize(("mesh", "rate"), [("prefill-bound", 400.0), ("decode-bound", 180.0)])
def test_goodput_survives_twice_the_capacity(slo: Any, mesh: str, rate: float) -> None:
    setup = slo.MESHES[mesh]
    targets = slo.Targets(1.0, 0.03)
    met = []
    for each in (slo.without_targets(setup), setup):
        result = slo.ServingSimulation(each).run(slo.chats(SECONDS, rate, targets, 1))["chat"]
        assert sum(result.outcomes.values()) == result.offered == int(SECONDS * rate)
        met.append(result.outcomes["met"])
    assert met[1] > 1.3 * met[0]


@pytest.mark.parametrize(
    ("mesh", "chats", "flood"), [("prefill-bound", 24.0, 200.0), ("decode-bound", 22.0, 180.0)]
)
def test_chats_keep_their_targets_beside_a_flood(
    slo: Any, mesh: str, chats: float, flood: float
) -> None:
    results = slo.ServingSimulation(slo.MESHES[mesh]).run(
        slo.merged(
            slo.chats(SECONDS, chats, slo.Targets(1.0, 0.03), 1), slo.flood(SECONDS, flood, 2)
        )
    )
    assert results["chat"].outcomes["met"] >= 0.95 * results["chat"].offered
    assert results["flood"].outcomes["served"] == results["flood"].offered, "held, not refused"


def test_with_little_load_the_gate_changes_nothing(slo: Any) -> None:
    setup = slo.MESHES["decode-bound"]
    targets = slo.Targets(1.0, 0.03)
    times = [
        slo.ServingSimulation(each).run(slo.chats(SECONDS, 20.0, targets, 1))["chat"].first_token_s
        for each in (slo.without_targets(setup), setup)
    ]
    assert sorted(times[0]) == pytest.approx(sorted(times[1]), rel=0.02)
