"""Which workers hold an adapter, by their own word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.common.adapters.manifest import Entry
from weft.gateway.fleet import Fleet, Worker
from weft.v1 import worker_pb2

_STATES = {
    worker_pb2.ADAPTER_STATE_LOADING: "loading",
    worker_pb2.ADAPTER_STATE_DISK: "disk",
    worker_pb2.ADAPTER_STATE_HOST: "host",
    worker_pb2.ADAPTER_STATE_DEVICE: "device",
    worker_pb2.ADAPTER_STATE_FAILED: "failed",
}
HELD = ("disk", "host", "device")


class Holder(NamedTuple):
    """An adapter on a worker."""

    worker_id: str
    role: str
    state: str
    """loading, disk, host, device, failed; absent = the worker does not tell of it, or unloads
    it."""
    error: str = ""
    num_requests: int = 0
    rank: int = 0
    """Largest rank in it; 0 = not known."""
    weight_bytes: int = 0
    """Likewise."""

    @property
    def holds(self) -> bool:
        """Requests for it can be served there."""
        return self.state in HELD


def holder(worker: Worker, entry: Entry) -> Holder:
    """What a worker says about an entry; what it said before it knew of it does not count."""
    info = worker.info
    assert info is not None
    if not info.HasField("adapters"):
        problem = "it was started without --adapter-root"
        return Holder(info.worker_id, worker.endpoint.role, "failed", problem)
    status = worker.adapter(entry.digest_bytes)
    if status is None or worker.adapter_generation < entry.generation:
        return Holder(info.worker_id, worker.endpoint.role, "absent")
    return Holder(
        info.worker_id,
        worker.endpoint.role,
        "absent" if status.unloading else _STATES.get(status.state, "absent"),
        status.error,
        status.num_requests,
        status.rank,
        status.weight_bytes,
    )


def holders(fleet: Fleet, entry: Entry) -> list[Holder]:
    """All workers of the entry's model that this gateway has met."""
    return [holder(worker, entry) for worker in _met(fleet.workers(model=entry.model))]


def serving_holders(fleet: Fleet, entry: Entry, now: float) -> list[Holder]:
    """Those that may get requests; event loop time."""
    met = _met(fleet.workers(model=entry.model))
    return [holder(worker, entry) for worker in met if not worker.health_problem(now)]


def _met(workers: Iterable[Worker]) -> Iterable[Worker]:
    return (worker for worker in workers if worker.info is not None)
