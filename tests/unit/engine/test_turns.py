"""Processes that take turns: one at a time, and a killed one holds nobody up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from weft.contract.errors import ConfigError
from weft.engine.base.machine_lock import machine_lock

HOLD = """
import sys, time
from weft.engine.base.machine_lock import machine_lock

with machine_lock(sys.argv[1], 60, lambda: None):
    print("mine", flush=True)
    time.sleep(600)
"""


def never() -> None:
    raise AssertionError("nobody else has the turn")


def test_a_turn_is_waited_for_and_ends_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    name = "test"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mine\n"
        told: list[str] = []
        with (
            pytest.raises(ConfigError, match=rf"weft-{name}.lock for 0 s.*kv_memory_bytes"),
            machine_lock(name, 0.3, lambda: told.append("wait")),
        ):
            raise AssertionError("it is the other's turn")
        assert told == ["wait"]
        with machine_lock(f"{name}-other", 0, never):
            pass
        with machine_lock(name, 60, holder.kill):  # Once it is waited for.
            assert holder.wait(60)
        with machine_lock(name, 0, never):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_a_file_that_is_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "weft-test.lock").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(ConfigError, match=r"weft-test\.lock.*kv_memory_bytes"),
        machine_lock("test", 0, never),
    ):
        raise AssertionError("it is not opened")
    assert not (tmp_path / "elsewhere").exists()
