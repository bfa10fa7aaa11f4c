"""A connection that is replaced while calls are open on it: they begin anew on the new one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from weft.common.tasks import run_together
from weft.gateway.fleet.session import DecodeSession
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, gateway


async def test_workers_whose_connections_are_replaced_are_found_again(tmp_path: Path) -> None:
    tokens = byte_level_bpe().encode("an answer").ids
    async with gateway(
        tmp_path,
        lambda *_: Script(tokens=[tokens]),
        num_decode=2,
        num_prefill=1,
        breaker_failures=0,  # five broken sessions without a request between them would open it
    ) as mesh:
        fleet = mesh.app.fleet
        for _ in range(5):
            for worker in random.sample(list(fleet.workers()), 2):
                worker._channel.renew()  # As silence on it does.
                before = mesh.workers[0].num_pings
                await mesh.wait(lambda b=before: mesh.workers[0].num_pings > b, 30)
            await mesh.wait(lambda: all(not w.problem(0.0) for w in fleet.workers()), 30)
        answer = await mesh.json("Completions", {"model": MODEL, "prompt": "hi"})
        assert answer["choices"][0]["text"]
        sessions = [worker.session for worker in fleet.workers("decode")]
        await mesh.wait(
            lambda: all(isinstance(one, DecodeSession) and one.is_open for one in sessions)
        )


async def test_a_call_that_is_cancelled_does_not_cancel_who_waits_for_it() -> None:

    async def cancelled_by_its_connection() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ConnectionError):
        await run_together(cancelled_by_its_connection(), asyncio.sleep(60))
