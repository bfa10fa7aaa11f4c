"""Bandwidth of page writes between two processes, beside NIXL's own for the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import transfer

from serving.load import LoadError
from serving.sections import SHIPPING, attempt
from serving.series import Ledger

WEFT, NIXL = "shipping", "NIXL itself"
REPEATS = 5
"""Writes of each a turn, in alternating order."""


@dataclass(slots=True)
class Shipping:
    """Writes of scattered pages of the model's size, taking turns with bare NIXL calls."""

    ledger: Ledger
    page_bytes: int
    chunk_mib: int
    name: str = SHIPPING

    def __post_init__(self) -> None:
        for system in (WEFT, NIXL):
            self.ledger.row(self.name, system, self._case)

    def take(self, turn: int) -> None:
        weft = self.ledger.row(self.name, WEFT, self._case)
        nixl = self.ledger.row(self.name, NIXL, self._case)
        if not turn:  # Each measurement warms up by itself.
            return
        page_kib = self.page_bytes >> 10
        found = attempt(weft, partial(transfer.measure, page_kib, self.chunk_mib, REPEATS))
        if found is None:
            return
        weft.note(turn, found["weft_gb_per_s"].median)
        nixl.note(turn, found["raw_gb_per_s"].median)
        weft.ratios[turn] = found["ratio"].median
        if not found["verified"]:
            weft.failure = f"{LoadError.__name__}: pages did not arrive as they were sent"

    def finish(self) -> None:
        """See `Section.finish`: the ratio is of writes side by side, a median a turn."""

    @property
    def _case(self) -> str:
        return f"{self.page_bytes >> 10} KiB"
