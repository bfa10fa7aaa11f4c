"""Assembles one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from functools import partial

from weft.common.adapters.registry import Registry
from weft.common.admin import AdminServicer, read_token
from weft.common.rpc.server import ServiceServer
from weft.common.rpc.tls import load_identity
from weft.common.tasks import start_logged
from weft.common.telemetry.profile_folder import ProfileFolder
from weft.common.telemetry.tracing import TraceServicer, make_tracer
from weft.contract.errors import ConfigError
from weft.gateway.adapters.cards import AdapterCards
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.adapters.manager import FleetAdapterManager
from weft.gateway.adapters.pool_metrics import AdapterPoolCollector
from weft.gateway.admin import GatewayAdmin, add_operators_calls
from weft.gateway.admission.admission import Admission
from weft.gateway.admission.authenticate import ApiKeys, TenantInterceptor
from weft.gateway.admission.keys import parse_hash
from weft.gateway.admission.slo import LatencyGate
from weft.gateway.admission.slo.admission import LatencyAdmission
from weft.gateway.admission.tenants import Tenants
from weft.gateway.api.adapter_calls import AdapterCalls
from weft.gateway.api.audio.calls import AudioCalls
from weft.gateway.api.dialects import add_dialects, make_response_store
from weft.gateway.api.grpc.service import GrpcFace
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.openai.service import OpenAIFace
from weft.gateway.api.relay import EdgeFace
from weft.gateway.api.server.profiles import ProfileCalls
from weft.gateway.api.worker_calls import WorkerCalls
from weft.gateway.catalogue import Catalogue, ServedModel
from weft.gateway.console.access import MeshAccess, OperatorsAccess
from weft.gateway.console.flows import MeshFlows
from weft.gateway.console.profiles import MeshProfiles
from weft.gateway.console.recent import RecentRequests
from weft.gateway.console.relay import OperatorsRelay
from weft.gateway.console.service import MeshFace
from weft.gateway.console.view import MeshView
from weft.gateway.console.weights import MeshWeights
from weft.gateway.fleet.discovery import Discovery, Endpoint, Role, make_discovery
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.fleet.kv_follow import KvFollower
from weft.gateway.fleet.worker import FleetWorker
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.media.clips import ClipReader
from weft.gateway.media.metrics import MediaCollector
from weft.gateway.media.reader import MediaReader
from weft.gateway.routing import FleetPageIndex, Policy, make_policy
from weft.gateway.routing.record_file import RoutingRecord
from weft.gateway.routing.router import Router
from weft.gateway.settings import GatewaySettings
from weft.gateway.telemetry.fleet_metrics import FleetCollector
from weft.gateway.telemetry.metrics import GatewayMetrics
from weft.gateway.telemetry.pool_metrics import PoolCollector
from weft.gateway.telemetry.request_log import GatewayRequestLog
from weft.gateway.telemetry.trace_fan_out import TraceFanOut
from weft.gateway.text.model_card import ModelCard, load_model_card
from weft.gateway.text.prepare import Preparer
from weft.v1 import edge_pb2_grpc, gateway_pb2_grpc, mesh_pb2_grpc, openai_pb2_grpc, worker_pb2_grpc

_log = logging.getLogger(__name__)

_NOTICE_S = 0.5
_LAST_WORDS_S = 0.5
"""Part of the grace period reserved for sending errors to the requests that end with it."""
_UNREAD_S = 60.0
"""How long an answer may wait for a client that takes no more calls on its connection."""
_LOOK_EVERY_S = 0.02
_ENVELOPE_BYTES = 1 << 16
"""What a message has around a body."""
_FIND_WORKERS_S = 10.0
_EDGES_FACE = "weft.v1.OpenAIService"
"""Health service name whose NOT_SERVING keeps edges from sending requests."""
SERVICES = (
    "weft.v1.GatewayService",
    _EDGES_FACE,
    "weft.v1.PoolingService",
    "weft.v1.ResponsesService",
    "weft.v1.AnthropicService",
    "weft.v1.OllamaService",
    "weft.v1.ServerService",
    "weft.v1.TrainerService",
    "weft.v1.MeshService",
    "weft.v1.EdgeService",
)


def _connection_ages(settings: GatewaySettings) -> tuple[tuple[str, int], ...]:
    """Age at which a connection takes no more calls, and the grace after which unread answers are
    cut, which is longer than any request can last.
    """
    left_s = settings.request_timeout_s + _UNREAD_S
    return (
        ("grpc.max_connection_age_ms", round(settings.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", round(left_s * 1000)),
    )


def _api_keys(settings: GatewaySettings) -> ApiKeys | None:
    if not settings.has_api_keys:
        return None
    fixed = [parse_hash(text) for text in settings.api_key_hashes]
    return ApiKeys(settings.api_keys_file, fixed)


def _load_cards(settings: GatewaySettings) -> list[ModelCard]:
    return [
        load_model_card(
            folder,
            name,
            settings.max_context_tokens,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            has_own_sampling=settings.generation_config == "auto",
            chat_template="" if number else settings.chat_template,
            json_whitespace=settings.json_whitespace,
        )
        for number, (name, folder) in enumerate(settings.model_folders)
    ]


class GatewayApp:
    """One gateway: built from settings, started and stopped once."""

    def __init__(
        self,
        settings: GatewaySettings,
        models: Sequence[ModelCard] = (),
        discovery: Discovery | None = None,
    ) -> None:
        """Loads the models' cards and connects all parts; nothing listens yet. Without `models` the
        cards are of the folders that the settings name, without `discovery` the settings name that
        too.

        Raises:
            ModelError: The model directory cannot be used.
            ConfigError: Two models have one name; the operators' token, the certificate, the API
                keys or the tenants' terms cannot be used.
        """
        self._settings = settings
        self._identity = load_identity(settings)
        loaded = models or _load_cards(settings)
        self._models = {model.name: model for model in loaded}
        if len(self._models) < len(loaded):
            names = ", ".join(model.name for model in loaded)
            raise ConfigError(f"each model needs a name of its own: {names}")
        # The mesh's view reads them as well.
        self.metrics = GatewayMetrics(
            is_on=settings.metrics_port is not None
            or settings.console != "off"
            or settings.admin_port is not None
        )
        self._gateway_id = f"gateway-{secrets.token_hex(4)}"
        self._gateway_epoch = secrets.randbits(64)
        self._responses = make_response_store(settings)
        self.fleet = Fleet(discovery or make_discovery(settings), self._make_worker, self._models)
        self._admission = Admission(settings.max_running_requests, settings.max_queued_requests)
        self._tenants = Tenants(settings.tenants_file)
        self.adapters = AdapterDirectory(
            None if settings.adapter_root is None else Registry(settings.adapter_root)
        )
        self._routing_record = (
            RoutingRecord(
                settings.routing_record_dir, self._gateway_id, settings.routing_record_bytes
            )
            if settings.routing_record_dir is not None
            else None
        )
        cards = AdapterCards(self.adapters)
        self.images = MediaReader(settings)
        """Reads images, and clips of chats, of all models."""
        self.clips = ClipReader(settings, self.images.pool, self.images.held)
        """Decodes the audio of models that transcribe."""
        served = [self._serve(model) for model in loaded]
        self.catalogue = Catalogue(served, self.adapters, cards, settings.expected_adapters)
        """The models that requests can name."""
        self._log = GatewayRequestLog(settings) if settings.request_log is not None else None
        tracer = make_tracer(settings, self._gateway_id)
        recent, flows = RecentRequests(), MeshFlows(self._gateway_id, self.fleet)
        self.pipeline = RequestPipeline(
            settings,
            self.catalogue,
            self._admission,
            self.metrics,
            tracer,
            self._tenants,
            self._log,
            (
                recent.ended,
                flows.ended,
                lambda answer: self.images.held.give_back(answer.raw.request_id),
            ),
        )
        self._adapter_manager = FleetAdapterManager(
            self.adapters,
            self.fleet,
            self.metrics,
            self._models,
            cards,
            self.pipeline.num_using,
            load_timeout_s=settings.adapter_load_timeout_s,
            linger_s=settings.adapter_linger_s,
            max_bytes=settings.max_adapter_bytes,
        )
        self._view = MeshView(
            self._gateway_id,
            self.fleet,
            self.catalogue,
            self.pipeline,
            self.metrics,
            recent,
            flows,
            self._identity,
            self.images.limits,
        )
        self._ending = asyncio.Event()
        self._admin = GatewayAdmin(self.fleet, self.catalogue, self.pipeline)
        self._spans = TraceServicer(
            tracer,
            TraceFanOut(self.fleet, self._identity),
            lambda start_ns, end_ns: self._profiles.covering(start_ns, end_ns),
        )
        self._profiles = MeshProfiles(
            ProfileFolder(settings.profile_dir, settings.max_profiles),
            self._relay(),
            self.fleet,
            self._spans,
        )
        keys = _api_keys(settings)
        self.server = ServiceServer(
            settings,
            self.metrics.registry,
            interceptors=() if keys is None else (TenantInterceptor(keys),),
            admin=self._admin,
            identity=self._identity,
            tracer=tracer,
            spans=self._spans,
            requires_client=settings.client_certificates,
            options=(*_connection_ages(settings), *self._message_bytes),
        )
        self._add_faces(keys)
        self._add_gauges()
        self.metrics.registry.register(FleetCollector(self.fleet, self.catalogue))
        self.metrics.registry.register(PoolCollector(self.pipeline))
        self.metrics.registry.register(AdapterPoolCollector(self.fleet, self.adapters))
        self.metrics.registry.register(MediaCollector(self.images, self.clips))
        self._fleet_task: asyncio.Task[None] | None = None
        self._view_task: asyncio.Task[None] | None = None
        self._open_task: asyncio.Task[None] | None = None
        self._adapter_task: asyncio.Task[None] | None = None

    @property
    def model(self) -> ModelCard:
        """The model named first."""
        return self.catalogue.first.model

    def _serve(self, model: ModelCard) -> ServedModel:
        settings, tenants = self._settings, self._tenants
        fleet = self.fleet.of(model.name)
        router = Router(
            fleet,
            self._policy(model.name, "decode", settings.decode_policy),
            self._policy(model.name, "prefill", settings.prefill_policy),
            settings.max_prefill_candidates,
            settings.replicas,
        )
        longest = partial(fleet.max_context_tokens, model.max_context_tokens)
        gate = LatencyGate(router.forecaster, settings.ahead_s, lambda: tenants.has_targets)
        return ServedModel(
            model=model,
            fleet=fleet,
            preparer=Preparer(settings, longest, self.images),
            router=router,
            latency_admission=LatencyAdmission(gate),
        )

    def _policy(self, model: str, role: Role, name: str) -> Policy:
        options = self._settings.policy_options(role)
        if self._routing_record is None:
            return make_policy(name, options)
        return self._routing_record.policy(f"{model}/{role}", name, options)

    def _make_worker(self, endpoint: Endpoint) -> FleetWorker:
        return FleetWorker(
            endpoint,
            self._models,
            self._settings,
            self._gateway_id,
            self._gateway_epoch,
            self.metrics.session_losses.inc,
            self.fleet.has_constraints,
            lambda stub, model: self._make_follower(endpoint, stub, model),
            self.fleet.worker_ids,
            self.fleet.versions,
            self._identity,
        )

    def _make_follower(
        self, endpoint: Endpoint, stub: worker_pb2_grpc.WorkerServiceAsyncStub, model: str
    ) -> KvFollower | None:
        index = self.catalogue.base(model).router.index(endpoint.role)
        return None if index is None else KvFollower(stub, index, self.metrics)

    def _add_faces(self, keys: ApiKeys | None) -> None:
        most = self._max_body_bytes
        adapters = AdapterCalls(self._adapter_manager, self.catalogue, self._settings.has_api_keys)
        workers = WorkerCalls(self.fleet, self._settings.has_api_keys)
        typed = GrpcFace(self.pipeline, self.catalogue, self.fleet, adapters, workers, most)
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(typed, self.server.grpc)
        if (operators := self.server.admin_grpc) is not None:
            add_operators_calls(typed, adapters, workers, operators)
        token = None
        if self._settings.admin_token_file is not None:
            token = read_token(self._settings.admin_token_file)
        access = MeshAccess(self._settings.console, token, keys)
        self._add_mesh_faces(adapters, workers, access)
        bodies = BodyParser(most, ignores_unknown=self._settings.ignore_unknown_fields)
        relays = EdgeFace(self._ending, self.pipeline)
        edge_pb2_grpc.add_EdgeServiceServicer_to_server(relays, self.server.grpc)
        audio = AudioCalls(
            self.pipeline,
            self.catalogue,
            bodies,
            relays,
            self.clips,
            max_bytes=most,
            timeout_s=self._settings.request_timeout_s,
        )
        self._openai = OpenAIFace(
            self.pipeline, self.catalogue, self.fleet, adapters, bodies, relays, audio
        )
        openai_pb2_grpc.add_OpenAIServiceServicer_to_server(self._openai, self.server.grpc)
        add_dialects(
            self.server.grpc,
            self._settings,
            pipeline=self.pipeline,
            models=self.catalogue,
            openai=self._openai,
            relays=relays,
            registry=self.metrics.registry,
            gateway=self._gateway_id.removeprefix("gateway-"),
            responses=self._responses,
            profiles=ProfileCalls(self._profiles, access),
            weights=MeshWeights(self.fleet, self._relay()),
            access=access,
        )

    def _relay(self) -> OperatorsRelay:
        return OperatorsRelay(self.fleet, self._view.stores, self._identity)

    def _add_mesh_faces(
        self, adapters: AdapterCalls, workers: WorkerCalls, access: MeshAccess
    ) -> None:
        servers = [(self.server.grpc, access)]
        if (operators := self.server.admin_grpc) is not None:
            servers.append((operators, OperatorsAccess()))
        for server, access in servers:
            face = MeshFace(
                self._view,
                access,
                self._relay(),
                AdminServicer(self._admin),
                self._spans,
                adapters,
                workers,
                self._profiles,
                self._gateway_id,
                self._ending,
                self._settings.max_connection_age_s,
            )
            mesh_pb2_grpc.add_MeshServiceServicer_to_server(face, server)

    @property
    def _max_body_bytes(self) -> int:
        takes_files = any(model.media for model in self._models.values())
        transcribes = any(model.speech is not None for model in self._models.values())
        settings = self._settings
        return max(
            settings.image_body_bytes if takes_files else settings.max_body_bytes,
            settings.audio_body_bytes if transcribes else 0,
        )

    @property
    def _message_bytes(self) -> tuple[tuple[str, int], ...]:
        """Room for bodies with images in messages of gRPC."""
        room = self._max_body_bytes + _ENVELOPE_BYTES
        if room <= self._settings.max_message_bytes:
            return ()
        return (("grpc.max_receive_message_length", room),)

    def _add_gauges(self) -> None:
        admission, fleet = self._admission, self.fleet
        gates = [served.latency_admission.gate for served in self.catalogue]
        self.metrics.add_gauges(
            {
                "weft_requests_running": ("Prompts in work.", lambda: admission.num_running),
                "weft_requests_queued": ("Prompts waiting.", lambda: admission.num_queued),
                "weft_requests_held": (
                    "Requests held so that others keep their latency targets.",
                    lambda: sum(gate.num_held for gate in gates),
                ),
                "weft_forecast_bias_seconds": (
                    "By which first tokens come later than forecast, in the mean; the model with "
                    "the largest.",
                    lambda: max(gate.bias_s for gate in gates),
                ),
                "weft_kv_index_pages": (
                    "Pages that workers are known to hold, over all of them.",
                    lambda: sum(index.num_pages for index in self._indexes()),
                ),
                "weft_kv_index_dropped_pages": (
                    "Pages that the index had no room for, since the start.",
                    lambda: sum(index.num_dropped for index in self._indexes()),
                ),
                "weft_adapters_serving": (
                    "LoRA adapters that requests can name.",
                    lambda: len(self.adapters.serving()),
                ),
                "weft_decode_workers": (
                    "Decode workers with an open Session.",
                    lambda: sum(
                        worker.session is not None and worker.session.is_open
                        for worker in list(fleet.workers("decode"))
                    ),
                ),
            }
        )

    def _indexes(self) -> list[FleetPageIndex]:
        roles: tuple[Role, ...] = ("decode", "prefill")
        found = (served.router.index(role) for served in self.catalogue for role in roles)
        return [index for index in found if index is not None]

    async def start(self) -> None:
        """Starts to listen and to follow the workers. Raises ConfigError if a port is taken."""
        await self.adapters.refresh()
        await self.server.start(SERVICES)
        self._adapter_task = start_logged(self._adapter_manager.run())
        self._fleet_task = start_logged(self.fleet.run())
        self._view_task = start_logged(self._view.run())
        await self.server.set_serving(True, but=(_EDGES_FACE,))
        self._open_task = start_logged(self._open_to_edges())
        self.server.write_ready_file()
        _log.info(
            "gateway ready",
            extra={
                "address": self.server.address,
                "metrics_address": self.server.metrics_address,
                "models": list(self._models),
                "settings": self._settings.describe(),
            },
        )

    async def _open_to_edges(self) -> None:
        """Opens the gateway to edges once the workers are there, which other gateways already know.

        Without workers it opens after a while, and refuses requests itself.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIND_WORKERS_S):
                while any(served.problem() for served in self.catalogue):
                    await asyncio.sleep(_LOOK_EVERY_S)
        await self.server.set_serving(True)

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT, then leaves and stops.

        Edges may send requests until the ready grace is over, since there may be no other gateway.
        """
        grace_s = self._settings.ready_grace_s
        await self.server.run_until_signal(self.leave, grace_s, but=(_EDGES_FACE,))

    async def leave(self) -> None:
        """Waits until edges know that this gateway is NOT_SERVING, then drains.

        Requests that arrive until then are accepted. Requests that still run shortly before the end
        of the grace period fail with a typed error, since the end of the server would just cut
        them.
        """
        grace_s = self._settings.drain_grace_s
        notice_s, last_s = min(_NOTICE_S, grace_s / 4), min(_LAST_WORDS_S, grace_s / 4)
        await asyncio.sleep(notice_s)
        try:
            async with asyncio.timeout(grace_s - notice_s - last_s):
                await self.drain()
        except TimeoutError:
            _log.warning(
                "%d requests are ended with the grace period", len(self.pipeline.running_ids)
            )
            self.pipeline.end_all()
            await self.drain()

    async def drain(self) -> None:
        """Refuses new requests and returns once the running ones have ended."""
        await self._admission.drain()
        self._ending.set()

    async def stop(self) -> None:
        """Stops at once, with or without a preceding `drain`."""
        self._ending.set()
        await self.server.stop()
        await self.close()

    async def close(self) -> None:
        """Releases workers and threads, after the server has stopped."""
        await self._adapter_manager.close()
        started = (self._open_task, self._adapter_task, self._fleet_task, self._view_task)
        tasks = [task for task in started if task is not None]
        for task in tasks:
            task.cancel()
        # A failed task was logged when it failed.
        await asyncio.gather(*tasks, return_exceptions=True)
        self._openai.close()
        await self._responses.close()
        for served in self.catalogue:
            served.latency_admission.close()
            served.preparer.close()
        await asyncio.to_thread(self.images.close)
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        if self._routing_record is not None:
            await asyncio.to_thread(self._routing_record.close)
