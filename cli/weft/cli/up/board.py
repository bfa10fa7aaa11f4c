"""The live part of `weft up` on a terminal: a line for each service that starts, then a summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class _Row:
    began_s: float
    state: str = "starting"
    done: int = 0
    total: int = 0
    ended_s: float | None = None
    """When it was ready or failed; None: it still starts."""
    has_failed: bool = False

    @property
    def percent(self) -> str:
        """Empty if the completed part of the phase is unknown, or the service does not start any
        more.
        """
        if self.ended_s is not None or not self.total:
            return ""
        return f"{min(100, 100 * self.done // self.total)} %"


class Board:
    """The live part of the terminal, drawn several times a second.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._spinner = Spinner("dots")
        self.summary: Text | None = None
        """The state of the whole mesh in a few lines; None: it has not been ready yet."""

    def starting(self, name: str) -> None:
        self._rows[name] = _Row(self._clock())

    def loading(self, name: str, done: int, total: int, what: str) -> None:
        """Sets the phase of a starting service, and how much of it is done; total 0: unknown."""
        row = self._rows[name]
        row.state, row.done, row.total = what, done, total

    def ready(self, name: str) -> None:
        row = self._rows[name]
        row.state, row.ended_s = "ready", self._clock()

    def failed(self, name: str, how: str) -> None:
        """A service ended before it was ready."""
        row = self._rows.setdefault(name, _Row(self._clock()))
        row.state, row.ended_s, row.has_failed = how, self._clock(), True

    def forget(self, name: str) -> None:
        """Drops the line of a service that is gone."""
        self._rows.pop(name, None)

    def forget_ended(self) -> None:
        """Drops the lines of services that no longer start."""
        self._rows = {name: row for name, row in self._rows.items() if row.ended_s is None}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = self._clock()
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column(no_wrap=True, justify="right", width=5)
        table.add_column(no_wrap=True, justify="right", width=8)
        for name, row in self._rows.items():
            mark: Spinner | Text = self._spinner
            style = ""
            if row.ended_s is not None:
                style = "red" if row.has_failed else "green"
                mark = Text("✗" if row.has_failed else "✓", style)
            seconds = (now if row.ended_s is None else row.ended_s) - row.began_s
            table.add_row(mark, name, Text(row.state, style), row.percent, f"{seconds:.1f} s")
        if self._rows:
            yield table
        if self.summary is not None:
            yield self.summary
