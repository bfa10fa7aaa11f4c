"""The KV store's part of AdminService."""

from __future__ import annotations

from collections.abc import Mapping

from weft.common.settings import LogLevel
from weft.common.tasks import tasks_now
from weft.engine.base.faults import FaultSpec, FaultState
from weft.kvstore.store import KvStore


class StoreAdmin:
    """Implements `AdminBackend` over a store."""

    def __init__(self, store: KvStore) -> None:
        self._store = store

    async def flush_cache(self) -> int:
        """See `AdminBackend`."""
        return await self._store.flush()

    async def dump_state(self, max_entries: int) -> Mapping[str, object]:
        """See `AdminBackend`; a store keeps no lists."""
        store = self._store
        return {
            "epoch": f"{store.epoch:016x}",
            "page_bytes": store.page_bytes,
            "pages": store.counts()._asdict(),
            "counters": store.all_counters(),
            "server": tasks_now(),
        }

    async def order_faults(
        self, *, add: FaultSpec | None = None, clear: str | None = None
    ) -> list[FaultState]:
        """See `AdminBackend`; a store is one process."""
        return []

    def set_log_level(self, level: LogLevel) -> None:
        """See `AdminBackend`; a store is one process."""
