"""Spans of a gateway, of a decode worker's requests, and how export fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.common.settings import ServiceSettings
from weft.common.telemetry.otlp import start_export
from weft.common.telemetry.spans import Tracer
from weft.common.worker.fill_trace import FillTrace
from weft.contract.errors import ConfigError
from weft.contract.fills import FillStart
from weft.contract.handle import FillEvent, FillTimings
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Failed, Failure, Finished, GatewayBatch, Submit
from weft.contract.timeline import FillRecord, Timeline
from weft.decode.spans import RequestSpans
from weft.testing.models.tiny_tokenizers import write_model_dir
from weft.testing.services.client_trace import new_trace, read_traceparent
from weft.testing.services.fake_decode import Event, Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.testing.services.otlp_collector import collector
from weft.testing.services.processes import ServiceProcess
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, trace_pb2, trace_pb2_grpc

CLIENT = new_trace(is_sampled=True)


def script_of(harness: list[Harness]) -> Any:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[harness[0].ids(" one two three")])

    return script


async def spans_of(harness: Harness, wanted: str) -> dict[str, trace_pb2.Span]:
    stub = trace_pb2_grpc.TraceServiceStub(harness.channel)
    answer = await stub.ListSpans(trace_pb2.ListSpansRequest(id=wanted))
    return {span.name: span for span in answer.spans}


async def ask(harness: Harness, *metadata: tuple[str, str]) -> str:
    """One request to its end; its id."""
    call = harness.typed.Complete(
        gateway_pb2.CompleteRequest(text="Hello"), metadata=metadata or None
    )
    return [message async for message in call][-1].request_id


async def test_a_gateway_joins_the_clients_trace_and_hands_it_on(tmp_path: Path) -> None:
    made: list[Harness] = []
    async with gateway(tmp_path, script_of(made)) as harness:
        made.append(harness)
        request_id = await ask(harness, ("traceparent", CLIENT.traceparent))
        (run,) = harness.workers[0].submits
        spans = await spans_of(harness, request_id)
        assert spans.keys() == {
            *("text_completion", "queue", "prepare", "attempt 1", "route", "render")
        }
        root, attempt = spans["text_completion"], spans["attempt 1"]
        assert root.trace_id == CLIENT.trace_id.to_bytes(16, "big")
        assert root.parent_span_id == CLIENT.span_id.to_bytes(8, "big")
        assert attempt.parent_span_id == root.span_id
        handed = read_traceparent(run.traceparent)
        assert handed.span_id.to_bytes(8, "big") == attempt.span_id
        assert (handed.trace_id, handed.is_sampled) == (CLIENT.trace_id, True)
        assert attempt.attributes["weft.worker_id"] == "decode-0"
        assert root.attributes["gen_ai.usage.output_tokens"] == len(harness.ids(" one two three"))


async def test_the_clients_own_id_is_in_spans_and_the_gateways_in_the_metadata(
    tmp_path: Path,
) -> None:
    made: list[Harness] = []
    async with gateway(tmp_path, script_of(made)) as harness:
        made.append(harness)
        faces = (
            (harness.typed.Complete, gateway_pb2.CompleteRequest(text="Hello")),
            (harness.openai.Completions, HttpBody(data=b'{"prompt": "Hello"}')),
        )
        for given, kept in (("mine:1.a_B-c", True), ("two words", False), ("x" * 65, False)):
            for ask_face, request in faces:
                call = ask_face(request, metadata=(("x-request-id", given),))
                header = dict(await call.initial_metadata() or ())
                assert [message async for message in call]
                trailer = dict(await call.trailing_metadata() or ())
                request_id = header["x-weft-request-id"]
                assert trailer["x-weft-request-id"] == request_id
                root = (await spans_of(harness, str(request_id)))["text_completion"]
                expected = given if kept else None
                assert dict(root.attributes).get("weft.client_request_id") == expected
                assert request_id == harness.workers[0].submits[-1].request_id


async def test_a_refused_request_has_a_name_too(tmp_path: Path) -> None:
    made: list[Harness] = []
    async with gateway(tmp_path, script_of(made)) as harness:
        made.append(harness)
        call = harness.openai.Completions(
            HttpBody(data=b'{"prompt": "", "request_id": "mine"}'),
            metadata=(("x-request-id", "req-of-the-edge"),),
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).param == "prompt"
        request_id = dict(caught.value.trailing_metadata() or ())["x-weft-request-id"]
        root = (await spans_of(harness, str(request_id)))["text_completion"]
        assert root.attributes["weft.client_request_id"] == "mine"
        assert root.attributes["weft.header_request_id"] == "req-of-the-edge"


async def test_a_request_without_a_trace_gets_one(tmp_path: Path) -> None:
    made: list[Harness] = []
    async with gateway(tmp_path, script_of(made), trace_sample_ratio=0.0) as harness:
        made.append(harness)
        ids = [await ask(harness), await ask(harness, ("traceparent", "nonsense"))]
        found = [(await spans_of(harness, i))["text_completion"] for i in ids]
        assert len({span.trace_id for span in found}) == 2
        assert not any(span.parent_span_id or span.sampled for span in found)


async def test_without_tracing_a_clients_context_passes_unchanged(tmp_path: Path) -> None:
    made: list[Harness] = []
    async with gateway(tmp_path, script_of(made), tracing=False) as harness:
        made.append(harness)
        request_id = await ask(harness, ("traceparent", CLIENT.traceparent))
        assert harness.workers[0].submits[0].traceparent == CLIENT.traceparent
        assert not await spans_of(harness, request_id)


async def test_a_refusal_and_a_failure_are_in_their_spans(tmp_path: Path) -> None:
    failed = Event.Failed(
        error=common_pb2.ErrorDetail(code="INTERNAL", message="broken"),
        grpc_code=grpc.StatusCode.INTERNAL.value[0],
    )

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[1]], fail=failed, fail_after=0)

    async with gateway(tmp_path, script) as harness:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(harness, ("traceparent", CLIENT.traceparent))
        spans = await spans_of(harness, f"{CLIENT.trace_id:032x}")
        assert spans["text_completion"].error == "internal"
        assert spans["attempt 1"].error == "INTERNAL: broken"
        other = new_trace(is_sampled=True)
        call = harness.typed.Complete(
            gateway_pb2.CompleteRequest(text="word " * 2000),
            metadata=(("traceparent", other.traceparent),),
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(call))
        spans = await spans_of(harness, f"{other.trace_id:032x}")
        assert spans["text_completion"].error == "context_length_exceeded"
        assert spans["prepare"].error == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    ("wanted", "max_spans"), [("", 10), ("x" * 129, 10), ("x", 0), ("x", 10**5)]
)
async def test_bad_questions_are_refused(tmp_path: Path, wanted: str, max_spans: int) -> None:
    async with gateway(tmp_path, script_of([]), wait=False) as harness:
        stub = trace_pb2_grpc.TraceServiceStub(harness.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListSpans(trace_pb2.ListSpansRequest(id=wanted, max_spans=max_spans))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_that_does_not_answer_is_named(tmp_path: Path) -> None:
    made: list[Harness] = []
    async with gateway(tmp_path, script_of(made)) as harness:
        made.append(harness)
        request_id = await ask(harness)
        # The scripted worker has no TraceService.
        stub = trace_pb2_grpc.TraceServiceStub(harness.channel)
        answer = await stub.ListSpans(trace_pb2.ListSpansRequest(id=request_id, fan_out=True))
        assert len(answer.spans) == 6
        assert [silent.problem for silent in answer.silent] == ["UNIMPLEMENTED"]


# -- a decode worker's requests ------------------------------------------------------------------


def submit(context: str, n: int = 1) -> Submit:
    return Submit(
        gateway=1,
        request_id="r",
        attempt=1,
        prompt=[1, 2, 3],
        sampling=SamplingParams(n=n),
        stop=StopCriteria(),
        traceparent=context,
    )


def finished(sample: int, timeline: Timeline) -> GatewayBatch:
    end = Finished(
        request_id="r",
        attempt=1,
        sample=sample,
        reason="length",
        stop_token_id=None,
        completion_tokens=5,
        cached_prompt_tokens=0,
        timeline=timeline,
    )
    return GatewayBatch(gateway=1, finished=[end])


def timeline(**values: Any) -> Timeline:
    return Timeline(submitted_at=time.monotonic(), **values)


def test_stages_of_a_request_lie_where_the_engine_says() -> None:
    tracer = Tracer("decode", "decode-0")
    spans = RequestSpans(tracer)
    order = submit(CLIENT.traceparent)
    spans.on_submit(order)
    fill = FillRecord(
        source="prefill",
        worker_id="prefill-0",
        transport="nixl",
        start_token=0,
        end_token=32,
        start_s=0.2,
        end_s=0.5,
        accepted_tokens=32,
        bytes=4096,
        failure="lost",
        lease_id="00000000000000ff" + "00" * 8,
    )
    times = timeline(
        admitted_s=0.1,
        fills=[fill],
        local_prefill_tokens=3,
        first_token_s=0.7,
        finish_s=1.5,
    )
    spans.on_batch(finished(0, times))
    found = {span.name: span for span in tracer.recent.find("r", 10)}
    zero_s = times.submitted_at + time.time() - time.monotonic()

    def lies(name: str) -> tuple[float, float]:
        span = found[name]
        return (
            round(span.start_time / 1e9 - zero_s, 3),
            round(span.end_time / 1e9 - zero_s, 3),
        )

    assert lies("queue") == (0.0, 0.1)
    assert lies("fill") == (0.2, 0.5)
    assert lies("prefill") == (0.5, 0.7)
    assert lies("decode") == (0.7, 1.5)
    # The filler's spans name it as their parent, though nobody has told it so.
    assert found["fill"].context.span_id == 0xFF
    assert found["fill"].status.description == "lost"
    request = found["request"]
    assert request.parent.span_id == CLIENT.span_id
    assert read_traceparent(order.traceparent) == (CLIENT.trace_id, request.context.span_id, True)
    assert all(
        span.parent.span_id == request.context.span_id
        for span in found.values()
        if span is not request
    )
    assert spans.num_open == 0


def test_the_phases_of_a_shipped_prompt_follow_one_another() -> None:
    tracer = Tracer("both")
    spans = RequestSpans(tracer)
    order = submit(CLIENT.traceparent)
    spans.on_submit(order)
    handle = SimpleNamespace(owner_id="decode-0")
    start = FillStart(stream=1, handle=handle, request_id="r", traceparent=order.traceparent)  # type: ignore[arg-type]
    filler = FillTrace(tracer, start)
    moments = sorted(random.uniform(0.001, 1.0) for _ in range(13))
    timings = FillTimings(
        accepted_at=time.monotonic(),
        queued_s=moments[0],
        planned_s=moments[1],
        last_chunk_computed_s=moments[2],
        last_digest_s=moments[4] - moments[3],
        last_digested_s=moments[4],
        last_write_posted_s=moments[5],
        last_write_complete_s=moments[6],
        reported_s=moments[7],
        computed_tokens=32,
        bytes=4096,
    )
    filler.on_event(FillEvent(kind="done", timings=timings))
    filler.end()
    fill = FillRecord(
        source="prefill",
        worker_id="prefill-0",
        transport="nixl",
        start_token=0,
        end_token=32,
        start_s=0.0,
        announced_s=moments[7],
        arrived_s=moments[8],
        checked_s=moments[9],
        end_s=moments[10],
        accepted_tokens=32,
    )
    times = timeline(
        admitted_s=0.0,
        fills=[fill],
        local_prefill_tokens=1,
        local_prefill_began_s=moments[11],
        first_token_s=moments[12],
        finish_s=2.0,
    )
    spans.on_batch(finished(0, times))

    def phases(names: list[str], zero_s: float) -> list[float]:
        """Begins of these phases; each ends where the next one begins, as far as both are known."""
        found = {span.name: span for span in tracer.recent.find("r", 40)}
        parts = [found[name] for name in names]
        zero_ns = (zero_s + time.time() - time.monotonic()) * 1e9
        for one, after in itertools.pairwise(parts):
            assert one.end_time == pytest.approx(after.start_time, abs=1e6), (one, after)
        ends = [part.start_time for part in parts] + [parts[-1].end_time]
        return [(end - zero_ns) / 1e9 for end in ends]

    of_filler = ["plan", "compute", "gather", "digest", "post", "write", "report"]
    assert phases(of_filler, timings.accepted_at) == pytest.approx(moments[:8], abs=1e-3)
    of_owner = ["arrival", "check", "publish"]
    assert phases(of_owner, times.submitted_at) == pytest.approx(moments[7:11], abs=1e-3)
    assert phases(["tail", "decode"], times.submitted_at) == pytest.approx(
        [*moments[11:], 2.0], abs=1e-3
    )


def test_samples_share_one_request() -> None:
    tracer = Tracer("decode")
    spans = RequestSpans(tracer)
    spans.on_submit(submit(CLIENT.traceparent, n=3))
    for sample in (1, 0, 2):
        assert spans.num_open == 1
        # The others are admitted behind the first one's prompt, of which they compute the end.
        began_s = 0.5 if sample else 0.0
        times = {"admitted_s": 0.1 + began_s, "first_token_s": 0.6 + began_s / 50}
        tokens = 3 if sample else 100
        spans.on_batch(finished(sample, timeline(**times, local_prefill_tokens=tokens, finish_s=2)))
    found = tracer.recent.find("r", 20)
    names = sorted(span.name for span in found)
    assert names == ["decode", "decode", "decode", "prefill", "queue", "request"]
    (queue,) = (span for span in found if span.name == "queue")
    assert (queue.end_time - queue.start_time) / 1e9 == pytest.approx(0.1, abs=1e-3)
    (prefill,) = (span for span in found if span.name == "prefill")
    assert prefill.attributes["weft.tokens"] == 100
    assert spans.num_open == 0


def test_failed_and_abandoned_requests_leave_nothing_open() -> None:
    tracer = Tracer("decode")
    spans = RequestSpans(tracer)
    spans.on_submit(submit(CLIENT.traceparent))
    failure = Failure(reason="OUT_OF_PAGES", message="none left")
    failed = Failed(request_id="r", attempt=1, failure=failure, timeline=timeline(admitted_s=0.1))
    spans.on_batch(GatewayBatch(gateway=1, failed=[failed]))
    by_name = {span.name: span for span in tracer.recent.find("r", 10)}
    assert by_name.keys() == {"queue", "request"}
    assert by_name["request"].status.description == "OUT_OF_PAGES: none left"
    spans.on_submit(submit(CLIENT.traceparent))
    spans.on_session_closed(2)
    assert spans.num_open == 1
    spans.on_session_closed(1)
    assert spans.num_open == 0
    assert tracer.recent.find("r", 1)[0].status.description == "the session ended"


@pytest.mark.parametrize(
    ("is_on", "context"), [(False, CLIENT.traceparent), (True, "")], ids=["off", "no"]
)
def test_what_is_not_traced_is_left_alone(is_on: bool, context: str) -> None:
    spans = RequestSpans(Tracer("decode", is_on=is_on))
    order = submit(context)
    spans.on_submit(order)
    assert (order.traceparent, spans.num_open) == (context, 0)


# -- export --------------------------------------------------------------------------------------


def run_gateway(folder: Path, *flags: str, **environment: str) -> ServiceProcess:
    model_dir = write_model_dir(folder / "tiny")
    command = [sys.executable, "-m", "weft.gateway", "--model-dir", str(model_dir)]
    command += ["--port", "0", "--decode", "127.0.0.1:1", "--log-format", "json", *flags]
    return ServiceProcess("gateway", command, folder, environment)


def test_a_protocol_of_the_environment_that_is_not_there_is_said(tmp_path: Path) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
    }
    with run_gateway(tmp_path, **environment) as process:
        process.wait_ready()
        log = process.log
    assert "spans are not exported to http://127.0.0.1:4317: OTEL_EXPORTER_OTLP_PROTOCOL" in log


def test_an_export_that_a_flag_asks_for_and_cannot_be_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    settings = ServiceSettings(otlp_endpoint="http://127.0.0.1:4317")
    with pytest.raises(ConfigError, match=r"^--otlp-endpoint http://127.0.0.1:4317: OTEL"):
        start_export(Tracer("decode"), settings)


async def test_a_collector_that_does_not_answer_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:  # takes connections, says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        made: list[Harness] = []
        caplog.set_level(logging.WARNING)
        async with gateway(tmp_path, script_of(made), otlp_endpoint=endpoint) as harness:
            made.append(harness)
            async with asyncio.timeout(30):
                ids = await asyncio.gather(*(ask(harness) for _ in range(50)))
            assert len(await spans_of(harness, ids[-1])) == 6
            stopping = time.monotonic()
        # It gives up on what is left instead of waiting for the collector.
        assert time.monotonic() - stopping < 25  # The exporter itself would wait for 30 s.


async def test_spans_reach_a_collector_over_the_flag(tmp_path: Path) -> None:
    made: list[Harness] = []
    with collector() as collecting:
        async with gateway(tmp_path, script_of(made), otlp_endpoint=collecting.address) as harness:
            made.append(harness)
            await ask(harness, ("traceparent", CLIENT.traceparent))
        # The stop has flushed them.
        names = {span.name for span in collecting.spans(f"{CLIENT.trace_id:032x}")}
    assert {"text_completion", "attempt 1", "render"} <= names
