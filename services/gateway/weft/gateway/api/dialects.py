"""Adds the faces of all dialects but OpenAI's completions to a server."""

from __future__ import annotations

import importlib.util

import grpc
from prometheus_client import CollectorRegistry
from weft.contract.errors import ConfigError
from weft.gateway.api.anthropic.service import AnthropicFace
from weft.gateway.api.ollama.service import OllamaFace
from weft.gateway.api.openai.service import OpenAIFace
from weft.gateway.api.pooling.service import PoolingFace
from weft.gateway.api.relay import EdgeFace
from weft.gateway.api.responses.service import ResponsesFace
from weft.gateway.api.responses.store import MemoryResponses, ResponseStore
from weft.gateway.api.server.profiles import ProfileCalls
from weft.gateway.api.server.service import ServerFace
from weft.gateway.api.trainer.service import TrainerFace
from weft.gateway.catalogue import Catalogue
from weft.gateway.console.access import MeshAccess
from weft.gateway.console.weights import MeshWeights
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.settings import GatewaySettings
from weft.v1 import dialects_pb2_grpc


def make_response_store(settings: GatewaySettings) -> ResponseStore:
    """Raises ConfigError if the settings contradict each other."""
    if not settings.response_store_url:
        return MemoryResponses(settings.response_store_bytes, settings.max_stored_responses)
    if importlib.util.find_spec("valkey") is None:
        raise ConfigError(
            "the package `valkey` is not installed: pip install 'weft[valkey]'",
            param="response_store_url",
        )
    # Imported here: the client of these servers is an extra of the package.
    from weft.gateway.api.responses.shared_store import SharedResponses

    return SharedResponses(
        settings.response_store_url,
        settings.response_store_password_file,
        prefix=settings.response_store_prefix,
        ttl_s=settings.response_ttl_s,
        timeout_s=settings.response_store_timeout_s,
    )


def add_dialects(
    server: grpc.aio.Server,
    settings: GatewaySettings,
    *,
    pipeline: RequestPipeline,
    models: Catalogue,
    openai: OpenAIFace,
    relays: EdgeFace,
    registry: CollectorRegistry,
    gateway: str,
    responses: ResponseStore,
    profiles: ProfileCalls,
    weights: MeshWeights,
    access: MeshAccess,
) -> None:
    """Adds the services of all dialects to the server. `openai` shares its body parser and its
    readiness with them; `gateway` names this gateway in ids of responses: letters and digits.
    """
    bodies = openai.bodies
    face = ResponsesFace(pipeline, models, bodies, responses, relays, gateway)
    dialects_pb2_grpc.add_ResponsesServiceServicer_to_server(face, server)
    anthropic = AnthropicFace(pipeline, models, bodies, relays)
    dialects_pb2_grpc.add_AnthropicServiceServicer_to_server(anthropic, server)
    ollama = OllamaFace(pipeline, models, bodies, relays)
    dialects_pb2_grpc.add_OllamaServiceServicer_to_server(ollama, server)
    vectors = PoolingFace(pipeline, bodies)
    dialects_pb2_grpc.add_PoolingServiceServicer_to_server(vectors, server)
    other = ServerFace(
        pipeline,
        models,
        registry,
        openai.check_ready,
        bodies,
        profiles,
        weights,
        serves_metrics=settings.rest_metrics,
        asks_for_keys=settings.has_api_keys,
    )
    dialects_pb2_grpc.add_ServerServiceServicer_to_server(other, server)
    trainer = TrainerFace(pipeline, weights, access, models, bodies, relays, is_on=settings.rl)
    dialects_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
