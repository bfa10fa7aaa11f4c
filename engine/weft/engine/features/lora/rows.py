"""Allocation of the rows of the device's adapter memory. Pure Python.

Each kind of projection has separate rows. A row holds ROW_RANK ranks of one layer's projection.
An adapter takes as many rows as its ranks need, at any positions, and one slot, which is its number
in the tables.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
from weft.checkpoint.adapters.rows import DevicePlace, Needs, Rows


class RowPool:
    """Free rows and slots of the adapter memory.

    Args:
        num_rows: Number of rows by kind, for the kinds that adapters may change here.
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
        return len(self._free_slots)

    def num_free_rows(self, kind: str) -> int:
        return len(self._free[kind])

    def lacks(self, needs: Needs, gained: Needs, gained_slots: int) -> bool:
        """Whether an adapter does not fit, even with `gained` more free rows and `gained_slots`
        more slots.
        """
        return self.num_free_slots + gained_slots < 1 or any(
            self.num_free_rows(kind) + gained.get(kind, 0) < count for kind, count in needs.items()
        )

    def allocate(self, needs: Needs) -> DevicePlace | None:
        """Allocates a slot and rows; None, with nothing changed, if there are too few."""
        if self.lacks(needs, {}, 0):
            return None
        rows = {}
        for kind, count in needs.items():
            free = self._free[kind]
            rows[kind], self._free[kind] = free[:count], free[count:]
        return DevicePlace(self._free_slots.pop(), rows)

    def free(self, place: DevicePlace) -> None:
        """Frees a place. No started step may use it any more."""
        assert place.slot not in self._free_slots, f"slot {place.slot} freed twice"
        insort(self._free_slots, place.slot, key=lambda slot: -slot)
        for kind, rows in place.rows.items():
            free = self._free[kind]
            self._free[kind] = np.sort(np.concatenate([free, rows]), kind="stable")
            assert len(free) + len(rows) <= self.num_rows[kind], f"rows of {kind} freed twice"
