"""The gRPC face of every process of a mesh: typed calls, health, reflection, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from weft.testing.meshes.local_mesh import MODEL, LocalMesh, wait_until
from weft.testing.meshes.mesh_calls import Ask, Caller, new_salt
from weft.testing.meshes.mesh_kinds import NUM_TOKENS, on
from weft.testing.meshes.mesh_prompts import BY_NAME
from weft.testing.meshes.text_reference import TextReference
from weft.v1 import common_pb2, gateway_pb2, worker_pb2

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600), on("nixl")]

CHAT = BY_NAME["turns"]
RAW = BY_NAME["chinese"]
SERVICES = {
    "gateway": {
        *("weft.v1.GatewayService", "weft.v1.OpenAIService", "weft.v1.ResponsesService"),
        *("weft.v1.AnthropicService", "weft.v1.OllamaService", "weft.v1.ServerService"),
        "weft.v1.TrainerService",
    },
    "decode-0": {"weft.v1.DecodeService", "weft.v1.WorkerService"},
    "prefill-0": {"weft.v1.PrefillService", "weft.v1.WorkerService"},
}
METRICS = {
    "gateway": {
        "weft_time_to_first_token_seconds_bucket",
        "weft_inter_token_latency_seconds_bucket",
        "weft_request_duration_seconds_bucket",
        "weft_requests_running",
        "weft_requests_queued",
        "weft_decode_workers",
    },
    "decode-0": {
        "weft_requests",
        "weft_kv_pages",
        "weft_engine_loop_age_seconds",
        "weft_engine_fills_done_total",
        "weft_engine_accepted_bytes_total",
        "weft_engine_digest_mismatches_total",
        "weft_engine_preemptions_total",
        "weft_engine_generated_tokens_total",
    },
    "prefill-0": {
        "weft_requests",
        "weft_kv_pages",
        "weft_engine_computed_tokens_total",
        "weft_engine_shipped_bytes_total",
        "weft_engine_leases_done_total",
    },
    "rest": set(),
}


@pytest.fixture
async def caller(mesh: LocalMesh) -> AsyncIterator[Caller]:
    async with Caller(mesh) as made:
        yield made


def chat_request(max_tokens: int = NUM_TOKENS) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(
        model=MODEL,
        messages=[gateway_pb2.ChatMessage(role=r, content=c) for r, c in CHAT.messages],
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopCriteria(max_tokens=max_tokens),
    )


async def test_chat_whole_and_streamed(caller: Caller, reference: TextReference) -> None:
    expected = reference.of(CHAT, NUM_TOKENS)
    request = chat_request()
    (whole,) = [message async for message in caller.stub.Chat(request)]
    assert whole.model == MODEL
    assert whole.choices[0].text == reference.text(expected.token_ids)
    assert list(whole.choices[0].token_ids) == expected.token_ids
    assert whole.usage.prompt_tokens == len(expected.prompt_ids)

    request.stream = True
    # However few: a busy gateway passes on several tokens at once.
    messages = [message async for message in caller.stub.Chat(request)]
    assert len({message.request_id for message in messages}) == 1
    parts = [choice for message in messages for choice in message.choices]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert [i for part in parts for i in part.token_ids] == expected.token_ids
    reasons = [part.finish_reason for part in parts]
    assert [bool(reason) for reason in reasons] == [False] * (len(parts) - 1) + [True]
    assert [message.HasField("usage") for message in messages][:-1] == [False] * (len(messages) - 1)
    assert messages[-1].usage.completion_tokens == len(expected.token_ids)
    assert messages[-1].timeline.worker_id == "decode-0"

    # But not all of them, of an answer that takes a minute.
    request.stop.max_tokens, request.stop.ignore_eos = 4000, True
    call = caller.stub.Chat(request)
    first = await anext(aiter(call))
    call.cancel()
    assert [bool(choice.finish_reason) for choice in first.choices] == [False]


async def test_logprobs(caller: Caller, reference: TextReference) -> None:
    expected = reference.of(RAW, NUM_TOKENS)
    request = gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=expected.prompt_ids),
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopCriteria(max_tokens=NUM_TOKENS),
        logprobs=common_pb2.LogprobOptions(top_logprobs=3),
    )
    (whole,) = [message async for message in caller.stub.Complete(request)]
    logprobs = whole.choices[0].logprobs
    assert [entry.token_id for entry in logprobs] == expected.token_ids
    for position, entry in enumerate(logprobs):
        right = expected.logprob(position, entry.token_id)
        assert entry.logprob == pytest.approx(right, abs=1e-3)
        assert [top.token_id for top in entry.top] == [i for i, _ in expected.top[position][:3]]


async def test_tokens_and_back(caller: Caller, reference: TextReference) -> None:
    stub = caller.stub
    for prompt in (RAW, CHAT, BY_NAME["emoji"]):
        messages = [gateway_pb2.ChatMessage(role=r, content=c) for r, c in prompt.messages]
        made = await stub.Tokenize(
            gateway_pb2.TokenizeRequest(model=MODEL, text=prompt.text, messages=messages)
        )
        assert list(made.tokens.ids) == reference.prompt_ids(prompt)
        assert made.max_context_tokens == 8192
        back = await stub.Detokenize(gateway_pb2.DetokenizeRequest(model=MODEL, tokens=made.tokens))
        if not prompt.is_chat:
            assert back.text == prompt.text


async def test_models_and_fleet(caller: Caller, mesh: LocalMesh) -> None:
    stub = caller.stub
    listed = await stub.ListModels(gateway_pb2.ListModelsRequest())
    assert [model.name for model in listed.models] == [MODEL]
    one = await stub.GetModel(gateway_pb2.GetModelRequest(model=MODEL))
    assert one.model == listed.models[0]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModel(gateway_pb2.GetModelRequest(model="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    fleet = await stub.GetFleet(gateway_pb2.GetFleetRequest())
    found = {worker.worker_id: worker for worker in fleet.workers}
    assert found.keys() == {"decode-0", "prefill-0"}
    for name, worker in found.items():
        assert worker.healthy
        assert worker.role == name.partition("-")[0]
        assert worker.address == mesh.service(name)["address"]


async def test_cancel_ends_a_stream_as_cancelled(caller: Caller, mesh: LocalMesh) -> None:
    request = chat_request(4000)
    request.stream = True
    request.stop.ignore_eos = True
    reason = common_pb2.FINISH_REASON_UNSPECIFIED
    was_found = None
    async for message in caller.stub.Chat(request):
        if was_found is None:
            cancel = gateway_pb2.CancelRequest(request_id=message.request_id)
            was_found = (await caller.stub.Cancel(cancel)).found
        for choice in message.choices:
            reason = choice.finish_reason or reason
    assert was_found
    assert reason == common_pb2.FINISH_REASON_CANCELLED
    await asyncio.to_thread(wait_until, lambda: mesh.is_idle("decode-0"), 30)
    again = await caller.stub.Cancel(gateway_pb2.CancelRequest(request_id="chatcmpl-none"))
    assert not again.found


async def test_a_deadline_ends_a_request_everywhere(caller: Caller, mesh: LocalMesh) -> None:
    request = chat_request(4000)
    request.stop.ignore_eos = True
    request.timeout.FromMilliseconds(700)
    for arguments in ({}, {"timeout": 0.7}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in caller.stub.Chat(request, **arguments):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        request.ClearField("timeout")
    await asyncio.to_thread(wait_until, lambda: mesh.is_idle("decode-0"), 30)


# ---- what every process has --------------------------------------------------------------------


@contextmanager
def channel_to(mesh: LocalMesh, name: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(mesh.service(name)["address"]) as channel:
        yield channel


@pytest.mark.parametrize("name", SERVICES)
def test_health(mesh: LocalMesh, name: str) -> None:
    with channel_to(mesh, name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES[name]):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", SERVICES)
def test_reflection(mesh: LocalMesh, name: str) -> None:
    with channel_to(mesh, name) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert services >= SERVICES[name] | {"grpc.health.v1.Health"}
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        for service in SERVICES[name]:
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
            (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=60)
            files = [
                FileDescriptorProto.FromString(raw)
                for raw in answer.file_descriptor_response.file_descriptor_proto
            ]
            names = {f"{file.package}.{each.name}" for file in files for each in file.service}
            assert service in names


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_worker_says_what_it_is(mesh: LocalMesh, name: str) -> None:
    ready = mesh.service(name)
    with mesh.worker(name) as stub:
        info = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
    assert (info.worker_id, info.epoch) == (name, ready["epoch"])
    assert (info.server_pid, info.engine_pid) == (ready["pid"], ready["engine_pid"])
    assert (info.model, info.dtype, info.page_size) == (MODEL, "float32", 16)
    assert (info.max_context_tokens, info.vocabulary_size) == (8192, 49152)
    assert len(info.model_digest) == 32
    assert common_pb2.TRANSPORT_KIND_NIXL in info.transports
    (plane,) = info.planes
    # Behind the model's 30 layers there is the draft head's.
    assert (plane.layers, plane.heads, [part.dim for part in plane.parts]) == (31, 3, [64, 64])
    assert len(plane.draft_digest) == 32
    assert {"weft", "torch", "nixl"} <= info.versions.keys()


async def test_metrics(mesh: LocalMesh, caller: Caller) -> None:
    await caller.grpc(Ask(CHAT, 2, new_salt()))
    async with httpx.AsyncClient(trust_env=False) as http:
        for name, wanted in METRICS.items():
            address = mesh.service(name)["metrics_address"]
            answer = await http.get(f"http://{address}/metrics")
            assert answer.status_code == 200
            lines = [line for line in answer.text.splitlines() if line and line[0] != "#"]
            names = {line.split("{")[0].split()[0] for line in lines}
            assert names >= wanted, wanted - names
            assert [name for name in names if name.startswith("weft_")]
