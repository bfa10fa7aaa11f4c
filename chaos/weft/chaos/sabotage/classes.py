"""Sabotages: each breaks one invariant on purpose, to show that a run detects it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from weft.chaos.mesh import ChaosMesh, MeshNotReady
from weft.chaos.schedule import FaultClass
from weft.contract.faults import FaultSpec

_REARM_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """A breach of an invariant: where it is armed, and the faults that reveal it."""

    invariant: int
    """Number of the invariant that the run must report as broken."""
    role: str
    """Role whose services are all sabotaged."""
    spec: FaultSpec
    support: Mapping[str, FaultSpec]
    """Faults that stay armed together with it, by role."""
    weights: Mapping[FaultClass, float]
    what: str
    targets: tuple[str, ...] = ()
    """Roles that the schedule attacks; empty: all."""
    hits_work: bool = False
    """Whether each fault waits until its target has requests, without which it would reveal
    nothing.
    """
    is_after_restart: bool = False
    """Whether it is armed only in services that were restarted."""

    @property
    def armed(self) -> list[tuple[str, FaultSpec]]:
        return [(self.role, self.spec), *self.support.items()]


def _sabotage(point: str, count: int = 0, probability: float = 1.0) -> FaultSpec:
    return FaultSpec(point=point, kind="sabotage", count=count, probability=probability)


_KILLS: Mapping[FaultClass, float] = {"kill": 1}
_POINTS: Mapping[FaultClass, float] = {"point": 1}
SABOTAGES: Mapping[str, Sabotage] = {
    "deliver": Sabotage(
        invariant=1,
        role="gateway",
        spec=_sabotage("gateway.deliver", probability=0.3),
        support={},
        weights=_POINTS,
        what="the gateway delivers some tokens twice",
    ),
    "resume": Sabotage(
        invariant=2,
        role="gateway",
        spec=_sabotage("gateway.resume"),
        # Delayed steps make streams last long enough to be hit by a kill.
        support={"decode": FaultSpec(point="engine.step", kind="delay", count=0, delay_s=0.03)},
        weights=_KILLS,
        what="a request goes on with another seed after its worker died",
        targets=("decode",),
        hits_work=True,
    ),
    "leak": Sabotage(
        invariant=3,
        role="decode",
        spec=_sabotage("memory.release", count=1),
        support={},
        weights=_POINTS,
        what="a page is not given back",
    ),
    "quarantine": Sabotage(
        invariant=4,
        role="decode",
        spec=_sabotage("fill.quarantine"),
        # Delayed writes arrive long after their owner has given them up.
        support={
            "prefill": FaultSpec(
                point="ship.post", kind="delay", count=0, probability=0.3, delay_s=3.0
            )
        },
        weights=_POINTS,
        what="pages are free although a write to them may still arrive",
    ),
    "check": Sabotage(
        invariant=5,
        role="decode",
        spec=_sabotage("fill.check"),
        support={
            "decode": FaultSpec(point="fill.digest", kind="corrupt", count=0, probability=0.3)
        },
        weights=_POINTS,
        what="corrupt pages are taken as good",
    ),
    "index": Sabotage(
        invariant=6,
        role="gateway",
        spec=_sabotage("gateway.index"),
        support={},
        weights=_POINTS,
        what="a restarted gateway does not know what its workers hold",
        is_after_restart=True,
    ),
}


async def keep_armed(mesh: ChaosMesh, sabotage: Sabotage) -> None:
    """Arms a sabotage and its support in every new incarnation, until it is cancelled."""
    armed: dict[tuple[str, str], object] = {}
    spared = {ready.pid for name in mesh.named(sabotage.role) if (ready := mesh.ready(name))}
    while True:
        for role, spec in sabotage.armed:
            for name in mesh.named(role):
                ready = mesh.ready(name)
                if ready is None or armed.get((name, spec.point)) == ready.pid:
                    continue
                if sabotage.is_after_restart and ready.pid in spared:
                    continue
                with contextlib.suppress(MeshNotReady):
                    await mesh.arm(name, spec)
                    armed[name, spec.point] = ready.pid
        await asyncio.sleep(_REARM_S)


async def disarm(mesh: ChaosMesh, sabotage: Sabotage) -> None:
    """Ends a sabotage. The damage that it has done remains."""
    for role, spec in sabotage.armed:
        for name in mesh.named(role):
            with contextlib.suppress(MeshNotReady):
                await mesh.clear(name, spec.point)
