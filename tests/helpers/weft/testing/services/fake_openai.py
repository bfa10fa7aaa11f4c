"""An OpenAIService whose behaviour is chosen by the model's name."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.common.rpc.errors import abort
from weft.contract.errors import (
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PeerUnavailable,
    WeftError,
)
from weft.v1 import openai_pb2, openai_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class Unprocessable(InvalidRequest):
    """A failure with an HTTP status of its own."""

    http_status = 422


FAILURES: dict[str, WeftError] = {
    "bad": InvalidRequest("n must be at least 1", param="n"),
    "missing": ModelNotFound("no model `missing`", param="model"),
    "odd": Unprocessable("cannot be processed", param="messages"),
    "busy": Overloaded("the queue is full", retry_after_s=0.3),
}


def chunk(index: int, words: list[str], model: str) -> dict[str, Any]:
    """A chat.completion.chunk; the last one carries the finish reason."""
    last = index == len(words)
    delta = {} if last else {"role": "assistant", "content": words[index]}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": "stop" if last else None}],
    }


def sse(value: object) -> bytes:
    """Encodes one server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class FakeOpenAI(openai_pb2_grpc.OpenAIServiceServicer):
    """Echoes the last message's words, or fails as the model's name says."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.bodies: list[bytes] = []
        self.may_go_on = asyncio.Event()
        """The model `slow` waits for it before every chunk."""

    async def ChatCompletions(self, request: HttpBody, context: Context) -> AsyncIterator[HttpBody]:
        self.bodies.append(request.data)
        try:
            body = json.loads(request.data)
        except ValueError:
            await abort(context, InvalidRequest("the body is not JSON"))
        model = body["model"]
        if model in FAILURES:
            await abort(context, FAILURES[model])
        words = body["messages"][-1]["content"].split(" ")
        if not body.get("stream"):
            if model == "hang":
                await self._hang()
            yield HttpBody(content_type="application/json", data=self._whole(words, model))
            return
        if model == "slow":
            kind = ("weft-content-type", "text/event-stream")
            await context.send_initial_metadata((("x-weft-request-id", "chatcmpl-1"), kind))
        for index in range(len(words) + 1):
            if model == "slow":
                await self.may_go_on.wait()
                self.may_go_on.clear()
            event = sse(chunk(index, words, model))
            yield HttpBody(content_type="text/event-stream", data=event)
            if model == "breaks":
                await abort(context, PeerUnavailable("the worker died"))
            if model == "hang":
                await self._hang()
        yield HttpBody(content_type="text/event-stream", data=b"data: [DONE]\n\n")

    async def _hang(self) -> None:
        try:
            self.started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _whole(self, words: list[str], model: str) -> bytes:
        message = {"role": "assistant", "content": " ".join(words)}
        value = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        return json.dumps(value).encode()

    async def Models(self, request: Empty, context: Context) -> HttpBody:
        model = {"id": "echo", "object": "model", "created": 1, "owned_by": "weft"}
        listing = {"object": "list", "data": [model]}
        return HttpBody(content_type="application/json", data=json.dumps(listing).encode())

    async def RetrieveModel(
        self, request: openai_pb2.RetrieveModelRequest, context: Context
    ) -> HttpBody:
        model = {"id": request.model, "object": "model", "created": 1, "owned_by": "weft"}
        return HttpBody(content_type="application/json", data=json.dumps(model).encode())
