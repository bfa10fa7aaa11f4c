"""Workers that break their contract, and prefill workers that failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from weft.common.rpc.breaker import BreakerState
from weft.gateway.fleet.discovery import Role
from weft.gateway.fleet.worker import FleetWorker
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 20])


async def ask(mesh: Harness, first_id: int = 5) -> None:
    ids = [first_id + number for number in range(100)]
    request = gateway_pb2.CompleteRequest(token_ids=common_pb2.TokenIds(ids=ids))
    request.stop.max_tokens = 20
    last = [message async for message in mesh.typed.Complete(request)][-1]
    assert last.choices[0].finish_reason


def follower(mesh: Harness, role: Role) -> FleetWorker:
    """The gateway's view of the first worker."""
    return next(iter(mesh.app.fleet.workers(role)))


async def test_one_that_breaks_the_protocol_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(
        tmp_path, script, num_decode=2, breaker_failures=3, breaker_open_s=60.0
    ) as mesh:
        broken = mesh.workers[0]

        def unknown_sample(run: Any, sample: int, event: decode_pb2.SessionEvent) -> None:
            submit = run.submit
            event.tokens.add(
                request_id=submit.request_id, attempt=submit.attempt, sample=99, ids=[65]
            )

        monkeypatch.setattr(broken, "_advance", unknown_sample)
        breaker = follower(mesh, "decode").breaker
        async with asyncio.timeout(60):
            while breaker.num_openings == 0:
                await asyncio.gather(*(ask(mesh) for _ in range(4)))
                await asyncio.sleep(0.1)
        num_asked = len(broken.submits)
        await asyncio.gather(*(ask(mesh) for _ in range(8)))
        assert len(broken.submits) == num_asked


async def test_one_request_tries_a_prefill_worker_that_failed(tmp_path: Path) -> None:
    """At a time: until it has its first token."""
    silent = Script(tokens=[[65] * 20], hang_after=0)
    async with gateway(
        tmp_path, lambda *_: silent, num_prefill=2, max_prefill_candidates=1
    ) as mesh:
        await mesh.wait(lambda: all(not one.problem(now()) for one in mesh.app.fleet.workers()))
        worker = follower(mesh, "prefill")
        for number in range(5):
            worker.breaker.failed(now() - 100 + number, "its process died again and again")
        assert worker.breaker.state(now()) is BreakerState.HALF_OPEN
        asked = [asyncio.create_task(ask(mesh, 5 + number)) for number in range(8)]
        submits = mesh.workers[0].submits
        await mesh.wait(lambda: len(submits) == 8)
        candidates = [one.worker_id for submit in submits for one in submit.prefill_candidates]
        assert len(candidates) == 8
        assert candidates.count("prefill-0") == 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def now() -> float:
    return asyncio.get_running_loop().time()
