"""The header with the mesh's load, which a load balancer asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.api.httpbody_pb2 import HttpBody
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from weft.gateway.telemetry.load_header import load_header
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, dialects_pb2_grpc, gateway_pb2, openai_pb2_grpc, worker_pb2

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"
USAGE, WAITING = 0.4, 7
"""Of 160 pages requests hold 64; the two workers have 2 and 5 requests that wait."""
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
DIALECTS: list[tuple[Callable[[Any], Any], str, dict[str, Any]]] = [
    (openai_pb2_grpc.OpenAIServiceStub, "ChatCompletions", CHAT),
    (openai_pb2_grpc.OpenAIServiceStub, "Completions", {"prompt": "hello", "max_tokens": 2}),
    (dialects_pb2_grpc.AnthropicServiceStub, "CreateMessage", CHAT),
    (
        dialects_pb2_grpc.ResponsesServiceStub,
        "CreateResponse",
        {"input": "hello", "max_output_tokens": 16},
    ),
    (
        dialects_pb2_grpc.OllamaServiceStub,
        "Generate",
        {"prompt": "hello", "options": {"num_predict": 2}},
    ),
]


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[7, 8]])


def load(mesh: Harness) -> None:
    """Gives the two workers their load."""
    first, second = mesh.workers[:2]
    first.total_pages, first.free_pages, first.cached_pages = 100, 30, 20
    second.total_pages, second.free_pages, second.cached_pages = 60, 40, 6
    first.waiting_requests, second.waiting_requests = 2, 5


async def wait_reported(mesh: Harness) -> None:
    def is_reported() -> bool:
        reports = [worker.report for worker in mesh.app.fleet.workers("decode")]
        return {None if one is None else one.total_pages for one in reports} == {100, 60}

    await mesh.wait(is_reported)


async def test_every_dialect_tells_the_load_of_all_workers(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2, num_prefill=1) as mesh:
        load(mesh)
        # What fills pages for others holds none of their requests.
        mesh.workers[2].total_pages = mesh.workers[2].waiting_requests = 1000
        await wait_reported(mesh)
        for stub, method, fields in DIALECTS:
            for stream in (False, True):
                data = json.dumps({"model": "tiny", "stream": stream, **fields}).encode()
                call = getattr(stub(mesh.channel), method)
                for asked in ("TEXT", "json"):
                    answer = call(HttpBody(data=data), metadata=((ASKED, asked),))
                    header = dict(await answer.initial_metadata())
                    assert [one async for one in answer]
                    kind, _, value = header[TOLD].partition(" ")
                    assert kind == asked.upper()
                    assert read(kind, value) == {
                        "kv_cache_usage_perc": USAGE,
                        "num_requests_waiting": WAITING,
                    }
                silent = call(HttpBody(data=data))
                assert TOLD not in dict(await silent.initial_metadata())
                assert [one async for one in silent]


def read(kind: str, value: str) -> dict[str, float]:
    """The named metrics of a report, as ORCA's two forms have them."""
    if kind == "JSON":
        named: dict[str, float] = json.loads(value)["named_metrics"]
        return named
    pairs = (pair.split("=") for pair in value.split(", "))
    return {name.removeprefix("named_metrics."): float(number) for name, number in pairs}


async def test_typed_calls_tell_it_too(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2) as mesh:
        load(mesh)
        await wait_reported(mesh)
        call = mesh.typed.Complete(
            gateway_pb2.CompleteRequest(text="hello"), metadata=((ASKED, "TEXT"),)
        )
        assert dict(await call.initial_metadata())[TOLD] == (
            f"TEXT named_metrics.kv_cache_usage_perc={USAGE}, "
            f"named_metrics.num_requests_waiting={WAITING}"
        )
        assert [one async for one in call]


async def test_another_form_is_left_out_with_a_warning(tmp_path: Path) -> None:
    async with gateway(tmp_path, script) as mesh:
        body = HttpBody(data=json.dumps({"prompt": "hello", "max_tokens": 2}).encode())
        call = mesh.openai.Completions(body, metadata=((ASKED, "BIN"),))
        header = dict(await call.initial_metadata())
        assert TOLD not in header
        assert header["x-weft-warnings"] == f"{ASKED}: left out (it may be TEXT or JSON)"
        assert [one async for one in call]


@pytest.mark.parametrize("queued", [0, 3])
def test_requests_without_a_worker_wait_as_well(queued: int) -> None:
    quarantined = worker_pb2.WatchLoadResponse(
        total_pages=8, free_pages=1, cached_pages=1, quarantined_pages=4, waiting_requests=1
    )
    assert load_header("TEXT", [quarantined], queued) == (
        TOLD,
        "TEXT named_metrics.kv_cache_usage_perc=0.75, "
        f"named_metrics.num_requests_waiting={1 + queued}",
    )
    # Before any worker has reported.
    assert load_header("TEXT", [], queued)[1].startswith("TEXT named_metrics.kv_cache_usage_perc=0")


async def test_pickers_of_other_makers_read_the_same_load(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2, num_prefill=1, metrics_port=0) as mesh:
        load(mesh)
        mesh.workers[0].running_requests, mesh.workers[1].running_requests = 3, 1
        await wait_reported(mesh)
        await mesh.wait(
            lambda: sum(one.running_requests for one in mesh.app.pipeline.reports()) == 4
        )
        text = generate_latest(mesh.app.metrics.registry).decode()
    told = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    assert told == {
        "vllm:kv_cache_usage_perc": USAGE,
        "vllm:num_requests_waiting": WAITING,
        "vllm:num_requests_running": 4,
    }
