"""Simulated fleets of `bench/fleet`: the gateway's policies and index over made-up workers."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weft.common.telemetry.request_log import LoggedPrompt, LoggedSample, to_line
from weft.contract.keys import ShortKeys
from weft.gateway.routing import PolicyOptions

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return SimpleNamespace(
        simulation=importlib.import_module("fleet.simulation"),
        trace=importlib.import_module("fleet.trace"),
    )


def run(fleet: Any, policy: str, num_requests: int = 1500, rate: float = 40, **setup: Any) -> Any:
    made = fleet.simulation.Setup(policy=policy, **{"num_workers": 8, **setup})
    return fleet.simulation.Simulation(made).run(
        fleet.trace.conversations(num_requests, rate, 3, num_systems=20)
    )


def test_prefix_policies_save_what_others_compute_again(fleet: Any) -> None:
    results = {
        name: run(fleet, name) for name in ("random", "round_robin", "prefix_hash", "cache_aware")
    }
    oracle = results["random"].oracle_hit_rate
    assert len({result.oracle_hit_rate for result in results.values()}) == 1
    assert all(result.num_requests == 1500 for result in results.values())
    assert results["cache_aware"].hit_rate > 0.95 * oracle
    assert results["prefix_hash"].hit_rate > results["random"].hit_rate + 0.1
    assert results["cache_aware"].extra_tokens < results["round_robin"].extra_tokens / 5


@pytest.mark.parametrize("policy", ["cache_aware", "cache_aware approximate", "power_of_two"])
def test_a_run_repeats_and_another_seed_does_not(fleet: Any, policy: str) -> None:
    first, second = (run(fleet, policy, 400) for _ in range(2))
    assert first.choices == second.choices
    if policy == "power_of_two":
        assert run(fleet, policy, 400, seed=1).choices != first.choices


def test_the_index_comes_to_what_workers_hold(fleet: Any) -> None:
    setup = fleet.simulation.Setup(
        policy="cache_aware", num_workers=6, num_gateways=2, pages_per_worker=300
    )
    simulation = fleet.simulation.Simulation(setup)
    simulation.run(fleet.trace.conversations(600, 60, 5, num_systems=8))
    simulation._run_until(simulation._now + 1)
    for gateway in simulation._gateways:
        index = gateway.policy.index
        for number, worker in enumerate(simulation._workers):
            held = set(worker.cache._pages)
            assert len(held) <= 300
            assert index._held[f"w{number}"][2] == held
        assert index.num_pages == sum(len(w.cache._pages) for w in simulation._workers)
        # Nothing runs: what was sent has been taken back.
        assert not gateway.view.num_requests.any()
        assert not gateway.view.queued_tokens.any()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_hundreds_of_workers(fleet: Any, pool: str) -> None:
    result = run(fleet, "cache_aware", 2000, 2000, num_workers=512, pool=pool)
    assert result.num_requests == 2000
    assert result.hit_rate > 0.5


def test_load_policies_are_more_even_than_chance(fleet: Any) -> None:
    shape = {"pool": "decode", "num_workers": 16, "rate": 110}
    chance = run(fleet, "random", **shape)
    for policy in ("total_requests", "total_tokens", "power_of_two"):
        result = run(fleet, policy, **shape)
        assert result.balance < chance.balance
        assert result.p99_s < chance.p99_s


def test_recorded_requests_replay_to_the_same_choices(fleet: Any, tmp_path: Path) -> None:
    """A request log: the pages are those of the tokens that were logged."""
    rng = random.Random(9)
    system = [rng.randrange(1000) for _ in range(400)]
    prompts = [system + [rng.randrange(1000) for _ in range(60)] for _ in range(40)]
    path = tmp_path / "requests.log"
    lines = [
        LoggedPrompt(
            time=1e9 + 0.1 * number,
            request_id=f"r{number}",
            prompt_ids=ids,
            samples=[LoggedSample(num_tokens=7)],
        )
        for number, ids in enumerate(prompts)
    ]
    rng.shuffle(lines)  # they are written when they end
    path.write_text("".join(to_line(line) + "\n" for line in lines))
    trace = list(fleet.trace.request_log(path))
    assert [list(arrival.tokens) for arrival in trace] == prompts
    assert [arrival.time for arrival in trace] == pytest.approx([0.1 * n for n in range(40)])
    assert trace[3].pages == ShortKeys(prompts[3], 16, bytes(32)).upto(28)
    choices: list[list[int]] = []
    for _ in range(2):
        chosen: list[int] = []
        setup = fleet.simulation.Setup(policy="cache_aware", num_workers=4)
        result = fleet.simulation.Simulation(
            setup, lambda number, worker, into=chosen: into.append(worker)
        ).run(fleet.trace.request_log(path))
        choices.append(chosen)
    assert choices[0] == choices[1]
    assert len(set(choices[0])) == 1, "one shared prefix, little load: one worker"
    assert result.hit_rate == pytest.approx(39 * 400 / (40 * 460))


def test_block_hashes_share_whole_blocks(fleet: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}\n'
        '{"timestamp": 500, "input_length": 1024, "output_length": 5, "hash_ids": [7, 9]}\n'
    )
    first, second = fleet.trace.block_hashes(path, 2.0)
    assert (first.time, second.time, len(first.tokens)) == (0, 0.25, 1000)
    assert len(first.pages) == 62
    assert [a == b for a, b in zip(first.pages, second.pages, strict=False)] == [
        *([True] * 32),
        *([False] * 30),
    ]
    options = PolicyOptions(kv_events=True)
    setup = fleet.simulation.Setup(policy="cache_aware", num_workers=2, options=options)
    result = fleet.simulation.Simulation(setup).run([first, second])
    assert result.hit_rate == pytest.approx(512 / 2024)
