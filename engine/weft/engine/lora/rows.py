"""Who has which rows of the device's adapter memory. Pure Python.

Each kind of projection has rows of its own, each for ROW_RANK ranks of one layer's projection. An
adapter takes as many as its ranks need, in any place, and one slot: its number in the tables.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]
Needs = Mapping[str, int]
"""Rows of each kind; those that are not named: none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an adapter is on the device."""

    slot: int
    """1 or more; 0 means no adapter."""
    rows: Mapping[str, Rows]
    """By kind of projection (`weft.engine.lora.names.DENSE_KINDS`), ascending."""


class RowPool:
    """Free rows and slots.

    Args:
        num_rows: Of each kind that adapters may change here.
        max_loras: Slots, numbered from 1.
    """

    def __init__(self, num_rows: Needs, max_loras: int) -> None:
        self.num_rows = dict(num_rows)
        self.max_loras = max_loras
        self._free: dict[str, Rows] = {
            kind: np.arange(count, dtype=np.int32) for kind, count in num_rows.items()
        }
        self._free_slots = list(range(max_loras, 0, -1))

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody has."""
        return len(self._free_slots)

    def num_free_rows(self, kind: str) -> int:
        """Rows that nobody has."""
        return len(self._free[kind])

    def lacks(self, needs: Needs, gained: Needs, gained_slots: int) -> bool:
        """An adapter does not fit now, and would not either once so much more was free."""
        return self.num_free_slots + gained_slots < 1 or any(
            self.num_free_rows(kind) + gained.get(kind, 0) < count for kind, count in needs.items()
        )

    def allocate(self, needs: Needs) -> Place | None:
        """Takes a slot and rows; None, and nothing changed, when there are too few."""
        if self.lacks(needs, {}, 0):
            return None
        rows = {}
        for kind, count in needs.items():
            free = self._free[kind]
            rows[kind], self._free[kind] = free[:count], free[count:]
        return Place(self._free_slots.pop(), rows)

    def free(self, place: Place) -> None:
        """Gives a place back, once no step that was begun uses it."""
        assert place.slot not in self._free_slots, f"slot {place.slot} freed twice"
        insort(self._free_slots, place.slot, key=lambda slot: -slot)
        for kind, rows in place.rows.items():
            free = self._free[kind]
            self._free[kind] = np.sort(np.concatenate([free, rows]), kind="stable")
            assert len(free) + len(rows) <= self.num_rows[kind], f"rows of {kind} freed twice"
