"""Creates the staging area of a pool in device memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from weft.contract.errors import ConfigError
from weft.engine.base.config import EngineConfig
from weft.engine.transfer.device_pages import DevicePages
from weft.engine.transfer.exchange import StagedExchange
from weft.engine.transfer.mover import Lanes, PageMover
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import (
    DeviceStagingPages,
    PinnedStagingPages,
    StagingMemory,
)
from weft.pages.marks import WorkMark
from weft.pages.transfer.nixl import nixl_available

DEFAULT_STAGING_BYTES = 2 << 30
MAX_DEVICE_STAGING_BYTES = 4 << 30
DEVICE_STAGING_SHARE = 1 / 16
"""Share of the worker's GPU memory for staging pages in GPU memory. A fill holds staging pages from
the moment it is requested, so they limit the prompts that other workers compute at a time.
"""
MIN_STAGING_PAGES = 4
LANDING_SHARES = {
    ("decode", False): 1.0,
    ("decode", True): 7 / 8,
    ("prefill", False): 0.0,
    ("prefill", True): 1 / 4,
}
"""Share of a staging area in which fills are received, by role and whether there is a KV store.
Both parts have at least one page.
"""


def staging_memory(config: EngineConfig, page_bytes: int, device: torch.device) -> StagingMemory:
    """Allocates the staging pages of a pool. Raises ConfigError if the area has too few pages, or
    there is not enough memory.
    """
    is_on_device = stages_on_device(config, device)
    size = config.staging_bytes
    if size is None:
        size = _device_bytes(config, device) if is_on_device else DEFAULT_STAGING_BYTES
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
    kind = DeviceStagingPages if is_on_device else PinnedStagingPages
    return kind(num_pages, page_bytes, device)


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
    is_reached = config.device_memory_share < 1 or bool(reached_gpus(device.index))
    return is_reached and nixl_available()[0]


def reached_gpus(index: int) -> list[int]:
    """The other GPUs whose memory a GPU reaches, as torch counts them."""
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    return [other for other in others if torch.cuda.can_device_access_peer(index, other)]
