"""How many cores a process counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from weft.contract import cores


def test_a_process_counts_the_cores_that_it_may_use() -> None:
    program = (
        "import os; from weft.contract.cores import num_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(num_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("text", "most"),
    [("max 100000", None), ("150000 100000", 2), ("20000 100000", 1), ("junk", None), ("", None)],
)
def test_a_control_groups_quota_counts(
    text: str, most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    monkeypatch.setattr(cores, "_QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores.num_cores() == (8 if most is None else most)
