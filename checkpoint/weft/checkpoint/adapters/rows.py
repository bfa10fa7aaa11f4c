"""Rows of the device's adapter memory: the rows that adapters need, and those that each one has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]


Needs = Mapping[str, int]
"""Rows needed by kind; kinds that are absent: none."""


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """An adapter's place on the device."""

    slot: int
    """Slot number from 1; 0 means no adapter."""
    rows: Mapping[str, Rows]
    """Row indices by kind of projection (`checkpoint.adapters.names.DENSE_KINDS`), ascending."""


class AdapterWeights(Protocol):
    """An adapter in host memory, as rows of the device's memory."""

    @property
    def digest(self) -> bytes:
        """Content digest of the adapter, 32 bytes."""
        ...

    @property
    def rank(self) -> int:
        """Largest rank among its modules."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        ...

    @property
    def needs(self) -> Needs:
        """Device rows needed of each kind."""
        ...

    @property
    def left_out(self) -> tuple[str, ...]:
        """Tensors that a lenient read left out."""
        ...
