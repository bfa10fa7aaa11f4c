"""What both processes of a worker log, and how; and how far a worker says that loading is."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from weft.cli.up.process import read_progress
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.processes import ServiceProcess

LOADED = "the engine is loaded"
NOTICE = "pages are loaded whole all the same"


@pytest.mark.full_after(2)
@pytest.mark.parametrize(
    ("level", "fmt"), [("info", "text"), ("warning", "json"), ("info", "json")]
)
def test_the_engine_logs_as_its_worker_does(tmp_path: Path, level: str, fmt: str) -> None:
    model = make_tiny("llama", tmp_path / "model")
    command = [sys.executable, "-m", "weft.cli", "serve", "decode", "--model-dir", str(model)]
    command += ["--kv-memory-bytes", "4194304", "--transport", "data"]
    command += ["--log-level", level, "--log-format", fmt, "--load-by-layer", "always"]
    with ServiceProcess("decode", command, tmp_path) as process:
        process.wait_ready(240)
        loaded = read_progress(process.ready_path.with_suffix(".progress"))
        assert loaded == (0, 0, "opening transports")
        deadline = time.monotonic() + 60
        while level == "info" and LOADED not in process.log:
            assert time.monotonic() < deadline, process.log
            time.sleep(0.1)
    # It has ended: nothing comes any more.
    lines = [line for line in process.log.splitlines() if LOADED in line]
    assert len(lines) == (level == "info"), process.log
    # What the worker tells of itself is no warning.
    assert (NOTICE in process.log) == (level == "info"), process.log
    wanted = {"text": r"[\d:.]+ decode-engine info ", "json": r'{.*"service": "decode-engine".*}'}
    assert all(re.match(wanted[fmt], line) for line in lines), lines
