"""`weft top`: members, flows and requests of a mesh, live."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Sequence

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.live import Live
from weft.cli.channel import (
    Metadata,
    add_gateway_flags,
    api_key_metadata,
    call_gateway,
    explain,
    open_channel,
)
from weft.cli.numbers import number as number_type
from weft.cli.top.keys import reading_keys
from weft.cli.top.picture import MeshPicture, watch_mesh
from weft.cli.top.view import SORTS, Sort, TopState, TopView
from weft.common.mesh import MAX_INTERVAL_S, MIN_INTERVAL_S, NOT_ASKED
from weft.common.rpc.tls import Identity
from weft.contract.errors import ConfigError
from weft.v1 import mesh_pb2

_RETRY_S = 1.0
_PAGE_MEMBERS = 10
_STORE_MESSAGES = 7
"""Most messages in which a KV store may appear that the gateway has not asked yet."""


class Gateway:
    def __init__(self, address: str, identity: Identity | None, metadata: Metadata) -> None:
        self.address = address
        self._identity = identity
        self._metadata = metadata

    async def watch(
        self, interval_s: float, take: Callable[[mesh_pb2.WatchMeshResponse], bool]
    ) -> None:
        """Calls `take` with each message until it returns False, or the gateway ends the stream.
        Raises grpc.aio.AioRpcError if the gateway refuses or does not answer.
        """
        async with (
            open_channel(self.address, "gateway", self._identity) as channel,
            contextlib.aclosing(watch_mesh(channel, self._metadata, interval_s)) as messages,
        ):
            async for message in messages:
                if not take(message):
                    return


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)

    def watch(address: str, identity: Identity | None, metadata: Metadata) -> int:
        gateway = Gateway(address, identity, metadata or api_key_metadata())
        console = Console()
        is_interactive = console.is_terminal and not console.is_dumb_terminal
        if arguments.once or not (arguments.json or is_interactive):
            picture = asyncio.run(_picture(gateway))
            if arguments.json:
                _print_json(picture.whole(), indent=2)
            else:
                state = TopState(sort=arguments.sort)
                console.print(TopView(picture, state, gateway.address, is_whole=True))
        elif arguments.json:
            asyncio.run(_print_messages(gateway, arguments.interval))
        else:
            asyncio.run(_Screen(gateway, arguments.interval, console, arguments.sort).run())
        return 0

    return call_gateway("weft top", arguments, watch)


async def _print_messages(gateway: Gateway, interval_s: float) -> None:
    def take(message: mesh_pb2.WatchMeshResponse) -> bool:
        _print_json(message)
        return True

    while True:
        await gateway.watch(interval_s, take)
        # The gateway ends old streams. The next stream repeats the last minutes.
        await asyncio.sleep(_RETRY_S)


def _print_json(message: mesh_pb2.WatchMeshResponse, indent: int | None = None) -> None:
    found = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    sys.stdout.write(json.dumps(found, indent=indent) + "\n")
    sys.stdout.flush()


async def _picture(gateway: Gateway) -> MeshPicture:
    """Waits until the gateway has asked the KV stores, or has ended the stream."""
    picture = MeshPicture()
    num_taken = 0

    def take(message: mesh_pb2.WatchMeshResponse) -> bool:
        nonlocal num_taken
        num_taken += 1
        picture.take(message)
        return _is_early(message, num_taken)

    await gateway.watch(MIN_INTERVAL_S, take)
    if not num_taken:
        raise ConfigError(f"the gateway at {gateway.address} ended the stream without a picture")
    return picture


def _is_early(message: mesh_pb2.WatchMeshResponse, num_taken: int) -> bool:
    """The gateway asks the KV stores only from its first watcher on."""
    stores = (one for one in message.members if one.role == mesh_pb2.MEMBER_ROLE_KVSTORE)
    return num_taken < _STORE_MESSAGES and any(one.problem == NOT_ASKED for one in stores)


class _Screen:
    def __init__(self, gateway: Gateway, interval_s: float, console: Console, sort: Sort) -> None:
        self._gateway = gateway
        self._interval_s = interval_s
        self._picture = MeshPicture()
        self._state = TopState(sort=sort)
        view = TopView(self._picture, self._state, gateway.address)
        self._live = Live(view, console=console, screen=True, auto_refresh=False)
        self._has_ended = asyncio.Event()

    async def run(self) -> None:
        """Draws until the user ends it. Raises grpc.aio.AioRpcError if the gateway refuses, or did
        not answer at first.
        """
        loop = asyncio.get_running_loop()
        first = asyncio.Event()
        watching = asyncio.create_task(self._watch(first))
        waiting = asyncio.create_task(first.wait())
        try:
            # The terminal stays as it is until there is something to draw.
            await asyncio.wait([watching, waiting], return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
                return
            with self._live, reading_keys(self._on_key):
                loop.add_signal_handler(signal.SIGWINCH, self._live.refresh)
                loop.add_signal_handler(signal.SIGTERM, self._has_ended.set)
                ended = asyncio.create_task(self._has_ended.wait())
                await asyncio.wait([watching, ended], return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
            if watching.done():
                watching.result()
        finally:
            for number in (signal.SIGWINCH, signal.SIGTERM):
                loop.remove_signal_handler(number)
            for task in (watching, waiting):
                task.cancel()
            await asyncio.gather(watching, waiting, return_exceptions=True)

    async def _watch(self, first: asyncio.Event) -> None:
        def take(message: mesh_pb2.WatchMeshResponse) -> bool:
            if first.is_set() and len(message.points) > 1 and self._state.notice:
                # A new stream repeats everything.
                self._picture.points.clear()
                self._picture.ended.clear()
            self._picture.take(message)
            self._state.notice = ""
            first.set()
            self._live.refresh()
            return True

        while True:
            try:
                await self._gateway.watch(self._interval_s, take)
                self._state.notice = "the stream has ended; asking again"
            except grpc.aio.AioRpcError as error:
                if not first.is_set():
                    raise
                self._state.notice = explain(error, self._gateway.address)
            self._live.refresh()
            await asyncio.sleep(_RETRY_S)

    def _on_key(self, key: str) -> None:
        state = self._state
        if key in ("q", "Q", "\x03"):
            self._has_ended.set()
        elif key == "s":
            state.sort = SORTS[(SORTS.index(state.sort) + 1) % len(SORTS)]
        elif key == "r":
            state.reverses = not state.reverses
        elif key == "p":
            state.shows_plans = not state.shows_plans
        elif key in ("up", "k"):
            state.first_member = max(0, state.first_member - 1)
        elif key in ("down", "j"):
            state.first_member += 1
        elif key == "page up":
            state.first_member = max(0, state.first_member - _PAGE_MEMBERS)
        elif key == "page down":
            state.first_member += _PAGE_MEMBERS
        self._live.refresh()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft top",
        description="Members, flows and requests of a mesh, live. Keys: q ends it, s sorts the "
        "members by another column, r reverses them, arrows scroll them, p shows all that planners "
        "want and did.",
    )
    add_gateway_flags(parser)
    parser.add_argument(
        "--interval",
        type=number_type(MIN_INTERVAL_S, MAX_INTERVAL_S),
        default=1.0,
        metavar="S",
        help="time between pictures (default 1)",
    )
    parser.add_argument("--sort", choices=SORTS, default="role", help="order of the members")
    parser.add_argument(
        "--once", action="store_true", help="one picture as text, as where there is no terminal"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="messages of MeshService.WatchMesh, one a line; with --once one of them",
    )
    return parser
