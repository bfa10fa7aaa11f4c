"""Answers at a worker's address while its engine loads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import grpc
from weft.common.rpc.authorize import AuthorizeInterceptor
from weft.common.rpc.errors import Context, abort
from weft.common.rpc.listen import add_port
from weft.common.rpc.start import StartProgress
from weft.common.rpc.tls import Identity
from weft.common.settings import ServiceSettings

_GRACE_S = 1.0
_BEGAN = 19
"""Place of the process's start, in ticks since the machine's, after its name in /proc/self/stat."""


class StartServer:
    """Refuses every call with the progress of the start; an async context manager.

    It listens at the worker's address, where nothing would answer until the worker is ready. With
    port 0 it does not listen, since nobody knows the port. Without `identity` there is no TLS.
    """

    def __init__(
        self, settings: ServiceSettings, identity: Identity | None, worker_id: str
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._worker_id = worker_id
        self._began_s = self._phase_began_s = time.monotonic()
        self._seconds = {"starting the server": _process_age_s()}
        self._phase, self._done, self._total = "starting the engine", 0, 0
        self._server: grpc.aio.Server | None = None

    def take(self, done: int, total: int, what: str) -> None:
        """Notes the progress of a phase; total 0: not known. What follows a colon changes within a
        phase.
        """
        if what != self._phase:
            self._end_phase()
        self._phase, self._done, self._total = what, done, total

    def phases(self) -> dict[str, float]:
        """Ends the start; returns the seconds of each of its phases, in their order."""
        self._end_phase()
        return self._seconds

    def _end_phase(self) -> None:
        now, phase = time.monotonic(), self._phase.partition(":")[0]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._phase_began_s
        self._phase_began_s = now

    async def __aenter__(self) -> StartServer:
        """Begins to listen.

        Raises:
            ConfigError: The port is taken, or the address is not this machine's.
        """
        settings, identity = self._settings, self._identity
        if settings.port:
            checks = () if identity is None else (AuthorizeInterceptor(),)
            server = grpc.aio.server(interceptors=checks, options=(("grpc.so_reuseport", 0),))
            server.add_generic_rpc_handlers((_Refusing(self._refuse),))
            credentials = None if identity is None else identity.server_credentials(True)
            add_port(server, settings.host, settings.port, ("--port", "--host"), credentials)
            await server.start()
            self._server = server
        return self

    async def __aexit__(self, *_: object) -> None:
        """Frees the port."""
        if self._server is not None:
            # Calls are answered at once, so this hardly waits; without a grace period peers would
            # log that their connections broke.
            await self._server.stop(_GRACE_S)
            self._server = None

    async def _refuse(self, requests: Any, context: Context) -> None:
        fraction = min(1.0, self._done / self._total) if self._total else None
        elapsed_s = time.monotonic() - self._began_s
        await abort(
            context, StartProgress(self._phase, fraction, elapsed_s, self._worker_id).error()
        )


def _process_age_s() -> float:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(fields[_BEGAN]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


class _Refusing(grpc.GenericRpcHandler):
    def __init__(self, refuse: Any) -> None:
        self._handler: Any = grpc.stream_stream_rpc_method_handler(refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Every method has the one handler."""
        return self._handler
