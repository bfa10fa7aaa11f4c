"""Rows of the device's adapter memory: how many adapters need, and which ones each adapter has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

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


class AdapterWeights(Protocol):
    """An adapter in host memory, as rows of the device's memory."""

    @property
    def digest(self) -> bytes:
        """32 bytes that name the adapter's content."""
        ...

    @property
    def rank(self) -> int:
        """Largest rank among its modules."""
        ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def needs(self) -> Needs:
        """Device rows needed of each kind."""
        ...

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of tensors that a lenient read left out."""
        ...
