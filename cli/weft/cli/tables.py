"""Tables on terminals, and in files and pipes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_UNBOUNDED = 10_000


def full_width(console: Console, table: Table) -> int:
    """Width in characters of a table in which nothing is cut or wrapped."""
    return console.measure(table, options=console.options.update(width=_UNBOUNDED)).maximum


def print_table(console: Console, table: Table) -> None:
    """Prints a table: whole to files and pipes, which have no width, else at most as wide as the
    terminal.
    """
    if not console.is_terminal:
        table.width = full_width(console, table)
    console.print(table, crop=False)
