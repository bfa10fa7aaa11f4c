"""REST edges that stay while the gateways behind them drain, end and come back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from weft.cli.up.ports import free_run
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.testing.services.gateway_harness import MODEL
from weft.testing.services.processes import ServiceProcess

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(300)]

TEXT = "All of it, 你好 🎉."
NUM_CLIENTS = 6
NUM_ROUNDS = 2


class Gateways:
    """Two gateways on fixed ports before one worker."""

    def __init__(self, folder: Path, worker: str, *flags: str) -> None:
        self._folder = folder
        self._worker = worker
        self._flags = flags
        port = free_run("127.0.0.1", 2)
        self.addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        self.processes: list[ServiceProcess] = []

    def start(self, number: int) -> ServiceProcess:
        host, port = self.addresses[number].split(":")
        command = [sys.executable, "-m", "weft.gateway", "--model-dir", str(self._folder / MODEL)]
        command += ["--decode", self._worker, "--host", host, "--port", port]
        command += ["--drain-grace-s", "60", *self._flags]
        return ServiceProcess(f"gateway-{number}", command, self._folder)


@asynccontextmanager
async def scripted_worker(folder: Path) -> AsyncIterator[str]:
    """The address of a worker that takes its time for `TEXT`."""
    tokenizer = byte_level_bpe()
    write_model_dir(folder / MODEL, tokenizer, 512)
    ids = tokenizer.encode(TEXT).ids
    worker = FakeWorker(
        MODEL,
        tokenizer.get_vocab_size(),
        lambda submit, prompt: Script(tokens=[list(ids)]),
        worker_id="decode-0",
        step_s=0.02,
    )
    try:
        yield await worker.start()
    finally:
        await worker.stop()


class Client:
    """Asks an edge again and again; every answer must be a 200 with the whole text."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url
        self.num_answers = 0
        self.is_ended = False

    async def run(self) -> None:
        while not self.is_ended:
            await self.ask(is_stream=random.random() < 0.5)
            self.num_answers += 1

    async def ask(self, *, is_stream: bool) -> None:
        body = {
            "messages": [{"role": "user", "content": "go on"}],
            "stream": is_stream,
        }
        answer = await self._http.post(f"{self._url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, (answer.text, answer.headers)
        if is_stream:
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text
        else:
            assert answer.json()["choices"][0]["message"]["content"] == TEXT


async def wait_ready(http: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(120):
        while (await http.get(f"{url}/readyz")).status_code != 200:
            await asyncio.sleep(0.05)


async def answers_of(clients: Sequence[Client]) -> None:
    """Returns once every client has got another answer."""
    before = [client.num_answers for client in clients]
    async with asyncio.timeout(120):
        while any(client.num_answers == then for client, then in zip(clients, before, strict=True)):
            await asyncio.sleep(0.05)


async def rest_edge(stack: ExitStack, binary: Path, folder: Path, backend: Sequence[str]) -> str:
    command = [str(binary), "--listen", "127.0.0.1:0", "--backend", ",".join(backend)]
    edge = stack.enter_context(ServiceProcess("rest", command, folder))
    ready = await edge.ready()
    return f"http://{ready['address']}"


async def test_gateways_take_turns_to_restart_and_no_request_fails(
    rest_binary: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        async with (
            scripted_worker(tmp_path) as worker,
            httpx.AsyncClient(timeout=120, trust_env=False) as http,
        ):
            gateways = Gateways(tmp_path, worker)
            running = [stack.enter_context(gateways.start(number)) for number in range(2)]
            for process in running:
                await process.ready()
            url = await rest_edge(stack, rest_binary, tmp_path, gateways.addresses)
            await wait_ready(http, url)
            clients = [Client(http, url) for _ in range(NUM_CLIENTS)]
            async with asyncio.TaskGroup() as tasks:
                for client in clients:
                    tasks.create_task(client.run())
                for _ in range(NUM_ROUNDS):
                    for number in range(2):
                        running[number].send(signal.SIGTERM)
                        assert await asyncio.to_thread(running[number].wait, 120) == 0
                        await answers_of(clients)
                        running[number] = stack.enter_context(gateways.start(number))
                        await running[number].ready()
                        await answers_of(clients)
                for client in clients:
                    client.is_ended = True


async def test_a_leaving_edge_and_gateway_serve_until_the_grace_is_over(
    rest_binary: Path, tmp_path: Path
) -> None:
    """As `weft up` ends them: both get SIGTERM at once, and there is no other gateway."""
    grace = ("--ready-grace-s", "8")
    with ExitStack() as stack:
        async with (
            scripted_worker(tmp_path) as worker,
            httpx.AsyncClient(timeout=120, trust_env=False) as http,
        ):
            gateways = Gateways(tmp_path, worker, *grace)
            gateway = stack.enter_context(gateways.start(0))
            await gateway.ready()
            backend = gateways.addresses[0]
            command = [str(rest_binary), "--listen", "127.0.0.1:0", "--backend", backend, *grace]
            edge = stack.enter_context(ServiceProcess("rest", command, tmp_path))
            url = f"http://{(await edge.ready())['address']}"
            await wait_ready(http, url)
            client = Client(http, url)
            await client.ask(is_stream=False)
            async with grpc.aio.insecure_channel(backend) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                for process in (edge, gateway):
                    os.kill(process.pid, signal.SIGTERM)
                await _until_leaving(http, url, health)
                for is_stream in (True, False):
                    await client.ask(is_stream=is_stream)
                async with httpx.AsyncClient(trust_env=False, timeout=120) as new:
                    for path, status in (("readyz", 503), ("healthz", 200), ("v1/models", 200)):
                        answer = await new.get(f"{url}/{path}")
                        assert (answer.status_code, answer.headers["connection"]) == (
                            status,
                            "close",
                        )
                    assert "retry-after" in (await new.get(f"{url}/readyz")).headers
            for process in (edge, gateway):
                assert await asyncio.to_thread(process.wait, 60) == 0
            with pytest.raises(httpx.ConnectError):
                await http.get(f"{url}/healthz")


async def _until_leaving(http: httpx.AsyncClient, url: str, health: Any) -> None:
    """Returns once the edge's readiness and the gateway's health both say so."""
    request = health_pb2.HealthCheckRequest()
    async with asyncio.timeout(60):
        while (await http.get(f"{url}/readyz")).status_code == 200:
            await asyncio.sleep(0.02)
        while (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.02)
