"""What can be learnt of a process whose main thread holds the interpreter for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from weft.common.worker.black_box import STACKS, STACKS_SIGNAL, STATE, STATE_SIGNAL

PROGRAM = """
import sys, time
from pathlib import Path
from weft.common.worker.black_box import BlackBox

class Engine:
    flight = None
    def snapshot(self, max_entries):
        return {"entries": max_entries}

def stuck_in_native_code():
    pow(7, 10**9)  # one call: the interpreter's lock is not given up

def sleeping():
    time.sleep(60)

folder = Path(sys.argv[1])
box = BlackBox(folder)
box.watch(Engine())
(folder / "ready").touch()
globals()[sys.argv[2]]()
"""


def wait_for(path: Path, text: str = "", timeout_s: float = 60.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{path} has no {text!r}"
        time.sleep(0.02)
    return path.read_text()


def run(folder: Path, what: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), what])
    wait_for(folder / "ready")
    time.sleep(0.2)
    return process


def test_stacks_are_told_though_the_interpreter_is_held(tmp_path: Path) -> None:
    process = run(tmp_path, "stuck_in_native_code")
    try:
        told, deadline = tmp_path / STACKS, time.monotonic() + 60
        while "in stuck_in_native_code" not in told.read_text():  # It may not be there yet.
            assert time.monotonic() < deadline, told.read_text()
            os.kill(process.pid, STACKS_SIGNAL)
            time.sleep(0.1)
        os.kill(process.pid, STATE_SIGNAL)
        time.sleep(0.5)
        assert not (tmp_path / STATE).exists()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_the_state_is_told_while_the_main_thread_is_stuck(tmp_path: Path) -> None:
    process = run(tmp_path, "sleeping")
    try:
        for _ in range(2):
            os.kill(process.pid, STATE_SIGNAL)
            assert json.loads(wait_for(tmp_path / STATE, "}")) == {"entries": 1000}
            (tmp_path / STATE).unlink()
    finally:
        process.kill()
        process.wait()
