"""Highest-random-weight hashing: a key's order of workers depends on these alone.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998). When a worker
leaves, only its own keys move, each to the next in that key's order; when one joins, it takes its
share from all others. It has the properties of a hash ring with many points for each worker,
without the ring.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from weft.gateway.routing.view import PoolView

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of SplitMix64's finaliser (Steele, Lea and Flood 2014)."""


def hash64(data: bytes) -> int:
    """Hashes to 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Rendezvous:
    """Orders a pool's workers for keys."""

    def __init__(self) -> None:
        self._view: PoolView | None = None
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    def weights(self, view: PoolView, key: bytes) -> NDArray[np.uint64]:
        """One weight per worker, by position; the highest is the key's first choice."""
        if view is not self._view:
            names = [hash64(worker.worker_id.encode()) for worker in view.workers]
            self._hashes, self._view = np.array(names, np.uint64), view
        mixed = self._hashes ^ np.uint64(hash64(key))
        for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * multiplier
        result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
        return result

    def first(self, view: PoolView, key: bytes, count: int) -> list[int]:
        """Positions of the key's first `count` choices."""
        weights = self.weights(view, key)
        if count == 1:
            return [int(weights.argmax())]
        order: list[int] = np.argsort(weights)[::-1][:count].tolist()
        return order
