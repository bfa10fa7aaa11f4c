"""How much of a pool quarantine may hold, and for how long, before its worker is to end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from weft.contract.errors import ConfigError
from weft.contract.messages import Outbox
from weft.contract.reports import LoadReport
from weft.engine.base.config import EngineConfig
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine, num_quarantined
from weft.testing.models.tiny_models import make_tiny

PAGE = 8
LEASE_S = 10.0
LEASE_PAGES = 12
"""A lease's: one is below a tenth of the pool (or staging area) of 199 pages, two are above."""


@pytest.fixture(params=[False, True], ids=["direct", "staged"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EnginePair]:
    clock = ManualClock()
    model_dir = make_tiny("llama", tmp_path / "tiny", seed=random.randrange(2**31))
    owner = make_engine(model_dir, "decode", clock, lease_s=LEASE_S, force_staging=request.param)
    fillers = [make_engine(model_dir, "prefill", clock, worker_id=name) for name in ("p0", "p1")]
    pair = EnginePair(owner, fillers, clock)
    yield pair
    pair.close()


def lose_a_lease(pair: EnginePair, filler: str) -> None:
    """The filler stands still in the middle of a lease: no proof comes."""
    pair.paused.add(filler)
    prompt = [random.randrange(3, 500) for _ in range(LEASE_PAGES * PAGE + 3)]
    request_id = pair.submit(prompt, candidates=[pair.candidate(filler)])
    started = len([command for command in pair.commands if command.action == "start"])
    pair.run(lambda: len([c for c in pair.commands if c.action == "start"]) > started)
    pair.stall(6)
    pair.finish(request_id)


def report(pair: EnginePair) -> LoadReport:
    """The owner's next load report."""
    loads: list[LoadReport] = []
    for _ in range(1000):
        outbox: Outbox = pair.owner.turn()
        if outbox.load is not None:
            loads.append(outbox.load)
            break
        pair.clock.offset_s += 0.05
    return loads[0]


def quarantined(load: LoadReport) -> int:
    """Of the pages that fillers write to."""
    if load.staging is None:
        return load.quarantined_pages
    assert load.quarantined_pages == 0
    return load.staging.quarantined


def test_one_lease_is_borne_for_ever(pair: EnginePair) -> None:
    lose_a_lease(pair, "p0")
    pair.clock.offset_s += 86_400
    load = report(pair)
    assert (quarantined(load), load.quarantine_over_s) == (LEASE_PAGES, 0.0)


def test_two_unanswered_leases_are_too_many_after_a_leases_life(pair: EnginePair) -> None:
    lose_a_lease(pair, "p0")
    lose_a_lease(pair, "p1")
    load = report(pair)
    assert quarantined(load) == 2 * LEASE_PAGES
    assert load.quarantine_over_s < LEASE_S
    pair.clock.offset_s += LEASE_S
    assert report(pair).quarantine_over_s > LEASE_S


def test_proof_in_time_ends_it(pair: EnginePair) -> None:
    lose_a_lease(pair, "p0")
    lose_a_lease(pair, "p1")
    pair.clock.offset_s += LEASE_S / 2
    pair.paused.clear()
    pair.run(lambda: num_quarantined(pair.owner) == 0)
    pair.clock.offset_s += LEASE_S
    assert report(pair).quarantine_over_s == 0.0


@pytest.mark.parametrize("wrong", [-0.1, 1.1])
def test_the_share_is_a_share(tmp_path: Path, wrong: float) -> None:
    with pytest.raises(ConfigError, match="max_quarantine_fraction"):
        EngineConfig(model_dir=tmp_path, max_quarantine_fraction=wrong)
