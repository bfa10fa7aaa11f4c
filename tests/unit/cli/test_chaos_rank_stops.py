"""What chaos makes of a rank that stood still: its engine may die of that or survive."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from weft.chaos import inject
from weft.chaos.inject import Injector
from weft.chaos.mesh import ChaosMesh, MeshNotReady
from weft.chaos.schedule import Planned

STOP = Planned(number=1, gap_s=0.0, kind="stop", target="decode-0", hold_s=0.0, part="rank", rank=1)


class Mesh:
    """A mesh whose worker answers late after a stop, or never."""

    until = ChaosMesh.until

    def __init__(self, num_late: float, *, has_rank: bool = True, dies: bool = False) -> None:
        self.num_late = num_late
        self.has_rank = has_rank
        self.dies = dies
        self.deaths = 0

    def named(self, role: str) -> list[str]:
        return [f"{role}-0"]

    def ready(self, name: str) -> object:
        return self

    def num_deaths(self, name: str) -> int:
        return self.deaths

    def send(self, *signal: object) -> bool:
        return self.has_rank

    async def dump(self, name: str) -> object:
        self.num_late -= 1
        if self.num_late >= 0:
            raise MeshNotReady("late")
        self.deaths += self.dies
        return {}


async def ended_s(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> float | None:
    """When the fault was over; a worker that never answers is given up soon."""
    timeout_s = 0.1 if mesh.num_late == math.inf else 60.0
    monkeypatch.setattr(inject, "RECOVERY_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(inject, "_POLL_S", 0.001)
    injector = Injector(mesh)
    injection = await injector.inject(STOP)
    assert injection.has_happened is mesh.has_rank
    await injector.settle()
    return injection.ended_s


@pytest.mark.parametrize("num_late", [0, 1, 3])
@pytest.mark.parametrize("dies", [False, True])
def test_an_engine_that_answers_late_is_not_waited_for(
    num_late: int, *, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asyncio.run(ended_s(Mesh(num_late, dies=dies), monkeypatch)) is not None


def test_a_stop_that_met_no_rank_has_no_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(math.inf, has_rank=False)
    assert asyncio.run(ended_s(mesh, monkeypatch)) is not None


def test_an_engine_that_never_answers_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshNotReady, match="decode-0 is not back"):
        asyncio.run(ended_s(Mesh(math.inf), monkeypatch))
