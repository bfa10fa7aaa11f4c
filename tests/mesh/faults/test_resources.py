"""What a mesh holds after clients left it in every way, and beside one that never reads."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import SlowClient
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, Greedy, TinyMesh
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.needs("go")
NUM_REQUESTS, MANY_REQUESTS = 140, 320
"""The latter with `--full`."""
NUM_AT_ONCE = 24
MAX_ROUNDS = 8
NUM_NEW = 60
FEW_TASKS = 3
"""Made when something is first needed, and kept; a leak is one for each of many requests."""
NUM_CLIENTS = 64
MAX_UNSENT_BYTES = 16 << 10
MAX_GROWTH_BYTES = 32 << 20
_SHIP_ALWAYS = ("--local-prefill-max-tokens", "0")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    """Two workers of each kind and a store, with pools that a dozen requests fill."""
    mesh = TinyMesh(
        tmp_path_factory.mktemp("resources"),
        *(*_SHIP_ALWAYS, "--prefill", "2", "--decode", "2", "--kvstore", "1"),
        *("--decode-args=--num-pages 60", "--prefill-args=--num-pages 80"),
    )
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


@dataclass(frozen=True)
class Prompt:
    """Token ids, and their greedy continuation."""

    ids: list[int]
    answer: list[int]
    text: str


def make_prompts(model_dir: Path, count: int) -> list[Prompt]:
    """Prompts that share prefixes."""
    greedy = Greedy(model_dir)
    stem = [random.randrange(3, VOCAB) for _ in range(120)]
    made = []
    for _ in range(count):
        ids = greedy.prompt(40, NUM_NEW, begin=stem[: random.randrange(120)])
        answer = greedy.ids(ids, NUM_NEW)
        made.append(Prompt(ids, answer, greedy.text(answer)))
    return made


def rest_body(prompt: Prompt, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt.ids,
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def typed_request(prompt: Prompt, **fields: Any) -> gateway_pb2.CompleteRequest:
    return gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=prompt.ids),
        stop=common_pb2.StopCriteria(max_tokens=NUM_NEW, ignore_eos=True),
        stream=True,
        **{"sampling": common_pb2.SamplingParams(temperature=0), **fields},
    )


async def read_rest(client: httpx.AsyncClient, prompt: Prompt, leave_after: int) -> str | None:
    """Text of a stream, or None when it was left after so many events."""
    text, done = "", False
    body = rest_body(prompt, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if leave_after == 0:
                return None
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                leave_after -= 1
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
    assert done
    return text


async def read_typed(stub: Any, prompt: Prompt, leave_after: int, n: int = 1) -> list[int] | None:
    """Tokens of a stream, or None when it was left after so many messages."""
    sampling = common_pb2.SamplingParams(temperature=0, n=n)
    call = stub.Complete(typed_request(prompt, sampling=sampling))
    ids: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        if leave_after == 0:
            call.cancel()
            return None
        leave_after -= 1
        for choice in message.choices:
            if choice.index == 0:
                ids += choice.token_ids
    return ids


class Crowd:
    """Clients that leave at random; those that stay check their texts."""

    def __init__(self, mesh: TinyMesh, prompts: list[Prompt]) -> None:
        self._mesh = mesh
        self._prompts = prompts
        self.outcomes: Counter[str] = Counter()

    async def run(self, num_requests: int) -> None:
        """Sends so many requests, a bounded number at once, over connections of its own."""
        places = asyncio.Semaphore(NUM_AT_ONCE)
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=self._mesh.url, timeout=120, trust_env=False, limits=limits
            ) as client,
            grpc.aio.insecure_channel(self._mesh.grpc_address) as channel,
        ):
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)

            async def one() -> None:
                async with places:
                    self.outcomes[await self._one(client, stub)] += 1

            await asyncio.gather(*(one() for _ in range(num_requests)))

    async def _one(self, client: httpx.AsyncClient, stub: Any) -> str:
        prompt = random.choice(self._prompts)
        # Of what comes late a busy client gets many tokens at once: some leave early.
        latest = random.choice((2, NUM_NEW))
        leave_after = random.randrange(latest) if random.random() < 0.5 else -1
        way = random.choice(["rest", "whole", "typed", "cancel"])
        if way == "rest":
            text = await read_rest(client, prompt, leave_after)
            assert text in (None, prompt.text)
            return "left" if text is None else "stayed"
        if way == "typed":
            n = random.choice([1, 1, 3])
            ids = await read_typed(stub, prompt, leave_after, n)
            assert ids in (None, prompt.answer)
            return "left" if ids is None else "stayed"
        if way == "cancel":
            return await self._cancel(stub, prompt)
        asking = asyncio.create_task(client.post("/v1/completions", json=rest_body(prompt)))
        if leave_after >= 0:
            await asyncio.sleep(random.uniform(0, 0.3))
            asking.cancel()
        try:
            answer = await asking
        except asyncio.CancelledError:
            return "left"
        assert answer.json()["choices"][0]["text"] == prompt.text
        return "stayed"

    async def _cancel(self, stub: Any, prompt: Prompt) -> str:
        call = stub.Complete(typed_request(prompt))
        first = await call.read()
        await asyncio.sleep(random.uniform(0, 0.1))
        await stub.Cancel(gateway_pb2.CancelRequest(request_id=first.request_id))
        ids = [i for choice in first.choices for i in choice.token_ids]
        while (message := await call.read()) is not grpc.aio.EOF:
            ids += [i for choice in message.choices for i in choice.token_ids]
        assert ids == prompt.answer[: len(ids)]
        return "cancelled"


def test_clients_that_leave_leave_nothing(mesh: TinyMesh, pytestconfig: pytest.Config) -> None:
    num_requests = MANY_REQUESTS if pytestconfig.getoption("--full") else NUM_REQUESTS
    prompts = make_prompts(mesh.model_dir, 10)
    crowd = Crowd(mesh, prompts)
    asyncio.run(crowd.run(NUM_AT_ONCE))
    mesh.wait_empty()
    services = mesh.services()
    assert {"gateway", "decode-0", "decode-1", "prefill-0", "prefill-1"} <= set(services)
    # Each has a call from the gateway that lasts, and some may not be there yet.
    workers = [name for name in services if name.startswith(("decode-", "prefill-"))]
    wait_until(
        lambda: mesh.dump("gateway")["server"]["tasks_of"].get("KvFollower.run") == len(workers), 10
    )
    before = {name: mesh.dump(name)["server"] for name in services}
    fds: list[dict[str, int]] = []
    while len(fds) < MAX_ROUNDS and not (
        len(fds) > 2 and is_steady(fds) and num_preemptions(mesh) > 0
    ):
        asyncio.run(crowd.run(num_requests // 4))
        mesh.wait_empty()
        fds.append(mesh.fds())
    assert is_steady(fds), fds
    assert crowd.outcomes["left"] > num_requests / 40, crowd.outcomes
    assert crowd.outcomes["stayed"] > num_requests / 40
    wait_until(
        lambda: all(mesh.tasks(name) <= before[name]["tasks"] + FEW_TASKS for name in services),
        10,
        lambda: f"{before}, now {[mesh.dump(name)['server'] for name in services]}",
    )
    # Workers can be done with a request before the gateway and the store are.
    wait_until(lambda: is_empty_gateway(mesh), 30, lambda: str(mesh.dump("gateway")))
    wait_until(lambda: is_empty_store(mesh), 30, lambda: str(mesh.dump("kvstore-0")))
    check_counters(mesh)


def is_empty_gateway(mesh: TinyMesh) -> bool:
    state = mesh.dump("gateway")
    left = state["running_prompts"], state["queued_prompts"], len(state["requests"])
    workers = state["workers"]
    return not any(left) and not any(
        worker["own_requests"] or worker.get("handlers", 0) or worker["problem"]
        for worker in workers
    )


def is_empty_store(mesh: TinyMesh) -> bool:
    pages = mesh.dump("kvstore-0")["pages"]
    return not pages["quarantined"] and pages["free"] + pages["cached"] == pages["total"]


def is_steady(fds: list[dict[str, int]]) -> bool:
    """The last round took no more descriptors than one before. Those that did may have made an
    agent for a peer; what leaks takes more in every round."""
    most = {name: max(before[name] for before in fds[:-1]) for name in fds[-1]}
    return all(count <= most[name] for name, count in fds[-1].items())


def check_counters(mesh: TinyMesh) -> None:
    """What owners accepted is what fillers and the store shipped, or less."""
    owners = [dict(mesh.load_now(name).counters) for name in mesh.names("decode")]
    fillers = [dict(mesh.load_now(name).counters) for name in mesh.names("prefill")]
    for owner in owners:
        ended = owner["fills_done"] + owner["fills_failed"]
        assert 0 < ended <= owner["fills_started"]
        assert owner["open_fills"] == owner["digest_mismatches"] == 0
    for filler in fillers:
        ended = filler["leases_done"] + filler["leases_stopped"]
        assert 0 < ended <= filler["leases_accepted"]
    assert num_preemptions(mesh) > 0, "the pools were large"


def num_preemptions(mesh: TinyMesh) -> int:
    return sum(mesh.counters(name)["preemptions"] for name in mesh.names("decode"))


def test_flush_empties_the_caches(mesh: TinyMesh) -> None:
    prompts = make_prompts(mesh.model_dir, 1)
    asyncio.run(Crowd(mesh, prompts).run(4))
    mesh.wait_empty()
    command = [*WEFT, "flush", "--state-dir", str(mesh.state)]
    done = subprocess.run(
        [*command, "decode-0"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("decode-0: ")
    assert mesh.load_now("decode-0").cached_pages == 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == len(mesh.services())
    for name in (*mesh.names("decode"), *mesh.names("prefill")):
        load = mesh.load_now(name)
        assert (load.cached_pages, load.free_pages) == (0, load.total_pages)
    unknown = subprocess.run([*command, "decode-9"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 1
    assert "decode-1" in unknown.stderr


@pytest.fixture(scope="module")
def narrow_mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    """A gateway that cuts clients off early, over a model with room for long texts."""
    mesh = TinyMesh(
        tmp_path_factory.mktemp("slow"),
        *_SHIP_ALWAYS,
        f"--gateway-args=--max-unsent-bytes {MAX_UNSENT_BYTES}",
        "--decode-args=--max-running-requests 96",
        max_context_tokens=16_384,
    )
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


SLOW_SAMPLES = 8
SLOW_TOKENS = 6000
TOP_LOGPROBS = 20


def slow_call(channel: grpc.aio.Channel, prompt: Prompt) -> Any:
    """A typed stream of far more than any buffer on its way."""
    return gateway_pb2_grpc.GatewayServiceStub(channel).Complete(
        gateway_pb2.CompleteRequest(
            token_ids=common_pb2.TokenIds(ids=prompt.ids),
            stop=common_pb2.StopCriteria(max_tokens=SLOW_TOKENS, ignore_eos=True),
            sampling=common_pb2.SamplingParams(temperature=1, seed=1, n=SLOW_SAMPLES),
            logprobs=common_pb2.LogprobOptions(top_logprobs=TOP_LOGPROBS),
            stream=True,
        )
    )


def slow_socket(mesh: TinyMesh, prompt: Prompt) -> socket.socket:
    """The same over REST, by a client with a small window that does not read."""
    body = json.dumps(
        rest_body(
            prompt,
            stream=True,
            max_tokens=SLOW_TOKENS,
            temperature=1,
            n=SLOW_SAMPLES,
            logprobs=5,
        )
    )
    host, port = mesh.rest_address.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


async def others(mesh: TinyMesh, prompts: list[Prompt]) -> list[tuple[Prompt, str | list[int]]]:
    """What all other clients got, half of them over REST."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=mesh.url, timeout=120, trust_env=False, limits=limits) as client,
        grpc.aio.insecure_channel(mesh.grpc_address) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def one(number: int) -> tuple[Prompt, Any]:
            prompt = prompts[number % len(prompts)]
            if number % 2:
                return prompt, await read_rest(client, prompt, -1)
            return prompt, await read_typed(stub, prompt, -1)

        return list(await asyncio.gather(*(one(number) for number in range(NUM_CLIENTS - 1))))


@pytest.mark.full_after(1)
@pytest.mark.parametrize("face", ["typed", "rest"])
def test_one_of_many_never_reads(narrow_mesh: TinyMesh, face: str) -> None:
    mesh = narrow_mesh
    prompts = make_prompts(mesh.model_dir, 9)
    processes = [psutil.Process(mesh.service(name)["pid"]) for name in ("gateway", "rest")]
    before = [process.memory_info().rss for process in processes]
    generated_before = mesh.counters("decode-0")["generated_tokens"]
    peak = list(before)

    def watch() -> bool:
        """Notes the memory; true once the slow client's samples are gone from the worker."""
        for index, process in enumerate(processes):
            peak[index] = max(peak[index], process.memory_info().rss)
        load = mesh.load("decode-0")
        return not load.running_requests + load.waiting_requests + load.filling_requests

    async def run() -> list[tuple[Prompt, str | list[int]]]:
        options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(mesh.grpc_address, options=options) as channel:
            slow = slow_call(channel, prompts[-1]) if face == "typed" else None
            connection = slow_socket(mesh, prompts[-1]) if face == "rest" else None
            if slow is not None:
                await slow.initial_metadata()
            got = await others(mesh, prompts[:-1])
            # Nobody has read a byte of it yet.
            await asyncio.to_thread(wait_until, watch, 60)
            if slow is not None:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await read_on(slow)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert isinstance(from_rpc_error(caught.value), SlowClient)
            if connection is not None:
                received = await asyncio.to_thread(read_all, connection)
                assert b"[DONE]" not in received
            return got

    for prompt, answer in asyncio.run(run()):
        assert answer == (prompt.text if isinstance(answer, str) else prompt.answer)
    generated = mesh.load_now("decode-0").counters["generated_tokens"] - generated_before
    assert generated - (NUM_CLIENTS - 1) * NUM_NEW < SLOW_SAMPLES * SLOW_TOKENS / 4, "cut off late"
    for was, after in zip(before, peak, strict=True):
        assert after - was < MAX_GROWTH_BYTES
    mesh.wait_empty()


async def read_on(call: Any) -> None:
    """Reads a stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other end closes, or resets, the connection."""
    received = b""
    with connection:
        connection.settimeout(60)
        try:
            while data := connection.recv(1 << 16):
                received += data
                if received.endswith(b"\r\n0\r\n\r\n"):
                    break
        except ConnectionResetError:
            pass
    return received
