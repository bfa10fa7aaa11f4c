"""What gateways use a worker of both roles for now, and the services of such a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc
from weft.common.telemetry.request_log import LoggedPrompt
from weft.contract.clock import Clock, monotonic
from weft.contract.codec.pairs import WORKER_ROLES
from weft.contract.errors import InvalidRequest, RoleFixed
from weft.contract.messages import Outbox
from weft.contract.settings import RoleName
from weft.v1 import worker_pb2

MIN_LEASE_S, MAX_LEASE_S = 1.0, 86400.0


class RoleService(Protocol):
    """A role's own gRPC service over an engine."""

    name: str
    """Full name of the gRPC service."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the servicer."""
        ...

    def on_outbox(self, outbox: Outbox) -> None:
        """Handles what the engine produced."""
        ...

    def sizes(self) -> dict[str, int]:
        """Sizes of what it keeps for calls, by name."""
        ...

    def open_requests(self) -> list[LoggedPrompt]:
        """Open requests, for crash dumps."""
        ...

    def on_engine_gone(self, reason: str) -> None:
        """Fails everything that waits for the engine."""
        ...


class RoleServices:
    """The services of all roles that one worker has."""

    def __init__(self, services: Sequence[RoleService]) -> None:
        self._services = tuple(services)
        self.names = tuple(service.name for service in services)

    def add_to(self, server: grpc.aio.Server) -> None:
        for service in self._services:
            service.add_to(server)

    def on_outbox(self, outbox: Outbox) -> None:
        for service in self._services:
            service.on_outbox(outbox)

    def sizes(self) -> dict[str, int]:
        return {name: size for one in self._services for name, size in one.sizes().items()}

    def open_requests(self) -> list[LoggedPrompt]:
        return [prompt for service in self._services for prompt in service.open_requests()]

    def on_engine_gone(self, reason: str) -> None:
        for service in self._services:
            service.on_engine_gone(reason)


class WorkerRoleState:
    """The role in which a worker gets new work. The engine does not know it: what runs goes on, and
    pages, epoch, adapters and graphs stay.

        both --set(role, lease)--> role --set--> role
          ^                          |
          +------- lease over -------+
    """

    def __init__(self, started_as: RoleName, clock: Clock = monotonic) -> None:
        self.started_as = started_as
        self._clock = clock
        self._role = started_as
        self._ends_at: float | None = None
        self._changes = 0
        self._has_accepted = self._is_proved = False

    @property
    def now(self) -> RoleName:
        if self._ends_at is not None and self._clock() >= self._ends_at:
            self._change(self.started_as, None)
        return self._role

    @property
    def changes(self) -> int:
        """Number of changes since the start."""
        _ = self.now
        return self._changes

    def set(self, role: RoleName, lease_s: float | None) -> RoleName:
        """Returns the role before.

        Raises:
            RoleFixed: The worker has one role alone.
            InvalidRequest: The lease is out of range.
        """
        if self.started_as != "both":
            raise RoleFixed(
                f"this worker can only {self.started_as}; start it with `--role both`, so that its "
                "role can change",
                stage="role",
            )
        if lease_s is not None and not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
            message = f"lease is {lease_s:g} s; give {MIN_LEASE_S:g} to {MAX_LEASE_S:g}"
            raise InvalidRequest(message, stage="validate", param="lease")
        previous = self.now
        if role == previous:
            # A renewed lease is no change, so what has been proved stays so.
            self._ends_at = None if lease_s is None else self._clock() + lease_s
        else:
            self._change(role, lease_s)
        return previous

    def on_outbox(self, outbox: Outbox) -> None:
        """Looks for what proves the role."""
        if self._is_proved:
            return
        if self._role != "decode":
            self._is_proved = any(reply.event.kind == "accepted" for reply in outbox.fill_replies)
        if self._role != "prefill" and outbox.gateways:
            # A batch tells what it accepted before it tells tokens.
            self._has_accepted |= any(batch.accepted for batch in outbox.gateways)
            has_tokens = any(batch.has_first_tokens for batch in outbox.gateways)
            self._is_proved |= self._has_accepted and has_tokens

    def describe(self) -> worker_pb2.RoleState | None:
        """None: the worker has one role alone."""
        if self.started_as != "both":
            return None
        state = worker_pb2.RoleState(
            role=WORKER_ROLES.numbers[self.now], proved=self._is_proved, changes=self._changes
        )
        if self._ends_at is not None:
            state.lease.FromNanoseconds(int(max(0.0, self._ends_at - self._clock()) * 1e9))
        return state

    def _change(self, role: RoleName, lease_s: float | None) -> None:
        self._role = role
        self._ends_at = None if lease_s is None else self._clock() + lease_s
        self._changes += 1
        self._has_accepted = self._is_proved = False
