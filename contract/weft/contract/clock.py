"""Monotonic time, injectable so that tests need not wait."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds."""

    def __call__(self) -> float: ...


monotonic: Clock = time.monotonic
