"""One chaos run: reference answers without faults, load with faults, recovery, checks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weft.chaos.checks import check_content, check_ends, check_hit_rate, check_pages
from weft.chaos.inject import Injection, Injector
from weft.chaos.load import ChaosLoad, Known, LoadResult, Violation, text_problem
from weft.chaos.mesh import ChaosMesh, MeshNotReady
from weft.chaos.requests import ChaosRequest, Pace, Reply, make_asks, send
from weft.chaos.sabotage.classes import SABOTAGES, Sabotage, disarm, keep_armed
from weft.chaos.schedule import (
    PARTS,
    POINTS,
    RANK_WEIGHTS,
    TRANSFER_POINTS,
    WEIGHTS,
    Planned,
    make_schedule,
    transfer_links,
)
from weft.cli.up.settings import UpSettings

INVARIANTS = {
    1: "every request ends right or with a typed error in time, each index once",
    2: "texts equal those without faults",
    3: "no page is lost or left in quarantine",
    4: "no page is written by who has no right to it any more",
    5: "no corrupt page is accepted",
    6: "a restarted gateway is back at its hit rate",
}
_CONTENT_EVERY = 5
"""Faults between two checks of the published pages."""
_MAX_POSTPONED = 64
_WORK_TIMEOUT_S, _LOOK_EVERY_S = 60.0, 0.05
_PEACE_TIMEOUT_S = 300.0
"""Limit of a phase without faults, which only a busy machine delays."""


Only = Literal["transfer", "ranks"]
"""`transfer`: the hand-over of pages, which is workers, stores and the links between them. `ranks`:
single ranks of workers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    seed: int
    num_faults: int | None
    """Faults after which the run ends; None: it ends after `minutes`."""
    minutes: float | None
    num_clients: int
    max_prompt_tokens: int
    max_new_tokens: int
    sabotage: str | None = None
    """Name of a sabotage, or None."""
    only: Only | None = None
    """The parts that are disturbed; None: all parts."""
    num_ranks: int = 1
    num_together: int = 1
    """Consecutive workers that share experts, and end together."""
    checks_hit_rate: bool = True
    has_images: bool = False
    """Whether half of the requests have an image, which the model must take."""


@dataclass(slots=True)
class ChaosResult:
    load: LoadResult
    injections: list[Injection] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    deaths: dict[str, int] = field(default_factory=dict)
    speculated_steps: int = 0
    """Steps in which drafts were verified, since the last start of the decode workers."""
    standstills: list[str] = field(default_factory=list)
    """Log lines of services that stood still, with or without a fault."""
    elapsed_s: float = 0.0

    @property
    def num_happened(self) -> int:
        """Faults that took place. A fault at a point that was never reached did not."""
        return sum(injection.has_happened for injection in self.injections)

    @property
    def red(self) -> list[int]:
        """Invariants that did not hold."""
        return sorted({violation.invariant for violation in self.violations})

    def by_class(self) -> Counter[str]:
        """Faults that took place, by class."""
        return Counter(i.planned.kind for i in self.injections if i.has_happened)


async def run_chaos(
    plan: ChaosPlan,
    settings: UpSettings,
    model_dir: Path,
    model_name: str,
    tell: Callable[[str], None],
) -> ChaosResult:
    """Starts a mesh, runs the plan on it and ends it. Calls `tell` with each event, in one line.
    Raises ExitedEarly or TimeoutError if the mesh does not start, MeshNotReady if it fails without
    any fault.
    """
    started_at = time.monotonic()
    async with ChaosMesh.running(settings, model_dir, model_name) as mesh:
        tell(f"the mesh is ready: {', '.join(mesh.names)}")
        most = plan.max_prompt_tokens, plan.max_new_tokens
        asks = make_asks(plan.seed, *most, has_images=plan.has_images)
        known = Known(model_name, asks, await answers_in_peace(mesh, model_name, asks))
        tell(f"{len(asks)} requests answered in peace")
        result = await run_on(mesh, plan, known, tell)
    result.elapsed_s = time.monotonic() - started_at
    return result


async def run_on(
    mesh: ChaosMesh, plan: ChaosPlan, known: Known, tell: Callable[[str], None]
) -> ChaosResult:
    """Runs a plan on a mesh with the settings of `weft chaos`. Afterwards all services run again,
    unless invariants broke.
    """
    sabotage = SABOTAGES[plan.sabotage] if plan.sabotage else None
    injector = Injector(mesh)
    load = ChaosLoad(mesh.gateways, known, injector, plan.seed)
    result = ChaosResult(load.result, injector.done)
    num_before = len(mesh.absences)
    async with _sabotaged(mesh, sabotage):
        try:
            async with _running(load, plan.num_clients):
                await _inject(plan, sabotage, injector, result, tell)
            await injector.settle()
            await mesh.wait_healthy()
            ended = mesh.absences[num_before:]
            result.violations += check_ends(ended, injector.done, plan.num_together)
            result.violations += await _look_again(plan, mesh, known)
            result.speculated_steps = await _speculated_steps(mesh)
        except MeshNotReady as error:
            result.violations.append(Violation(invariant=1, what=f"the mesh: {error}"))
        finally:
            await injector.close()
    result.violations += [*load.result.violations, *load.unserved()]
    result.deaths = dict(Counter(absence.name for absence in mesh.absences[num_before:]))
    result.standstills = mesh.standstills()
    return result


async def _speculated_steps(mesh: ChaosMesh) -> int:
    dumps = [await mesh.dump(name) for name in mesh.named("decode")]
    return sum(dump["engine"]["counters"]["speculated_steps"] for dump in dumps)


async def answers_in_peace(
    mesh: ChaosMesh, model: str, asks: Sequence[ChaosRequest]
) -> dict[int, Reply]:
    """The answer to each request, one at a time and without a fault. Raises MeshNotReady if one
    fails.
    """
    address = next(iter(mesh.gateways.values()))
    found: dict[int, Reply] = {}
    for ask in asks:
        reply = await send(address, model, ask, Pace(_PEACE_TIMEOUT_S))
        if not reply.is_whole:
            raise MeshNotReady(f"request {ask.number} failed without a fault: {reply.error}")
        found[ask.number] = reply
    return found


async def _inject(
    plan: ChaosPlan,
    sabotage: Sabotage | None,
    injector: Injector,
    result: ChaosResult,
    tell: Callable[[str], None],
) -> None:
    mesh = injector.mesh
    weights = sabotage.weights if sabotage is not None else WEIGHTS
    until = None if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    targets = sabotage.targets if sabotage is not None else ()
    names = [name for name in mesh.names if not targets or name.partition("-")[0] in targets]
    links, points = list(mesh.proxies), POINTS
    parts = PARTS if plan.num_ranks == 1 else (*PARTS, "rank")
    if plan.only == "transfer":
        names = [name for name in names if name.partition("-")[0] in TRANSFER_POINTS]
        links, points = transfer_links(links), TRANSFER_POINTS
    elif plan.only == "ranks":
        names = [*mesh.named("prefill"), *mesh.named("decode")]
        weights, parts = RANK_WEIGHTS, ("rank",)
    schedule = make_schedule(plan.seed, names, links, weights, points, parts, plan.num_ranks)
    postponed: list[Planned] = []
    for number in itertools.count(1):
        is_late = until is not None and time.monotonic() >= until
        if is_late or (plan.num_faults is not None and result.num_happened >= plan.num_faults):
            return
        planned = _next(schedule, postponed, injector)
        await asyncio.sleep(planned.gap_s)
        if sabotage is not None and sabotage.hits_work:
            await _wait_for_work(mesh, planned.target)
        injection = await injector.inject(planned)
        tell(f"{planned.number}: {planned.label}" + ("" if injection.has_happened else ": not met"))
        if number % _CONTENT_EVERY == 0:
            result.violations += await check_content(mesh)


async def _wait_for_work(mesh: ChaosMesh, name: str) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WORK_TIMEOUT_S):
            while True:
                with contextlib.suppress(MeshNotReady):
                    if (await mesh.pages(name)).in_work:
                        return
                await asyncio.sleep(_LOOK_EVERY_S)


def _next(schedule: Iterator[Planned], postponed: list[Planned], injector: Injector) -> Planned:
    """Postpones faults of services that restart."""
    for planned in postponed:
        if injector.can_hit(planned):
            postponed.remove(planned)
            return planned
    for planned in schedule:
        if injector.can_hit(planned) or len(postponed) >= _MAX_POSTPONED:
            return planned
        postponed.append(planned)
    raise AssertionError("a schedule has no end")


async def _look_again(plan: ChaosPlan, mesh: ChaosMesh, known: Known) -> list[Violation]:
    found = await check_pages(mesh)
    found += await check_content(mesh)
    try:
        again = await answers_in_peace(mesh, known.model, known.asks)
    except MeshNotReady as error:
        return [*found, Violation(invariant=1, what=f"after the faults: {error}")]
    found += [
        Violation(invariant=2, what=f"request {number} after the faults {problem}")
        for number, answer in known.expected.items()
        if (problem := text_problem(answer, again[number])) is not None
    ]
    if plan.checks_hit_rate:
        try:
            found += await check_hit_rate(mesh, known.model, known.asks)
        except MeshNotReady as error:
            found.append(Violation(invariant=6, what=f"its check broke down: {error}"))
    return found


@contextlib.asynccontextmanager
async def _running(load: ChaosLoad, num_clients: int) -> AsyncIterator[None]:
    clients = asyncio.create_task(load.run(num_clients))
    try:
        yield
    finally:
        load.stop()
        await clients


@contextlib.asynccontextmanager
async def _sabotaged(mesh: ChaosMesh, sabotage: Sabotage | None) -> AsyncIterator[None]:
    if sabotage is None:
        yield
        return
    arming = asyncio.create_task(keep_armed(mesh, sabotage))
    try:
        yield
    finally:
        arming.cancel()
        await asyncio.gather(arming, return_exceptions=True)
        await disarm(mesh, sabotage)
