"""Keeps a pool's page index equal to one worker's reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from weft.common.rpc.errors import from_rpc_error
from weft.common.tasks import is_ending
from weft.gateway.fleet.session import ReconnectBackoff
from weft.gateway.routing import FleetPageIndex
from weft.gateway.telemetry.metrics import GatewayMetrics
from weft.v1 import worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)


class _Gap(Exception):
    """A change is missing from the sequence."""


class KvFollower:
    """Keeps `index` equal to the pages that one worker reports as cached, also after the worker
    has restarted.

    After a broken stream it continues after the last change applied. A missing change, and any
    other inconsistency, is repaired by a snapshot.
    """

    def __init__(
        self,
        stub: worker_pb2_grpc.WorkerServiceAsyncStub,
        index: FleetPageIndex,
        metrics: GatewayMetrics,
    ) -> None:
        self._stub = stub
        self._index = index
        self._metrics = metrics
        self._worker_id = ""
        self._epoch = 0
        self._sequence: int | None = None
        """Sequence number of the last change applied; None: a snapshot is needed."""
        self._snapshot: list[int] = []
        self._max_pages = 0

    async def run(self, info: worker_pb2.GetInfoResponse) -> None:
        """Follows one incarnation until cancelled."""
        if (info.worker_id, info.epoch) != (self._worker_id, self._epoch):
            self.forget()
            self._worker_id, self._epoch = info.worker_id, info.epoch
        self._max_pages = info.num_pages
        backoff = ReconnectBackoff()
        while True:
            self._snapshot = []
            request = worker_pb2.WatchKvRequest(after_sequence=self._sequence, epoch=self._epoch)
            call: Any = self._stub.WatchKv(request)
            try:
                async for response in call:
                    self._take(response)
                    backoff.reset()
            except _Gap:
                self._sequence = None
                self._metrics.kv_gaps.inc()
            except grpc.aio.AioRpcError as error:
                _log.info("the stream of a worker's KV events broke: %s", from_rpc_error(error))
            except asyncio.CancelledError:
                if is_ending():
                    raise
                _log.info("the stream of a worker's KV events broke with its connection")
            finally:
                call.cancel()
            await backoff.sleep()

    def forget(self) -> None:
        """Removes the worker, which has gone, from the index."""
        self._index.forget(self._worker_id)
        self._sequence = None

    def _take(self, response: worker_pb2.WatchKvResponse) -> None:
        if response.epoch != self._epoch:
            raise _Gap
        if response.HasField("snapshot"):
            self._take_part(response.snapshot)
        for change in response.changes:
            if self._sequence is None or change.sequence != self._sequence + 1:
                raise _Gap
            self._sequence = change.sequence
            self._index.remove(self._worker_id, self._epoch, change.removed_keys)
            self._index.add(self._worker_id, self._epoch, _keys(change.stored))
        self._metrics.kv_changes.inc(len(response.changes))

    def _take_part(self, part: worker_pb2.KvSnapshotPart) -> None:
        self._snapshot += _keys(part.held)
        if len(self._snapshot) > self._max_pages:
            _log.warning("%s says that it holds more pages than it has", self._worker_id)
            raise _Gap
        if part.is_last:
            keys, self._snapshot = self._snapshot, []
            self._index.replace(self._worker_id, self._epoch, keys)
            self._sequence = part.as_of_sequence
            self._metrics.kv_snapshots.inc()


def _keys(runs: Iterable[worker_pb2.KvRun]) -> Iterator[int]:
    for run in runs:
        yield from run.page_keys
