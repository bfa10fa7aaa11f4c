"""Discovery by DNS names: every address of a name is one worker."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from weft.common.rpc.listen import bracket, split_address
from weft.gateway.fleet.discovery.base import Endpoint, Role

_log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a name to IP addresses for TCP; OSError if it has none or resolution fails."""


class DnsDiscovery:
    """Resolves the names periodically; a name that cannot be resolved keeps its addresses."""

    def __init__(
        self,
        decode: Sequence[str],
        prefill: Sequence[str],
        interval_s: float,
        resolve: Resolve | None = None,
    ) -> None:
        """Stores the settings; queries nothing yet. Names of workers are host:port each;
        `interval_s` lies between two queries. The default resolver is the system's.
        """
        self._names: list[tuple[Role, str, int]] = [
            *(("decode", *split_address(name)) for name in decode),
            *(("prefill", *split_address(name)) for name in prefill),
        ]
        self._interval_s = interval_s
        self._resolve = resolve or _resolve
        self._known: dict[tuple[Role, str, int], tuple[Endpoint, ...]] = {}
        self._failing: set[str] = set()

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        last: tuple[Endpoint, ...] | None = None
        while True:
            await asyncio.gather(*(self._ask(*name) for name in self._names))
            found = dict.fromkeys(e for name in self._names for e in self._known.get(name, ()))
            if (endpoints := tuple(found)) != last:
                last = endpoints
                yield endpoints
            await asyncio.sleep(self._interval_s)

    async def _ask(self, role: Role, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                addresses = await self._resolve(host, port)
        except (OSError, TimeoutError) as error:
            if host not in self._failing:  # Logged once, not at every interval.
                _log.warning("%s cannot be resolved: %s", host, error or "no answer")
            self._failing.add(host)
            return
        self._failing.discard(host)
        # The addresses are sorted, since name servers rotate them.
        self._known[role, host, port] = tuple(
            Endpoint(role, f"{bracket(address)}:{port}") for address in sorted(set(addresses))
        )


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
