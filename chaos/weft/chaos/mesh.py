"""A mesh on this machine with a fault proxy on every link, whose processes can be sent signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
from weft.chaos.pages import ServicePages, read_pages
from weft.chaos.proxy import FaultProxy
from weft.cli.channel import open_channel
from weft.cli.up.exits import report_exit
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.process import ReadyFile, describe_status
from weft.cli.up.readiness import wait_for_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import locked_state_folder
from weft.cli.up.supervisor import Reporter, RestartBackoff, Supervisor
from weft.common.admin import read_token
from weft.common.rpc.server import QUARANTINE_STATUS
from weft.contract.codec.pairs import FAULT
from weft.contract.faults import FaultSpec
from weft.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
)

Part = Literal["whole", "server", "engine", "rank"]
"""The processes of a service to attack. `rank` is one rank of its engine."""
Link = tuple[str, str]
"""A connection: the dialling role (gateway, decode or worker), and the dialled service."""
RECOVERY_TIMEOUT_S = 600.0
"""Limit of a recovery, which takes seconds on an idle machine."""
AFTERMATH_S = 3.0
"""Time after a fault's end until Sessions and channels are open again."""
FENCE_S = 5.0
"""Longest time between a worker's refusal of requests, because of its quarantine, and its end."""
_CALL_TIMEOUT_S = 10.0
_STOP_GRACE_S = 2.0


class MeshNotReady(Exception):
    """A service does not run, or does not answer in time."""


@dataclass(slots=True, kw_only=True)
class Absence:
    """An interval in which a service did not run, in times of the event loop."""

    name: str
    how: str
    """Description of its end."""
    since_s: float
    until_s: float | None = None
    """When it was ready again; None: it is still away."""

    def overlaps(self, start_s: float, end_s: float) -> bool:
        """Whether the service was away, about to end or just back between two times."""
        is_over_s = float("inf") if self.until_s is None else self.until_s + AFTERMATH_S
        begins_s = self.since_s - FENCE_S if self.is_last_fence else self.since_s
        return begins_s <= end_s and start_s <= is_over_s

    @property
    def is_last_fence(self) -> bool:
        """Whether the service ended because of its quarantine, which faults of others may fill."""
        return self.how == describe_status(QUARANTINE_STATUS)


class ChaosMesh:
    """Workers, stores and gateways under a supervisor, and the proxies between them.

    Use it as `async with ChaosMesh.running(...) as mesh`, in the main thread.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        proxies: dict[Link, FaultProxy],
        names: tuple[str, ...],
        gateways: dict[str, str],
        token: str,
        logs: Path,
    ) -> None:
        self._supervisor = supervisor
        self.proxies = proxies
        self.names = names
        self.gateways = gateways
        """host:port by name. Clients dial them directly."""
        self.logs = logs
        self._metadata = (("authorization", f"Bearer {token}"),)
        self.absences: list[Absence] = []
        """When services were away, intended or not."""

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, settings: UpSettings, model_dir: Path, model_name: str
    ) -> AsyncIterator[ChaosMesh]:
        """Starts a mesh and waits until it is ready. The settings of `weft up` must name a state
        folder and set `enable_faults`.
        Everything is gone when the block ends. Raises ExitedEarly or TimeoutError if the mesh does
        not start.
        """
        proxies: dict[Link, FaultProxy] = {}

        def dial(source: str, target: str, address: str) -> str:
            if (source, target) not in proxies:
                proxies[source, target] = FaultProxy(address)
            return proxies[source, target].address

        with locked_state_folder(settings.state_folder()) as state:
            plan = plan_mesh(settings, state, [ModelFolder(model_name, model_dir)], None, dial)
            workers = plan.worker_addresses

            async def tell(worker_id: str, epoch: int) -> None:
                others = {name: at for name, at in workers.items() if name != worker_id}
                await report_exit(others, worker_id, epoch)

            listener = _Listener()
            supervisor = Supervisor(
                plan.services, listener, tell, lambda: RestartBackoff(first_s=0.1, most_s=0.5)
            )
            mesh = cls(
                supervisor,
                proxies,
                tuple(spec.name for spec in plan.services),
                plan.gateways,
                read_token(state.admin_token),
                state.logs,
            )
            mesh.absences = listener.absences
            watch: asyncio.Task[None] | None = None
            try:
                for proxy in proxies.values():
                    await proxy.start()
                await supervisor.start()
                for address in mesh.gateways.values():
                    await wait_for_mesh(address, None, settings.ready_timeout_s)
                watch = asyncio.create_task(supervisor.watch())
                yield mesh
            finally:
                if watch is not None:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
                await supervisor.stop(_STOP_GRACE_S, asyncio.Event())
                for proxy in proxies.values():
                    await proxy.close()

    # -- services --------------------------------------------------------------------------------

    def named(self, role: str) -> list[str]:
        """Services of a role: gateway, prefill, decode or kvstore."""
        return [name for name in self.names if name.partition("-")[0] == role]

    def ready(self, name: str) -> ReadyFile | None:
        """A service's report of its readiness; None while it is not ready."""
        process = self._supervisor.process(name)
        return None if process is None or process.is_gone else process.ready

    async def wait_ready(self, name: str, timeout_s: float = RECOVERY_TIMEOUT_S) -> ReadyFile:
        """Raises MeshNotReady if the service is not ready in time."""
        await self.until(lambda: self.ready(name) is not None, f"{name} is not ready", timeout_s)
        found = self.ready(name)
        assert found is not None
        return found

    async def until(self, condition: Callable[[], bool], problem: str, timeout_s: float) -> None:
        """Waits for a condition. Raises MeshNotReady with `problem` if it does not become true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise MeshNotReady(f"{problem} after {timeout_s:g} s")
            await asyncio.sleep(0.02)

    def num_deaths(self, name: str) -> int:
        """Deaths of a service, intended or not."""
        return sum(absence.name == name for absence in self.absences)

    def send(self, name: str, part: Part, number: signal.Signals, rank: int = 0) -> bool:
        """Sends a signal to processes of a service. False: they do not run. `rank` counts only if
        `part` is "rank".
        """
        ready = self.ready(name)
        if ready is None:
            return False
        pids: tuple[int | None, ...]
        if part == "rank":
            if (pid := _pid_of_rank(ready.engine_pid, rank)) is None:
                return False
            pids = (pid,)
        else:
            pids = {
                "whole": (ready.engine_pid, ready.pid),
                "engine": (ready.engine_pid,),
                "server": (ready.pid,),
            }[part]
        for pid in pids:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return True

    # -- what they say ---------------------------------------------------------------------------

    async def admin(self, name: str, method: str, request: Any) -> Any:
        """Makes one call of a service's AdminService. Raises MeshNotReady if the service does not
        run, or does not answer.
        """
        ready = self.ready(name)
        if ready is None:
            raise MeshNotReady(f"{name} is not ready")
        try:
            async with open_channel(ready.admin_address) as channel:
                call = getattr(admin_pb2_grpc.AdminServiceStub(channel), method)
                return await call(request, metadata=self._metadata, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise MeshNotReady(f"{name}: {method}: {error.details()}") from error

    async def arm(self, name: str, spec: FaultSpec) -> None:
        """Arms a fault in a service. Raises MeshNotReady."""
        await self.admin(
            name, "InjectFault", admin_pb2.InjectFaultRequest(fault=FAULT.encode(spec))
        )

    async def fired(self, name: str, point: str) -> int:
        """How often faults at a point of a service have happened. Raises MeshNotReady."""
        answer = await self.admin(name, "ListFaults", admin_pb2.ListFaultsRequest())
        return sum(state.fired for state in answer.faults if state.fault.point == point)

    async def clear(self, name: str, point: str) -> None:
        """Disarms faults at a point of a service. Raises MeshNotReady."""
        await self.admin(name, "ClearFaults", admin_pb2.ClearFaultsRequest(point=point))

    async def flush(self, name: str) -> None:
        """Drops a service's cache. Raises MeshNotReady."""
        await self.admin(name, "FlushCache", admin_pb2.FlushCacheRequest())

    async def dump(self, name: str) -> Any:
        """A service's state. Raises MeshNotReady."""
        return json.loads((await self.admin(name, "DumpState", admin_pb2.DumpStateRequest())).state)

    def standstills(self) -> list[str]:
        """Log lines of services that stood still, each with its service."""
        return [
            f"{path.stem}: {line}"
            for path in sorted(self.logs.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if "stood still" in line
        ]

    async def pages(self, name: str) -> ServicePages:
        """Pages of a worker or store by state, and its work in progress. Raises MeshNotReady."""
        ready = self.ready(name)
        if ready is None:
            raise MeshNotReady(f"{name} is not ready")
        try:
            async with open_channel(ready.address) as channel:
                return await read_pages(channel, is_store=name.startswith("kvstore"))
        except grpc.aio.AioRpcError as error:
            raise MeshNotReady(f"{name}: {error.details()}") from error

    async def is_healthy(self, gateway: str) -> bool:
        try:
            async with open_channel(self.gateways[gateway]) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                fleet = await stub.GetFleet(gateway_pb2.GetFleetRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return all(worker.healthy for worker in fleet.workers)

    async def wait_healthy(self, timeout_s: float = RECOVERY_TIMEOUT_S) -> None:
        """Returns once all services are ready and every gateway sees its workers healthy. Raises
        MeshNotReady if this takes too long.
        """
        deadline = time.monotonic() + timeout_s
        for name in self.names:
            await self.wait_ready(name, timeout_s)
        for gateway in self.gateways:
            while not await self.is_healthy(gateway):
                if time.monotonic() > deadline:
                    raise MeshNotReady(f"{gateway} does not see its workers healthy")
                await asyncio.sleep(0.1)


def _pid_of_rank(engine_pid: int | None, rank: int) -> int | None:
    """Rank 0 is the engine's process. The others are its children, in order of rank."""
    if not rank or engine_pid is None:
        return engine_pid
    try:
        children = Path(f"/proc/{engine_pid}/task/{engine_pid}/children").read_text().split()
    except OSError:  # The engine has ended.
        return None
    return int(children[rank - 1]) if len(children) >= rank else None


class _Listener(Reporter):
    def __init__(self) -> None:
        self.absences: list[Absence] = []

    def ready(self, name: str, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        for absence in self.absences:
            if absence.name == name and absence.until_s is None:
                absence.until_s = now

    def died(self, name: str, how: str) -> None:
        now = asyncio.get_running_loop().time()
        self.absences.append(Absence(name=name, how=how, since_s=now))
