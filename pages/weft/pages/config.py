"""Settings of everyone who keeps pages: workers and KV stores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.contract.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
    """Settings of pages that workers and KV stores have in common."""

    max_quarantine_fraction: float = setting(
        "share of the KV pool, or of a store's arena, that may be in quarantine; a service that "
        "exceeds it for longer than a lease lasts (a store: put_timeout_s) drains and exits, to "
        "be restarted; 1 = never",
        0.1,
        ge=0,
        le=1,
    )
    disk_cache_dir: Path | None = setting(
        "folder for KV pages on local disk, which survive restarts; each worker or store uses a "
        "subfolder named by its id; none = no disk cache",
        None,
    )
    disk_cache_bytes: int = setting("most KV pages on disk, in bytes", 10 << 30, ge=1 << 12)
