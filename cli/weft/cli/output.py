"""Standard output that may fail."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE}
"""Error numbers of a full disk, a closed terminal, and a pipe without a reader."""


class SteadyOutput(io.TextIOBase):
    """Standard output that ignores failures, such as a pipe without a reader, a full disk or a
    closed terminal.
    """

    def __init__(self) -> None:
        # Kept, since Rich replaces `sys.stdout` while it shows a bar by a file that writes to the
        # bar's console. If that console writes here, each write would lead back to itself.
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


def open_closed_output() -> None:
    """Makes standard output and error usable if the caller has closed them: to nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def finish_output() -> None:
    """Writes the buffered output or drops it. Otherwise the interpreter would try again at its end
    and fail.
    """
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
