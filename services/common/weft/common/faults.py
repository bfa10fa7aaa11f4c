"""Lists of the faults of a worker's processes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal

from weft.contract.codec.pairs import FAULT, FAULT_KINDS
from weft.contract.faults import BOARD, FaultState
from weft.v1 import admin_pb2


def allow_sabotage(part: Literal["gateway", "worker"]) -> None:
    """Lets `weft chaos --sabotage` break guarantees of this process. Each guarantee holds until its
    fault is armed. Product code imports nothing else of `weft.chaos`.
    """
    importlib.import_module(f"weft.chaos.sabotage.{part}").install()


def faults_to_proto(*processes: Sequence[FaultState]) -> admin_pb2.ListFaultsResponse:
    """The faults armed in the processes of one service, as one list. All processes list their
    faults in the same order.
    """
    response = admin_pb2.ListFaultsResponse()
    # Each process has every fault; only the one whose code has the point passes it.
    for states in zip(*(states for states in processes if states), strict=False):
        response.faults.add(
            fault=FAULT.encode(states[0].spec),
            reached=sum(state.reached for state in states),
            fired=sum(state.fired for state in states),
        )
    for point in BOARD.points:
        response.points.add(
            name=point.name,
            description=point.where,
            kinds=[FAULT_KINDS.numbers[kind] for kind in point.kinds],
        )
    return response
