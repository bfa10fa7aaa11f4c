"""`weft up` on a terminal: a pseudo-terminal whose output is read as a user would see it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weft.cli.up.ports import free_ports
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.terminal import Terminal

COLUMNS = 60


@contextmanager
def weft_up(folder: Path, *flags: str) -> Iterator[Terminal]:
    (port,) = free_ports("127.0.0.1", 1)
    model = make_tiny("llama", folder / "tiny-model", tokenizer=True, vocab_size=512)
    own = ("--model", str(model), "--grpc-port", str(port), "--no-rest", "--prefill", "0")
    state = ("--state-dir", str(folder / "state"), "--kv-memory-bytes", "4194304")
    command = (sys.executable, "-m", "weft.cli", "up", *own, *state, *flags)
    terminal = Terminal(*command, columns=COLUMNS)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.full
def test_a_start_is_seen_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with weft_up(tmp_path) as terminal:
        terminal.until("Ctrl-C ends it.")
        shown = terminal.text
        assert re.search(r"\S decode-0 +starting +\d+\.\d s", shown)
        assert re.search(r"✓ decode-0 +ready +\d+\.\d s", shown)
        lines = shown.partition("Weft is ready")[0].splitlines()
        assert max(len(line) for line in lines) == COLUMNS
        terminal.type(b"\x03")
        terminal.until("")
        assert terminal.process.wait(60) == 0
        assert "stopping: running requests have 3 s" in terminal.text


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--plain",), marks=pytest.mark.full)], ids=["live", "plain"]
)
def test_why_a_worker_failed_can_be_read(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with weft_up(tmp_path, "--decode-args", "--host-cache-bytes 1", *flags) as terminal:
        terminal.until("")
        assert terminal.process.wait(60) == 1
        assert ("✗ decode-0" in terminal.text) == (not flags)
        last = terminal.text.rpartition("the end of")[2]
        assert "host_cache_bytes = 1" in last
        assert "ended with status 1" in terminal.text
