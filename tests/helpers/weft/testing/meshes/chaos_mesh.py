"""A mesh with proxies on its links, and what it answers in peace."""

from __future__ import annotations

from dataclasses import dataclass

from weft.cli.chaos.load import Known
from weft.cli.chaos.mesh import ChaosMesh
from weft.cli.up.settings import UpSettings


@dataclass(frozen=True, slots=True)
class Chaos:
    """State shared by the tests of tests/chaos."""

    mesh: ChaosMesh
    known: Known
    seed: int


def bear_quarantine(settings: UpSettings) -> UpSettings:
    """A mesh in which no owner ends for its quarantine while a test looks into it."""
    args = f"{settings.decode_args} --max-quarantine-fraction 1"
    return settings.model_copy(update={"decode_args": args})
