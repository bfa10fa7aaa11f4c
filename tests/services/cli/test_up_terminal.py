"""`weft up` on a terminal: a pseudo-terminal whose output is read as a user would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weft.cli.up.ports import free_ports
from weft.testing.models.tiny_models import make_tiny

COLUMNS = 60


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
        for name in ("COLUMNS", "LINES"):  # They would count more than the terminal.
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self._bytes = b""

    @property
    def text(self) -> str:
        """What was written, without control sequences."""
        text = self._bytes.decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")

    def until(self, wanted: str) -> None:
        """Reads until something was written; an empty text: to the end."""
        deadline = time.monotonic() + 120
        while not wanted or wanted not in self.text:
            assert time.monotonic() < deadline, self.text
            if not select.select([self._ours], [], [], 1)[0]:
                continue
            try:
                self._bytes += os.read(self._ours, 65536)
            except OSError:  # its last process has ended
                assert not wanted, self.text
                return

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)


def _take_terminal() -> None:
    """Makes the terminal that of a session of its own, so that Ctrl-C is its."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def weft_up(folder: Path, *flags: str) -> Iterator[Terminal]:
    (port,) = free_ports("127.0.0.1", 1)
    model = make_tiny("llama", folder / "tiny-model", tokenizer=True, vocab_size=512)
    own = ("--model", str(model), "--grpc-port", str(port), "--no-rest", "--prefill", "0")
    state = ("--state-dir", str(folder / "state"), "--kv-memory-bytes", "4194304")
    terminal = Terminal(sys.executable, "-m", "weft.cli", "up", *own, *state, *flags)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()


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
    with weft_up(tmp_path, "--decode-args", "--max-num-nothing 1", *flags) as terminal:
        terminal.until("")
        assert terminal.process.wait(60) == 1
        assert ("✗ decode-0" in terminal.text) == (not flags)
        last = terminal.text.rpartition("the end of")[2]
        assert "--max-num-nothing" in last
        assert "ended with status 2" in terminal.text
