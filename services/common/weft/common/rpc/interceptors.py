"""The server side of every RPC: typed errors without internal details; refusal of bad messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.message import DecodeError
from weft.common.rpc.errors import Context, abort
from weft.contract.errors import Internal, InvalidRequest, WeftError

_log = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 20
"""Messages with a body that are parsed without copying it."""
_CONTENT_TYPE_TAG, _DATA_TAG = 1 << 3 | 2, 2 << 3 | 2
"""First bytes of HttpBody's fields in protobuf's wire format."""
_MOST_SIZE_BITS = 28


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Converts exceptions of handlers to statuses.

    `WeftError` keeps its code and details. A request that is not a valid message (bad wire format,
    invalid UTF-8 in a string) is INVALID_ARGUMENT. Anything else is logged once with its traceback
    and answered by INTERNAL without its text.
    """

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        parse = None if handler.request_streaming else _parser(handler.request_deserializer)
        # Unary requests are parsed inside the guard, so that a bad one gets a typed answer.
        deserializer = handler.request_deserializer if handler.request_streaming else None
        if handler.response_streaming:
            behavior = handler.stream_stream or handler.unary_stream
            # For a method with one request gRPC would keep its bytes until the answer has ended.
            return grpc.stream_stream_rpc_method_handler(
                _guard_stream(behavior, parse, method), deserializer, handler.response_serializer
            )
        behavior = handler.stream_unary or handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            _guard_unary(behavior, parse, method), deserializer, handler.response_serializer
        )


@dataclass(slots=True)
class TakenBody:
    """The content of an HttpBody, whose data a handler can remove once it has parsed them. A
    handler holds its request until it has answered, and a protobuf message holds all memory that it
    was parsed into.
    """

    content_type: str
    message: bytes
    """Has the data from `start` to `end`."""
    start: int
    end: int

    @property
    def data(self) -> bytes:
        return self.message[self.start : self.end]

    def remove(self) -> None:
        self.message, self.start, self.end = b"", 0, 0


def _parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        if deserialize is None:
            return data
        if len(data) >= _LARGE_BYTES and deserialize == HttpBody.FromString:
            with suppress(IndexError):
                if body := _large_body(data):
                    return body
        try:
            message = deserialize(data)
        except DecodeError as error:
            raise _malformed() from error
        if isinstance(message, HttpBody):
            data = message.data
            return TakenBody(message.content_type, data, 0, len(data))
        return message

    return parse


def _large_body(message: bytes) -> TakenBody | None:
    """Finds the data of an HttpBody of two fields, without a copy, for which protobuf would hold
    Python's lock; None: it has other fields. Raises IndexError for what is no message.
    """
    content_type, at = b"", 0
    for tag in (_CONTENT_TYPE_TAG, _DATA_TAG):
        if message[at] != tag:
            return None
        size, shift, at = 0, 0, at + 1
        while True:
            byte, at = message[at], at + 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > _MOST_SIZE_BITS:
                return None
        if tag == _CONTENT_TYPE_TAG:
            content_type, at = message[at : at + size], at + size
        if at >= len(message):
            return None
    is_plain = content_type.isascii() and at + size == len(message)
    return TakenBody(content_type.decode(), message, at, at + size) if is_plain else None


def _malformed() -> InvalidRequest:
    return InvalidRequest(
        "the request is not a valid message of this method: malformed protobuf, or text that is "
        "not UTF-8",
        stage="validate",
    )


def _guard_unary(behavior: Any, parse: Callable[[bytes], Any] | None, method: str) -> Any:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behavior(request if parse is None else parse(request), context)
        except Exception as error:
            aborted = await _abort(context, error, method, parses_itself=parse is None)
        del request
        if aborted is not None:
            raise aborted
        return None

    return guarded


def _guard_stream(behavior: Any, parse: Callable[[bytes], Any] | None, method: str) -> Any:
    # The guard is a coroutine that writes the messages, also those of async generators. A cancelled
    # RPC then raises inside the handler and never leaves it suspended at a `yield`.
    async def guarded(requests: Any, context: Context) -> None:
        try:
            result = behavior(requests if parse is None else parse(await _only(context)), context)
            if hasattr(result, "__aiter__"):
                try:
                    async for message in result:
                        await context.write(message)
                finally:
                    await result.aclose()
            else:
                await result
            return
        except Exception as error:
            aborted = await _abort(context, error, method, parses_itself=parse is None)
        result = message = None
        if aborted is not None:
            raise aborted

    return guarded


async def _only(context: Context) -> bytes:
    """Raises InvalidRequest if the call has no request."""
    data: object = await context.read()
    if not isinstance(data, bytes):
        raise InvalidRequest("the call has no request message", stage="validate")
    return data


async def _abort(
    context: Context,
    error: Exception,
    method: str,
    *,
    parses_itself: bool,
) -> grpc.aio.AbortError | None:
    """Ends a call that raised; returns what the guard has to raise; None: there is nobody to
    answer.

    gRPC keeps the exception that it raises for that in the context, and thus in a cycle, which only
    the garbage collector ends. It runs by the number of objects: hundreds of bodies of megabytes
    could wait for it in the frames of failed calls. Therefore the exception has no frames here.
    `parses_itself` says that gRPC parses messages while the handler reads.
    """
    try:
        await _answer(context, error, method, parses_itself=parses_itself)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__cause__ = aborted.__context__ = None
        return aborted
    return None


async def _answer(
    context: Context,
    error: Exception,
    method: str,
    *,
    parses_itself: bool,
) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if parses_itself and isinstance(error, DecodeError):
        await abort(context, _malformed())
    if isinstance(error, WeftError):
        await abort(context, error)
    if isinstance(error, grpc.aio.BaseError) and context.done():
        return  # The client has left, so there is nobody to answer.
    if isinstance(error, grpc.aio.InternalError):
        # A failed write means that the client has left; gRPC may report that only later.
        _log.info("%s could not be answered: %r", method, error)
    else:
        _log.error("unexpected failure in %s", method, exc_info=error)
    await abort(context, Internal("an internal error; the service's log has the details"))
