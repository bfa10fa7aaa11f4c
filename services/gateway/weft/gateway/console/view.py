"""What everyone who watches a mesh is sent, made once for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice

from weft.common.rpc.tls import Identity
from weft.common.tasks import start_logged
from weft.contract.errors import Overloaded
from weft.gateway.adapters.holders import holders
from weft.gateway.catalogue import Catalogue, ServedModel
from weft.gateway.console.flows import MeshFlows
from weft.gateway.console.history import SPAN_S, MeshHistory, page_counts
from weft.gateway.console.members import describe_store, describe_worker
from weft.gateway.console.plans import PlanBoard
from weft.gateway.console.recent import MAX_REQUESTS, RecentRequests, RequestHandles, describe
from weft.gateway.console.stores import StoreWatch
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.media.sources import SourceLimits
from weft.gateway.telemetry.metrics import GatewayMetrics
from weft.v1 import mesh_pb2

MAX_WATCHERS = 64
"""Watchers with the operators' token, and as many without, who thus lock nobody out."""
MAX_ADAPTERS = 100
"""Adapters that are shown."""
_ADAPTERS_FRESH_S = 5.0
"""Time for which what was made of an unchanged registry is shown: each adapter is looked up on each
worker.
"""
_FRESH_S = 0.4
"""Time for which what was made for one watcher serves the others."""


class Cursor:
    """The parts, of those that are sent only once, that a watcher has."""

    def __init__(self) -> None:
        self.num_points = self.num_ended = 0


class MeshView:
    """Follows the mesh while the gateway runs, and its KV stores while somebody watches."""

    def __init__(
        self,
        gateway_id: str,
        fleet: Fleet,
        models: Catalogue,
        pipeline: RequestPipeline,
        metrics: GatewayMetrics,
        recent: RecentRequests,
        flows: MeshFlows,
        identity: Identity | None,
        images: SourceLimits,
    ) -> None:
        self._gateway_id = gateway_id
        self._images = images
        self._fleet = fleet
        self._models = models
        self._pipeline = pipeline
        self._recent = recent
        self._flows = flows
        self._history = MeshHistory(metrics, fleet, pipeline.load)
        self.stores = StoreWatch(fleet, identity)
        """The KV stores; known while somebody watches."""
        self.plans = PlanBoard()
        """What planners want."""
        self._asking: asyncio.Task[None] | None = None
        self._num_watchers = {True: 0, False: 0}
        self._handles = RequestHandles()
        self._adapters: list[mesh_pb2.MeshAdapter] = []
        self._adapters_of = (-1, float("-inf"))
        self._shared = mesh_pb2.WatchMeshResponse()
        self._shared_at = float("-inf")

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(SPAN_S)
                self._history.tick()
                self._flows.tick()
        finally:
            if self._asking is not None:
                self._asking.cancel()

    @contextmanager
    def watching(self, *, has_token: bool) -> Iterator[None]:
        """Counts a watcher for the duration of the block. Raises Overloaded if there are
        too many.
        """
        if self._num_watchers[has_token] >= MAX_WATCHERS:
            raise Overloaded(
                f"{MAX_WATCHERS} clients watch this gateway already; close one of them",
                stage="admit",
                retry_after_s=5.0,
            )
        self._num_watchers[has_token] += 1
        if self._asking is None or self._asking.done():
            self.stores.forget()
            self._asking = start_logged(self.stores.run())
        try:
            yield
        finally:
            self._num_watchers[has_token] -= 1
            if not any(self._num_watchers.values()) and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    def news(
        self, cursor: Cursor, *, can_operate: bool, has_token: bool
    ) -> mesh_pb2.WatchMeshResponse:
        """The next message to a watcher, whose cursor it advances; the first message takes a new
        one. Only a watcher with the operators' token gets ids of requests.
        """
        now = asyncio.get_running_loop().time()
        if now - self._shared_at >= _FRESH_S:
            self._shared, self._shared_at = self._make(now), now
        message = mesh_pb2.WatchMeshResponse()
        message.CopyFrom(self._shared)
        message.can_operate = can_operate
        message.points.extend(self._history.since(cursor.num_points))
        message.ended_requests.extend(self._recent.since(cursor.num_ended))
        cursor.num_points, cursor.num_ended = self._history.num_points, self._recent.num_ended
        if not has_token:
            for request in chain(message.running_requests, message.ended_requests):
                self._handles.hide(request)
        return message

    def find_request(self, given: str) -> str:
        """The id of the request that a handle names; what is no handle is returned as it is."""
        running = (one.request.request_id for one in self._pipeline.open_requests(MAX_REQUESTS))
        ended = (one.request_id for one in self._recent.since(0))
        known = (one for one in chain(running, ended) if self._handles.handle(one) == given)
        return next(known, given)

    def _make(self, now: float) -> mesh_pb2.WatchMeshResponse:
        """What all watchers get; `now` is event loop time."""
        message = mesh_pb2.WatchMeshResponse(gateway_id=self._gateway_id)
        message.time.FromNanoseconds(time.time_ns())
        message.members.append(self._describe_gateway())
        message.members.extend(describe_worker(one, now) for one in self._fleet.workers())
        message.members.extend(
            describe_store(address, self.stores.state(address))
            for address in self.stores.addresses()
        )
        message.flows.extend(self._flows.describe(self.stores.ids()))
        message.models.extend(_describe_model(served, self._images, now) for served in self._models)
        message.adapters.extend(self._known_adapters(now))
        message.demand.extend(served.demand.describe(served.model.name) for served in self._models)
        message.plans.extend(self.plans.plans())
        message.running_requests.extend(
            describe(answer) for answer in self._pipeline.open_requests(MAX_REQUESTS)
        )
        return message

    def _describe_gateway(self) -> mesh_pb2.MeshMember:
        load = self._pipeline.load()
        return mesh_pb2.MeshMember(
            member_id=self._gateway_id,
            role=mesh_pb2.MEMBER_ROLE_GATEWAY,
            healthy=not self._pipeline.is_draining,
            problem="draining" if self._pipeline.is_draining else "",
            draining=self._pipeline.is_draining,
            running_requests=load.running_prompts,
            waiting_requests=load.queued_prompts + load.held_requests,
            pages=page_counts(self._fleet),
        )

    def _known_adapters(self, now: float) -> list[mesh_pb2.MeshAdapter]:
        generation, made_at = self._adapters_of
        current = self._models.adapters.manifest.generation
        if generation != current or now - made_at >= _ADAPTERS_FRESH_S:
            self._adapters = list(self._describe_adapters())
            self._adapters_of = (current, now)
        return self._adapters

    def _describe_adapters(self) -> Iterator[mesh_pb2.MeshAdapter]:
        for entry in islice(self._models.adapters.manifest.entries, MAX_ADAPTERS):
            yield mesh_pb2.MeshAdapter(
                name=entry.name,
                parent=entry.model,
                digest=entry.digest_bytes.hex(),
                path=entry.path,
                state=entry.state,
                pinned=entry.is_pinned,
                holders=[
                    mesh_pb2.MeshAdapterHolder(
                        member_id=one.worker_id,
                        state=one.state,
                        error=one.error,
                        requests=one.num_requests,
                    )
                    for one in holders(self._fleet, entry)
                ],
            )


def _describe_model(served: ServedModel, images: SourceLimits, now: float) -> mesh_pb2.MeshModel:
    problem = served.problem()
    healthy = {
        role: sum(not worker.problem(now) for worker in served.fleet.workers(role))
        for role in ("prefill", "decode")
    }
    return mesh_pb2.MeshModel(
        name=served.model.name,
        ready=not problem,
        problem=problem,
        max_context_tokens=served.context_tokens,
        task=served.task,
        prefill_workers=healthy["prefill"],
        decode_workers=healthy["decode"],
        has_chat=served.model.template is not None,
        images=None
        if served.model.images is None
        else mesh_pb2.MeshImages(
            max_images=images.max_files,
            max_file_bytes=images.max_file_bytes,
            max_bytes=images.max_bytes,
        ),
    )
