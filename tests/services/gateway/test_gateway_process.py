"""The gateway as a real process, and many clients that leave at random."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, gateway
from weft.testing.services.processes import ServiceProcess
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, gateway_pb2_grpc, openai_pb2_grpc

FAKE_DECODE = "weft.testing.services.fake_decode"
TEXT = "Hello from a process, 你好 🎉."


@asynccontextmanager
async def mesh(folder: Path, **flags: object) -> AsyncIterator[tuple[ServiceProcess, Any, Any]]:
    """A worker and a gateway, each a process; torch cannot be imported in the gateway's."""
    model_dir = write_model_dir(folder / MODEL)
    blocked = folder / "blocked"
    blocked.mkdir()
    for name in ("torch", "transformers", "triton", "nixl"):
        (blocked / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    with ExitStack() as stack:
        command = [sys.executable, "-m", FAKE_DECODE, "--model-dir", str(model_dir)]
        command += ["--model", MODEL, "--text", TEXT, "--step-s", "0.02"]
        worker = stack.enter_context(ServiceProcess("worker", command, folder))
        address = worker.wait_ready()["address"]
        command = [sys.executable, "-m", "weft.gateway", "--model-dir", str(model_dir)]
        command += ["--decode", address, "--port", "0", "--drain-grace-s", "8"]
        environment = {"PYTHONPATH": str(blocked), "WEFT_GATEWAY_LOG_FORMAT": "json"}
        process = stack.enter_context(ServiceProcess("gateway", command, folder, environment))
        ready = process.wait_ready()
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            openai = openai_pb2_grpc.OpenAIServiceStub(channel)
            async with asyncio.timeout(60):
                while True:
                    try:
                        await openai.Ready(Empty())
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.05)
            yield process, ready, gateway_pb2_grpc.GatewayServiceStub(channel)


async def test_process_serves_drains_and_ends(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (process, ready, stub):
        request = gateway_pb2.ChatRequest(
            messages=[gateway_pb2.ChatMessage(role="user", content="hi")], stream=True
        )
        call = stub.Chat(request)
        text = (await call.read()).choices[0].text
        url = f"http://{ready['metrics_address']}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        assert "weft_time_to_first_token_seconds_count 1.0" in page
        # A stream that runs when SIGTERM comes is served to its end; then the process ends well.
        os.kill(process.pid, signal.SIGTERM)
        while (message := await call.read()) is not grpc.aio.EOF:
            text += "".join(choice.text for choice in message.choices)
        assert text == TEXT
        assert await asyncio.to_thread(process.wait, 60) == 0
        records = [json.loads(line) for line in process.log.splitlines()]
        assert records[0]["message"] == "gateway ready"
        assert records[0]["settings"]["model_dir"].endswith(MODEL)


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"--decode": "nowhere"}, 2, "host:port"),
        ({"--decode": None}, 2, "--decode"),
        ({"--model-dir": "/nonexistent"}, 1, "/nonexistent"),
        ({"--port": "70000"}, 2, "--port"),
        ({"--host": "203.0.113.7"}, 2, "--insecure"),
        ({"--host": "203.0.113.7", "--insecure": ""}, 1, "--host"),
        ({"--api-key-hashes": "sk-weft-secret"}, 2, "TENANT:ID:SHA256"),
    ],
)
def test_start_that_fails_says_why(
    tmp_path: Path, change: dict[str, str | None], status: int, named: str
) -> None:
    flags: dict[str, str | None] = {
        "--model-dir": str(write_model_dir(tmp_path / MODEL)),
        "--decode": "127.0.0.1:1",
        "--port": "0",
        **change,
    }
    flags = {key: value for key, value in flags.items() if value is not None}
    given = [part for pair in flags.items() for part in pair if part]
    done = subprocess.run(
        [sys.executable, "-m", "weft.gateway", *given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


async def test_nothing_is_left_after_random_ends(tmp_path: Path) -> None:
    rng = random.Random(11)
    tokens = byte_level_bpe().encode(TEXT).ids

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(
            tokens=[tokens * 3],
            break_after=rng.randrange(10) if rng.random() < 0.03 else 10**9,
            hang_after=3 if rng.random() < 0.05 else 10**9,
        )

    async with gateway(tmp_path, script, num_decode=2, max_running_requests=8) as harness:

        async def one() -> str:
            request = gateway_pb2.CompleteRequest(
                text="x",
                stream=rng.random() < 0.7,
                sampling=common_pb2.SamplingParams(n=rng.randint(1, 3)),
                stop=common_pb2.StopCriteria(stop=["🎉"] if rng.random() < 0.3 else []),
            )
            request.timeout.FromMilliseconds(1500)
            call = harness.typed.Complete(request)
            leave_after = rng.randrange(15) if rng.random() < 0.4 else 10**9
            try:
                for _ in range(leave_after):
                    if await call.read() is grpc.aio.EOF:
                        return "finished"
                call.cancel()
                return "left"
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)

        await one()
        await asyncio.sleep(0.3)
        before = len(asyncio.all_tasks())
        outcomes = [o for _ in range(4) for o in await asyncio.gather(*(one() for _ in range(40)))]
        assert {"finished", "left"} <= set(outcomes)
        assert set(outcomes) <= {"finished", "left", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
        app = harness.app
        await harness.wait(lambda: not app._admission.num_running)
        await harness.wait(lambda: not app.pipeline._open)
        for worker in app.fleet.workers():
            session = worker.session
            assert session is not None
            await harness.wait(lambda one=worker: one.own_requests == 0)
            await harness.wait(lambda one=session: not one._handlers)
        await harness.wait(lambda: len(asyncio.all_tasks()) <= before + 4)
