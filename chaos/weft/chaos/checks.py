"""Checks of more than the answers: pages, published content, and the hit rate after a restart."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Sequence

from weft.chaos.inject import Injection
from weft.chaos.load import Violation
from weft.chaos.mesh import Absence, ChaosMesh, MeshNotReady
from weft.chaos.requests import ChaosRequest, Pace, Reply, send
from weft.chaos.schedule import RANK_TIMEOUT_S

IDLE_TIMEOUT_S = 45.0
SECONDS_TO_LEARN = 2.0
"""Time in which a restarted gateway learns its workers' pages, once it sees the workers."""
MIN_HIT_SHARE = 0.6
"""Least share of hits among prompts that were sent before. On a busy machine a worker may be stale
for a moment, so that one or two of six prompts miss.
"""
_POLL_S = 0.2
_LIMITS_S = 2 * RANK_TIMEOUT_S
"""Time in which workers notice that one with which they share experts has stopped."""
_NUM_PROBES, _MAX_PROBE_TOKENS = 6, 300


def check_ends(
    absences: Sequence[Absence], injections: Sequence[Injection], num_together: int = 1
) -> list[Violation]:
    """Checks that each service that ended did so because of a fault, or of a quarantine that faults
    have filled.

    Args:
        num_together: Consecutive workers that end together, since they share experts.
    """
    return [
        Violation(invariant=1, what=f"{absence.name} {absence.how} without a fault of its own")
        for absence in absences
        if not absence.is_last_fence
        and not any(
            each.overlaps(
                _together(absence.name, num_together),
                absence.since_s - _LIMITS_S * (num_together > 1),
                absence.since_s,
            )
            for each in injections
        )
    ]


def _together(name: str, count: int) -> list[str]:
    """A service and those that end with it."""
    stem, _, number = name.rpartition("-")
    if count == 1 or not number.isdecimal():
        return [name]
    first = int(number) // count * count
    return [f"{stem}-{first + index}" for index in range(count)]


async def check_pages(mesh: ChaosMesh) -> list[Violation]:
    """Checks invariant 3: on an idle mesh every page is free or cached, and none is quarantined."""
    names = (*mesh.named("decode"), *mesh.named("prefill"), *mesh.named("kvstore"))
    problems = await asyncio.gather(*(_idle_problem(mesh, name) for name in names))
    return [
        Violation(invariant=3, what=f"{name}, idle: {problem}")
        for name, problem in zip(names, problems, strict=True)
        if problem
    ]


async def _idle_problem(mesh: ChaosMesh, name: str) -> str:
    """Pages that a service still holds after a while, in words; empty: none."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + IDLE_TIMEOUT_S
    while True:
        try:
            pages = await mesh.pages(name)
        except MeshNotReady as error:
            problem = str(error)
        else:
            problem = "" if pages.is_idle else str(pages)
            if not problem and name not in mesh.named("kvstore"):
                problem = await _staging_problem(mesh, name)
        if not problem or loop.time() > deadline:
            return problem
        await asyncio.sleep(_POLL_S)


async def _staging_problem(mesh: ChaosMesh, name: str) -> str:
    try:
        staging = (await mesh.dump(name))["engine"]["staging_pages"]
    except MeshNotReady as error:
        return str(error)
    is_free = staging is None or staging["free"] == staging["total"]
    return "" if is_free else f"staging pages: {staging}"


async def check_content(mesh: ChaosMesh) -> list[Violation]:
    """Checks invariants 4 and 5: published pages did not change, and equal the pages that their
    fillers sent.
    """
    found: list[Violation] = []
    for name in (*mesh.named("decode"), *mesh.named("prefill")):
        try:
            engine = (await mesh.dump(name))["engine"]
            pages = await mesh.pages(name)
        # The service is between two incarnations, and no page is left of the first.
        except MeshNotReady:
            continue
        if not pages.is_whole:
            found.append(Violation(invariant=3, what=f"{name}: {pages}"))
        audit = engine["audit"]
        if audit["changed_pages"]:
            what = f"{name}: {audit['changed_pages']} published pages have changed"
            found.append(Violation(invariant=4, what=what))
        if audit["corrupt_pages"]:
            what = f"{name}: {audit['corrupt_pages']} corrupt pages were accepted"
            found.append(Violation(invariant=5, what=what))
    return found


async def check_hit_rate(
    mesh: ChaosMesh, model: str, asks: Sequence[ChaosRequest]
) -> list[Violation]:
    """Checks invariant 6: a restarted gateway routes prompts to the workers that hold them. Decode
    workers' caches are dropped before each round, so that only prefill workers' hits count.
    """
    gateway = mesh.named("gateway")[0]
    probes = [ask for ask in asks if 64 <= len(ask.prompt) <= _MAX_PROBE_TOKENS][:_NUM_PROBES]
    pace = Pace(salt=secrets.token_hex(8))

    async def hit_share(order: Sequence[ChaosRequest]) -> float:
        for name in (*mesh.named("decode"), *mesh.named("kvstore")):
            await mesh.flush(name)
        address = mesh.gateways[gateway]
        replies = [await send(address, model, ask, pace) for ask in order]
        return _hit_share(replies)

    await hit_share(probes)
    before = await hit_share(probes[::-1])
    old = mesh.ready(gateway)
    mesh.send(gateway, "whole", signal.SIGKILL)
    await mesh.until(lambda: mesh.ready(gateway) not in (None, old), f"{gateway} is gone", 60.0)
    await mesh.wait_healthy()
    await asyncio.sleep(SECONDS_TO_LEARN)
    # The prompts are sent in another order, so that round robin would not hit.
    after = await hit_share([probes[i ^ (i // 2 % 2)] for i in range(len(probes) // 2 * 2)])
    if min(before, after) < MIN_HIT_SHARE:
        what = f"hit rate {before:.2f} before {gateway} was restarted, {after:.2f} after"
        return [Violation(invariant=6, what=what)]
    return []


def _hit_share(replies: Sequence[Reply]) -> float:
    computed = shippable = 0
    for reply in replies:
        if reply.timeline is None:
            continue
        for fill in reply.timeline.fills:
            shippable += fill.accepted_tokens
            computed += fill.computed_tokens
    return 1.0 - computed / shippable if shippable else 0.0
