"""Creates the staging area of a pool in device memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.errors import ConfigError
from weft.engine.base.config import EngineConfig
from weft.engine.transfer.device_pages import DevicePages
from weft.engine.transfer.exchange import (
    DirectExchange,
    LandingExchange,
    PageExchange,
    StagedExchange,
)
from weft.engine.transfer.mover import Lanes, PageMover
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import (
    DeviceStagingPages,
    PinnedStagingPages,
    StagingMemory,
)
from weft.pages.marks import WorkMark
from weft.pages.transfer.lanes import best_lane
from weft.pages.transfer.nixl_wire import TransferError
from weft.pages.transfer.shared_memory import MemoryFile

logger = logging.getLogger(__name__)

DEFAULT_STAGING_BYTES = 2 << 30
MAX_DEVICE_STAGING_BYTES = 4 << 30
DEVICE_STAGING_SHARE = 1 / 16
"""Share of the worker's GPU memory for staging pages in GPU memory. A fill holds staging pages from
the moment it is requested, so they limit the prompts that other workers compute at a time.
"""
POPULATED_BYTES = 256 << 20
"""Bytes of the landing pages of a pool in host memory that are taken from the system at the start:
enough for one long prompt. Landing pages with low numbers are used first, and again.
"""
MIN_STAGING_PAGES = 4
LANDING_SHARES = {
    ("decode", False): 1.0,
    ("decode", True): 7 / 8,
    ("prefill", False): 0.0,
    ("prefill", True): 1 / 4,
    ("both", False): 1 / 2,
    ("both", True): 1 / 2,
}
"""Share of a staging area in which fills are received, by role and whether there is a KV store.
Both parts have at least one page.
"""


def staging_memory(config: EngineConfig, page_bytes: int, device: torch.device) -> StagingMemory:
    """Allocates the staging pages of a pool. Raises ConfigError if the area has too few pages, or
    there is not enough memory.
    """
    is_on_device = stages_on_device(config, device)
    most = _device_bytes(config, device) if is_on_device else DEFAULT_STAGING_BYTES
    num_pages = _num_staging_pages(config, page_bytes, most)
    kind = DeviceStagingPages if is_on_device else PinnedStagingPages
    if shares_memory(config):
        try:
            return kind(num_pages, page_bytes, device, is_shared=True)
        except ConfigError as error:
            logger.warning("no memory is shared, so pages come as data: %s", error.message)
    return kind(num_pages, page_bytes, device)


def _num_staging_pages(config: EngineConfig, page_bytes: int, default_bytes: int) -> int:
    size = default_bytes if config.staging_bytes is None else config.staging_bytes
    num_pages = size // page_bytes
    if config.kv_memory_bytes is not None:
        num_pages = min(num_pages, config.kv_memory_bytes // page_bytes)
    if config.num_pages is not None:
        num_pages = min(num_pages, config.num_pages)
    if num_pages < MIN_STAGING_PAGES:
        raise ConfigError(
            f"staging_bytes = {size:,} holds {num_pages} pages of {page_bytes:,} bytes; give at "
            f"least {MIN_STAGING_PAGES * page_bytes:,}",
            param="staging_bytes",
        )
    return num_pages


def host_exchange(config: EngineConfig, pool: NDArray[np.uint8]) -> PageExchange:
    """Creates the exchange of a pool in host memory, uint8 `[num_pages, page_bytes]`, with landing
    pages if fillers of this host are to map them.
    """
    pool_pages, page_bytes = pool.shape
    if pool_pages <= 1 or not shares_memory(config):
        return DirectExchange(pool)
    num_pages = _num_staging_pages(config, page_bytes, DEFAULT_STAGING_BYTES)
    num_pages = min(num_pages, pool_pages)
    try:
        memory = MemoryFile(num_pages * page_bytes)
    except TransferError as error:
        logger.warning("no memory is shared, so pages come as data: %s", error)
        return DirectExchange(pool)
    memory.populate(POPULATED_BYTES)
    area = StagingArea(memory.array.reshape(num_pages, page_bytes), num_pages - 1)
    return LandingExchange(pool, area, memory)


def shares_memory(config: EngineConfig) -> bool:
    """Whether processes of this host are to map the memory in which fills arrive."""
    receives = config.owns_requests or config.has_store
    return config.ships_pages and receives and best_lane(config.transport) == "shared"


def _device_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_STAGING_BYTES
    memory = torch.cuda.get_device_properties(device).total_memory
    share = DEVICE_STAGING_SHARE * config.device_memory_share
    return min(MAX_DEVICE_STAGING_BYTES, int(share * memory))


def staged_exchange(
    config: EngineConfig,
    pages: DevicePages,
    memory: StagingMemory,
    lanes: Lanes,
    mark: Callable[[], WorkMark],
) -> StagedExchange:
    """Creates the exchange of a pool that has a staging area. Raises ConfigError if in a trial
    copy, bytes or digests differed from those that the host computed.
    """
    num_pages = len(memory.pages)
    share = LANDING_SHARES[config.role, config.has_store]
    area = StagingArea(memory.pages, min(num_pages - 1, max(1, int(share * num_pages))))
    return StagedExchange(area, memory, PageMover(pages, area, memory, lanes, mark))


def stages_on_device(config: EngineConfig, device: torch.device) -> bool:
    if config.staging_memory != "auto":
        return config.staging_memory == "device"
    if device.type != "cuda" or config.has_store or config.transport == "data":
        return False
    return config.device_memory_share < 1 or bool(reached_gpus(device.index))


def reached_gpus(index: int) -> list[int]:
    """The other GPUs whose memory a GPU reaches, as torch counts them."""
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    return [other for other in others if torch.cuda.can_device_access_peer(index, other)]
