"""Which workers hold an adapter, according to their own reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.common.adapters.manifest import Entry
from weft.contract.codec.pairs import ADAPTER_STATES
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.fleet.worker import FleetWorker

HELD = ("disk", "host", "device")


class Holder(NamedTuple):
    """State of an adapter on a worker."""

    worker_id: str
    role: str
    state: str
    """loading, disk, host, device or failed; None: not reported, or being unloaded."""
    error: str = ""
    num_requests: int = 0
    rank: int = 0
    """Largest rank in it; 0: unknown."""
    weight_bytes: int = 0
    """Bytes of its weights, or 0 while unknown."""
    is_pinned: bool = False
    left_out: tuple[str, ...] = ()
    """Some of the tensors that a lenient load left out."""

    @property
    def holds(self) -> bool:
        """Whether requests for it can be served there."""
        return self.state in HELD

    def has(self, entry: Entry) -> bool:
        """Whether it holds what an entry asks for, pinned if that is asked for."""
        return self.holds and (self.is_pinned or not entry.is_pinned)


def holder(worker: FleetWorker, entry: Entry) -> Holder:
    """A worker's report about an entry; reports from before it knew of the entry do not count."""
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
        "absent" if status.unloading else ADAPTER_STATES[status.state] or "absent",
        status.error,
        status.num_requests,
        status.rank,
        status.weight_bytes,
        status.pinned,
        tuple(status.left_out),
    )


def holders(fleet: Fleet, entry: Entry) -> list[Holder]:
    """Holders among all workers of the entry's model that this gateway has met."""
    return [holder(worker, entry) for worker in _met(fleet.workers(model=entry.model))]


def serving_holders(fleet: Fleet, entry: Entry, now: float) -> list[Holder]:
    """Holders among the workers that may get requests at an event loop time."""
    met = _met(fleet.workers(model=entry.model))
    return [holder(worker, entry) for worker in met if not worker.health_problem(now)]


def _met(workers: Iterable[FleetWorker]) -> Iterable[FleetWorker]:
    return (worker for worker in workers if worker.info is not None)
