"""Adapters in host memory, within a limit of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.model.adapters.weights import HostWeights


class HostCache:
    """Keeps the most recently used adapters. Adapters that requests wait for are evicted last."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: dict[bytes, HostWeights] = {}
        """The least recently used first."""
        self.touched: set[bytes] = set()
        """Adapters that were added or evicted. The reader clears it."""

    @property
    def num_bytes(self) -> int:
        return sum(weights.num_bytes for weights in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def get(self, digest: bytes) -> HostWeights | None:
        """Counts as a use of the adapter."""
        weights = self._kept.pop(digest, None)
        if weights is not None:
            self._kept[digest] = weights
        return weights

    def put(self, weights: HostWeights, wanted: Sequence[bytes] = ()) -> bool:
        """Caches an adapter and evicts others for it. Returns whether the cache kept the adapter.
        `wanted` are adapters that requests wait for, the most wanted first: the cache evicts them
        last, and only for adapters that are wanted more.
        """
        self._kept.pop(weights.digest, None)
        rank = {digest: index for index, digest in enumerate(wanted)}
        own = rank.get(weights.digest, len(rank))
        others = sorted(self._kept, key=lambda digest: -rank.get(digest, len(rank)))
        excess = self.num_bytes + weights.num_bytes - self.max_bytes
        given_up: list[bytes] = []
        for digest in others:
            if excess <= 0:
                break
            if rank.get(digest, len(rank)) < own:
                return False
            given_up.append(digest)
            excess -= self._kept[digest].num_bytes
        if excess > 0:
            return False
        for digest in given_up:
            del self._kept[digest]
        self._kept[weights.digest] = weights
        self.touched.update(given_up, [weights.digest])
        return True

    def drop(self, digest: bytes) -> None:
        self.touched.add(digest)
        self._kept.pop(digest, None)
