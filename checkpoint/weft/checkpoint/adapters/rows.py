"""Rows of the device's adapter memory: how many adapters need, and which ones each adapter has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]


Needs = Mapping[str, int]
"""Rows needed by kind; a kind that is absent needs none."""


@dataclass(frozen=True, slots=True)
class DevicePlace:
    slot: int
    """Slot from 1; 0 means no adapter."""
    rows: Mapping[str, Rows]
    """Row indices by kind of projection (`checkpoint.adapters.names.DENSE_KINDS`), ascending."""
