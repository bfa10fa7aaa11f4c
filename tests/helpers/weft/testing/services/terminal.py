"""A program on a pseudo-terminal, whose output is read as a user would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

_LAUNCHER = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal that of its session, so that Ctrl-C is its, and becomes the program."""


class Terminal:
    """A program on a pseudo-terminal.

    Args:
        command: The program and its arguments.
        columns: Width of the terminal, which has 24 lines.
    """

    def __init__(self, *command: str, columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns)
        environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
        for name in ("COLUMNS", "LINES"):  # They would count more than the terminal.
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
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

    def forget(self) -> None:
        """Drops what was written so far."""
        self._bytes = b""

    def type(self, keys: bytes) -> None:
        """Sends what the keyboard would."""
        os.write(self._ours, keys)

    def resize(self, columns: int) -> None:
        """Gives the terminal another width."""
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Ends the program."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
