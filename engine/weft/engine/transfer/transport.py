"""The transport of one engine: agents, and the threads that ship and check pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from weft.contract.errors import ConfigError
from weft.contract.fills import StagingCounts
from weft.contract.handle import NixlTargetInfo, SharedTargetInfo
from weft.engine.base.config import EngineConfig
from weft.engine.transfer.exchange import PageExchange
from weft.engine.transfer.staging import StagingArea
from weft.pages.fills.data_budget import NUM_SLOTS
from weft.pages.transfer.lanes import FillerLanes, best_lane
from weft.pages.transfer.nixl import (
    Notification,
    ReceiveAgent,
    SendAgents,
    TransferError,
    nixl_available,
)
from weft.pages.transfer.nixl_binding import load_binding
from weft.pages.transfer.shared import OutgoingData, SharedPool, SharedSenders
from weft.pages.transfer.ship import Senders, ShipThread
from weft.pages.transfer.source import PageSource

logger = logging.getLogger(__name__)

HOST_LAST_TOKENS = 512
"""Tokens of the last step of a long prompt whose pages leave a device through host memory. A step
with fewer tokens takes hardly less time.
"""


class Transport:
    """Owns the agents and threads of one pool's exchange.

    Args:
        config: Role and transport. `auto` uses NIXL if it works, and logs why if it does not; then
            memory shared on a host is used where the exchange can be shared.
        wake: Called by background threads when there are results to take.
        senders: Write pages over NIXL, read from `nixl_source`; None: those of the exchange are
            written.

    Raises:
        ConfigError: The transport is `nixl`, and NIXL does not work here.
    """

    def __init__(
        self,
        config: EngineConfig,
        exchange: PageExchange,
        wake: Callable[[], None],
        senders: Senders | None = None,
        nixl_source: PageSource | None = None,
    ) -> None:
        self.notices: list[str] = []
        self.memory_type = "DRAM"
        """Memory type of the exchange, as NIXL names it."""
        self._receiver: ReceiveAgent | None = None
        self._is_released = False
        """Whether NIXL does not have the pool's memory, which sleeps."""
        self._arrived: list[Notification] = []
        self._senders = senders
        self._sharer: SharedPool | None = None
        self._shared_senders: SharedSenders | None = None
        if config.transport in ("auto", "nixl"):
            self._open_nixl(config, exchange)
        if config.transport in ("auto", "shared"):
            self._open_shared(config, exchange)
        self._outgoing: OutgoingData | None = None
        if config.fills_others:
            self._open_outgoing(config)
        self._exchange = exchange
        source = exchange.source(has_digests=config.page_digests)
        self.shipper = ShipThread(
            source,
            self._senders,
            wake,
            self._shared_senders,
            self._outgoing,
            nixl_source if self._senders is not None else None,
        )
        self.port = exchange.port(wake, has_digests=config.page_digests)

    @property
    def target(self) -> NixlTargetInfo | None:
        """Describes to fillers the memory to write to over NIXL; None: it is not offered. `fence`
        changes it.
        """
        return self._receiver.target() if self._receiver else None

    @property
    def shared(self) -> SharedTargetInfo | None:
        """Describes to fillers on this host the memory to map; None: it is not offered."""
        return self._sharer.target() if self._sharer else None

    @property
    def staging(self) -> StagingArea | None:
        """The area that peers write to instead of the pool; None: they write into the pool."""
        return self._exchange.staging

    def staging_counts(self) -> StagingCounts | None:
        """Staging pages by state; None if there are none."""
        return None if self.staging is None else self.staging.counts()

    @property
    def last_piece_tokens(self) -> int:
        """Default of the setting of this name. Between devices the pages of a whole step arrive in
        less time than one more step takes; through host memory they take tens of times longer.
        """
        is_through_host = self.staging is not None and self.memory_type == "DRAM"
        return HOST_LAST_TOKENS if is_through_host else 0

    @property
    def incoming(self) -> SharedTargetInfo | None:
        """Describes to this worker's server the memory in which fills land, if it is the host's."""
        return self.shared if self.shared and self.shared.memory_type == "DRAM" else None

    @property
    def outgoing(self) -> SharedTargetInfo | None:
        """Describes to this worker's server the memory from which it sends data."""
        return self._outgoing.target() if self._outgoing else None

    @property
    def lanes(self) -> FillerLanes:
        """The transports over which this engine can write to owners."""
        return FillerLanes(
            nixl_version=load_binding().version if self._senders else None,
            shares=self._shared_senders is not None,
            memory_type=self.memory_type,
        )

    @property
    def transports(self) -> list[str]:
        """Transports that this engine can use, best first."""
        usable = {
            "nixl": self._receiver is not None,
            "shared": self._sharer is not None or self._shared_senders is not None,
            "data": True,
        }
        return [name for name, is_usable in usable.items() if is_usable]

    def has_arrived(self) -> bool:
        """Whether `notifications` has some, or pages have moved into the pool. Takes
        microseconds.
        """
        if self._receiver is not None and not self._is_released:
            self._arrived += self._receiver.poll()
        return bool(self._arrived) or self.port.has_moved()

    def notifications(self) -> Sequence[Notification]:
        """The NIXL notifications that arrived since the last call."""
        self.has_arrived()
        arrived, self._arrived = self._arrived, []
        return arrived

    def fence(self) -> None:
        """Cuts every connection into the pool, so that nothing sent before can arrive."""
        if self._receiver is not None:
            self._receiver.reopen()

    def release(self) -> None:
        """Takes the pool's memory back from NIXL, until `register`. No transfer may be under way.
        Raises TransferError if one is.
        """
        if self._exchange.staging is not None and self._senders is None:
            return  # NIXL has other memory than the pool.
        if self._senders is not None:
            self._senders.close_unused()
        if self._receiver is not None:
            self._receiver.close()
            self._is_released = True

    def register(self) -> None:
        """Registers the pool's memory again. Peers learn of it by the next handles."""
        if self._is_released and self._receiver is not None:
            self._receiver.reopen()
        self._is_released = False

    def describe(self) -> str:
        """Describes transports and lanes, for people."""
        ways: list[str] = []
        if agent := self._senders or self._receiver:
            ways.append(agent.describe())
        if self._sharer is not None:
            ways.append(self._sharer.describe())
        if self._shared_senders is not None and (self._shared_senders.is_used or not ways):
            ways.append(self._shared_senders.describe())
        ways = ways or ["gRPC data messages"]
        return ", ".join(filter(None, ("; ".join(ways), self._exchange.describe())))

    def sizes(self) -> dict[str, int]:
        return {**self.shipper.sizes(), **self.port.sizes()}

    def close(self) -> None:
        self.shipper.close()
        self.port.close()
        if self._outgoing is not None:
            self._outgoing.close()
        if self._senders is not None:
            self._senders.close()
        if self._receiver is not None:
            self._receiver.close()
        if self._shared_senders is not None:
            self._shared_senders.close()
        if self._sharer is not None:
            self._sharer.close()
        self._exchange.close()

    def _open_nixl(self, config: EngineConfig, exchange: PageExchange) -> None:
        is_available, reason = nixl_available()
        name = f"{config.role}-{config.worker_id}"
        try:
            if not is_available:
                raise ConfigError(reason)
            region = exchange.region()
            self.memory_type = region.memory_type
            self._receiver = ReceiveAgent(name, region)
            if config.fills_others and self._senders is None:
                self._senders = SendAgents(name, region)
        except (ConfigError, TransferError) as error:
            if self._senders is not None:
                self._senders.close()
                self._senders = None
            if config.transport == "nixl":
                raise ConfigError(f"transport = nixl: {error}") from error
            notice = (
                f"NIXL is not usable ({error}): pages travel in memory shared on one host, or as "
                "gRPC data, several times slower"
            )
            if self.memory_type == "VRAM":
                notice += "; staging_memory = host may help"
            self.notices.append(notice)
            logger.warning(notice)

    def _open_outgoing(self, config: EngineConfig) -> None:
        try:
            self._outgoing = OutgoingData(f"{config.role}-{config.worker_id}", NUM_SLOTS)
        except TransferError as error:
            logger.warning("data reach the server process in messages: %s", error)

    def _open_shared(self, config: EngineConfig, exchange: PageExchange) -> None:
        """Shares memory that was allocated for it, and writes into that of others."""
        try:
            region = exchange.region()
            if config.fills_others and config.ships_pages:
                self._shared_senders = SharedSenders(region)
            if exchange.memory is not None:
                name = f"{config.role}-{config.worker_id}"
                num_pages, page_bytes = exchange.pages.shape
                self._sharer = SharedPool(name, exchange.memory, page_bytes, num_pages)
            if best_lane(config.transport) == "shared":
                self.memory_type = region.memory_type
        except TransferError as error:
            notice = f"no memory is shared on this host ({error}): pages travel as gRPC data"
            self.notices.append(notice)
            logger.warning(notice)
