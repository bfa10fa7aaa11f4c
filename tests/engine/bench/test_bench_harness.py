"""The harness of the benchmarks: turns, spreads, parts that fail, and two trees in turns."""

from __future__ import annotations

import importlib
import json
import random
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
SCRIPT = """
import json, sys
at = sys.argv.index("--json")
rows = [{"name": "sum", "size": 8, "us": {"median": US}}, {"name": "sum", "size": 9, "us": 1.0}]
assert sys.argv[1:at] == ["--sizes", "8"], sys.argv
json.dump({"rows": rows}, open(sys.argv[at + 1], "w"))
"""


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("harness")


def test_ways_take_turns_and_the_first_does_not_count(harness: ModuleType) -> None:
    called: list[str] = []

    def way(name: str) -> int:
        called.append(name)
        return len(called)

    found = harness.in_turns({"a": lambda: way("a"), "b": lambda: way("b")}, 2)
    assert called in (["a", "b", "b", "a", "a", "b"], ["b", "a", "a", "b", "b", "a"])
    assert sorted(found["a"] + found["b"]) == [3, 4, 5, 6]


def test_a_spread_is_median_and_outer_tenths(harness: ModuleType, seed: int) -> None:
    values = [random.Random(seed).random() for _ in range(101)]
    found, ordered = harness.spread(values, 10.0), sorted(values)
    assert found.median == pytest.approx(10 * statistics.median(values))
    assert (found.low, found.high) == pytest.approx((10 * ordered[10], 10 * ordered[90]))
    assert harness.ratio_of([2.0, 8.0, 3.0], [1.0, 2.0, 1.0]).median == 3.0


def bench_of(harness: ModuleType) -> Any:
    bench = harness.Harness("some/sums.py", "Sums.", repeats=3)

    @bench.part
    def broken(run: Any) -> None:
        run.row(size=1, us=2.5)
        raise ValueError("no sum")

    @bench.part
    def whole(run: Any) -> None:
        run.row({"size": 2}, table="sums", us=harness.spread([1.0, 3.0, 2.0]))

    @bench.part_if_named
    def slow(run: Any) -> None:
        raise AssertionError("nobody asked for it")

    return bench


def test_a_part_that_fails_loses_nothing(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "folder" / "sums.json"
    assert bench_of(harness).main(["--json", str(target), "--commit", "abc"]) == 1
    document = json.loads(target.read_text())
    assert document["setup"]["commit"] == "abc"
    assert document["options"] == {"only": None, "repeats": 3}
    assert document["failures"] == ["broken: ValueError: no sum"]
    assert document["rows"] == [
        {"size": 1, "us": 2.5},
        {"table": "sums", "size": 2, "us": {"median": 2, "low": 1.2, "high": 2.8, "num": 3}},
    ]
    assert "FAILED broken" in capsys.readouterr().out
    assert bench_of(harness).main(["--only", "whole"]) == 0
    with pytest.raises(SystemExit):
        bench_of(harness).main(["--only", "nothing"])


def test_two_trees_are_compared_figure_by_figure(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tree, us in (("old", "4.0"), ("new", "3.0")):
        (tmp_path / tree / "bench").mkdir(parents=True)
        (tmp_path / tree / "bench" / "sums.py").write_text(SCRIPT.replace("US", us))
    monkeypatch.setattr(harness, "ROOT", tmp_path / "new")
    target = tmp_path / "pairs.json"
    bench = bench_of(harness)
    bench.flag("--sizes", type=int)
    flags = ["--sizes", "8", "--baseline", str(tmp_path / "old"), "--pairs", "2"]
    assert bench.main([*flags, "--json", str(target)]) == 0
    (row,) = json.loads(target.read_text())["rows"]
    assert row.pop("ratio")["median"] == 0.75
    assert row == {"what": "sum: us", "old": 4.0, "new": 3.0}
