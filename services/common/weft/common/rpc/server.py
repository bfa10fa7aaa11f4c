"""Bootstrap of a gRPC service: ports, health, reflection, metrics, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from http.server import HTTPServer
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from weft.common.admin import AdminBackend, AdminServer
from weft.common.rpc.authorize import AuthorizeInterceptor
from weft.common.rpc.interceptors import ErrorInterceptor
from weft.common.rpc.listen import add_port, bracket
from weft.common.rpc.tls import Identity, load_identity
from weft.common.settings import ServiceSettings, is_loopback
from weft.common.tasks import start_logged, tell_standstills
from weft.common.telemetry.otlp import OtlpExport, start_export
from weft.common.telemetry.spans import Tracer
from weft.common.telemetry.tracing import SERVICE_NAME as TRACE_SERVICE
from weft.common.telemetry.tracing import TraceServicer, make_tracer
from weft.contract.errors import ConfigError
from weft.v1 import trace_pb2_grpc

_log = logging.getLogger(__name__)

LIVENESS = "liveness"
"""Name under which grpc.health.v1 reports liveness, whether or not the service is ready."""
SECOND_SIGNAL_AFTER_S = 1.0
"""A signal within this time of the first counts as the same one: a terminal, `make` and a service
manager may each send one to all processes, which pass it on to each other.
"""
_MAX_UNTAKEN_CALLS = 1 << 16
QUARANTINE_STATUS = 3
"""Exit status of a service that ends because too many of its pages are quarantined."""


class ServiceServer:
    """A grpc.aio server with everything that all Weft services need around it.

    Use: construct on a running loop, add servicers to `grpc`, `await start(...)`, then
    `await run_until_signal(...)`, or `await stop(...)` in tests.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        registry: CollectorRegistry,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        admin: AdminBackend | None = None,
        identity: Identity | None = None,
        tracer: Tracer | None = None,
        spans: TraceServicer | None = None,
        requires_client: bool = True,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Creates the server; nothing listens yet.

        Args:
            registry: Metrics that the HTTP port shows.
            interceptors: Interceptors outside the error interceptor, in this order.
            admin: Calls for operators, served if the settings give them a port.
            identity: For TLS; default: the one that the settings name.
            tracer: Keeps this service's spans; default: one of its own.
            spans: Finds this service's spans and those of the services that it calls; default: its
                own only.
            requires_client: Whether callers need a certificate, with TLS.
            options: Further options of gRPC, for its port.

        Raises:
            ConfigError: The operators' token or the certificate cannot be used, or the settings
                give a port for operators and `admin` is None.
        """
        self._settings = settings
        self._identity = identity or load_identity(settings)
        self._requires_client = requires_client
        self._registry = registry
        self._health = health.aio.HealthServicer()
        self._health_only: grpc.aio.Server | None = None
        self._metrics_http: HTTPServer | None = None
        self._service_names: tuple[str, ...] = ()
        self._admin: AdminServer | None = None
        self._tracer = tracer or make_tracer(settings, "")
        self._spans = spans or TraceServicer(self._tracer)
        self._export: OtlpExport | None = None
        self._telling: asyncio.Task[None] | None = None
        if settings.admin_port is not None:
            if admin is None:
                raise ConfigError("this service has no operators' port; leave out --admin-port")
            self._admin = AdminServer(settings, admin, self._identity)
        self._stop_wanted = asyncio.Event()
        self._is_stopping = False
        self.address = ""
        """Address host:port of the gRPC service, once started."""
        self.metrics_address = ""
        """Address host:port of the Prometheus endpoint, once started; empty if disabled."""
        self.health_address = ""
        """Address host:port of the port for probes, once started; empty if disabled."""
        authorize = () if self._identity is None else (AuthorizeInterceptor(),)
        self.grpc = grpc.aio.server(
            interceptors=(*authorize, *interceptors, ErrorInterceptor()),
            options=(
                *options,
                # Two processes must not share a port silently.
                ("grpc.so_reuseport", 0),
                # Of an option that is given twice, the first counts.
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                # No limit on messages sent: the receiver has its own.
                ("grpc.max_send_message_length", -1),
                # Room for the HTTP headers that the REST edge passes on. Above the soft limit gRPC
                # refuses calls at random.
                ("grpc.max_metadata_size", 96 << 10),
                ("grpc.absolute_max_metadata_size", 128 << 10),
                # gRPC cancels calls at random above 1,000 that Python has not taken yet, which come
                # in one burst. Services refuse by their own limits, and say why.
                ("grpc.server.max_pending_requests", _MAX_UNTAKEN_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", _MAX_UNTAKEN_CALLS),
                # Peers may ping once a second without being cut off.
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ),
        )
        """The gRPC server; add servicers before `start`."""

    async def start(self, service_names: Sequence[str]) -> None:
        """Binds the ports and starts serving; health reports NOT_SERVING until `set_serving(True)`.
        `service_names` are the full names of the services added, for health and reflection.

        Raises:
            ConfigError: A port is taken or an address cannot be bound; nothing listens then.
        """
        try:
            await self._start(service_names)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, service_names: Sequence[str]) -> None:
        for server in (self.grpc, self.admin_grpc):
            if server is not None:
                trace_pb2_grpc.add_TraceServiceServicer_to_server(self._spans, server)
        service_names = (*service_names, TRACE_SERVICE)
        self._service_names = ("", *service_names)
        await self.set_serving(False)
        await self.set_alive(True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )
        host = self._settings.host
        credentials = None
        if self._identity is not None:
            credentials = self._identity.server_credentials(self._requires_client)
        self.address = add_port(
            self.grpc, host, self._settings.port, ("--port", "--host"), credentials
        )
        if exposure := self._settings.exposure:
            _log.warning("insecure: %s", exposure)
        if self._admin is not None:
            await self._admin.start()
        await self._start_health(host)
        self._start_metrics(host)
        await self.grpc.start()
        self._export = start_export(self._tracer, self._settings)
        self._telling = start_logged(tell_standstills())

    async def _start_health(self, host: str) -> None:
        port = self._settings.health_port
        if port is None:
            return
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.health_address = add_port(server, host, port, ("--health-port", "--host"))
        await server.start()
        self._health_only = server

    def _start_metrics(self, host: str) -> None:
        port = self._settings.metrics_port
        if port is None:
            return
        ProcessCollector(registry=self._registry)
        try:
            self._metrics_http, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another "
                "--metrics-port, or none"
            ) from error
        self.metrics_address = f"{bracket(host)}:{self._metrics_http.server_port}"

    @property
    def admin_grpc(self) -> grpc.aio.Server | None:
        """The operators' gRPC server, to which services can be added before `start`; None without
        such a port.
        """
        return None if self._admin is None else self._admin.grpc

    @property
    def admin_address(self) -> str:
        """Address host:port of the operators' service, once started; empty if disabled."""
        return "" if self._admin is None else self._admin.address

    @property
    def admin_port(self) -> int:
        """Port of `admin_address`, once started, for callers of the main port; 0 if disabled, or if
        it listens on loopback and the main port does not.
        """
        settings = self._settings
        if is_loopback(settings.admin_host) and not is_loopback(settings.host):
            return 0
        return int(self.admin_address.rpartition(":")[2] or 0)

    async def set_serving(self, serving: bool, but: Collection[str] = ()) -> None:
        """Sets the state that grpc.health.v1 reports for all services `but` these. From `stop` on
        it stays NOT_SERVING.
        """
        if serving and self._is_stopping:
            return
        for name in self._service_names:
            if name not in but:
                await self._health.set(name, _state(serving))

    async def set_alive(self, alive: bool) -> None:
        """Sets the state that grpc.health.v1 reports for `LIVENESS`. A service that does not answer
        counts as dead too.
        """
        await self._health.set(LIVENESS, _state(alive))

    def write_ready_file(self, **extra: object) -> None:
        """Writes `--ready-file` atomically: addresses (empty where off), pid and `extra`."""
        path = self._settings.ready_file
        if path is None:
            return
        content = {
            "address": self.address,
            "metrics_address": self.metrics_address,
            "admin_address": self.admin_address,
            "health_address": self.health_address,
            "pid": os.getpid(),
            **extra,
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)

    def request_stop(self) -> None:
        """Ends `run_until_signal` as a signal would."""
        self._stop_wanted.set()

    async def run_until_signal(
        self,
        drain: Callable[[], Awaitable[None]] | None = None,
        ready_grace_s: float = 0.0,
        but: Collection[str] = (),
    ) -> None:
        """Serves until SIGTERM or SIGINT, then drains and stops; a second signal stops at once.

        Args:
            drain: Lets running work finish; it gets `drain_grace_s` at most.
            ready_grace_s: Seconds before the drain in which health reports NOT_SERVING and work is
                still accepted.
            but: Names of services that are SERVING in this time.

        Raises:
            Exception: What `drain` raised; everything has been stopped nevertheless.
        """
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, received.put_nowait, number)
        signalled = asyncio.create_task(received.get())
        wanted = asyncio.create_task(self._stop_wanted.wait())
        stopping: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({signalled, wanted}, return_when=asyncio.FIRST_COMPLETED)
            name = signalled.result().name if signalled.done() else None
            leaving = self._leave(name, drain, ready_grace_s, but)
            stopping = asyncio.create_task(leaving)
            if signalled.done():
                signalled = asyncio.create_task(_second(received))
            done, _ = await asyncio.wait({stopping, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if stopping not in done:
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)
                await self.close_ports()
            else:
                stopping.result()
        finally:
            signalled.cancel()
            wanted.cancel()
            if stopping is not None and not stopping.done():
                # The caller that ends this task closes the server itself.
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _leave(
        self,
        signal_name: str | None,
        drain: Callable[[], Awaitable[None]] | None,
        ready_grace_s: float,
        but: Collection[str],
    ) -> None:
        if ready_grace_s:
            _log.info("not ready", extra={"signal": signal_name, "ready_grace_s": ready_grace_s})
            self._is_stopping = True
            await self.set_serving(False, but)
            await asyncio.sleep(ready_grace_s)
        _log.info("draining", extra={"signal": signal_name})
        await self.stop(drain)

    async def stop(self, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refuses new work, lets `drain` finish within the grace period, then ends what is left.

        Raises:
            Exception: What `drain` raised, once everything has ended.
        """
        self._is_stopping = True
        await self.set_serving(False)
        grace = self._settings.drain_grace_s
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        if drain is not None:
            try:
                await asyncio.wait_for(drain(), grace)
            except TimeoutError:
                _log.warning("requests were still running when the grace period ended")
            except Exception:
                await self._close(deadline)
                raise
        await self._close(deadline)

    async def _close(self, deadline: float) -> None:
        if self._telling is not None:
            self._telling.cancel()
        now = asyncio.get_running_loop().time()
        await self.close_ports(max(0.0, min(1.0, deadline - now)))
        await self.close_export()
        if self._metrics_http is not None:
            # shutdown() waits for the server thread's poll; off the loop.
            await asyncio.to_thread(self._metrics_http.shutdown)
            self._metrics_http.server_close()
            self._metrics_http = None

    async def close_ports(self, grace_s: float = 0.0) -> None:
        """Closes the ports of calls, operators and probes; calls that run end after `grace_s`."""
        await self.grpc.stop(grace_s)
        if self._admin is not None:
            await self._admin.stop()
        if self._health_only is not None:
            await self._health_only.stop(None)

    async def close_export(self) -> None:
        """Exports the remaining spans, within a time limit."""
        export, self._export = self._export, None
        if export is not None:
            await asyncio.to_thread(export.close)


async def _second(received: asyncio.Queue[signal.Signals]) -> signal.Signals:
    """Waits for a signal that does not count as a repetition of the first one."""
    loop = asyncio.get_running_loop()
    first_at = loop.time()
    while True:
        number = await received.get()
        if loop.time() - first_at >= SECOND_SIGNAL_AFTER_S:
            return number


def _state(is_good: bool) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    states = health_pb2.HealthCheckResponse
    return states.SERVING if is_good else states.NOT_SERVING


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs a service's main coroutine on uvloop where there is one; returns its exit status.

    The status is 1 after an unexpected failure, which is logged. It is that of SIGTERM if the
    signal came before the service waited for it; parts that had started are stopped all the same.
    """
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    # uvloop is not built for every platform; the standard loop is slower.
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_until_terminated(main))
    except asyncio.CancelledError:
        _log.info("ended before it was ready")
        return 128 + signal.SIGTERM
    except Exception:
        _log.exception("the service ends: it failed")
        return 1


async def _until_terminated(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main`; SIGTERM cancels it until `run_until_signal` handles the signal. Otherwise
    process 1 of a container would ignore SIGTERM, and others would end without cleanup.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await main
