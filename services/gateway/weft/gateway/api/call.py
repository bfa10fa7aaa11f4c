"""What all dialects read from a gRPC call, and the metadata that they answer with."""

from __future__ import annotations

import re
import secrets

from weft.common.rpc.errors import Context
from weft.common.telemetry.logging import request_id as current_request_id
from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.request import CallFacts, LoadFormat, Targets, WorkerChoice, earliest
from weft.gateway.validate import invalid
from weft.gateway.warnings import begin_warnings, warn, warning_headers

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
LOAD_FORMAT = "endpoint-load-metrics-format"
"""Name of the metadata with the form in which the answer's header has the mesh's load."""
_LOAD_FORMATS: dict[str, LoadFormat] = {"text": "TEXT", "json": "JSON"}
_IN_MILLISECONDS = (TTFT_TARGET, ITL_TARGET, REQUEST_TIMEOUT, FIRST_TOKEN_TIMEOUT)
_NUMBER = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")
_RANK = re.compile(r"[0-9]{1,6}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def call_facts(context: Context, prefix: str, joint: str = "-") -> CallFacts:
    """Names a new request and reads its call's deadline, trace context and client metadata. The
    name is `prefix`, such as "chatcmpl", `joint` and a random part; however the call ends, its
    trailer has it. Raises InvalidRequest if a metadata value is not a number, or two values
    contradict each other.
    """
    request_id = f"{prefix}{joint}{secrets.token_hex(16)}"
    current_request_id.set(request_id)
    begin_warnings()
    context.set_trailing_metadata(((_ID_KEY, request_id),))
    traceparent = client_request_id = routing_key = ""
    seconds: dict[str, float] = {}
    workers: list[WorkerChoice] = []
    load_format: LoadFormat | None = None
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
        elif key == LOAD_FORMAT:
            load_format = _LOAD_FORMATS.get(value.strip().lower())
            if load_format is None:
                warn(key, "left out (it may be TEXT or JSON)")
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
        load_format,
    )


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
    the request to another gateway. By the content type the edge knows event streams, which it keeps
    alive.
    """
    kind = ((_CONTENT_TYPE_KEY, content_type),) if content_type else ()
    await context.send_initial_metadata(
        ((_ID_KEY, request_id), *kind, *headers, *warning_headers())
    )
