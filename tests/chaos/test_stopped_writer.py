"""A process is stopped in the middle of moving pages, past its lease, and then goes on."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from weft.chaos.checks import check_content, check_pages
from weft.chaos.command import mesh_settings
from weft.chaos.load import text_problem
from weft.chaos.mesh import ChaosMesh
from weft.chaos.requests import ChaosRequest, Pace, Reply, send
from weft.chaos.tiny import TINY_NAME, make_tiny_model
from weft.contract.faults import FaultSpec
from weft.testing.meshes.chaos_mesh import Chaos, for_tests, in_peace

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.needs("nixl"),
    pytest.mark.timeout(900),
]

LEASE_S = 4.0
"""As `mesh_settings` has it."""


async def stopped_in_mid_write(chaos: Chaos) -> None:
    """Stops both prefill engines between their look at the lease and the write itself."""
    mesh, known = chaos.mesh, chaos.known
    before = {name: (await mesh.dump(name))["engine"]["counters"] for name in mesh.named("decode")}
    # That thread is where a write is posted: it is held there, so that the signal meets it, however
    # busy the machine is. Time goes on for a process that is stopped.
    held = FaultSpec(point="ship.post", kind="delay", count=1, delay_s=0.9 * LEASE_S)
    for name in mesh.named("prefill"):
        await mesh.arm(name, held)
    first = max(known.asks, key=lambda ask: len(ask.prompt))
    asking, stopped = await stop_who_fired(chaos, first, held.point)
    try:
        deadline = time.monotonic() + LEASE_S + 2
        replies: list[tuple[ChaosRequest, Reply]] = [(first, await asking)]
        # Other requests take the pages that are free, more than the whole pool.
        while time.monotonic() < deadline or await turned_over(chaos, before) < 1:
            asks = known.asks[:8]
            replies += zip(
                asks, await asyncio.gather(*(ask_one(chaos, a) for a in asks)), strict=True
            )
        quarantined = sum([await num_quarantined(mesh, name) for name in mesh.named("decode")])
    finally:
        mesh.send(stopped, "engine", signal.SIGCONT)
        for name in mesh.named("prefill"):
            await mesh.clear(name, held.point)
    assert quarantined > 0, "the stopped filler held nothing"
    for ask, reply in replies:
        assert reply.is_whole, reply.error
        assert text_problem(known.expected[ask.number], reply) is None
    await mesh.wait_healthy()
    assert await check_pages(mesh) == []
    assert await check_content(mesh) == []
    for ask in known.asks[:4]:
        assert text_problem(known.expected[ask.number], await ask_one(chaos, ask)) is None


async def num_quarantined(mesh: ChaosMesh, name: str) -> int:
    """Of the pages that fillers write to."""
    engine = (await mesh.dump(name))["engine"]
    return int((engine["staging_pages"] or engine["pages"])["quarantined"])


async def ask_one(chaos: Chaos, ask: ChaosRequest) -> Reply:
    """From an empty cache."""
    address = chaos.mesh.gateways[chaos.mesh.named("gateway")[0]]
    return await send(address, chaos.known.model, ask, Pace(120.0, salt=secrets.token_hex(8)))


async def stop_who_fired(
    chaos: Chaos, ask: ChaosRequest, point: str
) -> tuple[asyncio.Task[Reply], str]:
    """Asks, stops the prefill engine that has come to the point, and disarms the other.

    Where a busy machine makes workers stale for a moment, nobody may have filled: once more.
    """
    mesh = chaos.mesh
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        asking = asyncio.create_task(ask_one(chaos, ask))
        while not asking.done():
            for name in mesh.named("prefill"):
                if await mesh.fired(name, point):
                    assert mesh.send(name, "engine", signal.SIGSTOP)
                    for other in mesh.named("prefill"):
                        if other != name:
                            await mesh.clear(other, point)
                    return asking, name
            await asyncio.sleep(0.01)
        await asking
    raise AssertionError("nobody was asked to fill")


async def turned_over(chaos: Chaos, before: dict[str, dict[str, int]]) -> float:
    """How often a decode worker has filled its whole pool anew since then."""
    found = []
    for name, counters in before.items():
        engine = (await chaos.mesh.dump(name))["engine"]
        gained = engine["counters"]["evicted_pages"] - counters["evicted_pages"]
        found.append(gained / engine["pages"]["total"])
    return max(found)


async def test_a_filler_stopped_in_mid_write(chaos: Chaos) -> None:
    await stopped_in_mid_write(chaos)


async def test_a_worker_stopped_during_a_put(chaos: Chaos) -> None:
    """The store reads its pages while it stands still; what it holds then is right or nothing."""
    mesh, known = chaos.mesh, chaos.known
    held = FaultSpec(point="store.put", kind="delay", count=1, delay_s=0.5)
    workers = mesh.named("decode")
    for name in workers:
        await mesh.arm(name, held)
    deadline = time.monotonic() + 60
    asking = [asyncio.create_task(ask_one(chaos, ask)) for ask in known.asks]
    while not (putting := [name for name in workers if await mesh.fired(name, held.point)]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    mesh.send(putting[0], "engine", signal.SIGSTOP)
    try:
        await asyncio.sleep(3.0)  # past the time that a store waits for pages
    finally:
        mesh.send(putting[0], "engine", signal.SIGCONT)
        for name in workers:
            await mesh.clear(name, held.point)
    for ask, reply in zip(known.asks, await asyncio.gather(*asking), strict=True):
        assert reply.is_whole, reply.error
        assert text_problem(known.expected[ask.number], reply) is None
    await mesh.wait_healthy()
    assert await check_pages(mesh) == []
    assert await check_content(mesh) == []


@pytest_asyncio.fixture(loop_scope="package")
async def tcp_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Chaos]:
    """A mesh whose pages travel over TCP. Its proxies need the loop that the test runs on."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    seed = 5
    model_dir = make_tiny_model(tmp_path / TINY_NAME, seed)
    settings = for_tests(
        mesh_settings(tmp_path / "state", is_tiny=True, transport="nixl", stores=0)
    )
    async with ChaosMesh.running(settings, model_dir, TINY_NAME) as mesh:
        yield await in_peace(mesh, model_dir, seed)


@pytest.mark.full
async def test_a_filler_stopped_in_mid_write_over_tcp(tcp_mesh: Chaos) -> None:
    info = await tcp_mesh.mesh.dump("decode-0")
    assert info["engine"]["counters"]["accepted_pages"] > 0
    await stopped_in_mid_write(tcp_mesh)
