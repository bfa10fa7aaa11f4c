"""What all dialects take from a call and tell it, at the gRPC border."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from weft.common.telemetry.logging import request_id as current_request_id
from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.admission.keys import Tenant
from weft.gateway.request import NO_TARGETS, Targets, WorkerChoice
from weft.gateway.validate import given_salt, invalid
from weft.gateway.warnings import begin_warnings, warning_headers

Context = grpc.aio.ServicerContext[Any, Any]

_ID_KEY = "x-weft-request-id"
_CONTENT_TYPE_KEY = "weft-content-type"
_CLIENT_ID_KEY = "x-request-id"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Client ids accepted for logs; the REST edge lets through the same."""
ROUTING_KEY = "x-routing-key"
"""Metadata key, and header of the REST edge: requests with the same value belong together."""
TTFT_TARGET = "x-ttft-target-ms"
ITL_TARGET = "x-itl-target-ms"
"""Name of the metadata with the inter-token latency target, in milliseconds."""
REQUEST_TIMEOUT = "x-request-timeout-ms"
"""Name of the metadata with the time limit of the whole request, in milliseconds."""
FIRST_TOKEN_TIMEOUT = "x-first-token-timeout-ms"
"""Name of the metadata with the time limit for the first token, in milliseconds."""
WORKER_ID = "x-worker-id"
"""Name of the metadata with the id of the decode worker that the request is for."""
RANK = "x-data-parallel-rank"
"""Name of the metadata with the number of that worker instead, in the order of their ids."""
_IN_MILLISECONDS = (TTFT_TARGET, ITL_TARGET, REQUEST_TIMEOUT, FIRST_TOKEN_TIMEOUT)
_NUMBER = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")
_RANK = re.compile(r"[0-9]{1,6}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts about a request taken from the call itself."""

    request_id: str
    client_request_id: str
    """Id given by the client or the REST edge; empty: none that is usable."""
    timeout_s: float | None
    """The lesser of the call's deadline and the metadata `x-request-timeout-ms`; None: there is
    neither.
    """
    traceparent: str
    """Trace context; well-formed, or empty."""
    tenant: Tenant | None
    """Tenant of the call; None: the gateway asks for no API keys."""
    routing_key: str = ""
    """Value of the metadata `x-routing-key`; empty: none."""
    targets: Targets = NO_TARGETS
    """Targets from the metadata `x-ttft-target-ms` and `x-itl-target-ms`."""
    first_token_timeout_s: float | None = None
    """Time limit from the metadata `x-first-token-timeout-ms`; None: none."""
    worker: WorkerChoice | None = None
    """Decode worker from the metadata `x-worker-id` or `x-data-parallel-rank`; None: none."""


def call_facts(context: Context, prefix: str, joint: str = "-") -> CallFacts:
    """Names a new request and reads its call's deadline, trace context and client metadata.

    However the call ends, its trailer has the new name.

    Args:
        context: Context of the call.
        prefix: Prefix of the request id, such as "chatcmpl".
        joint: Text after the prefix.

    Raises:
        InvalidRequest: A metadata value is not a number, or two values contradict each other.
    """
    request_id = f"{prefix}{joint}{secrets.token_hex(16)}"
    current_request_id.set(request_id)
    begin_warnings()
    context.set_trailing_metadata(((_ID_KEY, request_id),))
    traceparent = client_request_id = routing_key = ""
    seconds: dict[str, float] = {}
    workers: list[WorkerChoice] = []
    for key, value in context.invocation_metadata() or ():
        if not isinstance(value, str):
            continue
        if key == "traceparent" and _TRACEPARENT.fullmatch(value):
            traceparent = value
        elif key == _CLIENT_ID_KEY and _CLIENT_ID.fullmatch(value):
            client_request_id = value
        elif key == ROUTING_KEY:
            routing_key = value
        elif key in _IN_MILLISECONDS:
            seconds[key] = _milliseconds(key, value)
        elif key in (WORKER_ID, RANK):
            workers.append(_worker(key, value))
    if len(workers) > 1:
        raise invalid(workers[1].param, f"contradicts {workers[0].param}: name one worker")
    return CallFacts(
        request_id,
        client_request_id,
        earliest(context.time_remaining(), seconds.get(REQUEST_TIMEOUT)),
        traceparent,
        current_tenant.get(),
        routing_key,
        Targets(seconds.get(TTFT_TARGET), seconds.get(ITL_TARGET)),
        seconds.get(FIRST_TOKEN_TIMEOUT),
        workers[0] if workers else None,
    )


class OwnFields(Protocol):
    """Weft's own fields of a body."""

    @property
    def model(self) -> str | None:
        """See `GenerateRequest`."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """See `GenerateRequest`."""
        ...

    @property
    def priority(self) -> int | None:
        """See `GenerateRequest`."""
        ...

    @property
    def session_id(self) -> str | None:
        """See `GenerateRequest`."""
        ...

    @property
    def end_session(self) -> bool | None:
        """See `GenerateRequest.ends_session`."""
        ...


def call_fields(body: OwnFields, facts: CallFacts, routing_key: str = "") -> dict[str, Any]:
    """Fields of a `GenerateRequest` that come from its call, and from Weft's fields of its body.

    Args:
        body: The body.
        facts: Facts about the call.
        routing_key: The body's routing key; empty: that of the call, else of the session.
    """
    return {
        "request_id": facts.request_id,
        "client_request_id": facts.client_request_id,
        "model": body.model or "",
        "timeout_s": facts.timeout_s,
        "first_token_timeout_s": facts.first_token_timeout_s,
        "cache_salt": given_salt(body.cache_salt),
        "priority": body.priority or 0,
        "routing_key": routing_key or facts.routing_key or body.session_id or "",
        "session_id": body.session_id or "",
        "ends_session": bool(body.end_session),
        "worker": facts.worker,
        "traceparent": facts.traceparent,
        "targets": facts.targets,
        "tenant": facts.tenant,
    }


def earliest(*limits_s: float | None) -> float | None:
    """The least of several time limits, each of which may be None; None if all are."""
    return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)


def check_client_id(param: str, name: str) -> None:
    """Raises InvalidRequest for a client's name of a request that logs cannot take."""
    if not _CLIENT_ID.fullmatch(name):
        raise invalid(param, "must have 1 to 64 of A-Za-z0-9._:-")


def _worker(key: str, text: str) -> WorkerChoice:
    if key == WORKER_ID:
        if not text:
            raise invalid(key, "is empty")
        return WorkerChoice(worker_id=text, param=key)
    if not _RANK.fullmatch(text):
        raise invalid(key, "must be a number from 0")
    return WorkerChoice(rank=int(text), param=key)


def _milliseconds(key: str, text: str) -> float:
    """Parses a metadata value in milliseconds; returns seconds."""
    if not _NUMBER.fullmatch(text):
        raise invalid(key, "must be a number of milliseconds")
    return float(text) / 1e3


async def begin_answer(
    context: Context,
    request_id: str,
    content_type: str = "",
    headers: tuple[tuple[str, str], ...] = (),
) -> None:
    """Sends the request's id and warnings ahead of its answer. From then on the edge does not send
    the request to another gateway.

    Args:
        context: Context of the call.
        request_id: The request's id.
        content_type: Type of an answer for the REST edge, which keeps event streams alive.
        headers: Further headers for the client.
    """
    kind = ((_CONTENT_TYPE_KEY, content_type),) if content_type else ()
    await context.send_initial_metadata(
        ((_ID_KEY, request_id), *kind, *headers, *warning_headers())
    )
