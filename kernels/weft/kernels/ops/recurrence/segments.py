"""Ragged sequences, cut into pieces that a recurrent operation computes one after another.

A piece is computed with matrix products from the state that the piece before it left. `Segments`
orders pieces in waves: the first piece of every sequence, then the second of those that have one,
so that one product computes a whole wave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

LONGEST = 64
"""Rows of a piece. Work for each row grows with the length of its piece, and each piece reads and
writes the states once.
"""
Piece = Callable[["Wave", torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Computes a wave from the states before it, [n, ...]. Returns the rows' results, [n, L, ...], and
the states after it, [n, ...].
"""


class Wave(NamedTuple):
    """Pieces of n sequences, padded with rows of zeros to the longest piece, L rows."""

    sequences: torch.Tensor
    """[n] int64."""
    rows: torch.Tensor
    """[n, L] int64; any row for padding."""
    real: torch.Tensor | None
    """[n, L] bool: false for padding; None: there is no padding."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, L, ...]: the pieces of `rows`, [N, ...]."""
        found = rows[self.rows]
        if self.real is None:
            return found
        return found * self.real.view(*self.real.shape, *[1] * (rows.dim() - 1))


class Segments(NamedTuple):
    """The pieces of N rows of S sequences."""

    num_rows: int
    sequences: torch.Tensor
    """[N] int64: the sequence of each row."""
    ends: torch.Tensor
    """[S] int64: the last row of each sequence."""
    waves: tuple[Wave, ...]

    @classmethod
    def of(cls, cu_lens: torch.Tensor, longest: int = LONGEST) -> Segments:
        """Cuts rows into pieces. `cu_lens`, [S + 1] int64, says where each sequence begins; each
        has at least one row.
        """
        return _segments(tuple(cu_lens.tolist()), longest, cu_lens.device)

    def run(
        self, piece: Piece, states: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all waves in turn.

        Args:
            states: [S, ...], before the first rows; not changed.
            out: [N, ...], written; results of `piece` are converted to its dtype.

        Returns:
            `out`, and the states after the last rows, [S, ...].
        """
        after = states.clone()
        for wave in self.waves:
            made, after[wave.sequences] = piece(wave, after[wave.sequences])
            if wave.real is None:
                out[wave.rows] = made.to(out.dtype)
            else:
                out[wave.rows[wave.real]] = made[wave.real].to(out.dtype)
        return out, after


@lru_cache(maxsize=8)
def _segments(cu_lens: tuple[int, ...], longest: int, device: torch.device) -> Segments:
    """Cached by bounds, so that it runs once for all layers of a step."""
    bounds = torch.tensor(cu_lens, dtype=torch.int64)
    lengths = bounds.diff()
    waves = []
    for begin in range(0, int(lengths.max()), longest):
        found = (lengths > begin).nonzero()[:, 0]
        taken = (lengths[found] - begin).clamp(max=longest)
        steps = torch.arange(int(taken.max()))
        real = steps < taken[:, None]
        rows = torch.where(real, bounds[found][:, None] + begin + steps, 0)
        wave = Wave(found.to(device), rows.to(device), real.to(device))
        waves.append(wave._replace(real=None) if bool(real.all()) else wave)
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    return Segments(cu_lens[-1], sequences.to(device), (bounds[1:] - 1).to(device), tuple(waves))
