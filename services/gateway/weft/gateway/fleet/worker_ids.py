"""One endpoint for each worker id: page indexes, fills and metrics know workers by their ids."""

from __future__ import annotations

from typing import Protocol

from weft.contract.errors import PeerUnavailable
from weft.gateway.fleet.discovery import Endpoint
from weft.v1 import worker_pb2


class Holder(Protocol):
    """An endpoint that has, or had, an id."""

    endpoint: Endpoint
    info: worker_pb2.GetInfoResponse | None

    @property
    def is_in_service(self) -> bool:
        """Whether the gateway watches this endpoint and routes new requests to it."""
        ...

    def step_back(self) -> None:
        """Gives up the id, and everything that is kept under it."""
        ...


class WorkerIds:
    """The endpoint that each worker id belongs to.

    One worker may be listed under several addresses, such as one of IPv4 and one of IPv6, and two
    workers may have the same id by mistake. The first endpoint that the gateway meets keeps the id
    while it is in service.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], Holder] = {}

    def take(self, holder: Holder, info: worker_pb2.GetInfoResponse) -> None:
        """Gives `holder` the id that it reports.

        Raises:
            PeerUnavailable: It belongs to another endpoint, which is in service.
        """
        self.release(holder)  # Another worker may run at the address now.
        key = (holder.endpoint.role, info.worker_id)
        other = self._holders.get(key)
        if other is not None:
            if other.is_in_service:
                raise PeerUnavailable(_why_refused(holder, other, info))
            other.step_back()
        self._holders[key] = holder

    def release(self, holder: Holder) -> None:
        """Takes back the id of an endpoint."""
        if holder.info is not None:
            key = (holder.endpoint.role, holder.info.worker_id)
            if self._holders.get(key) is holder:
                del self._holders[key]


def _why_refused(holder: Holder, other: Holder, info: worker_pb2.GetInfoResponse) -> str:
    address = other.endpoint.address
    if other.info is not None and other.info.epoch == info.epoch:
        return f"is worker {info.worker_id!r}, which gets its requests at {address}"
    return (
        f"calls itself {info.worker_id!r} as the worker at {address} does; give each a --worker-id "
        "of its own"
    )
