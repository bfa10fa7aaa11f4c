"""Schedules of faults, drawn from a seed: the same seed gives the same schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.chaos.mesh import Link, Part
from weft.chaos.proxy import Mode
from weft.contract.faults import FaultSpec

FaultClass = Literal["kill", "stop", "link", "point"]
WEIGHTS: Mapping[FaultClass, float] = {"kill": 0.5, "stop": 2, "link": 3, "point": 6}
RANK_WEIGHTS: Mapping[FaultClass, float] = {"kill": 1, "stop": 1}
"""Weights of the kinds of faults in runs that attack only ranks."""
GATEWAY_STOP = 4.0
"""Factor on the length of a gateway's stops, so that some are longer than the silence that workers
tolerate.
"""
RANK_TIMEOUT_S = 2.5
"""Longest wait of a rank for another."""
RANK_STOP = 3.0
"""Factor on the length of a rank's stops, so that some outlast that wait."""
PARTS: tuple[Part, ...] = ("whole", "server", "engine")
_MODES = tuple(mode for mode in Mode if mode is not Mode.PASS)

_FILLS_OWNED: dict[str, tuple[str, ...]] = {
    "fill.notify": ("drop", "duplicate"),
    "fill.digest": ("corrupt", "delay", "stall"),
    "fill.start": ("drop", "duplicate", "delay", "error"),
    "fill.renew": ("drop", "duplicate", "delay"),
    "fill.stop": ("drop", "duplicate", "delay"),
    "fill.event.in": ("drop", "duplicate", "delay", "error"),
}
_FILLS_MADE: dict[str, tuple[str, ...]] = {
    "ship.post": ("drop", "duplicate", "delay", "stall", "error", "kill"),
    "fill.event.out": ("drop", "duplicate", "delay", "error"),
}
_STORE_USED: dict[str, tuple[str, ...]] = {
    "store.lookup": ("drop", "delay", "error"),
    "store.put": ("drop", "duplicate", "delay", "error"),
}
POINTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "decode": {
        "engine.step": ("delay", "stall", "error", "kill"),
        "session.submit": ("drop", "duplicate", "delay", "error"),
        "session.event": ("drop", "duplicate", "delay", "error"),
        **_FILLS_OWNED,
        **_STORE_USED,
    },
    "prefill": {"engine.step": ("delay", "stall", "error"), **_FILLS_MADE, **_STORE_USED},
    "kvstore": {
        "store.read": ("corrupt", "delay", "error"),
        "store.fill": ("corrupt", "delay"),
        **_FILLS_MADE,
    },
}
"""Fault points that can be armed, by role."""
TRANSFER_POINTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "decode": _FILLS_OWNED,
    "prefill": _FILLS_MADE,
    "kvstore": POINTS["kvstore"],
}
"""Fault points that a hand-over of pages passes, by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault of a schedule."""

    number: int
    gap_s: float
    """Seconds without faults before it."""
    kind: FaultClass
    target: str
    """The service; for a link, the dialled service."""
    hold_s: float
    """Duration of the fault; for a fault point, the longest wait until it fires."""
    part: Part = "whole"
    rank: int = 0
    link: Link | None = None
    mode: Mode = Mode.PASS
    spec: FaultSpec | None = None

    @property
    def label(self) -> str:
        if self.kind == "link":
            assert self.link is not None
            return f"{self.link[0]}->{self.link[1]} {self.mode.value} {self.hold_s:.1f} s"
        if self.spec is not None:
            return f"{self.target} {self.spec.point} {self.spec.kind} x{self.spec.count}"
        held = f" {self.hold_s:.1f} s" if self.kind == "stop" else ""
        part = f"rank {self.rank}" if self.part == "rank" else self.part
        return f"{self.target} {self.kind} {part}{held}"


def transfer_links(links: Sequence[Link]) -> list[Link]:
    """The links from workers to the services that fill their pages."""
    fillers = ("prefill", "kvstore")
    return [link for link in links if link[0] != "gateway" and link[1].partition("-")[0] in fillers]


def make_schedule(
    seed: int,
    names: Sequence[str],
    links: Sequence[Link],
    weights: Mapping[FaultClass, float] = WEIGHTS,
    points: Mapping[str, Mapping[str, tuple[str, ...]]] = POINTS,
    parts: Sequence[Part] = PARTS,
    num_ranks: int = 1,
) -> Iterator[Planned]:
    """Generates faults without end. `links` have a proxy; `weights` are the classes' relative
    frequencies; `points` are fault points by role; `parts` are those of workers that are killed or
    stopped.
    """
    draw = random.Random(seed)
    number = 0
    while True:
        number += 1
        gap_s, hold_s = draw.uniform(0.05, 0.3), draw.uniform(0.2, 2.0)
        kind = draw.choices(list(weights), list(weights.values()))[0]
        if kind == "link":
            link = draw.choice(list(links))
            yield Planned(
                number=number,
                gap_s=gap_s,
                kind=kind,
                target=link[1],
                hold_s=hold_s,
                link=link,
                mode=draw.choice(_MODES),
            )
        elif kind == "point":
            yield _at_point(draw, number, gap_s, hold_s, names, points)
        else:
            target = draw.choice(list(names))
            if kind == "stop" and target.startswith("gateway"):
                hold_s *= GATEWAY_STOP
            has_engine = target.partition("-")[0] in ("decode", "prefill")
            part = draw.choice(parts) if has_engine else "server"
            at_rank = draw.randrange(num_ranks) if part == "rank" else 0
            if part == "rank":
                hold_s *= RANK_STOP
            yield Planned(
                number=number,
                gap_s=gap_s,
                kind=kind,
                target=target,
                hold_s=hold_s,
                part=part,
                rank=at_rank,
            )


def _at_point(
    draw: random.Random,
    number: int,
    gap_s: float,
    hold_s: float,
    names: Sequence[str],
    points: Mapping[str, Mapping[str, tuple[str, ...]]],
) -> Planned:
    target = draw.choice([name for name in names if name.partition("-")[0] in points])
    kinds = points[target.partition("-")[0]]
    point = draw.choice(list(kinds))
    spec = FaultSpec(
        point=point,
        kind=draw.choice(kinds[point]),
        count=draw.randint(1, 3),
        skip=draw.choice((0, 0, 1, 2)),
        seed=draw.randrange(1 << 32),
        delay_s=hold_s,
    )
    return Planned(
        number=number, gap_s=gap_s, kind="point", target=target, hold_s=hold_s, spec=spec
    )
