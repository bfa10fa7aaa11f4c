"""Which workers have the weights that a trainer's last update brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_SETTLE_S = 5.0
"""Time after an update in which load reports may still tell of the weights before it."""


class ServedVersions:
    """After an update that only some workers have ended, the others get no requests until one
    reaches them too; nor does a worker that starts with older weights. If no worker has what the
    last update through this gateway brought, another gateway or an operator has changed the
    weights, and all of them count.

    Args:
        clock: Of the event loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wanted: dict[str, frozenset[bytes]] = {}
        """Digests of the last update, by model: workers may name the same weights differently."""
        self._digests: dict[str, dict[str, bytes]] = {}
        """Digest of each worker's weights, by model and worker; empty: they are a mixture."""
        self._settled_at = 0.0

    def update(self, model: str, digests: Mapping[str, bytes]) -> None:
        """Notes how an update has ended.

        Args:
            digests: Of the workers that have ended it, by their ids.
        """
        if digests:
            self._wanted[model] = frozenset(digests.values())
            self._digests.setdefault(model, {}).update(digests)
            self._settled_at = self._clock() + _SETTLE_S

    def report(self, model: str, worker: str, digest: bytes) -> None:
        """Notes what a worker says."""
        if self._clock() >= self._settled_at or worker not in self._digests.get(model, {}):
            self._digests.setdefault(model, {})[worker] = digest

    def forget(self, model: str, worker: str) -> None:
        self._digests.get(model, {}).pop(worker, None)

    def is_outdated(self, model: str, worker: str) -> bool:
        wanted, digests = self._wanted.get(model), self._digests.get(model, {})
        if not wanted or digests.get(worker, b"") in wanted:
            return False
        return any(digest in wanted for digest in digests.values())
