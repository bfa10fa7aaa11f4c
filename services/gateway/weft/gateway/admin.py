"""The gateway's part of AdminService."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from weft.common.admin import AdminBackend
from weft.common.tasks import tasks_now
from weft.gateway.api.adapter_calls import AdapterCalls
from weft.gateway.api.worker_calls import WorkerCalls
from weft.gateway.catalogue import Catalogue
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.generation.pipeline import RequestPipeline
from weft.v1 import gateway_pb2, gateway_pb2_grpc


class GatewayAdmin(AdminBackend):
    def __init__(self, fleet: Fleet, models: Catalogue, pipeline: RequestPipeline) -> None:
        self._fleet = fleet
        self._models = models
        self._pipeline = pipeline

    async def flush_cache(self) -> int:
        return sum(served.router.flush() for served in self._models)

    async def dump_state(self, max_entries: int) -> Mapping[str, object]:
        now = asyncio.get_running_loop().time()
        workers = list(self._fleet.workers())
        requests, load = self._pipeline.running_ids, self._pipeline.load()
        return {
            "running_prompts": load.running_prompts,
            "queued_prompts": load.queued_prompts,
            "held_requests": load.held_requests,
            "forecast_first_token_s": (
                load.first_token.ToNanoseconds() / 1e9 if load.HasField("first_token") else None
            ),
            "requests_with_target": load.requests_with_target,
            "requests_within_target": load.requests_within_target,
            "models": {one.model.name: one.problem() or "ready" for one in self._models},
            "rate_limits": self._pipeline.limits.describe(now, max_entries),
            "num_requests": len(requests),
            "requests": requests[:max_entries],
            "num_adapters": len(self._models.adapters.serving()),
            "adapter_generation": self._models.adapters.manifest.generation,
            "num_workers": len(workers),
            "workers": [worker.snapshot(now) for worker in workers[:max_entries]],
            "server": tasks_now(),
        }


def add_operators_calls(
    face: gateway_pb2_grpc.GatewayServiceServicer,
    adapters: AdapterCalls,
    workers: WorkerCalls,
    server: grpc.aio.Server,
) -> None:
    """Adds the operators' calls of `GatewayService` to their port.

    On the main port operators are known by their certificates, which a gateway without
    `client_certificates` never sees, and by API keys.
    """
    handlers: dict[str, Any] = {
        "GetFleet": grpc.unary_unary_rpc_method_handler(
            face.GetFleet,
            gateway_pb2.GetFleetRequest.FromString,
            gateway_pb2.GetFleetResponse.SerializeToString,
        ),
        "DrainWorker": grpc.unary_unary_rpc_method_handler(
            workers.drain,
            gateway_pb2.DrainWorkerRequest.FromString,
            gateway_pb2.DrainWorkerResponse.SerializeToString,
        ),
        "UndrainWorker": grpc.unary_unary_rpc_method_handler(
            workers.undrain,
            gateway_pb2.UndrainWorkerRequest.FromString,
            gateway_pb2.UndrainWorkerResponse.SerializeToString,
        ),
        "LoadAdapter": grpc.unary_unary_rpc_method_handler(
            adapters.load,
            gateway_pb2.LoadAdapterRequest.FromString,
            gateway_pb2.LoadAdapterResponse.SerializeToString,
        ),
        "UnloadAdapter": grpc.unary_unary_rpc_method_handler(
            adapters.unload,
            gateway_pb2.UnloadAdapterRequest.FromString,
            gateway_pb2.UnloadAdapterResponse.SerializeToString,
        ),
        "ListAdapters": grpc.unary_unary_rpc_method_handler(
            adapters.list,
            gateway_pb2.ListAdaptersRequest.FromString,
            gateway_pb2.ListAdaptersResponse.SerializeToString,
        ),
    }
    calls = grpc.method_handlers_generic_handler("weft.v1.GatewayService", handlers)
    server.add_generic_rpc_handlers((calls,))
