"""The declaration of settings: each once, with its default, its bounds and the words that users
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Literal, NamedTuple

TransportName = Literal["auto", "nixl", "shared", "data"]
"""How KV pages travel."""
RoleName = Literal["decode", "prefill", "both"]
"""What a worker does for the mesh."""


class Setting(NamedTuple):
    """The purpose of a setting, in words for users, and the bounds of a number."""

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


MAX_CONTEXT_TOKENS = Setting("longest prompt plus output in tokens; default the model's", ge=2)
"""A setting that gateways and engines have in common."""


def setting(
    declared: Setting | str,
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """Declares a field of a dataclass of settings, with the words for its users."""
    if isinstance(declared, str):
        declared = Setting(declared, ge, gt, le)
    return field(default=default, metadata={"setting": declared})


def settings_of(declaring: type[Any]) -> Mapping[str, Setting]:
    """The settings that a dataclass declares, by name."""
    return {one.name: one.metadata["setting"] for one in fields(declaring) if one.metadata}
