"""What the log tells of a Valkey server that is not there when its user starts."""

from __future__ import annotations

import asyncio
import socket

import pytest

ValkeyServers = pytest.importorskip("weft.common.valkey_servers").ValkeyServers


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(4096):
        writer.write(b"-ERR This instance has cluster support disabled\r\n")
    writer.close()


async def test_an_absent_server_is_told_at_the_start_and_when_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "weft.common.valkey_servers")
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    servers = ValkeyServers([f"valkey://127.0.0.1:{port}"], None, 1.0)
    greeting = asyncio.create_task(servers.greet())
    while not caplog.messages:
        await asyncio.sleep(0.01)
    assert caplog.messages[0].startswith(f"valkey at 127.0.0.1:{port}: ")
    server = await asyncio.start_server(_answer, sock=taken)
    await greeting
    assert caplog.messages[1:] == [f"valkey at 127.0.0.1:{port} answers again"]
    await servers.close()
    server.close()
