"""`weft fault proxy` between a client and a service, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from weft.cli.main import main

ECHO = "/test.Echo/Say"
WAIT_S = 60.0


class Echo(grpc.GenericRpcHandler):
    """A service that answers with what it was sent, and remembers it."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self._say)

    async def _say(self, request: bytes, context: object) -> bytes:
        self.heard.append(request)
        return request


class Proxy:
    """The command as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""

    async def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def order(self, text: str) -> str:
        """Gives an order; what it says to that."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        return await self.line()


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[tuple[Echo, str]]:
    handler, server = Echo(), grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def proxy_of(target: str, *flags: str) -> AsyncIterator[Proxy]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weft.cli", "fault", "proxy", target, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    proxy = Proxy(process)
    try:
        proxy.address = (await proxy.line()).split()[0]
        yield proxy
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def say(address: str, text: bytes, timeout_s: float) -> bytes | grpc.StatusCode:
    """The answer over a connection of its own, or how the call failed."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        try:
            answer: bytes = await channel.unary_unary(ECHO)(text, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return answer


async def test_a_link_fails_as_it_is_told() -> None:
    lost = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    async with echo() as (service, target), proxy_of(target) as proxy:
        assert await say(proxy.address, b"pass", WAIT_S) == b"pass"
        assert "delay 0.2 s" in await proxy.order("delay 0.2")
        assert await say(proxy.address, b"delay", WAIT_S) == b"delay"
        for order in ("black-hole", "mute-server", "mute-client", "cut"):
            assert f" {order}, " in await proxy.order(order)
            assert await say(proxy.address, order.encode(), 1.0) in lost
        assert " cut-before-ack, " in await proxy.order("cut-before-ack")
        assert await say(proxy.address, b"cut-before-ack", 1.0) in lost
        for wrong in ("block", "delay soon", "delay -1", "pass 3"):
            assert await proxy.order(wrong) == (
                f"not an order: {wrong!r}; give pass, black-hole, mute-server, mute-client, delay, "
                "cut, cut-before-ack, or status; a number of seconds may follow `delay`"
            )
        assert f"{proxy.address} -> {target}: cut-before-ack, " in await proxy.order("status")
        await proxy.order("pass")
        assert await say(proxy.address, b"again", WAIT_S) == b"again"
        assert {b"pass", b"delay", b"again"} <= set(service.heard)
        assert not {b"black-hole", b"mute-client", b"cut"} & set(service.heard)


OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Channels to one address share connections otherwise, also one that is being cut."""


async def test_a_request_can_be_delivered_and_its_answer_lost() -> None:
    """On a connection that is there: a new one's first word is the service's."""
    async with echo() as (service, target), proxy_of(target) as proxy:
        for number in range(20):
            await proxy.order("pass")
            async with grpc.aio.insecure_channel(proxy.address, OWN_CONNECTION) as channel:
                call = channel.unary_unary(ECHO)
                await call(b"connected", timeout=WAIT_S, wait_for_ready=True)
                await proxy.order("cut-before-ack")
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"delivered %d" % number, timeout=WAIT_S)
            # The service may see the end of the connection before it looks at the request.
            if b"delivered %d" % number in service.heard:
                return
        raise AssertionError(service.heard)


async def test_it_goes_on_without_input_and_ends_by_a_signal() -> None:
    async with (
        echo() as (_, target),
        proxy_of(target, "--mode", "delay", "--delay-s", "0") as proxy,
    ):
        assert proxy.process.stdin is not None
        proxy.process.stdin.close()
        assert await say(proxy.address, b"still there", WAIT_S) == b"still there"
        proxy.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(proxy.process.wait(), WAIT_S) == 0
        assert await say(proxy.address, b"gone", 1.0) != b"gone"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "TARGET nowhere: give host:port"),
        (["localhost:99999"], "TARGET localhost:99999: give host:port"),
        (["localhost:1", "--listen", "0.0.0.0:0"], "accept that with --insecure"),
        (["localhost:1", "--listen", "[::1"], "--listen [::1: give host:port"),
        (["localhost:1", "--delay-s", "-1"], "--delay-s -1: give 0 or more"),
        (["localhost:1", "--delay-s", "nan"], "--delay-s nan: give 0 or more"),
    ],
)
def test_what_cannot_be_done_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main(["fault", "proxy", *arguments]) == 1
    assert problem in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["fault", "proxy", "localhost:1", "--listen", address]) == 1
    assert f"cannot listen on {address}: Address already in use" in capsys.readouterr().err
