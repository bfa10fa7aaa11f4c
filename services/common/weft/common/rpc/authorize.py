"""Which service may call which method. A method that is not listed is closed to all."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import grpc
from weft.common.rpc.errors import Context, abort
from weft.common.rpc.tls import services_of
from weft.contract.errors import PermissionDenied

_log = logging.getLogger(__name__)

ANYONE = "*"
"""Any caller, also without a certificate where the server accepts that."""
SERVICES = ("gateway", "prefill", "decode", "kvstore", "rest", "cli", "client")
"""All identities. `cli` is the operators' command line and `weft up`; `client` are clients'
programs.
"""
_ALL = frozenset(SERVICES)
_FRONT = frozenset({"rest", "cli", "client", ANYONE})
_FILLED = frozenset({"decode", "prefill"})
OPERATORS = frozenset({"cli"})
_WATCHERS = frozenset({"gateway", "cli"})
_CONSOLE = frozenset({"rest", "cli"})
_SCALERS = frozenset({"client", "cli"})

TOKEN_CHECKED = frozenset(
    {
        "/weft.v1.ServerService/StartProfile",
        "/weft.v1.ServerService/StopProfile",
        "/weft.v1.ServerService/StartExpertRecord",
        "/weft.v1.ServerService/StopExpertRecord",
        "/weft.v1.ServerService/DumpExpertRecord",
        "/weft.v1.ServerService/BalanceExperts",
        "/weft.v1.TrainerService/PauseWorkers",
        "/weft.v1.TrainerService/ResumeWorkers",
        "/weft.v1.TrainerService/IsPaused",
        "/weft.v1.TrainerService/PauseGeneration",
        "/weft.v1.TrainerService/ContinueGeneration",
        "/weft.v1.TrainerService/AbortRequests",
        "/weft.v1.TrainerService/ShowLoads",
        "/weft.v1.TrainerService/UpdateWeightsFromDisk",
        "/weft.v1.TrainerService/InitWeightsUpdateGroup",
        "/weft.v1.TrainerService/DestroyWeightsUpdateGroup",
        "/weft.v1.TrainerService/BeginWeightUpdate",
        "/weft.v1.TrainerService/UpdateWeightsFromDistributed",
        "/weft.v1.TrainerService/EndWeightUpdate",
        "/weft.v1.TrainerService/UpdateWeightsFromTensor",
        "/weft.v1.TrainerService/UpdateWeightsFromPeer",
        "/weft.v1.TrainerService/UpdateWeightsFromIpc",
        "/weft.v1.TrainerService/InitWeightTransferEngine",
        "/weft.v1.TrainerService/StartWeightUpdate",
        "/weft.v1.TrainerService/UpdateWeights",
        "/weft.v1.TrainerService/FinishWeightUpdate",
        "/weft.v1.TrainerService/ShutdownWeightTransferEngine",
        "/weft.v1.TrainerService/GetWorldSize",
        "/weft.v1.TrainerService/GetWeightVersion",
        "/weft.v1.TrainerService/FlushCache",
        "/weft.v1.TrainerService/CheckWeights",
        "/weft.v1.TrainerService/ShowServer",
        "/weft.v1.TrainerService/SleepWorkers",
        "/weft.v1.TrainerService/WakeWorkers",
        "/weft.v1.TrainerService/IsSleeping",
        "/weft.v1.TrainerService/ReleaseMemory",
        "/weft.v1.TrainerService/ResumeMemory",
    }
)
"""Methods for which the gateway asks for the operators' token, and for no API key."""
RELAYED = frozenset(
    {
        "/weft.v1.AdminService/FlushCache",
        "/weft.v1.AdminService/SetLogLevel",
        "/weft.v1.AdminService/StartProfile",
        "/weft.v1.AdminService/StopProfile",
        "/weft.v1.AdminService/ReadProfile",
        "/weft.v1.AdminService/StartExpertCounts",
        "/weft.v1.AdminService/StopExpertCounts",
        "/weft.v1.AdminService/ReadExpertCounts",
        "/weft.v1.AdminService/BalanceExperts",
        "/weft.v1.AdminService/Pause",
        "/weft.v1.AdminService/Resume",
        "/weft.v1.AdminService/Refit",
        "/weft.v1.AdminService/JoinWeightGroup",
        "/weft.v1.AdminService/LeaveWeightGroup",
        "/weft.v1.AdminService/BeginRefit",
        "/weft.v1.AdminService/ReceiveWeights",
        "/weft.v1.AdminService/EndRefit",
        "/weft.v1.AdminService/Sleep",
        "/weft.v1.AdminService/Wake",
        "/weft.v1.AdminService/ShowWeights",
        "/weft.v1.AdminService/SetRole",
    }
)
"""Methods that a gateway may call on operators' ports too, with the token that an operator sent it.
"""

CALLERS: Mapping[str, frozenset[str]] = {
    "/weft.v1.GatewayService/Chat": _FRONT,
    "/weft.v1.GatewayService/Complete": _FRONT,
    "/weft.v1.GatewayService/Tokenize": _FRONT,
    "/weft.v1.GatewayService/Detokenize": _FRONT,
    "/weft.v1.GatewayService/ListModels": _FRONT,
    "/weft.v1.GatewayService/GetModel": _FRONT,
    "/weft.v1.GatewayService/Cancel": _FRONT,
    "/weft.v1.GatewayService/EndSession": _FRONT,
    # A worker that starts asks it for others that have its model.
    "/weft.v1.GatewayService/GetFleet": OPERATORS | _FILLED,
    "/weft.v1.GatewayService/DrainWorker": OPERATORS,
    "/weft.v1.GatewayService/UndrainWorker": OPERATORS,
    # These calls change what all tenants see. Over REST, API keys with that right may call them
    # too.
    "/weft.v1.GatewayService/LoadAdapter": OPERATORS,
    "/weft.v1.GatewayService/UnloadAdapter": OPERATORS,
    "/weft.v1.GatewayService/ListAdapters": OPERATORS,
    "/weft.v1.OpenAIService/LoadLoraAdapter": frozenset({"rest", "cli"}),
    "/weft.v1.OpenAIService/UnloadLoraAdapter": frozenset({"rest", "cli"}),
    "/weft.v1.OpenAIService/ChatCompletions": _FRONT,
    "/weft.v1.OpenAIService/Completions": _FRONT,
    "/weft.v1.OpenAIService/Transcriptions": _FRONT,
    "/weft.v1.OpenAIService/Translations": _FRONT,
    "/weft.v1.OpenAIService/Models": _FRONT,
    "/weft.v1.OpenAIService/RetrieveModel": _FRONT,
    "/weft.v1.OpenAIService/CountChatTokens": _FRONT,
    "/weft.v1.OpenAIService/TokenizeText": _FRONT,
    "/weft.v1.OpenAIService/DetokenizeTokens": _FRONT,
    "/weft.v1.OpenAIService/CancelRequestById": _FRONT,
    "/weft.v1.OpenAIService/EndSession": _FRONT,
    "/weft.v1.OpenAIService/Ready": _FRONT,
    "/weft.v1.OpenAIService/OpenApi": _FRONT,
    "/weft.v1.GatewayService/Embed": _FRONT,
    "/weft.v1.GatewayService/Rerank": _FRONT,
    "/weft.v1.GatewayService/Score": _FRONT,
    "/weft.v1.PoolingService/CreateEmbeddings": _FRONT,
    "/weft.v1.PoolingService/EmbedTexts": _FRONT,
    "/weft.v1.PoolingService/RerankDocuments": _FRONT,
    "/weft.v1.PoolingService/ScorePairs": _FRONT,
    "/weft.v1.PoolingService/ClassifyTexts": _FRONT,
    "/weft.v1.PoolingService/PoolTexts": _FRONT,
    "/weft.v1.ResponsesService/CountInputTokens": _FRONT,
    "/weft.v1.ResponsesService/CreateResponse": _FRONT,
    "/weft.v1.ResponsesService/ListInputItems": _FRONT,
    "/weft.v1.ResponsesService/RetrieveResponse": _FRONT,
    "/weft.v1.ResponsesService/DeleteResponse": _FRONT,
    "/weft.v1.ResponsesService/CancelResponse": _FRONT,
    "/weft.v1.AnthropicService/CreateMessage": _FRONT,
    "/weft.v1.AnthropicService/CountTokens": _FRONT,
    "/weft.v1.OllamaService/Chat": _FRONT,
    "/weft.v1.OllamaService/Generate": _FRONT,
    "/weft.v1.OllamaService/Embed": _FRONT,
    "/weft.v1.OllamaService/EmbedPrompt": _FRONT,
    "/weft.v1.OllamaService/ListTags": _FRONT,
    "/weft.v1.OllamaService/ShowModel": _FRONT,
    "/weft.v1.OllamaService/ListRunning": _FRONT,
    "/weft.v1.OllamaService/GetVersion": _FRONT,
    "/weft.v1.ServerService/ShowVersion": _FRONT,
    "/weft.v1.ServerService/Ping": _FRONT,
    "/weft.v1.ServerService/HealthGenerate": _FRONT,
    "/weft.v1.ServerService/TokenizerInfo": _FRONT,
    "/weft.v1.ServerService/Metrics": _CONSOLE,
    **dict.fromkeys(sorted(TOKEN_CHECKED), _CONSOLE),
    "/weft.v1.TrainerService/GenerateTokens": _FRONT,
    "/weft.v1.TrainerService/ContinueTokens": _FRONT,
    # The gateway itself checks who may watch, and who may change something.
    "/weft.v1.MeshService/WatchMesh": _CONSOLE,
    "/weft.v1.MeshService/ListRequestSpans": _CONSOLE,
    "/weft.v1.MeshService/DrainMember": _CONSOLE,
    "/weft.v1.MeshService/UndrainMember": _CONSOLE,
    "/weft.v1.MeshService/FlushMember": _CONSOLE,
    "/weft.v1.MeshService/SetMemberLogLevel": _CONSOLE,
    "/weft.v1.MeshService/SetMemberRole": _CONSOLE,
    "/weft.v1.MeshService/TellPlan": _CONSOLE,
    "/weft.v1.MeshService/StartMeshProfile": _CONSOLE,
    "/weft.v1.MeshService/StopMeshProfile": _CONSOLE,
    "/weft.v1.MeshService/ReadMeshProfile": _CONSOLE,
    "/weft.v1.MeshService/LoadMeshAdapter": _CONSOLE,
    "/weft.v1.MeshService/UnloadMeshAdapter": _CONSOLE,
    "/weft.v1.EdgeService/Relay": frozenset({"rest"}),
    "/weft.v1.EdgeService/CheckAdmission": frozenset({"rest"}),
    # Only gateways may submit requests, because they have checked tenants and limits.
    "/weft.v1.DecodeService/Session": frozenset({"gateway"}),
    # Only services with pools exchange pages, since a handle tells where NIXL may write and read.
    "/weft.v1.PrefillService/Fill": frozenset({"decode"}),
    "/weft.v1.PrefillService/FillStatus": frozenset({"decode"}),
    "/weft.v1.KvStoreService/Lookup": _FILLED,
    "/weft.v1.KvStoreService/Fill": _FILLED,
    "/weft.v1.KvStoreService/FillStatus": _FILLED,
    "/weft.v1.KvStoreService/Put": _FILLED,
    "/weft.v1.KvStoreService/PutData": _FILLED,
    "/weft.v1.KvStoreService/Hold": frozenset({"decode"}),
    "/weft.v1.KvStoreService/ReportCorrupt": _FILLED,
    "/weft.v1.KvStoreService/GetStoreInfo": _FILLED | _WATCHERS,
    "/weft.v1.KvStoreService/Stats": _WATCHERS,
    "/weft.v1.WorkerService/GetInfo": _WATCHERS,
    "/weft.v1.WorkerService/WatchLoad": _WATCHERS,
    "/weft.v1.WorkerService/PutMedia": frozenset({"gateway"}),
    # Only workers read weights, since an offer tells where NIXL may read.
    "/weft.v1.WorkerService/OfferWeights": _FILLED,
    # They are code, of what a worker runs; it asks only a peer that has shown its certificate.
    "/weft.v1.WorkerService/GetKernels": _FILLED,
    "/weft.v1.WorkerService/WatchKv": _WATCHERS,
    "/weft.v1.WorkerService/ListHeldAdapters": _WATCHERS,
    # Gateways pass on what operators ask of them.
    "/weft.v1.WorkerService/Drain": _WATCHERS,
    "/weft.v1.WorkerService/Undrain": _WATCHERS,
    # A false report would free pages that a write may still reach.
    "/weft.v1.WorkerService/ReportExit": OPERATORS,
    # These are served on a separate port, and need its token.
    **dict.fromkeys(sorted(RELAYED), OPERATORS),
    "/weft.v1.AdminService/DumpState": OPERATORS,
    "/weft.v1.AdminService/InjectFault": OPERATORS,
    "/weft.v1.AdminService/ListFaults": OPERATORS,
    "/weft.v1.AdminService/ClearFaults": OPERATORS,
    # `weft up` serves these on a port of its own, with the same token.
    "/weft.v1.SupervisorService/ShowWorkers": OPERATORS,
    "/weft.v1.SupervisorService/SetWorkers": OPERATORS,
    # Gateways ask the services that they call.
    "/weft.v1.TraceService/ListSpans": _WATCHERS,
    "/externalscaler.ExternalScaler/IsActive": _SCALERS,
    "/externalscaler.ExternalScaler/StreamIsActive": _SCALERS,
    "/externalscaler.ExternalScaler/GetMetricSpec": _SCALERS,
    "/externalscaler.ExternalScaler/GetMetrics": _SCALERS,
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPERATORS | {"client"},
}
"""Services that may call each method, by its full path."""
_LOG_EVERY_S = 1.0


def may_call(services: frozenset[str], method: str) -> bool:
    """Whether a caller whose certificate names these services may call a method.

    A caller without a certificate, or whose certificate names no service, is `ANYONE`.
    """
    return not (services or {ANYONE}).isdisjoint(CALLERS.get(method, frozenset()))


class AuthorizeInterceptor(grpc.aio.ServerInterceptor):
    """Accepts a call if `CALLERS` lists a service that the caller's certificate names.

    Args:
        among: Callers that are accepted at all, whatever `CALLERS` lists; None: any.
        relayed: Methods that gateways may call too, whatever `CALLERS` lists.
    """

    def __init__(
        self, among: frozenset[str] | None = None, relayed: frozenset[str] = frozenset()
    ) -> None:
        self._among = among
        self._relayed = relayed
        self._log_at = 0.0

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wraps the method's handler, because only the handler knows the caller."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:  # no such method
            return None
        wrapped = {}
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                wrapped[kind] = self._checked(behavior, method, kind)
        (kind, checked), *_ = wrapped.items()
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(checked, handler.request_deserializer, handler.response_serializer)

    def _checked(self, behavior: Any, method: str, kind: str) -> Any:
        async def unary(request: Any, context: Context) -> Any:
            await self._check(context, method)
            return await behavior(request, context)

        async def stream(request: Any, context: Context) -> None:
            # A coroutine that writes the messages, as in `ErrorInterceptor`.
            await self._check(context, method)
            result = behavior(request, context)
            if hasattr(result, "__aiter__"):
                async for message in result:
                    await context.write(message)
            else:
                await result

        return stream if kind.endswith("_stream") else unary

    async def _check(self, context: Context, method: str) -> None:
        names = [name.decode() for name in context.auth_context().get("peer_dns", ())]
        services = services_of(names)
        is_among = self._among is None or not services.isdisjoint(self._among)
        if is_among and may_call(services, method):
            return
        if method in self._relayed and "gateway" in services:
            return
        caller = ", ".join(sorted(services)) or "a caller without a service's certificate"
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            _log.warning("a call was refused", extra={"method": method, "caller": caller})
        await abort(context, PermissionDenied(f"{caller} may not call {method}", stage="authorize"))
