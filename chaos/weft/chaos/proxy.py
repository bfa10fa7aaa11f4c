"""A TCP proxy on one link between two services, which misbehaves on request.

It does not know HTTP/2 or gRPC. It delays, keeps and drops bytes and ends connections, as a network
can.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from enum import Enum

from weft.common.rpc.listen import bracket

READ_BYTES = 64 << 10


class Mode(Enum):
    """Treatment of the bytes that a proxy receives."""

    PASS = "pass"
    BLACK_HOLE = "black-hole"
    """Accepts bytes and connections from both sides and delivers nothing."""
    MUTE_SERVER = "mute-server"
    """Delivers the client's bytes and drops the server's."""
    MUTE_CLIENT = "mute-client"
    """Delivers the server's bytes and drops the client's."""
    DELAY = "delay"
    """Delivers everything late, in order."""
    CUT = "cut"
    """Ends every connection, and each new one at once."""
    CUT_BEFORE_ACK = "cut-before-ack"
    """Delivers the client's bytes, drops the server's answer to them, then cuts."""


class FaultProxy:
    """Listens on a port of its own and forwards connections to one service, which need not run yet.
    Port 0 is any free one; a taken port raises OSError.

    Bytes are treated in the mode in which they were received. Bytes that are kept back are lost,
    and a connection that has lost bytes is ended when the proxy passes again.
    """

    def __init__(self, target: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.target = target
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._host, self._port = host, int(self._socket.getsockname()[1])
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.mode = Mode.PASS
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        """Most bytes that each direction of a connection delivers; None: no limit."""
        self.num_connections = 0

    @property
    def address(self) -> str:
        """host:port to dial."""
        return f"{bracket(self._host)}:{self._port}"

    async def start(self) -> None:
        """Begins to accept connections. Earlier ones wait until then."""
        self._server = await asyncio.start_server(self._serve, sock=self._socket)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in list(self._connections):
            connection.cut()
        if self._server is not None:
            await self._server.wait_closed()

    def set_mode(self, mode: Mode, delay_s: float = 0.0) -> None:
        """Changes the mode. `delay_s` is the delay of bytes in the mode DELAY."""
        self.mode, self.delay_s = mode, delay_s
        for connection in list(self._connections):
            if mode is Mode.CUT or (mode is Mode.PASS and connection.has_lost):
                connection.cut()

    @contextlib.asynccontextmanager
    async def misbehaving(self, mode: Mode, delay_s: float = 0.0) -> AsyncIterator[None]:
        """Sets a mode for the duration of the block."""
        self.set_mode(mode, delay_s)
        try:
            yield
        finally:
            self.set_mode(Mode.PASS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.mode is Mode.CUT:
            writer.transport.abort()
            return
        host, _, port = self.target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(self, (reader, writer), (there, back))
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


class _Connection:
    def __init__(
        self,
        proxy: FaultProxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self.has_lost = False
        """Whether bytes were lost, so that later bytes would make no sense to the receiver."""

    async def run(self) -> None:
        up = asyncio.create_task(self._pump(self._client[0], self._server[1], is_up=True))
        down = asyncio.create_task(self._pump(self._server[0], self._client[1], is_up=False))
        try:
            # gRPC never half-closes, so the end of one direction is the end of the connection.
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            self.cut()

    def cut(self) -> None:
        for _, writer in (self._client, self._server):
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                mode = self._proxy.mode
                if mode is Mode.CUT_BEFORE_ACK and not is_up:
                    return
                if self._keeps(mode, is_up=is_up):
                    self.has_lost = True
                    continue
                if mode is Mode.DELAY:
                    await asyncio.sleep(self._proxy.delay_s)
                if (rate := self._proxy.bytes_per_s) is not None:
                    await asyncio.sleep(len(data) / rate)
                writer.write(data)
                await writer.drain()

    @staticmethod
    def _keeps(mode: Mode, *, is_up: bool) -> bool:
        if mode is Mode.BLACK_HOLE:
            return True
        return mode is (Mode.MUTE_CLIENT if is_up else Mode.MUTE_SERVER)
