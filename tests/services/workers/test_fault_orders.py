"""Faults are armed, counted and cleared while what they hold up stands still."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.service import Queries
from weft.contract.faults import STORE_FILL, FaultSpec
from weft.contract.messages import Inbox, Outbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.contract.token_ids import token_ids
from weft.engine.base.config import EngineConfig
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.kv_chain import Chain, StoreCaller, fill_handle, random_pages
from weft.testing.services.store_server import store_here

FOR_EVER_S = 500.0


class Engine:
    """An engine process, and who asks it."""

    def __init__(self, model_dir: Path) -> None:
        config = EngineConfig(
            model_dir=model_dir,
            dtype="float32",
            num_pages=64,
            num_threads=1,
            transport="data",
            enable_faults=True,
        )
        self.client = EngineClient(config, self._on_outbox)
        self.queries = Queries(self.client)
        self.num_finished = 0

    def _on_outbox(self, outbox: Outbox) -> None:
        self.queries.on_outbox(outbox)
        self.num_finished += sum(len(batch.finished) for batch in outbox.gateways)

    def ask(self, request_id: str) -> None:
        """A short request."""
        submit = Submit(
            gateway=1,
            request_id=request_id,
            attempt=1,
            prompt=token_ids(random.randrange(3, 90) for _ in range(20)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopCriteria(max_tokens=4, ignore_eos=True),
        )
        self.client.send(Inbox(submits=[submit]))

    async def fired(self) -> int:
        """Times that faults have happened there."""
        return sum(state.fired for state in await self.queries.order_faults())


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(make_tiny("llama", tmp_path / "tiny", seed=random.randrange(2**31)))
    await engine.client.start()
    yield engine
    await engine.client.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_stalled_step_is_cleared(engine: Engine) -> None:
    stall = FaultSpec(point="engine.step", kind="stall", delay_s=FOR_EVER_S)
    assert len(await engine.queries.order_faults(add=stall)) == 1
    engine.ask("r1")
    async with asyncio.timeout(60):
        while not await engine.fired():
            await asyncio.sleep(0.02)
    assert engine.num_finished == 0
    assert await engine.queries.order_faults(clear="engine.step") == []
    await until(lambda: engine.num_finished == 1)


async def test_orders_are_obeyed_while_a_step_is_delayed(engine: Engine) -> None:
    """The delay goes on to its end; the ones after it do not come."""
    delay = FaultSpec(point="engine.step", kind="delay", count=0, delay_s=7.0)
    await engine.queries.order_faults(add=delay)
    engine.ask("r1")
    async with asyncio.timeout(60):
        while not await engine.fired():
            await asyncio.sleep(0.02)
    assert await engine.queries.order_faults(clear="") == []
    await until(lambda: engine.num_finished == 1)


@pytest.mark.parametrize("kind", ["stall", "delay"])
async def test_a_store_serves_while_a_fill_is_held_up(kind: str) -> None:
    async with store_here() as (_, address), StoreCaller(address) as caller:
        chain, contents = Chain(4), random_pages(4, 4104)
        await caller.put_data(chain, range(4), contents)
        delay_s = FOR_EVER_S if kind == "stall" else 3.0
        STORE_FILL.arm(FaultSpec(point="store.fill", kind=kind, delay_s=delay_s))
        try:
            filling = asyncio.create_task(caller.fill(chain))
            await until(lambda: STORE_FILL.states()[0].fired == 1)
            for _ in range(3):
                assert await caller.look_up(chain) == 4
            assert not filling.done()
            STORE_FILL.clear()
            filled = await asyncio.wait_for(filling, 60)
        finally:
            STORE_FILL.clear()
        assert bytes(filled.pages[3]) == contents[3].tobytes()
        await caller.settled()


async def test_a_fill_that_is_stopped_while_it_is_held_up_begins_nothing() -> None:
    async with store_here() as (_, address), StoreCaller(address) as caller:
        chain = Chain(4)
        await caller.put_data(chain, range(4), random_pages(4, 4104))
        STORE_FILL.arm(FaultSpec(point="store.fill", kind="stall", delay_s=FOR_EVER_S))
        try:
            call = await caller.open_fill(fill_handle(chain, 0, 4, caller.epoch))
            await until(lambda: STORE_FILL.states()[0].fired == 1)
            assert (await caller.stats()).pinned_pages == 4
            call.cancel()
            await caller.settled()
        finally:
            STORE_FILL.clear()
        assert (await caller.stats()).counters["filled_pages"] == 0
