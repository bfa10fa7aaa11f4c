"""The store's transport: agents and the shipping thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from weft.contract.errors import ConfigError
from weft.contract.settings import TransportName
from weft.pages.transfer.lanes import FillerLanes
from weft.pages.transfer.nixl import (
    PoolRegion,
    ReadAgents,
    SendAgents,
    TransferError,
    nixl_available,
)
from weft.pages.transfer.nixl_binding import load_binding
from weft.pages.transfer.nixl_ranges import MemoryRange, RangesTarget, SharedRanges
from weft.pages.transfer.nixl_wire import TransportMismatch
from weft.pages.transfer.shared import SharedSenders
from weft.pages.transfer.ship import ShipThread
from weft.pages.transfer.source import PageSource

logger = logging.getLogger(__name__)


class TransportChoice:
    """The transports that this process can use, determined once. `auto` takes NIXL where it works,
    and otherwise logs why it does not.

    Raises:
        ConfigError: `nixl` is wanted and cannot be used on this machine.
    """

    def __init__(self, wanted: TransportName) -> None:
        self.notices: list[str] = []
        self.shares = wanted in ("auto", "shared")
        """Whether pages are written into memory of owners on this host that offer it."""
        self.nixl_version: str | None = None
        """Version of NIXL; None: NIXL is not used."""
        if wanted in ("shared", "data"):
            return
        is_available, reason = nixl_available()
        if is_available:
            self.nixl_version = load_binding().version
        elif wanted == "nixl":
            raise ConfigError(f"transport = nixl: {reason}")
        else:
            notice = (
                f"NIXL is not usable ({reason}): fills travel in memory shared on one host, puts "
                "and fills of other hosts as gRPC data, several times slower"
            )
            self.notices.append(notice)
            logger.warning(notice)

    @property
    def names(self) -> list[str]:
        """Transports, best first."""
        usable = {"nixl": bool(self.nixl_version), "shared": self.shares, "data": True}
        return [name for name, is_usable in usable.items() if is_usable]


class StoreTransport:
    """Agents and threads around the pool, uint8 `[num_pages, page_bytes]`, which outlives this
    object. The shipping thread calls `wake` when there is something to take.
    """

    def __init__(
        self,
        transport: TransportChoice,
        name: str,
        pool: NDArray[np.uint8],
        wake: Callable[[], None],
    ) -> None:
        self.nixl_version = transport.nixl_version
        self.lanes = FillerLanes(nixl_version=transport.nixl_version, shares=transport.shares)
        self.senders: SendAgents | None = None
        self.readers: ReadAgents | None = None
        region = PoolRegion.of_array(pool)
        self.shared = SharedSenders(region) if transport.shares else None
        if transport.nixl_version:
            self.senders = SendAgents(name, region)
            self.readers = ReadAgents(name, region)
        self._name, self._region = name, region
        self._arena: SharedRanges | None = None
        self._arena_lock = threading.Lock()
        self.shipper = ShipThread(PageSource(pool), self.senders, wake, self.shared)

    def arena_target(self) -> RangesTarget:
        """What others need to read the pool over NIXL. The first call registers it, in half a
        second.

        Raises:
            TransferError: NIXL is not used here, or does not take the memory.
        """
        if self.nixl_version is None:
            raise TransportMismatch("this store does not use NIXL")
        with self._arena_lock:
            if self._arena is None:
                pool = MemoryRange(self._region.address, self._region.num_bytes, "DRAM", 0)
                self._arena = SharedRanges(f"{self._name}-arena", [pool])
            return self._arena.target

    def describe(self) -> str:
        """Transports and lanes, for people. May take milliseconds."""
        fills = "" if self.senders is None else self.senders.describe()
        if self.shared is not None and (self.shared.is_used or not fills):
            fills = "; ".join(filter(None, (fills, self.shared.describe())))
        puts = "gRPC data messages" if self.readers is None else self.readers.describe()
        return f"fills: {fills}. puts: {puts}" if fills else puts

    def close_idle(self) -> None:
        """Closes agents that were not used for long. May take milliseconds."""
        if self.senders is not None:
            self.senders.close_idle()
        if self.readers is not None:
            self.readers.close_idle()

    def close(self) -> None:
        """Ends the thread and the agents. May take seconds."""
        self.shipper.close()
        for agents in (self.senders, self.readers):
            if agents is not None:
                try:
                    agents.close()
                except TransferError as error:
                    logger.warning("%s", error)
        if self._arena is not None:
            try:
                self._arena.close()
            except TransferError as error:
                logger.warning("%s", error)
        if self.shared is not None:
            self.shared.close()
