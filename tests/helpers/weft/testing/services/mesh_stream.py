"""A gateway that streams a mesh made up by a test, behind the real edge."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from weft.common.rpc.errors import abort
from weft.contract.codec.walk import duration
from weft.gateway.console.relay import MemberNotFound
from weft.testing.services.processes import ServiceProcess
from weft.v1 import mesh_pb2, mesh_pb2_grpc, trace_pb2

GATEWAY = "gateway-0"
ROLES = {
    "prefill": mesh_pb2.MEMBER_ROLE_PREFILL,
    "decode": mesh_pb2.MEMBER_ROLE_DECODE,
    "kvstore": mesh_pb2.MEMBER_ROLE_KVSTORE,
}
_TICK_S = 0.3


class MeshStream(mesh_pb2_grpc.MeshServiceServicer):
    """Streams `mesh`, with a history of ten minutes; remembers the calls that change something."""

    def __init__(self, mesh: mesh_pb2.WatchMeshResponse) -> None:
        self.mesh = mesh
        self.spans: list[trace_pb2.Span] = []
        self.calls: list[Any] = []
        self.num_elsewhere = 0
        """Further calls that another gateway answers, as behind an edge with several."""
        self.url = ""

    async def WatchMesh(self, request: Any, context: Any) -> AsyncIterator[Any]:
        first = mesh_pb2.WatchMeshResponse()
        first.CopyFrom(self.mesh)
        first.points.extend(made_points(300))
        yield first
        while True:
            await asyncio.sleep(_TICK_S)
            news = mesh_pb2.WatchMeshResponse()
            news.CopyFrom(self.mesh)
            del news.ended_requests[:]
            yield news

    async def ListRequestSpans(
        self, request: Any, context: Any
    ) -> mesh_pb2.ListRequestSpansResponse:
        if self._is_elsewhere():
            return mesh_pb2.ListRequestSpansResponse(gateway_id="gateway-other")
        return mesh_pb2.ListRequestSpansResponse(spans=self.spans, gateway_id=self.mesh.gateway_id)

    def _is_elsewhere(self) -> bool:
        self.num_elsewhere -= 1
        return self.num_elsewhere >= 0

    def _note(self, request: Any) -> None:
        self.calls.append(request)

    async def DrainMember(self, request: Any, context: Any) -> mesh_pb2.DrainMemberResponse:
        self._note(request)
        for member in self.mesh.members:
            if member.member_id == request.member_id:
                member.draining, member.healthy, member.problem = True, False, "draining"
        return mesh_pb2.DrainMemberResponse(running_requests=3)

    async def UndrainMember(self, request: Any, context: Any) -> mesh_pb2.UndrainMemberResponse:
        self._note(request)
        for member in self.mesh.members:
            if member.member_id == request.member_id:
                member.draining, member.healthy, member.problem = False, True, ""
        return mesh_pb2.UndrainMemberResponse()

    async def FlushMember(self, request: Any, context: Any) -> mesh_pb2.FlushMemberResponse:
        if self._is_elsewhere():
            await abort(context, MemberNotFound("there is no such member"))
        self._note(request)
        return mesh_pb2.FlushMemberResponse(flushed_pages=1234)

    async def SetMemberLogLevel(
        self, request: Any, context: Any
    ) -> mesh_pb2.SetMemberLogLevelResponse:
        self._note(request)
        return mesh_pb2.SetMemberLogLevelResponse(previous_level="info")

    async def LoadMeshAdapter(self, request: Any, context: Any) -> mesh_pb2.LoadMeshAdapterResponse:
        self._note(request)
        self.mesh.adapters.add(name=request.name, parent=request.model, state="serving")
        return mesh_pb2.LoadMeshAdapterResponse(digest="ab" * 32)

    async def UnloadMeshAdapter(
        self, request: Any, context: Any
    ) -> mesh_pb2.UnloadMeshAdapterResponse:
        self._note(request)
        kept = [one for one in self.mesh.adapters if one.name != request.name]
        del self.mesh.adapters[:]
        self.mesh.adapters.extend(kept)
        return mesh_pb2.UnloadMeshAdapterResponse(digest="ab" * 32)


def made_points(count: int) -> list[mesh_pb2.MeshPoint]:
    """A busy mesh's history, up to now."""
    now, points = time.time(), []
    level = 2000.0
    for at in range(count):
        level = min(max(level * random.uniform(0.93, 1.08), 800), 6000)
        point = mesh_pb2.MeshPoint(
            span=duration(2.0),
            requests_per_second=level / 120,
            failures_per_second=max(0.0, random.gauss(0, 0.2)),
            prompt_tokens_per_second=level * 3,
            output_tokens_per_second=level,
            hit_rate=random.uniform(0.5, 0.7),
            goodput=random.uniform(0.93, 1.0),
            first_token=mesh_pb2.LatencyQuantiles(
                p50_s=random.uniform(0.1, 0.14),
                p90_s=random.uniform(0.2, 0.3),
                p99_s=random.uniform(0.4, 0.9),
            ),
            between_tokens=mesh_pb2.LatencyQuantiles(
                p50_s=random.uniform(0.011, 0.013), p90_s=0.017, p99_s=random.uniform(0.03, 0.05)
            ),
            running=int(level / 40),
            queued=random.randrange(6),
            worker_waiting=random.randrange(30),
            worker_queued_tokens=random.randrange(9000),
            pages=mesh_pb2.PageCounts(
                total=100000, used=int(level * 10), cached=30000, quarantined=random.randrange(200)
            ),
        )
        point.time.FromNanoseconds(int((now - 2 * (count - 1 - at)) * 1e9))
        points.append(point)
    return points


def made_mesh(
    decode: int = 2, prefill: int = 1, stores: int = 1, model: str = "tiny"
) -> mesh_pb2.WatchMeshResponse:
    """A mesh at work, whose numbers are random."""
    mesh = mesh_pb2.WatchMeshResponse(gateway_id=GATEWAY, can_operate=True)
    mesh.time.GetCurrentTime()
    mesh.members.add(
        member_id=GATEWAY, role=mesh_pb2.MEMBER_ROLE_GATEWAY, healthy=True, running_requests=41
    )
    for role, number in (("decode", decode), ("prefill", prefill), ("kvstore", stores)):
        for index in range(number):
            used, cached = random.randrange(2000, 30000), random.randrange(20000, 50000)
            mesh.members.add(
                member_id=f"{role}-{index}",
                role=ROLES[role],
                address=f"10.0.{len(role)}.{index}:50052",
                model="" if role == "kvstore" else model,
                healthy=True,
                breaker="closed",
                running_requests=random.randrange(40),
                waiting_requests=random.randrange(3),
                pages=mesh_pb2.PageCounts(total=100000, used=used, cached=cached, quarantined=300),
                prefill_tokens_per_second=random.uniform(2e4, 6e4) if role == "prefill" else 0,
                decode_tokens_per_second=random.uniform(800, 3000) if role == "decode" else 0,
                hit_rate=random.random(),
                transports=["nixl", "data"],
                epoch=f"{random.getrandbits(64):016x}",
            )
    for index in range(decode):
        mesh.flows.add(
            source_id=GATEWAY,
            target_id=f"decode-{index}",
            kind=mesh_pb2.FLOW_KIND_REQUESTS,
            per_second=random.uniform(0.5, 4),
            tokens_per_second=random.uniform(800, 3000),
            open=random.randrange(40),
        )
        for source in [f"prefill-{index % prefill}"] * bool(prefill) + ["kvstore-0"] * bool(stores):
            mesh.flows.add(
                source_id=source,
                target_id=f"decode-{index}",
                kind=mesh_pb2.FLOW_KIND_PAGES,
                per_second=random.uniform(0.5, 4),
                pages_per_second=random.uniform(20, 300),
                bytes_per_second=random.uniform(1e6, 5e8),
            )
    mesh.models.add(
        name=model,
        ready=True,
        max_context_tokens=32768,
        task="generate",
        decode_workers=decode,
        prefill_workers=prefill,
        has_chat=True,
    )
    for index in range(40):
        one = mesh.ended_requests.add(
            request_id=f"chatcmpl-{random.getrandbits(128):032x}",
            model=model,
            worker_id=f"decode-{index % max(decode, 1)}",
            duration=duration(random.uniform(0.4, 4)),
            first_token=duration(random.uniform(0.05, 0.3)),
            prompt_tokens=random.randrange(20, 4000),
            cached_tokens=random.randrange(20),
            output_tokens=random.randrange(1, 400),
            outcome="ok" if index % 9 else "rate_limited",
        )
        one.arrival_time.GetCurrentTime()
    return mesh


@asynccontextmanager
async def mesh_stream(
    rest_binary: Path, folder: Path, mesh: mesh_pb2.WatchMeshResponse
) -> AsyncIterator[MeshStream]:
    """Serves a mesh; `url` is the edge's."""
    fake = MeshStream(mesh)
    server = grpc.aio.server()
    mesh_pb2_grpc.add_MeshServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    command = [str(rest_binary), "--listen", "127.0.0.1:0", "--backend", f"127.0.0.1:{port}"]
    try:
        with ServiceProcess("rest", command, folder) as process:
            fake.url = f"http://{(await process.ready())['address']}"
            yield fake
    finally:
        await server.stop(0)
