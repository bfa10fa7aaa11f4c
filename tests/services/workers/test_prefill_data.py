"""A prefill worker whose pages travel as gRPC data, and owners that do not read them."""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from weft.common.rpc.channel import CHANNEL_OPTIONS
from weft.contract.keys import namespace_digest
from weft.contract.layout import CacheLayout, PagedPlane
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.processes import ServiceProcess
from weft.v1 import common_pb2, kv_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc

PAGE_SIZE = 64
NUM_FILLED = 64
"""Pages of the prompt: 128 MiB."""
HEADS, HEAD_DIM, LAYERS = 16, 64, 4


class Prefill:
    """A worker in a process of its own, and an owner's view of it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._worker: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        self._prefill: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._tokens = [random.randrange(3, 500) for _ in range(NUM_FILLED * PAGE_SIZE)]

    async def open_fill(self) -> Any:
        """A Fill of the whole prompt that has begun; the first event is still to be read."""
        info = await self._worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
        plane = PagedPlane(heads=HEADS, layers=LAYERS, dim=HEAD_DIM, dtype=info.dtype)
        layout = CacheLayout.of_plane(plane, PAGE_SIZE)
        handle = kv_pb2.KvHandle(
            owner_id="test-worker",
            owner_epoch=7,
            lease_id=secrets.token_bytes(16),
            lease_duration=Duration(seconds=300),
            namespace=namespace_digest(info.model_digest, layout.describe()),
            planes=["target"],
            page_size=PAGE_SIZE,
            tokens=common_pb2.TokenIds(ids=self._tokens),
            end_token=len(self._tokens),
            page_runs=[kv_pb2.PageRun(first_page=1, num_pages=NUM_FILLED)],
            filler_epoch=info.epoch,
        )
        call = self._prefill.Fill(timeout=300)
        await call.write(kv_pb2.FillControl(start=kv_pb2.FillControl.Start(handle=handle)))
        return call

    async def load(self) -> worker_pb2.WatchLoadResponse:
        """The worker's load now."""
        call = self._worker.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=60)
        load = await call.read()
        call.cancel()
        assert isinstance(load, worker_pb2.WatchLoadResponse)
        return load

    async def wait_until_shipped(self, num_pages: int) -> None:
        """Waits until the worker reports that it shipped this many pages since it started.

        A worker reports its load from time to time, so an owner can have the last page before the
        report counts it.
        """
        async with asyncio.timeout(60):
            while (await self.load()).counters["shipped_pages"] < num_pages:
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture
async def prefill(tmp_path: Path) -> AsyncIterator[Prefill]:
    model_dir = make_tiny(
        "llama",
        tmp_path / "tiny",
        seed=random.randrange(2**31),
        hidden_size=64,
        head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=LAYERS,
        max_position_embeddings=8192,
    )
    command = [sys.executable, "-m", "weft.cli", "serve", "prefill", "--model-dir", str(model_dir)]
    command += ["--dtype", "float32", "--transport", "data", "--page-size", str(PAGE_SIZE)]
    command += ["--num-pages", str(NUM_FILLED + 16)]
    with ServiceProcess("prefill", command, tmp_path) as process:
        ready = await process.ready(120)
        async with grpc.aio.insecure_channel(ready["address"], options=CHANNEL_OPTIONS) as channel:
            yield Prefill(channel)


async def read_pages(call: Any) -> dict[int, bytes]:
    """The rest of a fill: what each page's bytes are."""
    pages: dict[int, bytearray] = {}
    last = None
    while isinstance(event := await call.read(), kv_pb2.FillEvent):
        last = event.WhichOneof("event")
        if last == "data":
            page = pages.setdefault(event.data.page_start_token // PAGE_SIZE, bytearray())
            assert len(page) == event.data.offset
            page += event.data.data
    assert last == "done"
    return {index: bytes(page) for index, page in pages.items()}


async def test_a_reader_that_does_not_read_fills_no_queues(prefill: Prefill) -> None:
    """All pages of a cached prompt are there at once."""
    first = await read_pages(await prefill.open_fill())
    assert sorted(first) == list(range(NUM_FILLED))
    await prefill.wait_until_shipped(NUM_FILLED)
    call = await prefill.open_fill()
    assert (await call.read()).WhichOneof("event") == "accepted"
    await prefill.wait_until_shipped(NUM_FILLED + 1)
    await asyncio.sleep(2)
    load = await prefill.load()
    assert load.counters["shipped_pages"] < NUM_FILLED + NUM_FILLED // 2
    assert load.used_pages > NUM_FILLED // 2, "the rest waits in the pool"
    assert await read_pages(call) == first
    async with asyncio.timeout(60):
        while (await prefill.load()).used_pages:
            await asyncio.sleep(0.05)
