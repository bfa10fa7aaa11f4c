"""Carries out planned faults. Remembers which services they affected, and for how long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection
from dataclasses import dataclass, field

from weft.chaos.mesh import AFTERMATH_S, RECOVERY_TIMEOUT_S, ChaosMesh, MeshNotReady
from weft.chaos.schedule import Planned

_REACHED_TIMEOUT_S = 1.2
_POLL_S = 0.1


@dataclass(slots=True, kw_only=True)
class Injection:
    """One injected fault, in times of the event loop."""

    planned: Planned
    names: frozenset[str]
    """Services that the fault affected or could have affected."""
    started_s: float
    ended_s: float | None = None
    """None: the fault lasts."""
    has_happened: bool = True
    """Whether the fault took place. A service may never reach a fault point."""
    num_deaths: int = 0
    """Deaths of the target before the fault."""

    def overlaps(self, names: Collection[str], start_s: float, end_s: float) -> bool:
        """Whether the fault may have affected one of the services between the two times."""
        is_over_s = float("inf") if self.ended_s is None else self.ended_s + AFTERMATH_S
        return not self.names.isdisjoint(names) and self.started_s <= end_s and start_s <= is_over_s


@dataclass(slots=True)
class Injector:
    """Carries out faults in one mesh, one at a time."""

    mesh: ChaosMesh
    done: list[Injection] = field(default_factory=list)
    _recoveries: list[asyncio.Task[None]] = field(default_factory=list)

    async def inject(self, planned: Planned) -> Injection:
        """Waits until the target can be hit, and hits it. Returns when the fault itself is over; a
        killed service may still be starting then. Raises MeshNotReady if the target has not
        recovered from an earlier fault.
        """
        await self.mesh.until(
            lambda: self.can_hit(planned), f"{planned.target} is not back", RECOVERY_TIMEOUT_S
        )
        loop = asyncio.get_running_loop()
        names = {planned.target}
        if planned.link is not None:
            # A fault on a link that several services dial affects all of them.
            names.add("->".join(planned.link))
        injection = Injection(
            planned=planned,
            names=frozenset(names),
            started_s=loop.time(),
            num_deaths=self.mesh.num_deaths(planned.target),
        )
        self.done.append(injection)
        if planned.kind == "kill":
            injection.has_happened = await self._kill(planned)
            injection.ended_s = loop.time()
            if injection.has_happened:
                self._follow(injection)
        elif planned.kind == "stop":
            injection.has_happened = await self._stop(planned)
            injection.ended_s = loop.time()
            # Ranks that waited too long for this one end their engine.
            may_die = planned.part == "rank" and injection.has_happened
            if may_die and not await self._has_survived(injection):
                self._follow(injection)
        elif planned.kind == "link":
            assert planned.link is not None
            async with self.mesh.proxies[planned.link].misbehaving(planned.mode, 0.3):
                await asyncio.sleep(planned.hold_s)
            injection.ended_s = loop.time()
        else:
            injection.has_happened = await self._at_point(injection)
        return injection

    async def settle(self) -> None:
        """Waits until every killed service is back. Raises MeshNotReady if one does not come
        back.
        """
        await asyncio.gather(*self._recoveries)

    async def close(self) -> None:
        for task in self._recoveries:
            task.cancel()
        await asyncio.gather(*self._recoveries, return_exceptions=True)

    def can_hit(self, planned: Planned) -> bool:
        """Whether all services of the target's role are up. Only one of them is attacked at a
        time.
        """
        role = planned.target.partition("-")[0]
        return all(self.mesh.ready(name) is not None for name in self.mesh.named(role))

    async def _kill(self, planned: Planned) -> bool:
        mesh, target = self.mesh, planned.target
        old = mesh.ready(target)
        if not mesh.send(target, planned.part, signal.SIGKILL, planned.rank):
            return False
        # Until the supervisor notices its end, the service counts as running and could be killed
        # again.
        await mesh.until(
            lambda: mesh.ready(target) is not old, f"{target} does not end", RECOVERY_TIMEOUT_S
        )
        return True

    async def _stop(self, planned: Planned) -> bool:
        if not self.mesh.send(planned.target, planned.part, signal.SIGSTOP, planned.rank):
            return False
        try:
            await asyncio.sleep(planned.hold_s)
        finally:
            self.mesh.send(planned.target, planned.part, signal.SIGCONT, planned.rank)
        return True

    async def _has_survived(self, injection: Injection) -> bool:
        target = injection.planned.target
        try:
            await self.mesh.dump(target)
        except MeshNotReady:
            return False
        return self.mesh.num_deaths(target) == injection.num_deaths

    async def _at_point(self, injection: Injection) -> bool:
        planned, mesh, loop = injection.planned, self.mesh, asyncio.get_running_loop()
        assert planned.spec is not None
        target, point = planned.target, planned.spec.point
        try:
            await mesh.arm(target, planned.spec)
        # An earlier fault holds the service up, so this one did not take place.
        except MeshNotReady:
            injection.ended_s = loop.time()
            return False
        try:
            until = loop.time() + _REACHED_TIMEOUT_S
            while not (has_happened := bool(await mesh.fired(target, point))):
                if loop.time() > until:
                    break
                await asyncio.sleep(_POLL_S)
            if has_happened:
                await asyncio.sleep(planned.hold_s / 2)
            await mesh.clear(target, point)
        except MeshNotReady:
            # The service has died of the fault, or its engine is held up.
            has_happened = True
        injection.ended_s = loop.time()
        is_back = mesh.ready(target) is not None
        if not is_back or mesh.num_deaths(target) != injection.num_deaths:
            self._follow(injection)
        return has_happened

    def _follow(self, injection: Injection) -> None:
        injection.ended_s = None
        task = asyncio.create_task(self._recover(injection))
        self._recoveries.append(task)

    async def _recover(self, injection: Injection) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECOVERY_TIMEOUT_S
        # An answer may merely have been late, so a death need not follow.
        while not (self._is_back(injection) or await self._has_survived(injection)):
            if loop.time() > deadline:
                what = f"{injection.planned.target} is not back"
                raise MeshNotReady(f"{what} after {RECOVERY_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)
        injection.ended_s = loop.time()

    def _is_back(self, injection: Injection) -> bool:
        # A process counts as ready until the supervisor notices its end.
        target = injection.planned.target
        has_died = self.mesh.num_deaths(target) > injection.num_deaths
        return has_died and self.mesh.ready(target) is not None
