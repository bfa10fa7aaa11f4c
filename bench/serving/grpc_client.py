"""Completions over the typed gRPC face; messages are parsed after the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import grpc.aio
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from serving.answers import Answer
from serving.load import LoadError, Raw

COMPLETE = "/weft.v1.GatewayService/Complete"
MAX_MESSAGE_BYTES = 64 << 20
CACHE_SALT = "bench-grpc"
"""The mesh answers the same prompts over REST: neither face may find what the other left."""


class GrpcClient:
    """The gateway of a mesh, over one channel.

    Args:
        address: host:port.
        executor: Where the channel lives.
    """

    def __init__(self, address: str, executor: asyncio.Runner) -> None:
        self._executor = executor
        self._channel = executor.run(_open(address))
        self._complete: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = (
            self._channel.unary_stream(COMPLETE)
        )
        self._model = executor.run(self._first_model())

    def close(self) -> None:
        """Closes the channel."""
        self._executor.run(self._channel.close())

    def encode(self, prompt: list[int], num_tokens: int) -> bytes:
        request = gateway_pb2.CompleteRequest(
            model=self._model,
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0.0),
            stop=common_pb2.StopCriteria(max_tokens=num_tokens, ignore_eos=True),
            stream=True,
            cache_salt=CACHE_SALT,
        )
        return request.SerializeToString()

    async def exchange(self, body: bytes, raw: Raw, on_piece: Callable[[], None] | None) -> None:
        raw.sent_s = time.perf_counter()
        try:
            async for piece in self._complete(body):
                raw.times_s.append(time.perf_counter())
                raw.pieces.append(piece)
                if on_piece is not None:
                    on_piece()
        except grpc.aio.AioRpcError as error:
            raise LoadError(f"{error.code().name}: {error.details()}") from error

    def decode(self, raw: Raw, num_tokens: int) -> Answer:
        answer = Answer([], None, raw.sent_s)
        tokens: list[int] = []
        for piece, time_s in zip(raw.pieces, raw.times_s, strict=True):
            message = gateway_pb2.CompleteResponse.FromString(piece)
            new = [token for choice in message.choices for token in choice.token_ids]
            if new:
                tokens += new
                answer.event_times_s.append(time_s)
            if message.HasField("timeline"):
                answer.timeline = message.timeline
        if len(tokens) != num_tokens:
            raise LoadError(f"{len(tokens)} tokens came instead of {num_tokens}")
        answer.token_ids = tokens
        return answer

    async def _first_model(self) -> str:
        stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        try:
            listed = await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            raise LoadError(f"{error.code().name}: {error.details()}") from error
        return listed.models[0].name


async def _open(address: str) -> grpc.aio.Channel:
    # Proxies of the environment are not for a mesh on this machine.
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.insecure_channel(address, options=options)
