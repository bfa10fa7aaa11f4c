"""Spans of the built Go edge: they reach a collector, and one that is away holds up nothing."""

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from weft.testing.services.client_trace import new_trace
from weft.testing.services.fake_openai import FakeOpenAI
from weft.testing.services.otlp_collector import collector
from weft.testing.services.processes import ServiceProcess
from weft.v1 import openai_pb2_grpc

pytestmark = pytest.mark.needs("go")

NEVER_BY_ITSELF = {"OTEL_BSP_SCHEDULE_DELAY": "3600000"}
"""Batches that are not full go at the end only."""


@asynccontextmanager
async def edge(
    binary: Path, folder: Path, *flags: str, **environment: str
) -> AsyncIterator[tuple[ServiceProcess, str]]:
    """An edge before a made-up gateway, and its URL."""
    server = grpc.aio.server()
    openai_pb2_grpc.add_OpenAIServiceServicer_to_server(FakeOpenAI(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    command = [str(binary), "--listen", "127.0.0.1:0", "--backend", f"127.0.0.1:{port}", *flags]
    try:
        with ServiceProcess("rest", command, folder, environment) as process:
            ready = await process.ready()
            yield process, f"http://{ready['address']}"
    finally:
        await server.stop(0)


async def chat(url: str, **headers: str) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        answer = await http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("by", ["flag", "variable"])
async def test_sigterm_sends_the_last_spans(rest_binary: Path, tmp_path: Path, by: str) -> None:
    client = new_trace(is_sampled=True)
    with collector() as collecting:
        flags = ["--otlp-endpoint", collecting.address] if by == "flag" else []
        variables = {} if by == "flag" else {"OTEL_EXPORTER_OTLP_ENDPOINT": collecting.address}
        environment = {**NEVER_BY_ITSELF, **variables}
        async with edge(rest_binary, tmp_path, *flags, **environment) as (process, url):
            await chat(url, traceparent=client.traceparent)
            process.send(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0, process.log
        (span,) = collecting.spans(f"{client.trace_id:032x}")
    assert (span.service, span.name) == ("rest", "POST /v1/chat/completions")
    assert span.parent_id == f"{client.span_id:016x}"
    assert span.instance.startswith("rest-")


async def test_no_tracing_sends_nothing(rest_binary: Path, tmp_path: Path) -> None:
    client = new_trace(is_sampled=True)
    with collector() as collecting:
        flags = ["--otlp-endpoint", collecting.address, "--no-tracing"]
        async with edge(rest_binary, tmp_path, *flags) as (process, url):
            await chat(url, traceparent=client.traceparent)
            process.send(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0, process.log
        assert not collecting.spans(f"{client.trace_id:032x}")


async def test_a_collector_that_does_not_answer_holds_up_nothing(
    rest_binary: Path, tmp_path: Path
) -> None:
    with socket.socket() as silent:  # takes connections, says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        few = {"OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2"}
        flags = ["--otlp-endpoint", endpoint]
        async with edge(rest_binary, tmp_path, *flags, **few) as (process, url):
            await asyncio.gather(*(chat(url) for _ in range(50)))
            process.send(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0, process.log
            assert "the last spans are lost" in process.log


async def test_an_endpoint_that_cannot_be_used_is_said(rest_binary: Path, tmp_path: Path) -> None:
    command = [str(rest_binary), "--listen", "127.0.0.1:0", "--otlp-endpoint", "localhost:4317"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "--otlp-endpoint localhost:4317: give the collector as http://" in done.stderr
    # What the environment says was perhaps meant for others.
    bad = {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4317"}
    async with edge(rest_binary, tmp_path, **bad) as (process, url):
        await chat(url)
        assert "spans are not exported" in process.log
