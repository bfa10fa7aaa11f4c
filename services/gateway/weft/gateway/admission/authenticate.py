"""Identifies the tenant of a request by its API key."""

from __future__ import annotations

import base64
import datetime
import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
from weft.common.rpc.authorize import TOKEN_CHECKED
from weft.common.rpc.errors import Context, abort
from weft.contract.errors import ConfigError, InvalidApiKey
from weft.gateway.admission.file_watch import FileWatch
from weft.gateway.admission.keys import KeyEntry, KeySet, Tenant, read_keys

_log = logging.getLogger(__name__)

KEYLESS = frozenset(
    {
        # Calls of probes, load balancers and documentation, which reveal nothing about tenants.
        "/weft.v1.OpenAIService/Ready",
        "/weft.v1.OpenAIService/OpenApi",
        "/weft.v1.OllamaService/GetVersion",
        "/weft.v1.ServerService/ShowVersion",
        "/weft.v1.ServerService/Ping",
        # This call bounds itself: all callers share one probe at a time.
        "/weft.v1.ServerService/HealthGenerate",
        # Calls of operators: with TLS, `weft.common.rpc.authorize` refuses all others.
        "/weft.v1.GatewayService/GetFleet",
        "/weft.v1.GatewayService/ListAdapters",
        # These two refuse callers without an operator's certificate.
        "/weft.v1.GatewayService/DrainWorker",
        "/weft.v1.GatewayService/UndrainWorker",
    }
).union(TOKEN_CHECKED)
"""Methods of the faces that need no key."""
FACES = (
    "/weft.v1.GatewayService/",
    "/weft.v1.OpenAIService/",
    "/weft.v1.PoolingService/",
    "/weft.v1.ResponsesService/",
    "/weft.v1.AnthropicService/",
    "/weft.v1.OllamaService/",
    "/weft.v1.ServerService/",
    "/weft.v1.TrainerService/",
    "/weft.v1.EdgeService/CheckAdmission",
)
"""Beginnings of the methods that need a key."""
_REFUSALS_LOGGED_EVERY_S = 1.0

current_tenant: ContextVar[Tenant | None] = ContextVar("current_tenant", default=None)
"""Tenant of the call being handled; None: the gateway asks for no keys."""


class ApiKeys:
    """The currently valid keys: those of the settings, and those of a file that may change."""

    def __init__(self, path: Path | None, fixed: Sequence[KeyEntry]) -> None:
        """Reads the file.

        Raises:
            ConfigError: It cannot be used.
        """
        self._path = path
        self._fixed = tuple(fixed)
        self._watch = FileWatch(path)
        self._keys = self._read()

    def find(self, key: str) -> Tenant | None:
        """Finds the tenant of a key; changes of the file take effect within a second."""
        if self._watch.has_changed():
            self._reread()
        return self._keys.find(key, datetime.datetime.now(datetime.UTC))

    def _read(self) -> KeySet:
        entries = [] if self._path is None else read_keys(self._path)
        return KeySet((*self._fixed, *entries))

    def _reread(self) -> None:
        try:
            self._keys = self._read()
        except ConfigError as error:
            _log.error("the file cannot be used, known API keys are kept: %s", error.message)
        else:
            _log.info("API keys re-read")


class TenantInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of the `FACES` without a known key; sets `current_tenant` for the others.

    Nothing that a caller sent is logged.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        self._log_at = 0.0

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        if not method.startswith(FACES) or method in KEYLESS:
            return await continuation(handler_call_details)
        tenant = self._keys.find(bearer(handler_call_details.invocation_metadata))
        if tenant is None:
            self._note()
            return grpc.stream_stream_rpc_method_handler(_refuse)
        current_tenant.set(tenant)
        return await continuation(handler_call_details)

    def _note(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._log_at:
            self._log_at = now_s + _REFUSALS_LOGGED_EVERY_S
            _log.warning("a call had no valid API key")


def bearer(metadata: Any) -> str:
    """The secret of a call: of a bearer token, the password of `Basic`, which clients make of a
    URL like http://any:SECRET@host, else of `x-api-key`; empty: none.
    """
    given = {key: value for key, value in metadata or () if isinstance(value, str)}
    scheme, _, key = given.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(key, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return given.get("x-api-key", "")


async def _refuse(requests: Any, context: Context) -> None:
    await abort(
        context,
        InvalidApiKey(
            "Incorrect API key provided, or none: send the header `Authorization: Bearer KEY` (or "
            "`x-api-key: KEY`) with a key that the operators gave you.",
            stage="authenticate",
        ),
    )
