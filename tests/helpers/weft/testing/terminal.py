"""Programs whose output is a terminal."""

from __future__ import annotations

import contextlib
import os
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence


def run_on_terminal(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float = 60
) -> tuple[int, str]:
    """Exit status, and all that the program has written to the terminal. It is killed after
    `timeout_s`.
    """
    terminal, end = os.openpty()
    termios.tcsetwinsize(terminal, (40, 120))
    shown = b""
    with (
        os.fdopen(terminal, "rb", buffering=0) as screen,
        subprocess.Popen(
            command, stdout=end, stderr=end, env=dict(environment) | {"TERM": "xterm"}
        ) as process,
    ):
        os.close(end)
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        # The end of a terminal that nobody writes to is an error.
        with contextlib.suppress(OSError):
            while piece := screen.read(4096):
                shown += piece
        status = process.wait()
        timer.cancel()
    return status, shown.decode(errors="replace")
