"""Settings of the KV store."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from weft.common.settings import PageSettings, declared_setting
from weft.pages.config import PageConfig

StoreEvictionName = Literal["lru", "lfu", "fifo", "mru", "filo", "slru"]
"""The eviction policies of workers that depend on pages alone."""


class KvStoreSettings(PageSettings):
    """Remembers KV pages for all workers."""

    program: ClassVar[str] = "kvstore"

    store_id: str = Field(
        "",
        max_length=64,
        description="id that stays the same over restarts, and that no other store has; empty = "
        "kvstore, host name and port",
    )
    memory_bytes: int = Field(
        1 << 30, ge=1 << 16, description="size of a KV store's arena, in bytes"
    )
    eviction_policy: StoreEvictionName = Field(
        "lru",
        description="order of evicting pages, in the arena and on disk: least recently, least "
        "frequently or most recently used, first in, last in (filo), or slru: those "
        "never found again before the others",
    )
    namespace_quota: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the arena, and of the disk, for the pages of one namespace (a "
        "model, adapter and cache salt); beyond it a namespace evicts its own pages",
    )
    backend: Literal["memory", "valkey"] = Field(
        "memory",
        description="where pages are kept in addition to the arena: memory = nowhere, or on local "
        "disk with --disk-cache-dir; valkey = in a Valkey or Redis server or "
        "cluster, which any number of stores can share",
    )
    valkey_url: list[str] = Field(
        [],
        max_length=64,
        repr=False,
        description="valkey: server, or some nodes of a cluster, as valkey://HOST:PORT or "
        "valkeys://USER:PASSWORD@HOST:PORT?ssl_ca_certs=FILE (TLS)",
    )
    valkey_password_file: Path | None = Field(
        None, description="valkey: file with the password, instead of one in --valkey-url"
    )
    valkey_prefix: str = Field(
        "weft",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="valkey: prefix of the pages' names; stores with the same prefix share pages",
    )
    valkey_timeout_s: float = Field(
        1.0,
        ge=0.01,
        le=60,
        description="valkey: time limit of a call that moves pages or connects, in seconds",
    )
    valkey_lookup_timeout_s: float = Field(
        0.05,
        ge=0.001,
        le=10,
        description="valkey: time limit of a lookup, which counts what was found by then, in "
        "seconds; workers wait for 0.08 s",
    )
    valkey_ttl_s: float = Field(
        0.0,
        ge=0,
        le=10 * 365 * 86400,
        description="valkey: time after which pages expire, in seconds; 0 = only when the server "
        "evicts them",
    )
    disk_cache_dir: Path | None = declared_setting(PageConfig, "disk_cache_dir")
    disk_cache_bytes: int = declared_setting(PageConfig, "disk_cache_bytes")
    max_fills: int = Field(
        64,
        ge=1,
        le=4096,
        description="fills in progress at once",
    )
    chunk_bytes: int = Field(
        16 << 20,
        ge=1 << 12,
        le=64 << 20,
        description="most bytes of a fill that are written at a time, in bytes",
    )
    max_puts: int = Field(
        8,
        ge=1,
        le=256,
        description="puts in progress at once; more are refused",
    )
    put_timeout_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="time limit for reading a put's pages, in seconds",
    )
    max_quarantine_fraction: float = declared_setting(PageConfig, "max_quarantine_fraction")
    put_data_timeout_s: float = Field(
        30.0,
        gt=0,
        le=600,
        description="time limit for receiving a put's gRPC data, in seconds",
    )

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.backend == "valkey" and not self.valkey_url:
            raise ValueError("--backend valkey needs --valkey-url")
        if self.backend == "valkey" and self.disk_cache_dir is not None:
            raise ValueError(
                "--backend valkey keeps pages in the server: leave --disk-cache-dir away, or take "
                "--backend memory"
            )
        if self.backend != "valkey" and self.valkey_url:
            raise ValueError("--valkey-url is for --backend valkey")
        return self
