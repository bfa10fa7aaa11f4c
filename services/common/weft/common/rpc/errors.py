"""Conversion of errors to gRPC statuses and back."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from weft.contract.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    PermissionDenied,
    Unauthenticated,
    WeftError,
    error_class,
)
from weft.contract.wire import MAX_MESSAGE_BYTES, cut
from weft.v1 import common_pb2

Context = grpc.aio.ServicerContext[Any, Any]
"""The call of a method of a service."""
DOMAIN = "weft.dev"
"""ErrorInfo.domain of all errors created here."""
_DETAILS_KEY = "grpc-status-details-bin"
_MAX_PARAM_BYTES = 256
_STATUS_LOST = "Internal error from Core"
"""Details that grpc.aio makes up if a write fails because the stream has ended, even where the peer
has told why (grpc/grpc#36066).
"""
_BY_CODE: dict[grpc.StatusCode, type[WeftError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def grpc_code(error: WeftError) -> int:
    """The number of the error's google.rpc.Code."""
    return int(code_pb2.Code.Value(error.grpc_code))


def error_detail(error: WeftError) -> common_pb2.ErrorDetail:
    """The error as the message that Session and Fill events carry."""
    return common_pb2.ErrorDetail(
        code=error.reason,
        retryable=error.retryable,
        stage=error.stage,
        worker_id=error.worker_id,
        attempt=error.attempt,
        message=cut(error.message, MAX_MESSAGE_BYTES),
        param=cut(error.param or "", _MAX_PARAM_BYTES),
    )


def from_error_detail(
    detail: common_pb2.ErrorDetail, retry_after_s: float | None = None
) -> WeftError:
    """Rebuilds the error of an `ErrorDetail` that came over a wire."""
    error = error_class(detail.code)(
        detail.message,
        stage=detail.stage,
        param=detail.param or None,
        worker_id=detail.worker_id,
        attempt=detail.attempt,
        retry_after_s=retry_after_s,
    )
    error.retryable = detail.retryable
    if detail.code:
        error.reason = detail.code  # kept also when it is of a later version
    return error


def to_status(error: WeftError) -> status_pb2.Status:
    """Builds the google.rpc.Status of a failure: ErrorInfo, RetryInfo if known, ErrorDetail.

    The message is that of the status; the ErrorDetail does not repeat it.
    """
    detail = error_detail(error)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    info.metadata["http_status"] = str(error.http_status)
    if error.param is not None:
        info.metadata["param"] = detail.param
    status = status_pb2.Status(code=grpc_code(error), message=detail.message)
    detail.ClearField("message")
    messages: list[Message] = [info, detail]
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(max(0, int(error.retry_after_s * 1e9)))
        messages.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for message in messages:
        packed = AnyProto()
        packed.Pack(message)
        status.details.append(packed)
    return status


async def abort(context: Context, error: WeftError) -> NoReturn:
    """Ends an RPC with the error's status and details.

    Raises:
        grpc.aio.AbortError: Always; callers must not catch it.
    """
    status = to_status(error)
    # The abort's metadata replaces the present trailer.
    trailer = context.trailing_metadata() or ()
    # Not abort_with_status: tracing instrumentation records OK for it.
    await context.abort(
        _status_code(status.code),
        status.message,
        (*trailer, *error.metadata, (_DETAILS_KEY, status.SerializeToString())),
    )
    raise AssertionError("context.abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError) -> WeftError:
    """The typed error of a failed call, from its details if the peer is a Weft service."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            found = _from_status(value)
            if found is not None:
                return found
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == _STATUS_LOST:
        return PeerUnavailable(
            "the peer or its connection ended the stream while a message was being sent to it, and "
            "gRPC lost the reason, which the peer's log has; send the request again"
        )
    cls = _BY_CODE.get(error.code(), Internal)
    return cls(f"{error.code().name}: {error.details() or 'no details'}")


def is_typed(error: grpc.aio.AioRpcError) -> bool:
    """Whether a Weft service reported the failure, rather than the transport."""
    return any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _from_status(data: bytes) -> WeftError | None:
    status = status_pb2.Status()
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    detail = common_pb2.ErrorDetail()
    try:
        status.ParseFromString(data)
        for packed in status.details:
            for message in (info, retry, detail):
                if packed.Is(message.DESCRIPTOR):
                    packed.Unpack(message)
    except ValueError:  # protobuf's DecodeError is one
        return None
    if info.domain != DOMAIN:
        return None
    seconds = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
    detail.code = detail.code or info.reason
    detail.message = status.message
    error = from_error_detail(detail, seconds)
    error.param = info.metadata.get("param")
    error.grpc_code = _status_code(status.code).name
    http_status = info.metadata.get("http_status", "")
    if http_status.isdigit():
        error.http_status = int(http_status)
    return error


def _status_code(number: int) -> grpc.StatusCode:
    for code in grpc.StatusCode:
        if code.value[0] == number:
            return code
    return grpc.StatusCode.UNKNOWN
