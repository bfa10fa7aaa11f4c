"""Fields of a request that are the same in every dialect."""

from __future__ import annotations

from typing import Any, Protocol

from weft.gateway.api.edge import CallFacts
from weft.gateway.validate import given_salt


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
        "cache_salt": given_salt(body.cache_salt),
        "priority": body.priority or 0,
        "routing_key": routing_key or facts.routing_key or body.session_id or "",
        "session_id": body.session_id or "",
        "ends_session": bool(body.end_session),
        "traceparent": facts.traceparent,
        "targets": facts.targets,
        "tenant": facts.tenant,
    }
