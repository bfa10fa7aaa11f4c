"""Loads the adapters that `weft up` was given, once the mesh answers."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from weft.cli.channel import explain
from weft.cli.operators import Operators
from weft.cli.up.settings import UpSettings
from weft.contract.errors import AdapterError
from weft.v1 import gateway_pb2, gateway_pb2_grpc

_TIMEOUT_S = 600.0


async def load_adapters(
    settings: UpSettings, operators: Operators, tell: Callable[[str], None]
) -> None:
    """Loads the adapters one after another. Adapters that are registered already stay as they are.

    Args:
        operators: The operators' port of a gateway.
        tell: Called for each adapter, with a line of text.

    Raises:
        AdapterError: An adapter cannot be loaded.
    """
    (address,) = operators.addresses.values()
    async with operators.open_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for text in settings.adapter:
            model, name, path = settings.parse_adapter(text)
            request = gateway_pb2.LoadAdapterRequest(
                name=name, path=path, model=model, replace=True
            )
            try:
                await stub.LoadAdapter(request, timeout=_TIMEOUT_S, metadata=operators.metadata)
            except grpc.aio.AioRpcError as error:
                raise AdapterError(f"--adapter {text}: {explain(error, address)}") from error
            tell(f"adapter {name} is loaded from {path}")
