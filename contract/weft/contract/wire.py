"""The form in which a field of a declared type travels: its name in messages, and its checks on
arrival.

`weft.contract.codec` reads these declarations. A field without one has the same name in its
message, or that name without the `is_`, `has_` or `num_` of a flag or a count, or with `_time` or
nothing in place of the `_s` of seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MAX_MESSAGE_BYTES = 1024
"""Longest message of an error, in bytes of UTF-8. gRPC sends a status's message twice,
percent-encoded and in the details. A call with more than 8 KiB of metadata may lose both, and with
them the error's type.
"""


class Wire(NamedTuple):
    """The declaration of a field in messages."""

    name: str = ""
    """Name in the message; `outer.inner` for a field of the message in a field; empty: by rule."""
    param: str = ""
    """The field of the whole request that an error names; empty: the name in the message."""
    low: float | None = None
    high: float | None = None
    """Bounds of a number, or of each value of a mapping. NaN is never within them."""
    clamps: bool = False
    """Whether a number out of its bounds counts as the nearest bound; otherwise it is refused."""
    least: int | None = None
    most: int | None = None
    """Bounds of the bytes of a text, or of the entries of a list."""
    entry_bytes: int | None = None
    """Bytes of each entry of a list."""
    is_required: bool = False
    """Whether a name that is missing or unknown is refused."""
    check: Callable[[Any], object] | None = None
    """Raises ValueError for a value that is refused."""
    cut_bytes: int | None = None
    """Bytes to which a longer text, or each longer text of a list, is cut when it is sent."""
    newest: int | None = None
    """Most entries of a list that are sent, which are its last ones."""


def wire(**declared: Any) -> dict[str, Wire]:
    """The metadata of a dataclass's field that `Wire` declares."""
    return {"wire": Wire(**declared)}


def cut(text: str, max_bytes: int) -> str:
    """Truncates a text at a whole character."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."
