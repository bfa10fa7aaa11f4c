"""Profiles of an engine's steps: what is asked, and what was recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.contract.errors import InvalidRequest

DEFAULT_STEPS, MAX_STEPS = 20, 100
"""Steps of a profile. An engine collects what it has recorded in a pause, some 10 us for each
operation of PyTorch, so that more steps would stall it for seconds.
"""
MAX_DELAY_STEPS = 1_000_000
DEFAULT_LIMIT_S, MAX_LIMIT_S = 60.0, 600.0
"""Seconds after which a profile ends, however many steps it has: an idle engine makes none."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_id(text: str, param: str) -> None:
    """Raises InvalidRequest unless the text can be the name of a profile and of a file."""
    if not _ID.fullmatch(text):
        message = f"{param}: give 1 to 64 letters, digits, `.`, `_` and `-`"
        raise InvalidRequest(message, stage="validate", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What a profile records. Raises InvalidRequest for a value out of its range."""

    steps: int = DEFAULT_STEPS
    after_steps: int = 0
    """Steps that begin before the first recorded one."""
    from_step: int = 0
    """Number, counted since the engine's start, of the first step that may be recorded."""
    limit_s: float = DEFAULT_LIMIT_S
    host: bool = True
    """Record PyTorch's operations on the host."""
    device: bool = True
    """Record kernels and copies of a GPU; without effect on a CPU."""

    def __post_init__(self) -> None:
        _check("steps", self.steps, 1, MAX_STEPS)
        _check("after_steps", self.after_steps, 0, MAX_DELAY_STEPS)
        _check("from_step", self.from_step, 0, 1 << 62)
        _check("limit_s", self.limit_s, 0.1, MAX_LIMIT_S)
        if not (self.host or self.device):
            raise InvalidRequest("record the host, the device or both", stage="validate")


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        message = f"{name} is {value:g}; give {least:g} to {most:,.16g}"
        raise InvalidRequest(message, stage="validate", param=name)


@dataclass(slots=True, kw_only=True)
class ProfileCommand:
    """Begins a profile, or ends it early."""

    query: int
    profile: str
    """Its id."""
    folder: str = ""
    """Where each rank leaves its part, `rank-N.json`."""
    options: ProfileOptions | None = None
    """None: the profile ends now."""


@dataclass(slots=True, kw_only=True)
class ProfileEnd:
    """What an engine has recorded. Its ranks write their parts meanwhile."""

    profile: str
    steps: int
    reason: str
    """Why it ended: steps, time or stopped."""
    ranks: int
    """Number of parts; 0: it ended before it began to record."""
    began_s: float
    """Unix time, as `ended_s`."""
    ended_s: float
    pause_s: float
    """Seconds for which the engine's loop stood still at the end."""
