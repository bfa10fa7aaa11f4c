"""Follows a mesh for the live summary of `weft up`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
from rich.text import Text
from weft.cli.operators import Operators, find_services
from weft.cli.top.picture import MeshPicture, watch_mesh
from weft.cli.top.summary import summarise
from weft.cli.up.state import StateFolder
from weft.common.admin import read_token
from weft.common.rpc.tls import Identity
from weft.contract.errors import ConfigError

_INTERVAL_S = 1.0
_RETRY_S = 1.0


async def keep_summary(
    state: StateFolder, gateway: str, identity: Identity | None, show: Callable[[Text], None]
) -> None:
    """Shows the state that a gateway streams about its mesh, until cancelled.

    It asks the operators' port, since the main port may want an API key. If the gateway ends, it is
    asked again once it is back, perhaps at another operators' port.
    """
    while True:
        with contextlib.suppress(ConfigError, grpc.aio.AioRpcError):
            await _follow(state, gateway, identity, show)
        await asyncio.sleep(_RETRY_S)


async def _follow(
    state: StateFolder, gateway: str, identity: Identity | None, show: Callable[[Text], None]
) -> None:
    addresses = find_services(state, [gateway])
    operators = Operators(addresses, read_token(state.admin_token), identity)
    picture = MeshPicture()
    async with operators.open_channel(addresses[gateway]) as channel:
        async for message in watch_mesh(channel, operators.metadata, _INTERVAL_S):
            picture.take(message)
            show(summarise(picture))
