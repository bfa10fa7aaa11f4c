"""What a worker answers to those who drain it, with a stub in place of its engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from google.protobuf.duration_pb2 import Duration
from weft.common.worker.role import WorkerRoleState
from weft.common.worker.service import WorkerServicer
from weft.contract.messages import Inbox
from weft.v1 import worker_pb2


class StubEngine:
    """Obeys orders to drain, and never ends its requests: 1 runs, 2 wait, 4 are filled."""

    def __init__(self) -> None:
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.load = SimpleNamespace(
            running_requests=1,
            waiting_requests=2,
            filling_requests=4,
            is_draining=False,
            is_idle=False,
        )

    def send(self, inbox: Inbox) -> None:
        for is_draining in inbox.drains:
            self.load.is_draining = is_draining


@pytest.mark.parametrize("is_put_back", [True, False])
async def test_a_drain_tells_what_is_left_and_whether_it_still_holds(is_put_back: bool) -> None:
    engine: Any = StubEngine()
    role = WorkerRoleState("decode")
    servicer = WorkerServicer(
        engine, MagicMock(), MagicMock(), MagicMock(), role, "decode-0", "m", 1
    )
    context, timeout = MagicMock(), Duration(seconds=60 * is_put_back)
    order = worker_pb2.DrainRequest(timeout=timeout, keep_running=True)
    drain = asyncio.create_task(servicer.Drain(order, context))
    if is_put_back:
        while not engine.load.is_draining:
            await asyncio.sleep(0)
        answer = await servicer.Undrain(worker_pb2.UndrainRequest(), context)
        assert answer.was_draining
    told = await drain
    assert (told.idle, told.running_requests) == (False, 7)
    assert told.draining != is_put_back
