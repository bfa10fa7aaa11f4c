"""Creates the tiers that a worker's settings ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from weft.contract.errors import ConfigError
from weft.engine.base.config import EngineConfig
from weft.pages.memory.eviction import EVICTION_POLICIES
from weft.pages.tiers.disk import PageFiles, disk_tier
from weft.pages.tiers.host import Pinned, host_tier
from weft.pages.tiers.tier import Tier
from weft.pages.transfer.page_pool import PagePool

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Host memory used as a buffer if only a disk tier is configured, bytes."""
MIN_SLOTS = 16
MIN_BLOCKS = 2
"""Least number of blocks of recurrent layers, or window pages, for which host memory has room."""


@dataclass(slots=True, kw_only=True)
class TierComponents:
    host: Tier
    disk: Tier | None
    files: PageFiles | None
    make_pool: Callable[[], PagePool]
    """Creates access to the pool for one thread."""
    notices: list[str]


def load_tiers(
    config: EngineConfig,
    page_bytes: int,
    block_pages: int,
    make_pool: Callable[[], PagePool],
    pin: Callable[[NDArray[np.uint8]], Pinned | None],
) -> TierComponents | None:
    """Creates the tiers, with the pages that the disk holds; None: none are configured.

    A tier that is not available now is skipped, with a log message.

    Args:
        block_pages: Pages that a block of recurrent layers, or a page of the window group, takes;
            0: there are none.
        pin: Pins host memory `[num_slots, page_bytes]`, so that the pool's device can copy from and
            to it; raises ConfigError if that fails. None: the pool is in host memory.

    Raises:
        ConfigError: The settings do not fit this machine, or another process uses the folder.
    """
    if not config.host_cache_bytes and config.disk_cache_dir is None:
        return None
    policy = EVICTION_POLICIES[config.kv_eviction_policy]
    notices: list[str] = []
    if config.host_cache_bytes:
        num_slots = config.host_cache_bytes // page_bytes
        if num_slots < 1:
            raise ConfigError(
                f"host_cache_bytes = {config.host_cache_bytes:,}: a page has {page_bytes:,} bytes",
                param="host_cache_bytes",
            )
        if num_slots < (needed := MIN_BLOCKS * block_pages):
            raise ConfigError(
                f"host_cache_bytes = {config.host_cache_bytes:,}: a block of recurrent layers "
                f"or a page of windows takes {block_pages:,} pages of {page_bytes:,} bytes; give "
                f"at least {needed * page_bytes:,}",
                param="host_cache_bytes",
            )
    else:
        num_slots = max(MIN_SLOTS, STAGING_BYTES // page_bytes, MIN_BLOCKS * block_pages)
    try:
        host, memory = host_tier(num_slots, page_bytes, policy)
    except (OSError, OverflowError) as error:
        if num_slots <= MIN_SLOTS:
            raise ConfigError(f"host memory: {error}", param="host_cache_bytes") from error
        notices.append(
            f"no {num_slots * page_bytes:,} bytes of host memory for KV pages ({error}): "
            f"only {MIN_SLOTS} pages are kept there"
        )
        host, memory = host_tier(MIN_SLOTS, page_bytes, policy)
    try:
        memory.pinned = pin(memory.rows)
    except ConfigError as error:
        notices.append(f"KV pages in host memory take one copy more: {error}")
    disk: Tier | None = None
    files: PageFiles | None = None
    if config.disk_cache_dir is not None:
        files = PageFiles(config.disk_cache_dir / config.worker_id)
        try:
            disk = disk_tier(files, config.disk_cache_bytes, page_bytes, policy)
        except OSError as error:
            files.close()
            files = None
            notices.append(f"no KV pages on disk in {config.disk_cache_dir}: {error}")
    for notice in notices:
        logger.warning(notice)
    if disk is not None and (num_pages := disk.counts().cached):
        notices.append(f"{num_pages:,} KV pages are on disk in {config.disk_cache_dir}")
    return TierComponents(
        host=host,
        disk=disk,
        files=files,
        make_pool=make_pool,
        notices=notices,
    )
