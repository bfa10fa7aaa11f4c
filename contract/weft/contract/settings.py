"""How a setting is declared: once, with its default, its bounds and the words that users read."""

from __future__ import annotations

from dataclasses import field
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """What a setting is for, in words for users, and the bounds of a number."""

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    @property
    def bounds(self) -> str:
        """The bounds in words; empty without any."""
        limits = ((">=", self.ge), (">", self.gt), ("<=", self.le))
        return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)

    def allows(self, value: float) -> bool:
        """Whether a number lies within the bounds; NaN never does."""
        return (
            value == value
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )


def setting(
    help: str,
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """Declares a field of a dataclass of settings."""
    return field(default=default, metadata={"setting": Setting(help, ge, gt, le)})
