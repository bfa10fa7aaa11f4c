"""A record of routing, replayed through the policies."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from weft.contract.errors import ConfigError
from weft.gateway.routing import (
    POLICIES,
    Choice,
    FleetPageIndex,
    Policy,
    PolicyOptions,
    PoolView,
    RoutingRequest,
    make_policy,
)
from weft.gateway.routing.record_file import RoutingRecord
from weft.testing.services.routing_pool import PAGE, pool, worker
from weft.testing.services.routing_replay import read_record, replay

NAMES = [*POLICIES, "cache_aware approximate"]
POOL = "tiny/prefill"


class Clock:
    """Moves when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def prompts(rng: random.Random) -> list[list[int]]:
    """Some begin alike."""
    systems = [[rng.randrange(9) for _ in range(rng.randint(8, 60))] for _ in range(3)]
    return [
        rng.choice(systems) + [rng.randrange(50) for _ in range(rng.randint(1, 90))]
        for _ in range(25)
    ]


class Life:
    """Random events of a pool, shown to a policy.

    Args:
        policy: Records.
        clock: Of the policy.
        seed: Of everything.
    """

    def __init__(self, policy: Policy, clock: Clock, seed: int) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.clock = clock
        self.prompts = prompts(self.rng)
        self.epochs = dict.fromkeys("abcd", 1)
        self.view = self.new_view()
        self.chosen: list[list[Choice]] = []

    def new_view(self) -> PoolView:
        names = self.rng.sample(sorted(self.epochs), self.rng.randint(1, 4))
        hosts = [self.rng.choice(["", "h1", "h2"]) for _ in names]
        workers = zip(sorted(names), hosts, strict=True)
        return pool([worker(name, epoch=self.epochs[name], host=host) for name, host in workers])

    def run(self, num_choices: int) -> None:
        while len(self.chosen) < num_choices:
            self.clock.now += self.rng.expovariate(0.1)
            self.event(self.rng.random())

    def event(self, which: float) -> None:
        if which < 0.05:
            self.view = self.new_view()
        elif which < 0.07:
            self.policy.flush()
        elif which < 0.1:
            name = self.rng.choice(sorted(self.epochs))
            self.epochs[name] += 1
        elif which < 0.4 and self.policy.index is not None:
            self.tell(self.policy.index)
        else:
            self.chosen.append(self.choose())

    def tell(self, index: FleetPageIndex) -> None:
        view = self.view
        name = self.rng.choice(view.workers)
        ids = self.rng.choice(self.prompts)
        keys = RoutingRequest(request_id="", prompt_ids=ids).page_keys(name).upto(len(ids) // PAGE)
        how = self.rng.choice(["add", "add", "remove", "replace", "forget"])
        if how == "forget":
            index.forget(name.worker_id)
        else:
            taken = iter(keys[: self.rng.randint(1, len(keys))])
            getattr(index, how)(name.worker_id, name.epoch, taken)

    def choose(self) -> list[Choice]:
        rng, view = self.rng, self.view
        for position in range(len(view)):
            view.put(position, rng.randrange(6), rng.randrange(400), rng.randrange(900))
            view.tokens_per_s[position] = rng.random() * 1000
        request = RoutingRequest(
            request_id=f"r{len(self.chosen)}",
            prompt_ids=rng.choice(self.prompts),
            cache_salt=rng.choice(["", "", "s"]),
            routing_key=rng.choice(["", "k1", "k2"]),
            prefill_host=rng.choice(["", "h1"]),
            first_token_s=rng.choice([None, 0.3]),
            adapter=rng.choice([b"", bytes(range(32))]),
        )
        return self.policy.choose(view, request, rng.randint(1, 3))


def recorded(folder: Path, name: str, seed: int, num_choices: int = 150) -> tuple[Path, Life]:
    """A record of a life, and the life."""
    kind, _, approximate = name.partition(" ")
    clock = Clock()
    options = PolicyOptions(
        clock=clock,
        kv_events=not approximate,
        max_tree_pages=40,
        index_pages=120,
        max_pins=1,
        pin_idle_s=50.0,
    )
    record = RoutingRecord(folder, "gateway-1", 1 << 30)
    life = Life(record.policy(POOL, kind, options), clock, seed)
    life.run(num_choices)
    record.close()
    return record.path, life


@pytest.mark.parametrize("name", NAMES)
def test_a_record_replays_to_the_same_choices(tmp_path: Path, name: str) -> None:
    for number in range(20):
        seed = random.randrange(2**31)
        print("seed", seed)
        path, life = recorded(tmp_path / str(number), name, seed)
        if any(len(chosen) > 1 for chosen in life.chosen):
            break
    assert any(len(chosen) > 1 for chosen in life.chosen), "no choice of several workers"
    assert path.stat().st_mode & 0o777 == 0o600
    decisions = list(replay(read_record(path), make_policy))
    assert [decision.recorded for decision in decisions] == life.chosen
    assert [decision.replayed for decision in decisions] == life.chosen
    assert [decision.request_id for decision in decisions] == [f"r{i}" for i in range(150)]


@pytest.mark.parametrize("name", ["cache_aware", "total_requests", "manual", "bucket"])
def test_something_else_in_a_record_is_another_choice(tmp_path: Path, name: str) -> None:
    """What is compared does depend on the record: without it other workers are chosen."""
    path, _ = recorded(tmp_path, name, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.get("columns", {}).clear()
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    decisions = list(replay(read_record(changed), make_policy))
    assert not all(decision.is_same for decision in decisions)


def test_without_its_events_cache_aware_finds_nothing(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path, "cache_aware", 4)
    untold = (line for line in read_record(path) if type(line).__name__ != "PagesReported")
    decisions = list(replay(untold, make_policy))
    assert any(choice.match_tokens for one in decisions for choice in one.recorded)
    assert not any(choice.match_tokens for one in decisions for choice in one.replayed)


def test_a_record_that_was_cut_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    path, life = recorded(tmp_path, "cache_aware", random.randrange(2**31))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    decisions = list(replay(read_record(path), make_policy))
    assert 0 < len(decisions) < len(life.chosen)
    assert all(decision.is_same for decision in decisions)
    path.write_bytes(b'{"kind": "chose", "pool": 7}\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(read_record(path))


def test_a_record_ends_at_its_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    record = RoutingRecord(tmp_path, "gateway-1", 20_000)
    life = Life(record.policy(POOL, "cache_aware", PolicyOptions(clock=clock)), clock, 5)
    life.run(300)
    record.close()
    assert record.path.stat().st_size <= 20_000
    assert "reached its bound" in caplog.text
    decisions = list(replay(read_record(record.path), make_policy))
    assert 0 < len(decisions) < 300
    assert all(decision.is_same for decision in decisions)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--routing-record-dir"):
        RoutingRecord(tmp_path / "file", "gateway-1", 1 << 20)
