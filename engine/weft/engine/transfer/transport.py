"""The transport of one engine: agents, and the threads that ship and check pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from weft.contract.errors import ConfigError
from weft.contract.handle import NixlTargetInfo
from weft.engine.base.config import EngineConfig
from weft.engine.transfer.exchange import PageExchange
from weft.engine.transfer.staging import StagingArea
from weft.pages.transfer.nixl import (
    Notification,
    ReceiveAgent,
    SendAgents,
    TransferError,
    nixl_available,
)
from weft.pages.transfer.nixl_binding import load_binding
from weft.pages.transfer.ship import ShipThread

logger = logging.getLogger(__name__)

HOST_LAST_TOKENS = 512
"""Tokens of the last step of a long prompt whose pages leave a device through host memory. A step
with fewer tokens takes hardly less time.
"""


class Transport:
    """Owns the agents and threads of one pool's exchange.

    Args:
        config: Role and transport. `auto` uses NIXL if it works, and logs why if it does not.
        wake: Called by background threads when there are results to take.

    Raises:
        ConfigError: The transport is `nixl`, and NIXL does not work here.
    """

    def __init__(
        self, config: EngineConfig, exchange: PageExchange, wake: Callable[[], None]
    ) -> None:
        self.notices: list[str] = []
        self.memory_type = "DRAM"
        """Memory type of the exchange, as NIXL names it."""
        self._receiver: ReceiveAgent | None = None
        self._arrived: list[Notification] = []
        self._senders: SendAgents | None = None
        if config.transport != "data":
            self._open_nixl(config, exchange)
        self._exchange = exchange
        source = exchange.source(has_digests=config.page_digests)
        self.shipper = ShipThread(source, self._senders, wake)
        self.port = exchange.port(wake, has_digests=config.page_digests)

    @property
    def target(self) -> NixlTargetInfo | None:
        """Describes to fillers the memory to write to; None: they send `data`. `fence`
        changes it.
        """
        return self._receiver.target() if self._receiver else None

    @property
    def staging(self) -> StagingArea | None:
        """The area that peers write to instead of the pool; None: they write into the pool."""
        return self._exchange.staging

    @property
    def last_piece_tokens(self) -> int:
        """Default of the setting of this name. Between devices the pages of a whole step arrive in
        less time than one more step takes; through host memory they take tens of times longer.
        """
        is_through_host = self.staging is not None and self.memory_type == "DRAM"
        return HOST_LAST_TOKENS if is_through_host else 0

    @property
    def nixl_version(self) -> str | None:
        """Version of NIXL; None: this process cannot send over it."""
        return load_binding().version if self._senders else None

    @property
    def transports(self) -> list[str]:
        """Transports that this engine can use, best first."""
        return ["nixl", "data"] if self._receiver else ["data"]

    def has_arrived(self) -> bool:
        """Whether `notifications` has some, or pages have moved into the pool. Takes
        microseconds.
        """
        if self._receiver is not None:
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

    def describe(self) -> str:
        """Describes transports and lanes, for people."""
        agent = self._senders or self._receiver
        transport = agent.describe() if agent else "gRPC data messages"
        return ", ".join(filter(None, (transport, self._exchange.describe())))

    def sizes(self) -> dict[str, int]:
        return {**self.shipper.sizes(), **self.port.sizes()}

    def close(self) -> None:
        self.shipper.close()
        self.port.close()
        if self._senders is not None:
            self._senders.close()
        if self._receiver is not None:
            self._receiver.close()
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
            if config.role == "prefill":
                self._senders = SendAgents(name, region)
        except (ConfigError, TransferError) as error:
            if config.transport == "nixl":
                raise ConfigError(f"transport = nixl: {error}") from error
            notice = (
                f"NIXL is not usable ({error}): pages travel as gRPC data, several times slower"
            )
            if self.memory_type == "VRAM":
                notice += "; staging_memory = host may help"
            self.notices.append(notice)
            logger.warning(notice)
