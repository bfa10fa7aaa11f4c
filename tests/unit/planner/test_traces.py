"""Public traces' forms, and made-up days."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from weft.cli.main import main
from weft.contract.errors import ConfigError
from weft.planner.forecast import Speed, Targets
from weft.planner.replay.replay import oracle, replay
from weft.planner.replay.traces import DayName, made_day, read_trace

SPEED = Speed(prefill_tokens_per_s=2500.0, step_base_s=0.015, step_request_s=0.0012)
TARGETS = Targets(first_token_s=3.0, inter_token_s=0.05, is_enforced=True)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1200, "output_length": 7, "hash_ids": [1, 2, 9]}\n'
    '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


def test_mooncakes_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second = read_trace(path)
    # In the file's order the other one came first, and left two blocks.
    assert first == (0.0, 1100 - 2 * 512, 5)
    assert second == (2.0, 1200, 7)


def test_azures_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.time_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.time_s == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", MOONCAKE + '{"timestamp": 1}\n', "line 3: KeyError"),
        ("a.jsonl", "{", "line 1: JSONDecodeError"),
        ("a.csv", AZURE + "yesterday,1,2\n", "line 4: ValueError"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "it has no requests"),
        ("a.txt", "", "give a .jsonl file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_trace(path)


def test_the_command_tells_a_days_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": 200 * number, "input_length": 1500, "output_length": 100}
        for number in range(1000)
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    speed = ("--prefill-rate", "2500", "--step-ms", "15", "--step-request-ms", "1.2")
    assert main(["plan", "--replay", str(path), *speed, "--first-token", "3", "--oracle"]) == 0
    told = capsys.readouterr().out
    assert "planner  goodput" in told
    assert "oracle   goodput" in told
    assert main(["plan", "--replay", str(path), *speed, "--first-token", "3", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["planner"]
    assert planned["requests"] == 1000
    assert planned["changes"]


def beside_an_oracle(name: DayName, hours: float) -> tuple[float, float, str]:
    """Goodput and worker hours of a day that no rule was chosen by, as shares of the oracle's."""
    seed = random.randrange(2**32)
    day = made_day(name, requests_per_s=8.0, hours=hours, seed=seed)
    best = oracle(day, SPEED, TARGETS)
    planned = replay(day, SPEED, TARGETS, first=(4, 2))
    assert planned.alarms == set()
    goodput = planned.tally.goodput / best.tally.goodput
    return goodput, planned.worker_hours / best.worker_hours, f"{name} of seed {seed}"


@pytest.mark.full
@pytest.mark.parametrize("name", ["diurnal", "bursts", "shift"])
def test_days_beside_an_oracle(name: DayName) -> None:
    """A day of traffic: nearly the oracle's goodput, for little more."""
    goodput, worker_hours, told = beside_an_oracle(name, 24.0)
    assert goodput >= 0.97, told
    assert worker_hours <= 1.15, told


def test_hours_beside_an_oracle() -> None:
    """As the days, but all of it comes twelve times as fast, so it costs more."""
    goodput, worker_hours, told = beside_an_oracle("shift", 2.0)
    assert goodput >= 0.95, told
    assert worker_hours <= 1.25, told
