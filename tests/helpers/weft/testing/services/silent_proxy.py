"""A TCP proxy whose connections can fall silent, as those that a firewall has forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class SilentProxy:
    """Passes connections on; one that is silent takes bytes, and passes none."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.silent: list[bool] = []
        """Of each connection, in their order."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one connection on."""
        number = len(self.silent)
        self.silent.append(False)
        behind, to_worker = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(OSError):
            await asyncio.gather(
                self._pass(number, reader, to_worker), self._pass(number, behind, writer)
            )

    async def _pass(
        self, number: int, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        while data := await source.read(1 << 16):
            if not self.silent[number]:
                target.write(data)
                await target.drain()
        target.close()


@asynccontextmanager
async def silent_proxy(port: int) -> AsyncIterator[tuple[SilentProxy, str]]:
    """Runs a proxy before a local port; returns it and its address."""
    proxy = SilentProxy(port)
    listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
    try:
        yield proxy, f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
