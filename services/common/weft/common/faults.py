"""Conversion of faults between protobuf and plain values, and lists over a worker's processes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal

from weft.common.durations import duration
from weft.contract.errors import InvalidRequest
from weft.contract.faults import BOARD, KINDS, FaultSpec, FaultState
from weft.v1 import admin_pb2

KIND_NUMBERS: dict[str, admin_pb2.FaultKind.ValueType] = {
    kind: admin_pb2.FaultKind.Value(f"FAULT_KIND_{kind.upper()}") for kind in KINDS
}
_KIND_NAMES = {number: name for name, number in KIND_NUMBERS.items()}


def allow_sabotage(part: Literal["gateway", "worker"]) -> None:
    """Lets `weft chaos --sabotage` break guarantees of this process. Each can be broken only once
    its fault is armed. Product code imports nothing of `weft.chaos` otherwise.
    """
    importlib.import_module(f"weft.chaos.sabotage.{part}").install()


def spec_from_proto(message: admin_pb2.Fault) -> FaultSpec:
    """Converts a fault from the wire; `FaultBoard` checks the rest.

    Raises:
        InvalidRequest: Its kind is missing or unknown here.
    """
    kind = _KIND_NAMES.get(message.kind)
    if kind is None:
        raise InvalidRequest("kind: give one of FaultKind", stage="faults", param="kind")
    default = FaultSpec(point=message.point, kind=kind)
    return FaultSpec(
        point=message.point,
        kind=kind,
        probability=(
            message.probability if message.HasField("probability") else default.probability
        ),
        count=message.count if message.HasField("count") else default.count,
        skip=message.skip,
        seed=message.seed,
        delay_s=(
            message.delay.ToNanoseconds() / 1e9 if message.HasField("delay") else default.delay_s
        ),
    )


def spec_to_proto(spec: FaultSpec) -> admin_pb2.Fault:
    """Converts a fault for the wire."""
    return admin_pb2.Fault(
        point=spec.point,
        kind=KIND_NUMBERS[spec.kind],
        probability=spec.probability,
        count=spec.count,
        skip=spec.skip,
        seed=spec.seed,
        delay=duration(spec.delay_s),
    )


def faults_to_proto(*processes: Sequence[FaultState]) -> admin_pb2.ListFaultsResponse:
    """The faults armed in the processes of one service, each in the same order, as one list."""
    response = admin_pb2.ListFaultsResponse()
    # Each process has every fault; only the one whose code has the point passes it.
    for states in zip(*(states for states in processes if states), strict=False):
        response.faults.add(
            fault=spec_to_proto(states[0].spec),
            reached=sum(state.reached for state in states),
            fired=sum(state.fired for state in states),
        )
    for point in BOARD.points:
        response.points.add(
            name=point.name,
            description=point.where,
            kinds=[KIND_NUMBERS[kind] for kind in point.kinds],
        )
    return response
