"""Requests for adapters at the gateway: which workers get them, with workers without engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from weft.checkpoint.adapters.digest import adapter_digest
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_adapters import (
    adapter_mesh,
    adapters,
    ask,
    complete,
    load,
    make_root,
    script,
    submits,
)
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import decode_pb2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "adapters")


@pytest.fixture
async def mesh(tmp_path: Path, root: Path) -> AsyncIterator[Harness]:
    async with adapter_mesh(tmp_path, root) as harness:
        yield harness


async def test_a_resumed_request_keeps_its_digest(tmp_path: Path, root: Path) -> None:
    """Also when its name means something else by then."""
    tokens = list(range(40, 50)) * 6

    def dies(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        is_first = submit.attempt == 1 and submit.HasField("adapter")
        return Script(
            tokens=[tokens[: submit.stop.max_tokens]], break_after=20 if is_first else 10**9
        )

    async with gateway(
        tmp_path, dies, num_decode=2, adapter_root=root, step_s=0.02, adapter_linger_s=0.1
    ) as mesh:
        old = adapter_digest(root / "pirate")
        await load(mesh, "pirate")
        running = ask(mesh, "pirate", max_tokens=len(tokens))
        await mesh.wait(lambda: submits(mesh))
        await load(mesh, "pirate", "other", replace=True)
        answer = await running
        assert answer["usage"]["completion_tokens"] == len(tokens)
        attempts = [one for one in submits(mesh) if one.HasField("adapter")]
        assert {submit.attempt for submit in attempts} == {1, 2}
        assert {submit.adapter.digest for submit in attempts} == {old}
        assert attempts[1].progress or attempts[0].progress


async def test_only_holders_get_its_requests(mesh: Harness) -> None:
    """A worker that joins gets requests for an adapter when it has loaded it."""
    adapters(mesh.workers[1]).is_stuck = True
    call = asyncio.create_task(load(mesh, "pirate"))
    await mesh.wait(lambda: adapters(mesh.workers[1]).orders)
    await mesh.workers[1].stop(keeps_port=True)
    await call
    await mesh.workers[1].start(int(mesh.workers[1].address.rpartition(":")[2]))
    fleet = mesh.app.fleet
    now = asyncio.get_running_loop().time
    await mesh.wait(lambda: all(not worker.problem(now()) for worker in fleet.workers()))
    adapters(mesh.workers[1]).stop()
    joined = mesh.workers[1].follow_adapters(mesh.app.adapters.registry.root)
    joined.is_stuck = True
    for _ in range(6):
        await complete(mesh, "pirate")
    assert not mesh.workers[1].submits
    joined.is_stuck = False
    await mesh.wait(lambda: joined.states)
    await mesh.wait(
        lambda: all(worker.holds(next(iter(joined.states))) for worker in fleet.workers())
    )
    await asyncio.gather(*(complete(mesh, "pirate", max_tokens=30) for _ in range(6)))
    assert mesh.workers[1].submits


async def test_workers_with_it_on_the_device_are_preferred(mesh: Harness) -> None:
    adapters(mesh.workers[0]).place = "host"
    await load(mesh, "pirate")
    await asyncio.gather(*(complete(mesh, "pirate", max_tokens=20) for _ in range(6)))
    assert not mesh.workers[0].submits
    # Not at any price: one that is much busier is passed over.
    mesh.workers[1].running_requests = 50
    await mesh.wait(
        lambda: any(worker.load.num_requests >= 50 for worker in mesh.app.fleet.workers())
    )
    await complete(mesh, "pirate")
    assert len(mesh.workers[0].submits) == 1


async def test_pickers_of_other_makers_see_where_it_is(mesh: Harness) -> None:
    def told() -> dict[str, str]:
        text = generate_latest(mesh.app.metrics.registry).decode()
        (labels,) = [
            sample.labels
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:lora_requests_info"
        ]
        return labels

    nothing = {"running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert told().items() >= nothing.items()
    for worker in mesh.workers:
        adapters(worker).place = "host"
    await load(mesh, "pirate")
    assert told().items() >= nothing.items()
    for worker in mesh.workers:
        adapters(worker).place = "device"
    await load(mesh, "second", "other")
    assert told()["running_lora_adapters"] == "second"


async def test_prefill_candidates_hold_it(tmp_path: Path, root: Path) -> None:
    async with gateway(
        tmp_path, script, num_prefill=2, adapter_root=root, adapter_linger_s=0.1
    ) as mesh:
        decode, first, second = mesh.workers
        await load(mesh, "pirate")
        text = "a prompt of more than one page " * 4
        await complete(mesh, "pirate", text)
        assert len(decode.submits[-1].prefill_candidates) == 2
        digest = next(iter(adapters(first).states))
        adapters(first).states[digest].is_unloading = True
        fleet = mesh.app.fleet
        await mesh.wait(
            lambda: sum(worker.holds(digest) for worker in fleet.workers("prefill")) == 1
        )
        await complete(mesh, "pirate", text)
        candidates = decode.submits[-1].prefill_candidates
        assert [one.worker_id for one in candidates] == [second.worker_id]
        await complete(mesh, MODEL, text)
        assert len(decode.submits[-1].prefill_candidates) == 2


async def test_pages_of_another_adapter_are_no_match(tmp_path: Path, root: Path) -> None:
    """cache_aware: the same prompt has other keys with another adapter."""
    async with gateway(
        tmp_path, script, num_prefill=2, adapter_root=root, prefill_policy="cache_aware"
    ) as mesh:
        decode, first, second = mesh.workers
        for name in ("pirate", "json"):
            await load(mesh, name)
        text = "the same prompt for all of them, several pages long " * 4
        ids = mesh.ids(text)
        first.hold(ids, adapter=adapter_digest(root / "pirate"))
        second.hold(ids)
        index = mesh.app.catalogue.first.router.index("prefill")
        assert index is not None
        await mesh.wait(lambda: index.num_pages == 2 * (len(ids) // 16))
        expected = {"pirate": first.worker_id, MODEL: second.worker_id}
        for name, worker_id in expected.items():
            for _ in range(3):
                await complete(mesh, name, text)
                best = decode.submits[-1].prefill_candidates[0]
                assert best.worker_id == worker_id
                assert best.match_tokens >= len(ids) // 16 * 16 - 16
        await complete(mesh, "json", text)
        assert {one.match_tokens for one in decode.submits[-1].prefill_candidates} == {0}


async def test_a_worker_that_does_not_know_it_is_passed_over(tmp_path: Path, root: Path) -> None:
    failed = decode_pb2.SessionEvent.Failed(grpc_code=5)
    failed.error.code = "ADAPTER_NOT_FOUND"
    calls: list[str] = []

    def refuses_once(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        calls.append(submit.request_id)
        ok = script(submit, prompt)
        return Script(tokens=ok.tokens, fail=failed, fail_after=0) if len(calls) == 1 else ok

    async with gateway(tmp_path, refuses_once, num_decode=2, adapter_root=root) as mesh:
        await load(mesh, "pirate")
        await complete(mesh, "pirate")
        assert len(calls) == 2
