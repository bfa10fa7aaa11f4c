"""A peer that ends a stream while the client writes to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from weft.common.rpc.errors import abort, from_rpc_error
from weft.common.rpc.streams import WRITE_AFTER_END
from weft.contract.errors import Overloaded, PeerUnavailable
from weft.v1 import kv_pb2, prefill_pb2_grpc

pytestmark = pytest.mark.asyncio
NUM_CALLS, NUM_WRITES = 40, 200


class Refusing(prefill_pb2_grpc.PrefillServiceServicer):
    """Refuses every fill after its first message."""

    async def Fill(self, request_iterator: Any, context: Any) -> AsyncIterator[kv_pb2.FillEvent]:
        await anext(aiter(request_iterator))
        await abort(context, Overloaded("no room", stage="fill"))
        yield kv_pb2.FillEvent()


async def read_only(stub: Any) -> grpc.aio.AioRpcError:
    """The client writes nothing after its first message, so that the reason arrives."""
    message = kv_pb2.FillControl(renew=kv_pb2.FillControl.Renew())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stub.Fill(iter([message])):
            pass
    return refused.value


async def written_until_refused(stub: Any) -> grpc.aio.AioRpcError:
    call = stub.Fill()
    message = kv_pb2.FillControl(renew=kv_pb2.FillControl.Renew())
    try:
        for _ in range(NUM_WRITES):
            await call.write(message)
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error
    except WRITE_AFTER_END:
        pass
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    return refused.value


async def test_it_is_never_taken_for_an_error_of_the_peer() -> None:
    """gRPC may lose why the stream has ended."""
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        reason = from_rpc_error(await read_only(stub))
        for _ in range(NUM_CALLS):
            found.append(await written_until_refused(stub))
    await server.stop(None)
    assert isinstance(reason, Overloaded)
    errors = [reason, *map(from_rpc_error, found)]
    assert {type(error) for error in errors} <= {Overloaded, PeerUnavailable}
    for error in errors:
        if isinstance(error, PeerUnavailable):
            assert "send the request again" in error.message
        else:
            assert error.message == "no room"
    print(sum(isinstance(error, PeerUnavailable) for error in errors), "of them lost the reason")


async def test_what_grpc_makes_up_is_told_with_a_way_out() -> None:
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="Internal error from Core",
    )
    error = from_rpc_error(lost)
    assert isinstance(error, PeerUnavailable)
    assert error.retryable
    assert "ended the stream" in error.message
