"""Watches gateways, plans, tells what it wants, and acts where it may."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from weft.common.rpc.tls import Identity
from weft.common.tasks import run_together, start_logged
from weft.contract.codec.walk import duration
from weft.contract.errors import WeftError
from weft.planner.actuators.base import CALL_TIMEOUT_S, Actuator
from weft.planner.actuators.make import make_actuators
from weft.planner.forecast import Counts, Targets
from weft.planner.gateways import GatewayCalls
from weft.planner.observe import MeshPicture
from weft.planner.policy import Alarm, ModelPlanner, Plan, Rules
from weft.planner.settings import PlannerSettings
from weft.v1 import mesh_pb2

_log = logging.getLogger(__name__)

_WATCH_AGAIN_S = 1.0
_FIND_AGAIN_S = 2.0
_MAX_HISTORY = 8


class MeshPlanner:
    """Plans for all models of some gateways.

    Raises:
        ConfigError: The token cannot be read, or an actuator cannot be used.
    """

    def __init__(
        self, settings: PlannerSettings, planner_id: str, identity: Identity | None
    ) -> None:
        self._settings = settings
        self.planner_id = planner_id
        self._calls = GatewayCalls(settings, identity)
        self._actuators: Sequence[Actuator] = make_actuators(
            settings, self._calls, identity, planner_id
        )
        self._picture = MeshPicture()
        self._planners: dict[str, ModelPlanner] = {}
        self.plans: dict[str, Plan] = {}
        """What is wanted, by model."""
        self.acts = False
        """Whether it may act now."""
        self._gives_way = False
        """Whether it does not want to act for once, so that another one may everywhere."""
        self.changed = asyncio.Event()
        """Set after each decision, for those who wait for the next one."""
        self._history: dict[str, deque[mesh_pb2.PlannerAct]] = {}
        """What it did last, by model, the newest first."""
        self._ordered: dict[str, Counts] = {}
        """What is ordered now, where that is known, by model."""
        self._own: dict[str, Counts] = {}
        """What this planner ordered last, by model, while it acts."""

    async def run(self) -> None:
        try:
            await run_together(self._watch_all(), self._decide_often())
        finally:
            for actuator in self._actuators:
                await actuator.close()
            await self._calls.close()

    async def _watch_all(self) -> None:
        """Watches each gateway for as long as it is one."""
        watches: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await self._calls.find()
                for address in watches.keys() - self._calls.addresses:
                    watches.pop(address).cancel()
                    self._picture.forget(address)
                for address in self._calls.addresses - watches.keys():
                    watches[address] = start_logged(self._watch(address))
                await asyncio.sleep(_FIND_AGAIN_S)
        finally:
            for watch in watches.values():
                watch.cancel()

    async def _watch(self, address: str) -> None:
        while True:
            try:
                async for message in self._calls.watch(address):
                    self._picture.take(address, time.monotonic(), message)
            except WeftError as error:
                what = {"gateway": address, "reason": error.message}
                _log.warning("a gateway is not heard", extra=what)
            await asyncio.sleep(_WATCH_AGAIN_S)

    async def _decide_often(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_s)
            await self._read_orders()
            self.decide(time.monotonic())
            await self._tell()
            if self.acts:
                await self._act()
            else:
                self._own.clear()

    async def _read_orders(self) -> None:
        """Learns what is ordered now. Orders that cannot be read are not known."""
        self._ordered.clear()
        for model in self._picture.models():
            workers = self._picture.workers(model)
            for actuator in self._actuators:
                try:
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        ordered = await actuator.ordered(model, workers)
                except (WeftError, TimeoutError) as error:
                    reason = str(error) or "no answer in time"
                    _log.warning("orders are not known", extra={"model": model, "reason": reason})
                    continue
                if ordered is not None:
                    self._ordered[model] = ordered
                    break

    def decide(self, now_s: float) -> None:
        settings = self._settings
        for model in sorted({*self._picture.models(), *self._planners}):
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
            seen = self._picture.observe(model)
            if seen is not None:
                seen = replace(
                    seen, ordered=self._ordered.get(model), own_order=self._own.get(model)
                )
            plan = planner.decide(now_s, seen)
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
        so, and more than half must answer. Where some gateways chose this planner and some another,
        that with the greater id gives way.
        """
        wants_to_act = bool(self._settings.act) and not self._gives_way
        request = mesh_pb2.TellPlanRequest(
            planner_id=self.planner_id, wants_to_act=wants_to_act, plans=self._told()
        )
        request.lease.CopyFrom(duration(self._settings.lease_s))
        answers = await asyncio.gather(
            *(self._tell_one(one, request) for one in self._calls.addresses)
        )
        heard = [answer for answer in answers if answer is not None]
        may = bool(heard) and all(answer.acts for answer in heard)
        self.acts = wants_to_act and may and 2 * len(heard) > len(answers)
        others = {one.holder_id for one in heard} - {self.planner_id, ""}
        is_chosen = any(one.acts for one in heard)
        self._gives_way = is_chosen and bool(others) and min(others) < self.planner_id

    async def _tell_one(
        self, address: str, request: mesh_pb2.TellPlanRequest
    ) -> mesh_pb2.TellPlanResponse | None:
        try:
            return await self._calls.tell(address, request)
        except WeftError as error:
            what = {"gateway": address, "reason": error.message}
            _log.warning("a gateway was not told", extra=what)
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
                    history=self._history.get(model, ()),
                )
            )
        return found

    async def _act(self) -> None:
        for model, plan in self.plans.items():
            if any(alarm.name == "no_data" for alarm in plan.alarms):
                continue
            counts, workers = plan.counts, self._picture.workers(model)
            for actuator in self._actuators:
                try:
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        done = await actuator.order(model, counts, workers, apart=plan.apart)
                except (WeftError, TimeoutError) as error:
                    text = f"an order failed: {str(error) or 'no answer in time'}"
                    self._alarm(model, Alarm(name="no_effect", text=text))
                    continue
                self._own[model] = counts
                if done:
                    act = mesh_pb2.PlannerAct(text=done)
                    act.time.GetCurrentTime()
                    self._history.setdefault(model, deque(maxlen=_MAX_HISTORY)).appendleft(act)
                    _log.info("done: %s", done, extra={"model": model})

    def _alarm(self, model: str, alarm: Alarm) -> None:
        """Adds an alarm to a plan until the next one is made."""
        plan = self.plans[model]
        self.plans[model] = replace(plan, alarms=(*plan.alarms, alarm))
        _log.warning(alarm.text, extra={"model": model, "alarm": alarm.name})
