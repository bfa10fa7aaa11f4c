"""Adapters of a gateway whose workers have no engines: what tests of it ask for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import WeftError
from weft.testing.models.adapter_files import write_adapter
from weft.testing.services.fake_adapters import FakeAdapters
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, gateway_pb2

LONG = 200


def make_root(folder: Path) -> Path:
    """An adapter root with three adapters, none of them loaded."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    for number, name in enumerate(("pirate", "json", "other")):
        write_adapter(folder / name, seed + number)
    return folder


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    """As many tokens as are asked for."""
    return Script(tokens=[[40 + index % 10 for index in range(submit.stop.max_tokens)]])


@asynccontextmanager
async def adapter_mesh(tmp_path: Path, root: Path) -> AsyncIterator[Harness]:
    """A gateway with two decode workers and a prefill worker."""
    async with gateway(
        tmp_path, script, num_decode=2, num_prefill=1, adapter_root=root, adapter_linger_s=0.1
    ) as harness:
        yield harness


def adapters(worker: FakeWorker) -> FakeAdapters:
    """The adapters of a worker that has some."""
    assert worker.adapters is not None
    return worker.adapters


async def load(
    mesh: Harness, name: str, path: str = "", *, timeout_s: float | None = None, **fields: Any
) -> gateway_pb2.RegisteredAdapter:
    """Loads an adapter, from the folder of its name if no other is given."""
    timeout = None
    if timeout_s is not None:
        timeout = Duration()
        timeout.FromNanoseconds(int(timeout_s * 1e9))
    request = gateway_pb2.LoadAdapterRequest(
        name=name, path=path or name, timeout=timeout, **fields
    )
    return (await mesh.typed.LoadAdapter(request)).adapter


async def unload(mesh: Harness, name: str) -> None:
    """Unloads a name."""
    await mesh.typed.UnloadAdapter(gateway_pb2.UnloadAdapterRequest(name=name))


async def complete(mesh: Harness, model: str, text: str = "hi", max_tokens: int = 3) -> Any:
    """The answer to a completion."""
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0}
    return await mesh.json("Completions", body)


def ask(mesh: Harness, model: str, max_tokens: int = LONG) -> asyncio.Task[Any]:
    """A request that goes on until it is looked at again."""
    return asyncio.create_task(complete(mesh, model, max_tokens=max_tokens))


async def error_of(awaitable: Any) -> WeftError:
    """The error that a call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return from_rpc_error(caught.value)


async def listed(mesh: Harness) -> dict[str, list[str]]:
    """States of each name in the registry."""
    answer = await mesh.typed.ListAdapters(gateway_pb2.ListAdaptersRequest())
    states: dict[str, list[str]] = {}
    for one in answer.adapters:
        name = gateway_pb2.RegistryState.Name(one.state).removeprefix("REGISTRY_STATE_").lower()
        states.setdefault(one.adapter.name, []).append(name)
    return states


def submits(mesh: Harness) -> list[decode_pb2.Submit]:
    """What all workers were asked for."""
    return [submit for worker in mesh.workers for submit in worker.submits]
