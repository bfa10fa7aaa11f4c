"""The worker's part of AdminService."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from weft.common.rpc.tls import Identity
from weft.common.settings import LogLevel
from weft.common.tasks import tasks_now
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.profiles import WorkerProfiles
from weft.common.worker.role import WorkerRoleState
from weft.common.worker.service import Queries
from weft.common.worker.weight_peers import ask_for_weights
from weft.contract.errors import PeerUnavailable
from weft.contract.experts import ExpertAction, ExpertState
from weft.contract.faults import FaultSpec, FaultState
from weft.contract.messages import Inbox
from weft.contract.profiles import ProfileOptions
from weft.contract.settings import RoleName
from weft.contract.weights import WeightAction, WeightStatus
from weft.v1 import profile_pb2, worker_pb2


class WorkerAdmin:
    """Implements `AdminBackend` over the engine. `sizes` returns the sizes of the server process's
    structures, by name; `on_weights` is called with the state of the weights after a command.
    """

    def __init__(
        self,
        engine: EngineClient,
        queries: Queries,
        profiles: WorkerProfiles,
        sizes: Callable[[], Mapping[str, int]],
        on_weights: Callable[[WeightStatus], None],
        role: WorkerRoleState,
        identity: Identity | None = None,
    ) -> None:
        self._engine = engine
        self._queries = queries
        self._profiles = profiles
        self._sizes = sizes
        self._on_weights = on_weights
        self._role = role
        self._identity = identity

    async def flush_cache(self) -> int:
        return await self._queries.flush_cache()

    async def dump_state(self, max_entries: int) -> Mapping[str, object]:
        engine = json.loads(await self._queries.dump_state(max_entries))
        return {
            "engine": engine,
            "server": tasks_now() | dict(self._sizes()),
        }

    async def order_faults(
        self, *, add: FaultSpec | None = None, clear: str | None = None
    ) -> list[FaultState]:
        return await self._queries.order_faults(add=add, clear=clear)

    async def start_profile(self, profile: str, options: ProfileOptions) -> None:
        await self._profiles.start(profile, options)

    async def stop_profile(self, profile: str) -> None:
        await self._profiles.stop(profile)

    async def read_profile(
        self, profile: str
    ) -> tuple[profile_pb2.ProfileSummary, AsyncIterator[bytes]]:
        return await self._profiles.read(profile)

    async def command_weights(self, action: WeightAction, **options: Any) -> WeightStatus:
        status = await self._queries.command_weights(action, **options)
        self._on_weights(status)
        return status

    async def command_experts(self, action: ExpertAction) -> ExpertState:
        return await self._queries.command_experts(action)

    async def copy_weights(self, address: str, version: str) -> WeightStatus:
        offer = await ask_for_weights(address, self._identity)
        return await self.command_weights("copy", offer=offer, version=version or offer.version)

    def set_role(
        self, role: RoleName, lease_s: float | None
    ) -> tuple[RoleName, worker_pb2.RoleState]:
        previous = self._role.set(role, lease_s)
        state = self._role.describe()
        assert state is not None, "the role could be set"
        return previous, state

    def set_log_level(self, level: LogLevel) -> None:
        # The engine is gone, and this process ends with it.
        with contextlib.suppress(PeerUnavailable):
            self._engine.send(Inbox(log_level=level))
