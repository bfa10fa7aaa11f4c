"""Breaks a worker's invariants for `weft chaos --sabotage`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.chaos.sabotage.wrap import wrap
from weft.contract.faults import FaultPoint
from weft.engine.sources.fill import Fill
from weft.engine.sources.owner import OwnerFills
from weft.pages.memory.page_memory import PageMemory

LEAK = FaultPoint("memory.release", "an engine releases pages: all but one", "sabotage")
QUARANTINE = FaultPoint(
    "fill.quarantine", "an owner quarantines pages: it frees them instead", "sabotage"
)
CHECK = FaultPoint("fill.check", "an owner compares digests: it takes them as equal", "sabotage")


def install() -> None:
    """Makes a worker's invariants breakable in this process, which is its server or its engine."""
    wrap(PageMemory, "release", LEAK, _leaking)
    wrap(OwnerFills, "_fail", QUARANTINE, _trusting)
    wrap(OwnerFills, "on_digested", CHECK, _believing)


def _leaking(whole: Callable[..., Any]) -> Callable[..., None]:
    def release(memory: PageMemory, pages: Sequence[int]) -> None:
        whole(memory, pages[1:] if pages and LEAK.fire() else pages)

    return release


def _trusting(whole: Callable[..., Any]) -> Callable[..., None]:
    def fail(
        owner: OwnerFills, fill: Fill, why: str, *, is_clean: bool = False, notify: bool = True
    ) -> None:
        whole(owner, fill, why, is_clean=bool(QUARANTINE.fire()) or is_clean, notify=notify)

    return fail


def _believing(whole: Callable[..., Any]) -> Callable[..., None]:
    def on_digested(owner: OwnerFills, lease_id: bytes, chunk: int, actual: list[int]) -> None:
        fill = owner._fills.get(lease_id)
        known = None if fill is None else fill.chunks[chunk].digests
        whole(owner, lease_id, chunk, known if known is not None and CHECK.fire() else actual)

    return on_digested
