"""What moves between the members of a mesh, as means over the last seconds."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft.gateway.fleet.fleet import Fleet
from weft.gateway.fleet.worker import FleetWorker
from weft.gateway.generation.answer import Answer
from weft.v1 import mesh_pb2

_NUM_SPANS = 5
"""Spans of the history that a mean is taken over, the open one apart."""


class _Pair(NamedTuple):
    source_id: str
    target_id: str
    kind: mesh_pb2.FlowKind.ValueType


@dataclass(slots=True)
class _Moved:
    count: float = 0.0
    pages: float = 0.0
    num_bytes: float = 0.0


class _Span(NamedTuple):
    start_s: float
    moved: defaultdict[_Pair, _Moved]


class MeshFlows:
    """Counts what this gateway learns of: its requests, the fills of their prompts, and the puts
    that workers report.
    """

    def __init__(self, gateway_id: str, fleet: Fleet) -> None:
        self._gateway_id = gateway_id
        self._fleet = fleet
        self._spans: deque[_Span] = deque(maxlen=_NUM_SPANS + 1)
        self._counters: dict[tuple[str, int], Mapping[str, int]] = {}
        self._begin_span()

    def ended(self, answer: Answer) -> None:
        """Counts a request that has ended, and the fills of its prompts."""
        moved = self._spans[-1].moved
        workers = self._decode_workers() if answer.generations else {}
        for generation in answer.generations:
            if (owner := workers.get(generation.worker_id)) is None or owner.info is None:
                continue
            pair = _Pair(self._gateway_id, generation.worker_id, mesh_pb2.FLOW_KIND_REQUESTS)
            moved[pair].count += 1
            for fill in generation.fills:
                if fill.worker_id and fill.worker_id != generation.worker_id:
                    pair = _Pair(fill.worker_id, generation.worker_id, mesh_pb2.FLOW_KIND_PAGES)
                    moved[pair].count += 1
                    moved[pair].pages += fill.accepted_tokens / max(1, owner.info.page_size)
                    moved[pair].num_bytes += fill.bytes

    def tick(self) -> None:
        """Counts what workers report, and begins the next span."""
        moved = self._spans[-1].moved
        seen: dict[tuple[str, int], Mapping[str, int]] = {}
        for worker in self._fleet.workers():
            report, info = worker.report, worker.info
            if report is None or info is None or not info.kvstores:
                continue
            names = ("store_stored_pages", "store_hit_pages")
            counters = seen[info.worker_id, info.epoch] = {
                name: report.counters[name] for name in names if name in report.counters
            }
            before = self._counters.get((info.worker_id, info.epoch), counters)
            put, hit = (counters.get(name, 0) - before.get(name, 0) for name in names)
            for store in info.kvstores:
                # Which of several stores got a page is not reported.
                share = 1 / len(info.kvstores)
                if put > 0:
                    pair = _Pair(info.worker_id, store, mesh_pb2.FLOW_KIND_PUTS)
                    moved[pair].pages += put * share
                # Fills of decode workers are in the reports of their requests.
                if hit > 0 and worker.endpoint.role == "prefill":
                    pair = _Pair(store, info.worker_id, mesh_pb2.FLOW_KIND_PAGES)
                    moved[pair].pages += hit * share
        self._counters = seen
        self._begin_span()

    def describe(self, ids: Mapping[str, str]) -> Iterator[mesh_pb2.MeshFlow]:
        """The flows now. `ids` are the KV stores', by their addresses, under which some flows are
        counted.
        """
        total: defaultdict[_Pair, _Moved] = defaultdict(_Moved)
        for span in self._spans:
            for counted, moved in span.moved.items():
                source, target = counted.source_id, counted.target_id
                pair = _Pair(ids.get(source, source), ids.get(target, target), counted.kind)
                total[pair].count += moved.count
                total[pair].pages += moved.pages
                total[pair].num_bytes += moved.num_bytes
        workers = self._decode_workers()
        for worker_id, worker in workers.items():
            if worker.own_requests:
                total[_Pair(self._gateway_id, worker_id, mesh_pb2.FLOW_KIND_REQUESTS)].count += 0
        over_s = max(0.5, time.monotonic() - self._spans[0].start_s)
        for pair, moved in total.items():
            flow = mesh_pb2.MeshFlow(
                source_id=pair.source_id,
                target_id=pair.target_id,
                kind=pair.kind,
                per_second=moved.count / over_s,
                pages_per_second=moved.pages / over_s,
                bytes_per_second=moved.num_bytes / over_s,
            )
            found = workers.get(pair.target_id)
            if pair.kind == mesh_pb2.FLOW_KIND_REQUESTS and found is not None:
                flow.open = max(0, found.own_requests)
                if (report := found.report) is not None:
                    flow.tokens_per_second = report.decode_tokens_per_second
            yield flow

    def _decode_workers(self) -> dict[str, FleetWorker]:
        workers = self._fleet.workers("decode")
        return {one.info.worker_id: one for one in workers if one.info is not None}

    def _begin_span(self) -> None:
        self._spans.append(_Span(time.monotonic(), defaultdict(_Moved)))
