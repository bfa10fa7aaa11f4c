"""A fault proxy on every link in turn: nothing of an old attempt is delivered, nothing is left."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from weft.chaos.checks import check_content, check_pages
from weft.chaos.load import LATE_S, text_problem, whole_problem
from weft.chaos.mesh import Link
from weft.chaos.proxy import FaultProxy, Mode
from weft.chaos.requests import ChaosRequest, Pace, Reply, send
from weft.contract.faults import FaultSpec
from weft.testing.meshes.chaos_mesh import Chaos

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.needs("nixl"),
    pytest.mark.timeout(600),
]

QUICK: dict[Link, Mode] = {
    ("gateway", "decode-0"): Mode.CUT_BEFORE_ACK,
    ("gateway", "prefill-0"): Mode.MUTE_SERVER,
    ("decode", "prefill-0"): Mode.BLACK_HOLE,
    ("worker", "kvstore-0"): Mode.MUTE_CLIENT,
}
"""Every link, and how it fails without --full too."""
TIMEOUT_S = 30.0
NUM_LONG = 250
STEP_S = 0.2
"""Of a worker that is held up: an attempt takes it fifty seconds, far longer than it has to find
out that nobody waits for it (2 s once the link is back, `SILENCE_TIMEOUT_S` if it stays away)."""


async def ask_while(chaos: Chaos, link: Link, mode: Mode) -> list[Reply]:
    """Asks as the link fails, is away for a while, and comes back."""
    address = chaos.mesh.gateways["gateway-0"]
    asks = chaos.known.asks[:6]
    asking = [
        asyncio.create_task(send(address, chaos.known.model, ask, Pace(TIMEOUT_S))) for ask in asks
    ]
    await asyncio.sleep(random.uniform(0.02, 0.2))
    async with chaos.mesh.proxies[link].misbehaving(mode, 0.2):
        await asyncio.sleep(1.5)
    return await asyncio.gather(*asking)


def check(chaos: Chaos, reply: Reply, ask: ChaosRequest) -> None:
    """It has ended in time; what came is a beginning of the right text, each index once."""
    assert reply.ended_s - reply.started_s < TIMEOUT_S + LATE_S
    assert text_problem(chaos.known.expected[ask.number], reply) is None
    if reply.error is None:
        assert whole_problem(ask, reply) is None
    else:
        assert reply.is_typed, reply.error


@pytest.mark.parametrize(
    ("link", "mode"),
    [
        pytest.param(
            link,
            mode,
            id=f"{'->'.join(link)} {mode.value}",
            marks=[] if QUICK[link] is mode else pytest.mark.full,
        )
        for link in QUICK
        for mode in Mode
        if mode is not Mode.PASS
    ],
)
async def test_a_link_that_fails_spoils_nothing(chaos: Chaos, link: Link, mode: Mode) -> None:
    mesh = chaos.mesh
    replies = await ask_while(chaos, link, mode)
    for ask, reply in zip(chaos.known.asks, replies, strict=False):
        check(chaos, reply, ask)
    await mesh.wait_healthy()
    assert mesh.proxies[link].num_connections > 0
    assert await check_pages(mesh) == []
    assert await check_content(mesh) == []


@pytest.mark.parametrize("is_back", [True, False], ids=["is-back", "stays-away"])
async def test_a_worker_that_was_cut_off_cancels(chaos: Chaos, is_back: bool) -> None:
    """Its gateway has given it up and resumed its requests elsewhere: it learns that when the link
    is back, or that the gateway is silent."""
    mesh, known = chaos.mesh, chaos.known
    prompt = tuple(await asyncio.to_thread(chaos.greedy.prompt, 3, NUM_LONG))
    ask = ChaosRequest(number=-1, prompt=prompt, max_tokens=NUM_LONG, temperature=0.0, seed=1, n=1)
    expected = await send(mesh.gateways["gateway-1"], known.model, ask, Pace(120.0))
    assert expected.is_whole
    # Its requests are to be under way still when it is back.
    slow = FaultSpec(point="engine.step", kind="delay", count=0, delay_s=STEP_S)
    workers = mesh.named("decode")
    for name in workers:
        await mesh.arm(name, slow)
    asking = [
        asyncio.create_task(send(mesh.gateways["gateway-0"], known.model, ask, Pace(120.0)))
        for _ in range(4)
    ]
    deadline = time.monotonic() + 60
    # Which one the policy takes is its own affair.
    running: dict[str, set[str]] = {}
    while sum(map(len, running.values())) < len(asking):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
        running = {name: await requests_on(chaos, name) for name in workers}
    victim = max(workers, key=lambda name: len(running[name]))
    for name in workers:
        if name != victim:
            await mesh.clear(name, slow.point)
    proxy = mesh.proxies["gateway", victim]
    proxy.set_mode(Mode.BLACK_HOLE)
    while await mesh.is_healthy("gateway-0"):  # it has not noticed yet
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    started_s = time.monotonic()
    if is_back:
        proxy.set_mode(Mode.PASS)
    # Later attempts may come to it once the link is back.
    while running[victim] & await requests_on(chaos, victim):
        assert time.monotonic() - started_s < ask.max_tokens * STEP_S / 2, "it went on"
        await asyncio.sleep(0.05)
    proxy.set_mode(Mode.PASS)
    await mesh.clear(victim, slow.point)
    print(f"cancelled {time.monotonic() - started_s:.3f} s after that")
    for reply in await asyncio.gather(*asking):
        assert reply.is_whole, reply.error
        assert reply.tokens == expected.tokens
    await mesh.wait_healthy()


async def requests_on(chaos: Chaos, name: str) -> set[str]:
    """Attempts that run on a worker since before now."""
    engine = (await chaos.mesh.dump(name))["engine"]
    return {f"{r['request_id']}/{r['attempt']}" for r in engine["requests"] if not r["is_fill"]}


# ---- the proxy by itself -----------------------------------------------------------------------


async def test_modes_of_the_proxy() -> None:
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            got.append(data)
            writer.write(data.upper())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = FaultProxy(f"127.0.0.1:{port}")
    await proxy.start()

    async def answer(text: bytes, timeout_s: float = 0.5, *, arrives: bool = False) -> bytes | None:
        """What comes back on a new connection; b"" when it was cut, None when nothing comes, and
        the text has come there if it is to.
        """
        host, _, port_text = proxy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port_text))
        try:
            writer.write(text)
            async with asyncio.timeout(60):
                while arrives and text not in got:
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(timeout_s):
                return await reader.read(100)
        except TimeoutError:
            return None
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()

    try:
        assert await answer(b"pass", 60) == b"PASS"
        async with proxy.misbehaving(Mode.DELAY, 0.1):
            started_s = time.monotonic()
            assert await answer(b"delay", 60) == b"DELAY"
            assert time.monotonic() - started_s >= 0.2
        async with proxy.misbehaving(Mode.BLACK_HOLE):
            assert await answer(b"hole") is None
        async with proxy.misbehaving(Mode.MUTE_CLIENT):
            assert await answer(b"mute client") is None
        async with proxy.misbehaving(Mode.MUTE_SERVER):
            assert await answer(b"mute server", arrives=True) is None
        async with proxy.misbehaving(Mode.CUT_BEFORE_ACK):
            assert await answer(b"no ack", 60) == b""
        async with proxy.misbehaving(Mode.CUT):
            assert await answer(b"cut", 60) == b""
        assert await answer(b"again", 60) == b"AGAIN"
        # What was delivered: all but what was lost on the way there.
        assert got == [b"pass", b"delay", b"mute server", b"no ack", b"again"]
    finally:
        await proxy.close()
        server.close()
