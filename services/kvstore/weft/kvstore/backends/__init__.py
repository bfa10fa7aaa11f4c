"""Back ends of the KV store: where pages outlive its memory."""

from __future__ import annotations

import importlib.util

from weft.contract.errors import ConfigError
from weft.kvstore.backends.base import BackendSource
from weft.kvstore.backends.disk import DiskSource
from weft.kvstore.settings import KvStoreSettings
from weft.pages.memory.eviction import EVICTION_POLICIES


def open_source(settings: KvStoreSettings, store_id: str) -> BackendSource | None:
    """Opens the configured back end; None: there is none.

    Raises:
        ConfigError: The back end cannot be used.
    """
    if settings.backend == "valkey":
        if importlib.util.find_spec("valkey") is None:
            raise ConfigError(
                "the package `valkey` is not installed: pip install 'weft[valkey]'",
                param="backend",
            )
        # Imported here, since its package is an extra.
        from weft.kvstore.backends.valkey import ValkeySource

        return ValkeySource(settings)
    if settings.disk_cache_dir is None:
        return None
    policy = EVICTION_POLICIES[settings.eviction_policy]
    return DiskSource(settings.disk_cache_dir / store_id, settings.disk_cache_bytes, policy)
