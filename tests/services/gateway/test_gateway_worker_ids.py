"""A worker listed under two addresses, and two workers of one id."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from weft.gateway.fleet.discovery import Endpoint
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2

PROMPT_TOKENS = 100
OTHER_ID = "give each a --worker-id of its own"


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 5])


class Listing:
    """Names what it is told to."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[tuple[Endpoint, ...]] = asyncio.Queue()

    def tell(self, *endpoints: Endpoint) -> None:
        self._told.put_nowait(endpoints)

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        yield ()
        while True:
            yield await self._told.get()


def both(worker: FakeWorker) -> tuple[Endpoint, Endpoint]:
    """A worker's address, and another one of the same worker."""
    role = "decode" if worker.worker_id.startswith("decode") else "prefill"
    port = worker.address.rpartition(":")[2]
    return Endpoint(role, worker.address), Endpoint(role, f"localhost:{port}")


async def ask(mesh: Harness) -> None:
    """Sends a prompt that nobody knows."""
    ids = [5 + secrets.randbelow(200) for _ in range(PROMPT_TOKENS)]
    request = gateway_pb2.CompleteRequest(token_ids=common_pb2.TokenIds(ids=ids))
    request.stop.max_tokens = 5
    last = [message async for message in mesh.typed.Complete(request)][-1]
    assert last.choices[0].finish_reason


def problems(mesh: Harness, role: str) -> dict[str, str]:
    """Problem by address, empty where there is none."""
    now = asyncio.get_running_loop().time()
    workers = [one for one in mesh.app.fleet.workers() if one.endpoint.role == role]
    return {worker.endpoint.address: worker.problem(now) for worker in workers}


def is_refused(mesh: Harness, role: str) -> bool:
    """Whether one gets no requests because they go to another address."""
    return any("gets its requests at" in problem for problem in problems(mesh, role).values())


def healthy(mesh: Harness, role: str = "decode") -> list[str]:
    return [address for address, problem in problems(mesh, role).items() if not problem]


async def test_one_worker_under_two_addresses_gets_requests_at_one(tmp_path: Path) -> None:
    listing = Listing()
    async with gateway(
        tmp_path, script, num_prefill=1, discovery=listing, wait=False, decode_policy="cache_aware"
    ) as mesh:
        decode, prefill = mesh.workers
        listing.tell(*both(decode), *both(prefill))
        await mesh.ready()
        for role in ("decode", "prefill"):
            await mesh.wait(partial(is_refused, mesh, role))
        for _ in range(5):
            await ask(mesh)
        assert {len(submit.prefill_candidates) for submit in decode.submits} == {1}
        chosen = healthy(mesh)
        assert len(chosen) == len(healthy(mesh, "prefill")) == 1
        # Without it, the other address is taken, and what the worker holds is still known.
        decode.hold(list(range(64)))
        left = [endpoint for endpoint in both(decode) if endpoint.address not in chosen]
        listing.tell(*left, *both(prefill))
        await mesh.wait(lambda: healthy(mesh) == [left[0].address])
        await ask(mesh)
        await mesh.wait(lambda: mesh.known_pages("decode") == [4])


async def test_of_two_workers_with_one_id_the_second_gets_nothing(tmp_path: Path) -> None:
    listing = Listing()
    async with gateway(
        tmp_path, script, num_decode=2, discovery=listing, wait=False, decode_policy="cache_aware"
    ) as mesh:
        first, second = mesh.workers
        second.worker_id = first.worker_id
        listing.tell(Endpoint("decode", first.address))
        await mesh.ready()
        listing.tell(*(Endpoint("decode", worker.address) for worker in mesh.workers))
        await mesh.wait(lambda: OTHER_ID in problems(mesh, "decode").get(second.address, ""))
        first.hold(list(range(64)))
        for _ in range(5):
            await ask(mesh)
        assert (len(first.submits), len(second.submits)) == (5, 0)
        await mesh.wait(lambda: mesh.known_pages("decode") == [4])
        # One that leaves makes room for its successor, and what it still tells changes nothing.
        first.is_draining = True
        await mesh.wait(lambda: healthy(mesh) == [second.address])
        second.hold(list(range(160)))
        first.hold(list(range(100, 400)))
        await ask(mesh)
        assert (len(first.submits), len(second.submits)) == (5, 1)
        await mesh.wait(lambda: mesh.known_pages("decode") == [10])
        await asyncio.sleep(0.1)
        assert mesh.known_pages("decode") == [10]
        await mesh.wait(lambda: OTHER_ID in problems(mesh, "decode")[first.address])


async def test_an_id_moves_with_its_worker(tmp_path: Path) -> None:
    """Its old address is another worker's now, as happens in clusters."""
    listing = Listing()
    async with gateway(tmp_path, script, num_decode=2, discovery=listing, wait=False) as mesh:
        first, second = mesh.workers
        second.worker_id = first.worker_id
        listing.tell(Endpoint("decode", first.address))
        await mesh.ready()
        first.worker_id, first.epoch = "decode-7", first.epoch ^ 1
        await mesh.wait(
            lambda: (
                [one.info and one.info.worker_id for one in mesh.app.fleet.workers()]
                == ["decode-7"]
            )
        )
        listing.tell(*(Endpoint("decode", worker.address) for worker in mesh.workers))
        await mesh.wait(lambda: len(healthy(mesh)) == 2)
