"""Adapters in host memory, within a bound of bytes. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.engine.lora.rows import Needs


class Weights(Protocol):
    """An adapter that was read, as rows of the device's memory (`weft.engine.lora.weights`)."""

    @property
    def digest(self) -> bytes:
        """Of its content, 32 bytes."""
        ...

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        ...

    @property
    def num_bytes(self) -> int:
        """Host memory."""
        ...

    @property
    def needs(self) -> Needs:
        """Its rows of each kind."""
        ...


class HostCache:
    """Keeps what was used last, and first of all what is waited for.

    Args:
        max_bytes: Of all adapters together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: dict[bytes, Weights] = {}
        """The least recently used one first."""
        self.touched: set[bytes] = set()
        """Adapters that came or went; whoever takes note of them empties it."""

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return sum(weights.num_bytes for weights in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def get(self, digest: bytes) -> Weights | None:
        """An adapter's weights, which are used now."""
        weights = self._kept.pop(digest, None)
        if weights is not None:
            self._kept[digest] = weights
        return weights

    def put(self, weights: Weights, wanted: Sequence[bytes] = ()) -> bool:
        """Keeps an adapter, and gives up others for it.

        Args:
            weights: Its.
            wanted: Adapters that are waited for, the first one most. They are given up last, and
                only for others that are wanted more.

        Returns:
            It was kept.
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
        """Gives an adapter up."""
        self.touched.add(digest)
        self._kept.pop(digest, None)
