"""KEDA's external scaler, and the metric that other autoscalers read."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.common.rpc.errors import Context
from weft.contract.errors import InvalidRequest, PeerUnavailable
from weft.keda import externalscaler_pb2, externalscaler_pb2_grpc
from weft.planner.planner import MeshPlanner
from weft.planner.policy import Plan

SERVICE_NAME = "externalscaler.ExternalScaler"


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Answers KEDA with the workers that are wanted."""

    def __init__(self, planner: MeshPlanner) -> None:
        self._planner = planner

    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.IsActiveResponse:
        return externalscaler_pb2.IsActiveResponse(result=self._wanted(request) > 0)

    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        told: bool | None = None
        while True:
            is_active = self._wanted(request) > 0
            if is_active != told:
                told = is_active
                yield externalscaler_pb2.IsActiveResponse(result=is_active)
            await self._planner.changed.wait()

    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        model, role = trigger_of(request)
        spec = externalscaler_pb2.MetricSpec(
            metricName=_metric(model, role), targetSize=1, targetSizeFloat=1.0
        )
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: Context
    ) -> externalscaler_pb2.GetMetricsResponse:
        wanted = self._wanted(request.scaledObjectRef)
        value = externalscaler_pb2.MetricValue(
            metricName=request.metricName, metricValue=wanted, metricValueFloat=float(wanted)
        )
        return externalscaler_pb2.GetMetricsResponse(metricValues=[value])

    def _wanted(self, request: externalscaler_pb2.ScaledObjectRef) -> int:
        """Raises PeerUnavailable while nothing is known, so that nobody scales by it."""
        model, role = trigger_of(request)
        plan = self._planner.plans.get(model)
        if plan is None or _is_blind(plan):
            raise PeerUnavailable(
                f"the planner has no news of the model {model!r}; nothing should change",
                stage="plan",
            )
        return plan.prefill if role == "prefill" else plan.decode


class PlanCollector(Collector):
    """`weft_desired_replicas` and what alarms, by model."""

    def __init__(self, planner: MeshPlanner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[Metric]:
        wanted = GaugeMetricFamily(
            "weft_desired_replicas", "Workers that the planner wants", labels=["model", "role"]
        )
        alarms = GaugeMetricFamily(
            "weft_planner_alarms", "1 for each thing that is wrong", labels=["model", "alarm"]
        )
        acts = GaugeMetricFamily("weft_planner_acts", "1 if this planner may act now")
        acts.add_metric([], float(self._planner.acts))
        for model, plan in self._planner.plans.items():
            for alarm in plan.alarms:
                alarms.add_metric([model, alarm.name], 1.0)
            if not _is_blind(plan):
                wanted.add_metric([model, "prefill"], plan.prefill)
                wanted.add_metric([model, "decode"], plan.decode)
        yield from (wanted, alarms, acts)


def _is_blind(plan: Plan) -> bool:
    return any(alarm.name == "no_data" for alarm in plan.alarms)


def trigger_of(request: externalscaler_pb2.ScaledObjectRef) -> tuple[str, str]:
    """Model and role of a trigger's metadata. Raises InvalidRequest if they are missing."""
    metadata = request.scalerMetadata
    # KEDA puts in the value of the scaled pods' variable and keeps the name of the field.
    model = metadata.get("model", "") or metadata.get("modelFromEnv", "")
    role = metadata.get("role", "")
    if not model or role not in ("prefill", "decode"):
        raise InvalidRequest(
            "the trigger's metadata need `model` or `modelFromEnv`, and `role`: prefill or decode",
            stage="validate",
            param="scalerMetadata",
        )
    return model, role


def _metric(model: str, role: str) -> str:
    """A name that is a segment of the API server's paths, as models' names may not be."""
    return re.sub(r"[^a-z0-9-]+", "-", f"weft-{model}-{role}".lower())
