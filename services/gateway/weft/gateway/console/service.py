"""Implements weft.v1.MeshService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.duration_pb2 import Duration
from weft.common.admin import AdminServicer
from weft.common.mesh import MAX_INTERVAL_S, MIN_INTERVAL_S
from weft.common.rpc.errors import Context
from weft.common.telemetry.tracing import TraceServicer
from weft.contract.codec.pairs import LOG_LEVELS, PROFILE_OPTIONS, WORKER_ROLES
from weft.contract.errors import Draining
from weft.gateway.admission.authenticate import bearer
from weft.gateway.api.adapter_calls import AdapterCalls
from weft.gateway.api.worker_calls import WorkerCalls
from weft.gateway.console.access import MeshAccess
from weft.gateway.console.profiles import MeshProfiles
from weft.gateway.console.relay import OperatorsRelay
from weft.gateway.console.view import Cursor, MeshView
from weft.gateway.validate import invalid
from weft.v1 import admin_pb2, gateway_pb2, mesh_pb2, mesh_pb2_grpc, trace_pb2

_DEFAULT_INTERVAL_S = 1.0
_RELAY_TIMEOUT_S = 10.0
_MIN_PLAN_S, _MAX_PLAN_S = 1.0, 600.0
_MAX_ID_CHARS = 64


class MeshFace(mesh_pb2_grpc.MeshServiceServicer):
    """Checks the caller, and converts. `spans` finds the spans of requests. When `ending` is set,
    or after `max_watch_s`, every stream ends, so that its watcher calls again, perhaps another
    gateway.
    """

    def __init__(
        self,
        view: MeshView,
        access: MeshAccess,
        relay: OperatorsRelay,
        admin: AdminServicer,
        spans: TraceServicer,
        adapters: AdapterCalls,
        workers: WorkerCalls,
        profiles: MeshProfiles,
        gateway_id: str,
        ending: asyncio.Event,
        max_watch_s: float,
    ) -> None:
        self._view = view
        self._access = access
        self._relay = relay
        self._admin = admin
        self._spans = spans
        self._adapters = adapters
        self._workers = workers
        self._profiles = profiles
        self._gateway_id = gateway_id
        self._ending = ending
        self._max_watch_s = max_watch_s

    async def WatchMesh(
        self, request: mesh_pb2.WatchMeshRequest, context: Context
    ) -> AsyncIterator[mesh_pb2.WatchMeshResponse]:
        self._access.check_watch(context)
        interval_s = _interval_s(request)
        if self._ending.is_set():
            raise Draining("this gateway is ending; call another one", stage="admit")
        can_operate = self._access.may_operate(context)
        has_token = self._access.has_token(context)
        cursor, end_s = Cursor(), time.monotonic() + self._max_watch_s
        with self._view.watching(has_token=has_token):
            while not self._ending.is_set() and time.monotonic() < end_s:
                # Keys are taken away while their holders watch.
                self._access.check_watch(context)
                yield self._view.news(cursor, can_operate=can_operate, has_token=has_token)
                try:
                    async with asyncio.timeout(interval_s):
                        await self._ending.wait()
                except TimeoutError:
                    pass

    async def ListRequestSpans(
        self, request: mesh_pb2.ListRequestSpansRequest, context: Context
    ) -> mesh_pb2.ListRequestSpansResponse:
        self._access.check_watch(context)
        limit = request.max_spans if request.HasField("max_spans") else None
        wanted = trace_pb2.ListSpansRequest(
            id=self._view.find_request(request.id), max_spans=limit, fan_out=True
        )
        found = await self._spans.ListSpans(wanted, context)
        if not self._access.has_token(context):
            for span in found.spans:
                hide_ids(span)
        return mesh_pb2.ListRequestSpansResponse(
            spans=found.spans, silent=found.silent, gateway_id=self._gateway_id
        )

    async def DrainMember(
        self, request: mesh_pb2.DrainMemberRequest, context: Context
    ) -> mesh_pb2.DrainMemberResponse:
        self._access.check_operate(context)
        # Without time to wait the worker answers once it drains.
        order = gateway_pb2.DrainWorkerRequest(worker_id=request.member_id, timeout=Duration())
        answer = await self._workers.drain(order, context)
        return mesh_pb2.DrainMemberResponse(running_requests=answer.running_requests)

    async def UndrainMember(
        self, request: mesh_pb2.UndrainMemberRequest, context: Context
    ) -> mesh_pb2.UndrainMemberResponse:
        self._access.check_operate(context)
        order = gateway_pb2.UndrainWorkerRequest(worker_id=request.member_id)
        await self._workers.undrain(order, context)
        return mesh_pb2.UndrainMemberResponse()

    async def FlushMember(
        self, request: mesh_pb2.FlushMemberRequest, context: Context
    ) -> mesh_pb2.FlushMemberResponse:
        answer = await self._administer(
            request.member_id, context, "FlushCache", admin_pb2.FlushCacheRequest()
        )
        return mesh_pb2.FlushMemberResponse(flushed_pages=answer.flushed_pages)

    async def SetMemberRole(
        self, request: mesh_pb2.SetMemberRoleRequest, context: Context
    ) -> mesh_pb2.SetMemberRoleResponse:
        self._access.check_operate(context)
        if not request.role or request.role not in WORKER_ROLES.numbers:
            raise invalid("role", f"must be one of {', '.join(filter(None, WORKER_ROLES.numbers))}")
        if request.role == "prefill" and not request.force:
            self._workers.check_decodes_without(request.member_id)
        order = admin_pb2.SetRoleRequest(role=WORKER_ROLES.numbers[request.role])
        if request.HasField("lease"):
            order.lease.CopyFrom(request.lease)
        answer = await self._administer(request.member_id, context, "SetRole", order)
        self._workers.take_role(request.member_id, answer.state)
        return mesh_pb2.SetMemberRoleResponse(
            previous_role=WORKER_ROLES[answer.previous_role], changes=answer.state.changes
        )

    async def SetMemberLogLevel(
        self, request: mesh_pb2.SetMemberLogLevelRequest, context: Context
    ) -> mesh_pb2.SetMemberLogLevelResponse:
        levels = [name for name in LOG_LEVELS.numbers if name]
        if request.level not in levels:
            raise invalid("level", f"must be one of {', '.join(levels)}")
        order = admin_pb2.SetLogLevelRequest(level=LOG_LEVELS.numbers[request.level])
        answer = await self._administer(request.member_id, context, "SetLogLevel", order)
        return mesh_pb2.SetMemberLogLevelResponse(previous_level=LOG_LEVELS[answer.previous_level])

    async def TellPlan(
        self, request: mesh_pb2.TellPlanRequest, context: Context
    ) -> mesh_pb2.TellPlanResponse:
        self._access.check_operate(context)
        if not 1 <= len(request.planner_id) <= _MAX_ID_CHARS:
            raise invalid("planner_id", f"must have 1 to {_MAX_ID_CHARS} characters")
        lease_s = request.lease.ToNanoseconds() / 1e9
        if not _MIN_PLAN_S <= lease_s <= _MAX_PLAN_S:
            raise invalid("lease", f"must be {_MIN_PLAN_S:g} s to {_MAX_PLAN_S:g} s")
        holder = self._view.plans.tell(
            request.planner_id, request.plans, lease_s, wants_to_act=request.wants_to_act
        )
        return mesh_pb2.TellPlanResponse(
            acts=holder == request.planner_id and bool(holder), holder_id=holder
        )

    async def StartMeshProfile(
        self, request: mesh_pb2.StartMeshProfileRequest, context: Context
    ) -> mesh_pb2.StartMeshProfileResponse:
        self._access.check_operate(context)
        profile = await self._profiles.start(
            PROFILE_OPTIONS.decode(request.options),
            bearer(context.invocation_metadata()),
            members=request.member_ids,
            prefix=request.prefix,
            folder=request.folder,
        )
        return mesh_pb2.StartMeshProfileResponse(
            profile_id=profile.profile_id,
            member_ids=profile.members,
            path=str(profile.out),
            notes=profile.notes,
        )

    async def StopMeshProfile(
        self, request: mesh_pb2.StopMeshProfileRequest, context: Context
    ) -> mesh_pb2.StopMeshProfileResponse:
        self._access.check_operate(context)
        profile = await self._profiles.stop(request.profile_id)
        return mesh_pb2.StopMeshProfileResponse(
            profile_id=profile.profile_id, path=str(profile.out)
        )

    async def ReadMeshProfile(
        self, request: mesh_pb2.ReadMeshProfileRequest, context: Context
    ) -> AsyncIterator[mesh_pb2.ReadMeshProfileResponse]:
        self._access.check_operate(context)
        summary, chunks = await self._profiles.read(request.profile_id)
        yield mesh_pb2.ReadMeshProfileResponse(summary=summary)
        async for chunk in chunks:
            yield mesh_pb2.ReadMeshProfileResponse(data=chunk)

    async def LoadMeshAdapter(
        self, request: mesh_pb2.LoadMeshAdapterRequest, context: Context
    ) -> mesh_pb2.LoadMeshAdapterResponse:
        self._access.check_operate(context)
        order = gateway_pb2.LoadAdapterRequest(
            name=request.name,
            path=request.path,
            model=request.model,
            replace=request.replace,
            pinned=request.pinned,
        )
        loaded = await self._adapters.load(order, context)
        return mesh_pb2.LoadMeshAdapterResponse(digest=loaded.adapter.adapter.digest.hex())

    async def UnloadMeshAdapter(
        self, request: mesh_pb2.UnloadMeshAdapterRequest, context: Context
    ) -> mesh_pb2.UnloadMeshAdapterResponse:
        self._access.check_operate(context)
        order = gateway_pb2.UnloadAdapterRequest(name=request.name)
        unloaded = await self._adapters.unload(order, context)
        return mesh_pb2.UnloadMeshAdapterResponse(digest=unloaded.adapter.digest.hex())

    async def _administer(self, member_id: str, context: Context, method: str, order: Any) -> Any:
        """Passes the caller's token on."""
        self._access.check_operate(context)
        if member_id == self._gateway_id:
            own: Callable[[Any, Context], Awaitable[Any]] = getattr(self._admin, method)
            return await own(order, context)
        token = bearer(context.invocation_metadata())
        async with self._relay.reach(member_id) as stub:
            return await getattr(stub, method)(
                order, timeout=_RELAY_TIMEOUT_S, metadata=(("authorization", f"Bearer {token}"),)
            )


def hide_ids(span: trace_pb2.Span) -> None:
    """Removes the ids of the request and its trace. Of a failure it leaves only the reason, since
    the message may quote an id.
    """
    span.ClearField("request_id")
    span.ClearField("trace_id")
    span.error = span.error.partition(":")[0]
    attributes = span.attributes.fields
    for name in [name for name in attributes if name.endswith("request_id")]:
        del attributes[name]


def _interval_s(request: mesh_pb2.WatchMeshRequest) -> float:
    if not request.HasField("interval"):
        return _DEFAULT_INTERVAL_S
    given_s = request.interval.ToNanoseconds() / 1e9
    if not MIN_INTERVAL_S <= given_s <= MAX_INTERVAL_S:
        raise invalid("interval", f"must be {MIN_INTERVAL_S:g} s to {MAX_INTERVAL_S:g} s")
    return given_s
