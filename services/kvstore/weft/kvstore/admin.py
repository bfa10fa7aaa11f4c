"""The KV store's part of AdminService."""

from __future__ import annotations

from collections.abc import Mapping

from weft.common.admin import AdminBackend
from weft.common.tasks import tasks_now
from weft.kvstore.store import KvStore


class StoreAdmin(AdminBackend):
    """`AdminBackend` over a store. A store keeps no lists, so `max_entries` bounds nothing."""

    def __init__(self, store: KvStore) -> None:
        self._store = store

    async def flush_cache(self) -> int:
        return await self._store.flush()

    async def dump_state(self, max_entries: int) -> Mapping[str, object]:
        store = self._store
        return {
            "epoch": f"{store.epoch:016x}",
            "page_bytes": store.page_bytes,
            "pages": store.counts()._asdict(),
            "counters": store.all_counters(),
            "server": tasks_now(),
        }
