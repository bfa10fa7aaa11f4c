"""Watches gateways, plans, tells what it wants, and acts where it may."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
from google.protobuf.duration_pb2 import Duration
from weft.common.admin import read_token
from weft.common.rpc.channel import open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.tls import Identity
from weft.common.tasks import run_together
from weft.planner.forecast import Targets
from weft.planner.observe import MeshPicture
from weft.planner.policy import ModelPlanner, Plan, Rules
from weft.planner.roles import role_orders
from weft.planner.settings import PlannerSettings
from weft.v1 import mesh_pb2, mesh_pb2_grpc

_log = logging.getLogger(__name__)

_WATCH_AGAIN_S = 1.0
_CALL_TIMEOUT_S = 10.0
_LEASES = 6.0
"""Decisions for which what is told, and a role, outlast the planner."""


class MeshPlanner:
    """Plans for all models of some gateways.

    Raises:
        ConfigError: The token cannot be read.
    """

    def __init__(
        self, settings: PlannerSettings, planner_id: str, identity: Identity | None
    ) -> None:
        self._settings = settings
        self.planner_id = planner_id
        assert settings.admin_token_file is not None, "checked with the settings"
        self._metadata = (("authorization", f"Bearer {read_token(settings.admin_token_file)}"),)
        self._channels = {
            address: open_channel(address, "gateway", identity) for address in settings.gateway
        }
        self._picture = MeshPicture()
        self._planners: dict[str, ModelPlanner] = {}
        self.plans: dict[str, Plan] = {}
        """What is wanted, by model."""
        self.acts = False
        """Whether it may act now."""
        self.changed = asyncio.Event()
        """Set after each decision, for those who wait for the next one."""
        self._last_acts: dict[str, str] = {}

    async def run(self) -> None:
        try:
            await run_together(
                *(self._watch(address) for address in self._channels), self._decide_often()
            )
        finally:
            for channel in self._channels.values():
                await channel.close()

    async def _watch(self, address: str) -> None:
        stub = mesh_pb2_grpc.MeshServiceStub(self._channels[address])
        interval = Duration(seconds=1)
        while True:
            try:
                call = stub.WatchMesh(
                    mesh_pb2.WatchMeshRequest(interval=interval), metadata=self._metadata
                )
                async for message in call:
                    self._picture.take(address, time.monotonic(), message)
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "a gateway is not heard",
                    extra={"gateway": address, "reason": str(from_rpc_error(error))},
                )
            await asyncio.sleep(_WATCH_AGAIN_S)

    async def _decide_often(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_s)
            self.decide(time.monotonic())
            await self._tell()
            if self.acts:
                await self._act()

    def decide(self, now_s: float) -> None:
        settings = self._settings
        for model in self._picture.models():
            planner = self._planners.get(model)
            if planner is None:
                targets = Targets(
                    first_token_s=settings.first_token_s,
                    inter_token_s=settings.inter_token_s,
                    is_enforced=settings.enforced,
                )
                rules = Rules(
                    hold_s=settings.calm_s,
                    budget=settings.budget,
                    least_prefill=settings.least_prefill,
                    least_decode=settings.least_decode,
                )
                planner = self._planners[model] = ModelPlanner(targets, rules)
            before = self.plans.get(model)
            plan = planner.decide(now_s, self._picture.observe(model))
            self.plans[model] = plan
            for alarm in plan.alarms:
                if before is None or alarm.name not in {one.name for one in before.alarms}:
                    _log.warning(alarm.text, extra={"model": model, "alarm": alarm.name})
            if before is None or (before.prefill, before.decode) != (plan.prefill, plan.decode):
                what = {"model": model, "prefill": plan.prefill, "decode": plan.decode}
                _log.info("plan: %s", plan.why, extra=what)
        self.changed.set()
        self.changed = asyncio.Event()

    async def _tell(self) -> None:
        """Tells all gateways, and learns whether it may act: every gateway that answers must say
        so, and more than half must answer.
        """
        request = mesh_pb2.TellPlanRequest(
            planner_id=self.planner_id, wants_to_act=self._settings.act, plans=self._told()
        )
        request.lease.FromNanoseconds(int(_LEASES * self._settings.interval_s * 1e9))
        answers = await asyncio.gather(*(self._tell_one(one, request) for one in self._channels))
        heard = [answer for answer in answers if answer is not None]
        may = bool(heard) and all(answer.acts for answer in heard)
        self.acts = self._settings.act and may and 2 * len(heard) > len(answers)

    async def _tell_one(
        self, address: str, request: mesh_pb2.TellPlanRequest
    ) -> mesh_pb2.TellPlanResponse | None:
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(
            self._channels[address]
        )
        try:
            return await stub.TellPlan(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            reason = str(from_rpc_error(error))
            _log.warning("a gateway was not told", extra={"gateway": address, "reason": reason})
            return None

    def _told(self) -> list[mesh_pb2.MeshPlan]:
        found: list[mesh_pb2.MeshPlan] = []
        for model, plan in self.plans.items():
            seen = self._picture.observe(model)
            found.append(
                mesh_pb2.MeshPlan(
                    model=model,
                    wanted_prefill=plan.prefill,
                    wanted_decode=plan.decode,
                    seen_prefill=0 if seen is None else seen.prefill,
                    seen_decode=0 if seen is None else seen.decode,
                    why=plan.why,
                    alarms=[alarm.text for alarm in plan.alarms],
                    last_act=self._last_acts.get(model, ""),
                )
            )
        return found

    async def _act(self) -> None:
        """Sets roles, with leases: without a planner, workers are of both roles again."""
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(
            next(iter(self._channels.values()))
        )
        for model, plan in self.plans.items():
            if any(alarm.name == "no_data" for alarm in plan.alarms):
                continue
            workers = self._picture.workers(model)
            for order in role_orders(workers.values(), plan):
                request = mesh_pb2.SetMemberRoleRequest(member_id=order.member_id, role=order.role)
                request.lease.FromNanoseconds(int(_LEASES * self._settings.interval_s * 1e9))
                try:
                    answer = await stub.SetMemberRole(
                        request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
                    )
                except grpc.aio.AioRpcError as error:
                    what = {"worker": order.member_id, "reason": str(from_rpc_error(error))}
                    _log.warning("a role was not set", extra=what)
                    continue
                if answer.previous_role != order.role:
                    self._last_acts[model] = (
                        f"{order.member_id}: {order.role} (was {answer.previous_role})"
                    )
                    _log.info("role set: %s", self._last_acts[model])
