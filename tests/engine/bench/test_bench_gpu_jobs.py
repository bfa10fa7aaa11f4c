"""Lists of jobs on GPUs, with commands that need none."""

from __future__ import annotations

import importlib
import json
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from weft.testing.docs import ROOT

BENCH = ROOT / "bench"
LISTS = sorted((BENCH / "jobs").glob("*.txt"))
SLEEP = "import sys, time; print(' '.join(sys.argv[2:])); time.sleep(float(sys.argv[1]))"
FAMILY = """
sleep 1000 &
echo $$ $! >>$OUT/pids
setsid sleep 1000 &
echo $! >>$OUT/pids
"""


@pytest.fixture
def gpu_jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "gpu_jobs", raising=False)
    return importlib.import_module("gpu_jobs")


def command(tmp_path: Path, lines: list[str], *flags: str) -> list[str]:
    jobs = tmp_path / "some.txt"
    jobs.write_text("# What they answer.\n\n" + "\n".join(lines))
    script = str(BENCH / "gpu_jobs.py")
    return [sys.executable, script, str(jobs), "--out", str(tmp_path / "out"), *flags]


def python(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    return f"python {path}"


def rows_of(tmp_path: Path) -> dict[str, dict[str, Any]]:
    summary = json.loads((tmp_path / "out" / "jobs.json").read_text())
    return {row["name"]: row for row in summary["rows"]}


def texts_of(tmp_path: Path) -> dict[str, str]:
    """Contents of the archive, beside which only the summary is left."""
    archive = tmp_path / "out" / "some.tar.xz"
    assert {path.name for path in archive.parent.iterdir()} == {archive.name, "jobs.json"}
    with tarfile.open(archive) as files:
        found = {one.name: files.extractfile(one) for one in files}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def test_jobs_are_run_and_packed(tmp_path: Path) -> None:
    sleep = python(tmp_path, "sleep", SLEEP)
    lines = [
        f"first   0           20    {sleep} 0.2 $CUDA_VISIBLE_DEVICES",
        f"both    01          20    X='a b' {sleep} 0.1 $CUDA_VISIBLE_DEVICES $X",
        f"none    -           20    {sleep} 0 '$CUDA_VISIBLE_DEVICES'",
        f"shared  1,shared    20    {sleep} 0 $TRITON_CACHE_DIR",
        "wrong    any         20    python -c 'raise SystemExit(3)'",
        "absent   any         20    no-such-program",
        "unset    any         20    true $NOT_SET",
        f"third   2           20    {sleep} 0",
        f"long    0           9999  {sleep} 0",
        "result   any         20    sh -c 'echo {} >$OUT/result.json'",
    ]
    done = subprocess.run(
        command(tmp_path, lines, "--cards", "2", "--seconds", "100"),
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": "common", **_python_path()},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    states = {name: row["state"] for name, row in rows_of(tmp_path).items()}
    assert states.pop("third") == "not run: the machine has 2 cards"
    assert states.pop("long") == "not run: too little time"
    assert "no-such-program" in states.pop("absent")
    assert "NOT_SET" in states.pop("unset")
    assert states.pop("wrong") == "failed"
    assert rows_of(tmp_path)["wrong"]["rc"] == 3
    assert set(states.values()) == {"done"}
    texts = texts_of(tmp_path)
    assert texts["first.log"] == "0\n"
    assert texts["both.log"] == "0,1 a b\n"
    assert texts["none.log"] == "\n"
    assert texts["shared.log"] not in ("common\n", "\n")
    assert texts["result.json"] == "{}\n"


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


@pytest.mark.parametrize("why", ["limit", "signal", "leftover"])
def test_what_a_job_started_does_not_outlive_it(tmp_path: Path, why: str) -> None:
    """Neither in its process group, nor in one of its own."""
    script, pids = tmp_path / "family.sh", tmp_path / "out" / "pids"
    script.write_text(FAMILY + "wait\n" * (why != "leftover"))
    lines = [f"family 0 {4 if why == 'limit' else 80} sh {script}"]
    running = subprocess.Popen(
        command(tmp_path, lines, "--cards", "1", "--seconds", "100"), stdout=subprocess.DEVNULL
    )
    if why == "signal":
        deadline = time.monotonic() + 60
        while not pids.exists() or len(pids.read_text().split()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
    running.wait(100)
    states = {"limit": "killed at its limit", "signal": "killed on SIGTERM", "leftover": "done"}
    assert rows_of(tmp_path)["family"]["state"] == states[why]
    started = [int(pid) for pid in texts_of(tmp_path)["pids"].split()]
    assert len(started) == 3
    assert not any(map(is_alive, started))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_orders_of_random_jobs(gpu_jobs: ModuleType) -> None:
    """Jobs that end at any time before their limit: cards are shared by shared jobs alone, every
    job ends in time, and none waits for a later one that is not over when it could start.
    """
    rng = random.Random()
    for _ in range(50):
        num_cards, max_beside, end_s = rng.choice([1, 2, 4]), rng.choice([1, 3]), 200.0
        board = gpu_jobs.Board(num_cards, max_beside, end_s)
        waiting = []
        for number in range(rng.randrange(1, 25)):
            some = "".join(map(str, rng.sample(range(num_cards), rng.randint(1, num_cards))))
            cards = rng.choice([some, some, "any", "-"]) + rng.choice(["", "", ",shared"])
            waiting.append(gpu_jobs.parse_job(f"job{number} {cards} {rng.randint(5, 60)} true"))
        now_s, ends = 0.0, {}
        promised: dict[str, float] = {}
        while waiting:
            while chosen := board.next_job(waiting, now_s):
                job, cards = chosen
                beside = [one for one in board.started if {*one.cards} & {*cards}]
                assert not beside or job.is_shared
                assert all(one.job.is_shared for one in beside)
                for card in cards:
                    assert sum(card in one.cards for one in beside) < max_beside or not beside
                assert now_s + job.seconds <= end_s
                assert now_s <= promised.get(job.name, now_s)
                waiting.remove(job)
                started = gpu_jobs.Started(job, cards, None, Path(), now_s)
                board.started.append(started)
                ends[job.name] = now_s + job.seconds * rng.uniform(0.1, 1.0)
            # The first that waits for one set of cards gets it once all that run there are over.
            head = next((job for job in waiting if now_s + job.seconds <= end_s), None)
            if head is not None and head.cards != "any" and head.name not in promised:
                limits = [one.limit_s for one in board.started if {*one.cards} & {*head.cards}]
                if max(limits) + head.seconds <= end_s:
                    promised[head.name] = max(limits)
            waiting = [job for job in waiting if now_s + job.seconds <= end_s]
            if board.started:
                first = min(board.started, key=lambda one: ends[one.job.name])
                board.started.remove(first)
                now_s = ends[first.job.name]


@pytest.mark.parametrize(
    "line",
    [
        "name 0 10",
        "na/me 0 10 true",
        "name 00 10 true",
        "name x 10 true",
        "name 0,cold 10 true",
        "name 0 1.5 true",
        "name 0 10 X=1",
        "name 0 10 'open",
    ],
)
def test_wrong_lines_are_refused(gpu_jobs: ModuleType, line: str) -> None:
    with pytest.raises(ValueError):
        gpu_jobs.parse_job(line)


def test_a_wrong_line_is_named_before_any_job_runs(tmp_path: Path) -> None:
    lines = ["fine 0 10 true", "wrong 0 10"]
    done = subprocess.run(command(tmp_path, lines), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "some.txt:4: a job has a name" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_lists_name_tests_and_variables_that_are_there(gpu_jobs: ModuleType, path: Path) -> None:
    options = gpu_jobs.harness.parse([str(path)])
    assert options.jobs
    for job in options.jobs:
        words = job.command
        assert words[0] == "python", job.name
        for file in (word for word in words if word.endswith(".py")):
            assert (ROOT / file).is_file(), file
        assert set(re.findall(r"\$(\w+)", " ".join(words))) <= {"OUT", "GPU_KIT_DEMO"}
