"""Warnings about parts of a request that were left out.

The server collects one list per call, from wherever the part is left out, and sends it ahead of the
answer as the header `x-weft-warnings`.
"""

from __future__ import annotations

from contextvars import ContextVar

HEADER = "x-weft-warnings"
_MAX_CHARS = 1024
_collected: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


def begin_warnings() -> None:
    """Starts the list of the current call."""
    _collected.set([])


def warn(where: str, what: str) -> None:
    """Adds a warning to the current call; each is kept once. `where` is the path of the part in the
    client's body, such as "tools[2]"; `what` has become of it, such as "left out: tools of type
    `web_search` run elsewhere".
    """
    collected, text = _collected.get(), _printable(f"{where[:120]}: {what[:200]}")
    if collected is not None and text not in collected:
        collected.append(text)


def current_warnings() -> tuple[str, ...]:
    """The warnings of the current call, in the order in which they arose."""
    return tuple(_collected.get() or ())


def warning_headers() -> tuple[tuple[str, str], ...]:
    """The header for the current call's warnings, separated by "; "; empty without any.

    Of more than 1,024 characters the rest is left out, which its end "..." shows.
    """
    text = "; ".join(current_warnings())
    if not text:
        return ()
    return ((HEADER, text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."),)


def _printable(text: str) -> str:
    """Headers of gRPC and HTTP are printable ASCII, without blanks at their ends."""
    return "".join(char if " " <= char <= "~" else "?" for char in text).strip()
