"""The state of a watched mesh: the newest message, and points and requests of earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence

import grpc
from weft.cli.channel import Metadata
from weft.contract.codec.walk import duration
from weft.v1 import mesh_pb2, mesh_pb2_grpc

MAX_POINTS = 300
MAX_ENDED = 200
_RECENT_POINTS = 15
"""Points in which to look for the newest latencies: half a minute."""

_OWNERS = (mesh_pb2.MEMBER_ROLE_DECODE, mesh_pb2.MEMBER_ROLE_BOTH)
_WORKERS = (mesh_pb2.MEMBER_ROLE_PREFILL, *_OWNERS)


async def watch_mesh(
    channel: grpc.aio.Channel, metadata: Metadata, interval_s: float
) -> AsyncGenerator[mesh_pb2.WatchMeshResponse, None]:
    """The messages of `MeshService.WatchMesh`. Raises grpc.aio.AioRpcError if the gateway refuses
    or does not answer.
    """
    stub = mesh_pb2_grpc.MeshServiceStub(channel)
    call = stub.WatchMesh(
        mesh_pb2.WatchMeshRequest(interval=duration(interval_s)), metadata=metadata
    )
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()


class MeshPicture:
    """The state of a mesh, from the messages of one stream."""

    def __init__(self) -> None:
        self.newest = mesh_pb2.WatchMeshResponse()
        """The newest message; empty before the first."""
        self.points: deque[mesh_pb2.MeshPoint] = deque(maxlen=MAX_POINTS)
        """The last minutes, oldest first."""
        self.ended: deque[mesh_pb2.MeshRequest] = deque(maxlen=MAX_ENDED)
        """The requests that ended last, in the order of their ends."""

    def take(self, message: mesh_pb2.WatchMeshResponse) -> None:
        self.newest = message
        self.points.extend(message.points)
        self.ended.extend(message.ended_requests)

    def whole(self) -> mesh_pb2.WatchMeshResponse:
        """The newest message, with the points and requests of all messages."""
        found = mesh_pb2.WatchMeshResponse()
        found.CopyFrom(self.newest)
        del found.points[:], found.ended_requests[:]
        found.points.extend(self.points)
        found.ended_requests.extend(self.ended)
        return found

    @property
    def members(self) -> Sequence[mesh_pb2.MeshMember]:
        return self.newest.members

    @property
    def running(self) -> int:
        """Requests that run on decode workers, through all gateways."""
        return sum(one.running_requests + one.filling_requests for one in self._decode_workers())

    @property
    def waiting(self) -> int:
        """Requests that wait at the gateway or at decode workers."""
        gateways = (one for one in self.members if one.role == mesh_pb2.MEMBER_ROLE_GATEWAY)
        waiting = sum(one.waiting_requests for one in gateways)
        return waiting + sum(one.waiting_requests for one in self._decode_workers())

    @property
    def tokens_per_second(self) -> float:
        """Tokens that decode workers generate."""
        return sum(one.decode_tokens_per_second for one in self._decode_workers())

    @property
    def pages(self) -> mesh_pb2.PageCounts:
        """Pages of the pools of all workers."""
        total = mesh_pb2.PageCounts()
        for one in self.members:
            if one.role in _WORKERS:
                total.total += one.pages.total
                total.free += one.pages.free
                total.cached += one.pages.cached
                total.used += one.pages.used
                total.quarantined += one.pages.quarantined
        return total

    def latency(self, name: str) -> mesh_pb2.LatencyQuantiles | None:
        """The newest quantiles of `first_token` or `between_tokens`; None: nothing lately."""
        for point in list(self.points)[: -_RECENT_POINTS - 1 : -1]:
            if point.HasField(name):  # type: ignore[arg-type]
                found: mesh_pb2.LatencyQuantiles = getattr(point, name)
                return found
        return None

    def _decode_workers(self) -> list[mesh_pb2.MeshMember]:
        # One that may change its role ends in any role what it owns.
        return [one for one in self.members if one.role in _OWNERS or one.HasField("role_state")]
