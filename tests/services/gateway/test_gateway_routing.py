"""Where a gateway sends requests, with scripted workers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
import pytest
from weft.gateway.routing import make_policy
from weft.testing.services.fake_decode import PAGE_SIZE, Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.testing.services.routing_replay import read_record, replay
from weft.v1 import common_pb2, decode_pb2, gateway_pb2

Candidate = decode_pb2.PrefillCandidate


def filled(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    """The first candidate fills, unless the salt names another one or a failure."""
    salt = submit.cache_salt
    by = int(salt.removeprefix("by ")) if salt.startswith("by ") else 0
    return Script(tokens=[[65]], fill_by=by, fill_failure="cut" if salt == "failed" else "")


def unfilled(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    """Owners ask nobody."""
    return Script(tokens=[[65]])


async def complete(mesh: Harness, ids: list[int], salt: str = "") -> list[Candidate]:
    """Runs a prompt to its end; the candidates that its owner was given."""
    request = gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=ids),
        cache_salt=salt,
        stop=common_pb2.StopCriteria(max_tokens=1),
    )
    call = mesh.typed.Complete(request)
    while await call.read() is not grpc.aio.EOF:
        pass
    submits = [s for worker in mesh.workers for s in worker.submits if s.cache_salt == salt]
    return list(next(s for s in reversed(submits) if s.prompt.ids == ids).prefill_candidates)


def prompt(num_tokens: int) -> list[int]:
    return [random.randrange(5, 250) for _ in range(num_tokens)]


async def settle(mesh: Harness, *, kv_events: bool) -> None:
    """Until the workers' next reports have replaced what the gateway guessed since the last, and it
    knows all pages that prefill workers tell it of.
    """
    workers = list(mesh.app.fleet.workers())
    for _ in range(2):
        seen = [worker.report for worker in workers]
        await mesh.wait(
            lambda seen=seen: all(
                worker.report is not before for worker, before in zip(workers, seen, strict=True)
            )
        )
    if kv_events:
        held = [worker.kv.num_pages for worker in mesh.workers if "prefill" in worker.worker_id]
        await mesh.wait(lambda: mesh.known_pages("prefill") == held)


@pytest.mark.parametrize("kv_events", [True, False])
async def test_a_prompt_goes_back_to_who_filled_it(tmp_path: Path, kv_events: bool) -> None:
    async with gateway(tmp_path, filled, num_prefill=3, kv_events=kv_events) as mesh:
        homes = []
        for _ in range(6):
            ids = prompt(5 * PAGE_SIZE + 3)
            first = await complete(mesh, ids)
            assert [candidate.match_tokens for candidate in first] == [0, 0, 0]
            homes.append((ids, first[0].worker_id))
        await settle(mesh, kv_events=kv_events)
        for ids, home in homes:
            again = await complete(mesh, ids + prompt(40))
            assert again[0].worker_id == home
            matches = {candidate.worker_id: candidate.match_tokens for candidate in again}
            assert matches == dict.fromkeys(matches, 0) | {home: 5 * PAGE_SIZE}
            await settle(mesh, kv_events=kv_events)
        assert len({home for _, home in homes}) == 3, "new prompts spread"


async def test_load_moves_a_prompt_elsewhere(tmp_path: Path) -> None:
    async with gateway(
        tmp_path, filled, num_prefill=2, kv_events=False, balance_abs_threshold=4
    ) as mesh:
        ids = prompt(10 * PAGE_SIZE + 1)
        home = (await complete(mesh, ids))[0].worker_id
        busy = next(worker for worker in mesh.workers if worker.worker_id == home)
        busy.running_requests, busy.queued_tokens = 40, 1000
        await settle(mesh, kv_events=False)
        first, second = await complete(mesh, ids)
        assert first.worker_id != home
        assert (second.worker_id, second.match_tokens) == (home, 10 * PAGE_SIZE)
        assert second.queued_tokens >= 1000


@pytest.mark.parametrize("is_computed_here", [False, True])
async def test_a_prompt_waits_where_it_is_computed(tmp_path: Path, is_computed_here: bool) -> None:
    """Until its first token, a prompt counts in the queue of the worker that computes it."""

    def waiting(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        num_steps = int(is_computed_here)
        return Script(tokens=[[65]], hang_after=num_steps, is_computed_here=is_computed_here)

    async with gateway(tmp_path, waiting, num_prefill=1, load_interval_s=10.0) as mesh:
        (owner,), (filler,) = (list(mesh.app.fleet.workers(one)) for one in ("decode", "prefill"))
        ids = prompt(random.randrange(2, 20) * PAGE_SIZE + 1)
        before = mesh.workers[0].num_pings
        call = mesh.typed.Complete(
            gateway_pb2.CompleteRequest(
                token_ids=common_pb2.TokenIds(ids=ids),
                stop=common_pb2.StopCriteria(max_tokens=2),
            )
        )
        at, other = (owner, filler) if is_computed_here else (filler, owner)
        await mesh.wait(lambda: at.load.queued_tokens == len(ids))
        await mesh.wait(lambda: mesh.workers[0].num_pings > before + 1)
        assert (at.load.queued_tokens, other.load.queued_tokens) == (len(ids), 0)
        assert filler.load.own_requests == (not is_computed_here)
        call.cancel()
        await mesh.wait(lambda: owner.load.own_requests == 0)
        assert (owner.load.queued_tokens, filler.load.queued_tokens) == (0, 0)


async def test_a_burst_of_one_prompt_spreads(tmp_path: Path) -> None:
    """What was sent since the last report counts as queued, so that nobody is drowned."""
    async with gateway(tmp_path, filled, num_prefill=2, load_interval_s=10.0) as mesh:
        ids = prompt(8 * PAGE_SIZE + 1)
        candidates = await asyncio.gather(*(complete(mesh, ids, f"{i}") for i in range(12)))
        firsts = Counter(chosen[0].worker_id for chosen in candidates)
        # The last ones may know where the first ones' pages are by then.
        assert min(firsts.values()) >= 4
        assert len(firsts) == 2


async def test_a_restarted_worker_holds_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, filled, num_prefill=1, kv_events=False) as mesh:
        ids = prompt(4 * PAGE_SIZE + 1)
        await complete(mesh, ids)
        assert (await complete(mesh, ids))[0].match_tokens == 4 * PAGE_SIZE
        prefill = mesh.workers[-1]
        port = int(prefill.address.rsplit(":", 1)[1])
        await prefill.stop(keeps_port=True)
        prefill.epoch ^= 1
        await prefill.start(port)
        async with asyncio.timeout(60):
            while True:
                chosen = await complete(mesh, ids, "probe")
                if chosen and chosen[0].epoch == prefill.epoch:
                    break
                await asyncio.sleep(0.05)
        assert (await complete(mesh, ids))[0].match_tokens == 0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


async def matches(mesh: Harness, ids: list[int], salt: str = "") -> dict[str, int]:
    """What the gateway takes each prefill worker to hold of a prompt."""
    found = await complete(mesh, ids, salt)
    return {candidate.worker_id: candidate.match_tokens for candidate in found}


async def test_a_gateway_learns_what_workers_hold(tmp_path: Path) -> None:
    """From a snapshot when it meets them, from their events then, whoever caused those."""
    prompts = {salt: prompt(5 * PAGE_SIZE + 3) for salt in ("", "tenant")}
    async with gateway(tmp_path, unfilled, num_prefill=3, wait=False) as mesh:
        holder = next(worker for worker in mesh.workers if worker.worker_id == "prefill-1")
        for salt, ids in prompts.items():
            holder.hold(ids, salt)
        await mesh.ready()
        other = mesh.workers[-1]
        for salt, ids in prompts.items():

            async def is_known(expected: int, ids: list[int] = ids, salt: str = salt) -> bool:
                found = await matches(mesh, ids, salt)
                return found == dict.fromkeys(found, 0) | {"prefill-1": expected}

            await until(partial(is_known, 5 * PAGE_SIZE))
            holder.drop(ids, salt, 2)
            await until(partial(is_known, 2 * PAGE_SIZE))
        # Pages of another tenant are not the same pages.
        assert set((await matches(mesh, prompts["tenant"], "other")).values()) == {0}
        ids = prompt(4 * PAGE_SIZE + 1)
        other.hold(ids)
        await until(lambda: holds(mesh, ids, other.worker_id, 4 * PAGE_SIZE))


async def holds(mesh: Harness, ids: list[int], worker_id: str, expected: int) -> bool:
    return (await matches(mesh, ids)).get(worker_id) == expected


async def test_a_gap_in_the_events_is_healed_by_a_snapshot(tmp_path: Path) -> None:
    async with gateway(tmp_path, unfilled, num_prefill=1, decode_policy="total_requests") as mesh:
        filler = mesh.workers[-1]
        first, second, third = (prompt(4 * PAGE_SIZE + 1) for _ in range(3))
        filler.hold(first)
        await until(lambda: holds(mesh, first, filler.worker_id, 4 * PAGE_SIZE))
        filler.lost_changes = {2, 3}
        filler.hold(second)
        filler.drop(first)
        filler.hold(third)  # its number tells that two are missing
        for ids, expected in ((second, 4 * PAGE_SIZE), (third, 4 * PAGE_SIZE), (first, 0)):
            await until(partial(holds, mesh, ids, filler.worker_id, expected))
        values = {
            sample.name: sample.value
            for family in mesh.app.metrics.registry.collect()
            for sample in family.samples
        }
        assert values["weft_kv_gaps_total"] == 1
        assert values["weft_kv_snapshots_total"] == 2
        assert values["weft_kv_index_pages"] == 8


async def test_a_lost_worker_is_forgotten_and_a_new_one_is_learned(tmp_path: Path) -> None:
    async with gateway(tmp_path, unfilled, num_prefill=2) as mesh:
        ids = prompt(4 * PAGE_SIZE + 1)
        filler = mesh.workers[-1]
        filler.hold(ids)
        await until(lambda: holds(mesh, ids, filler.worker_id, 4 * PAGE_SIZE))
        port = int(filler.address.rsplit(":", 1)[1])
        await filler.stop(keeps_port=True)
        filler.epoch ^= 1
        await filler.start(port)
        filler.hold(ids, num_pages=1)
        await until(lambda: holds(mesh, ids, filler.worker_id, PAGE_SIZE))


async def test_a_routing_key_stays_with_its_worker(tmp_path: Path) -> None:
    """By metadata on both faces, and by the field of a body, which is stronger."""
    async with gateway(tmp_path, unfilled, num_decode=4, decode_policy="manual") as mesh:

        async def home(ids: list[int]) -> str:
            await mesh.wait(lambda: any(ids in worker.prompts for worker in mesh.workers))
            return next(worker.worker_id for worker in mesh.workers if ids in worker.prompts)

        async def typed(key: str) -> str:
            ids = prompt(9)
            request = gateway_pb2.CompleteRequest(
                token_ids=common_pb2.TokenIds(ids=ids), stop=common_pb2.StopCriteria(max_tokens=1)
            )
            call = mesh.typed.Complete(request, metadata=(("x-routing-key", key),))
            while await call.read() is not grpc.aio.EOF:
                pass
            return await home(ids)

        async def rest(**body: object) -> str:
            ids = prompt(9)
            await mesh.json("Completions", {"prompt": ids, "max_tokens": 1, **body})
            return await home(ids)

        homes = {key: await typed(key) for key in ("k1", "k2", "k3", "k4")}
        assert len(set(homes.values())) > 1, "new keys spread"
        for key, expected in homes.items():
            assert await typed(key) == expected
            assert await rest(routing_key=key) == expected
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await rest(routing_key="k" * 257)
        assert "routing_key" in str(failed.value.details())


async def test_each_pool_has_its_policy(tmp_path: Path) -> None:
    """Decode workers in turn, prefill workers by the prompt's beginning."""
    async with gateway(
        *(tmp_path, unfilled),
        num_decode=2,
        num_prefill=3,
        decode_policy="round_robin",
        prefill_policy="prefix_hash",
        prefix_tokens=48,
        load_factor=16.0,
    ) as mesh:
        ids = prompt(60)
        firsts = {(await complete(mesh, ids + prompt(3)))[0].worker_id for _ in range(6)}
        assert len(firsts) == 1
        assert [len(worker.submits) for worker in mesh.workers[:2]] == [3, 3]


@pytest.mark.parametrize("kv_events", [True, False])
async def test_recorded_routing_replays_to_the_same_choices(
    tmp_path: Path, kv_events: bool
) -> None:
    """Under load, with a worker that is lost and comes back with nothing."""
    folder = tmp_path / "records"
    async with gateway(
        *(tmp_path, filled),
        num_decode=2,
        num_prefill=3,
        kv_events=kv_events,
        decode_policy="power_of_two",
        routing_record_dir=folder,
    ) as mesh:
        systems = [prompt(3 * PAGE_SIZE + 2) for _ in range(3)]
        prompts = [random.choice(systems) + prompt(random.randint(1, 60)) for _ in range(20)]

        async def burst(salt: str) -> None:
            asks = [complete(mesh, random.choice(prompts), f"{salt}{i}") for i in range(12)]
            await asyncio.gather(*asks)

        for turn in range(3):
            await burst("")
            await burst(f"{turn} ")
        lost = mesh.workers[-1]
        port = int(lost.address.rsplit(":", 1)[1])
        await lost.stop(keeps_port=True)
        lost.epoch ^= 1
        await burst("")
        await lost.start(port)
        await burst("")
    (path,) = folder.iterdir()
    decisions = list(replay(read_record(path), make_policy))
    assert [one for one in decisions if not one.is_same] == []
    for pool in ("tiny/prefill", "tiny/decode"):
        assert sum(one.pool == pool for one in decisions) >= 96
    assert any(choice.match_tokens for one in decisions for choice in one.replayed)
