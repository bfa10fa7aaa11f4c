"""What goes wrong: workers lost, restarted, stalled; clients that leave, stall or cancel."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.common.rpc.errors import from_rpc_error
from weft.contract.codec.walk import duration
from weft.contract.errors import (
    DeadlineExceeded,
    Draining,
    Overloaded,
    PeerUnavailable,
    SlowClient,
)
from weft.gateway.fleet.worker import FleetWorker
from weft.gateway.generation import pipeline
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Event, FakeWorker, Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, gateway_pb2_grpc

TOKENIZER = byte_level_bpe()
TEXT = "The text that every worker writes, 你好."
TOKENS = TOKENIZER.encode(TEXT).ids
USER = [{"role": "user", "content": "hi"}]


def plain(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[TOKENS])


def endless(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[TOKENS[0]] * submit.stop.max_tokens])


async def text_of(mesh: Harness, **body: Any) -> str:
    answer = await mesh.json("ChatCompletions", {"model": MODEL, "messages": USER, **body})
    return str(answer["choices"][0]["message"]["content"])


async def rest_of(call: Any) -> list[Any]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def failure_of(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    return from_rpc_error(caught.value)


def chat(mesh: Harness, **fields: Any) -> Any:
    return mesh.typed.Chat(
        gateway_pb2.ChatRequest(
            messages=[gateway_pb2.ChatMessage(role="user", content="hi")], stream=True, **fields
        )
    )


@asynccontextmanager
async def narrow_stub(mesh: Harness) -> AsyncIterator[Any]:
    """A client whose transport holds little that it has not read."""
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(mesh.app.server.address, options=options) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


async def test_lost_session_before_output_goes_elsewhere(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], break_after=0 if submit.attempt == 1 else 10**9)

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        body = {"seed": None, "temperature": 0.5}
        assert await text_of(mesh, **body) == TEXT
        submits = [submit for worker in mesh.workers for submit in worker.submits]
        assert sorted(submit.attempt for submit in submits) == [1, 2]
        assert len({submit.request_id for submit in submits}) == 1
        assert len({submit.sampling.seed for submit in submits}) == 1
        assert {len(worker.submits) for worker in mesh.workers} == {1}
        # The cut Session comes back.
        await mesh.wait(lambda: sum(worker.num_sessions for worker in mesh.workers) == 3)


async def test_lost_session_without_another_attempt_is_a_typed_error(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], break_after=3)

    async with gateway(tmp_path, script, num_decode=2, max_attempts=1) as mesh:
        call = chat(mesh)
        assert (await call.read()).choices[0].text
        error = await failure_of(call)
        assert isinstance(error, PeerUnavailable)
        assert error.retryable
        assert error.retry_after_s
        assert error.worker_id.startswith("decode-")
        assert sum(len(worker.submits) for worker in mesh.workers) == 1


async def test_every_worker_lost_ends_in_an_error(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], break_after=0)

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        error = await failure_of(chat(mesh))
        assert isinstance(error, PeerUnavailable)
        assert error.http_status == 503


async def test_refusal_is_tried_elsewhere_only_when_retryable(tmp_path: Path) -> None:
    def refusal(code: str, retryable: bool) -> Event.Failed:
        return Event.Failed(
            error=common_pb2.ErrorDetail(code=code, retryable=retryable, message="no: " + code)
        )

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if submit.cache_salt == "final":
            return Script(
                tokens=[TOKENS], fail=refusal("CONTEXT_LENGTH_EXCEEDED", False), fail_after=0
            )
        first = submit.attempt == 1
        return Script(
            tokens=[TOKENS],
            fail=refusal("OVERLOADED", True),
            fail_after=0 if first or submit.cache_salt == "full" else 10**9,
        )

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        assert await text_of(mesh) == TEXT
        for salt, expected in (("final", "CONTEXT_LENGTH_EXCEEDED"), ("full", "OVERLOADED")):
            for worker in mesh.workers:
                worker.submits.clear()
            error = await failure_of(chat(mesh, cache_salt=salt))
            assert error.reason == expected
            num_tried = sum(len(worker.submits) for worker in mesh.workers)
            assert num_tried == (1 if salt == "final" else 2)


async def test_worker_restarted_at_the_same_address(tmp_path: Path) -> None:
    async with gateway(tmp_path, plain) as mesh:
        assert await text_of(mesh) == TEXT
        old = mesh.workers[0]
        port = int(old.address.rsplit(":", 1)[1])
        await old.stop(keeps_port=True)
        error = await failure_of(chat(mesh))
        assert isinstance(error, PeerUnavailable)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.openai.Ready(Empty())
        assert from_rpc_error(caught.value).http_status == 503
        new = FakeWorker(MODEL, old.vocabulary_size, plain, worker_id="decode-0")
        await new.start(port)
        mesh.workers.append(new)
        await mesh.ready()
        assert await text_of(mesh) == TEXT
        assert len(new.submits) == 1


async def test_worker_that_comes_later(tmp_path: Path) -> None:
    async with gateway(tmp_path, plain, wait=False) as mesh:
        worker = mesh.workers[0]
        port = int(worker.address.rsplit(":", 1)[1])
        await worker.stop(keeps_port=True)
        error = await failure_of(chat(mesh))
        assert isinstance(error, PeerUnavailable)
        await worker.start(port)
        await mesh.ready()
        assert await text_of(mesh) == TEXT


async def test_a_worker_that_is_away_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a gateway stood still, and all its Sessions are gone."""
    monkeypatch.setattr(pipeline, "_FIND_WORKER_S", 60.0)
    async with gateway(tmp_path, plain, num_decode=1) as mesh:
        worker = mesh.workers[0]
        port = int(worker.address.rsplit(":", 1)[1])
        await worker.stop(keeps_port=True)
        answer = asyncio.create_task(text_of(mesh))
        await asyncio.sleep(0.3)
        assert not answer.done()
        await worker.start(port)
        assert await answer == TEXT


def tells_to_be_stale_after(worker: FleetWorker, stale_after_s: float) -> bool:
    report = worker.report
    return report is not None and report.stale_after == duration(stale_after_s)


@pytest.mark.parametrize("stale_after_s", [2.0, 600.0])
async def test_a_silent_worker_is_dead_within_its_bound(
    tmp_path: Path, stale_after_s: float
) -> None:
    """Its engine may be in a step of minutes: nothing of that keeps its server from reporting."""
    async with gateway(tmp_path, endless, num_decode=2, step_s=0.01, max_attempts=1) as mesh:
        for worker in mesh.workers:
            worker.stale_after_s = stale_after_s
        for known in mesh.app.fleet.workers():
            await mesh.wait(partial(tells_to_be_stale_after, known, stale_after_s))
        call = chat(mesh)
        await call.read()
        victim = next(worker for worker in mesh.workers if worker.submits)
        other = next(worker for worker in mesh.workers if worker is not victim)
        victim.is_frozen = True
        async with asyncio.timeout(60):
            error = await failure_of(call)
        assert isinstance(error, PeerUnavailable)
        fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
        state = {worker.worker_id: worker for worker in fleet.workers}
        assert not state[victim.worker_id].healthy
        assert state[victim.worker_id].problem
        assert state[other.worker_id].healthy
        victim.is_frozen = False

        async def healthy() -> int:
            fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
            return sum(worker.healthy for worker in fleet.workers)

        async with asyncio.timeout(60):
            while await healthy() < 2:
                await asyncio.sleep(0.05)


async def test_a_gateway_that_was_stopped_does_not_blame_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(tmp_path, endless, num_decode=1, step_s=0.01, max_attempts=1) as mesh:
        call = chat(mesh)
        await call.read()
        worker = mesh.workers[0]
        worker.is_frozen = True
        await asyncio.sleep(0.5)  # A ping is under way, and its answer.
        worker.is_frozen = False
        time.sleep(3.0)  # noqa: ASYNC251 - The gateway itself stands still.
        await asyncio.sleep(1.0)
        assert worker.num_sessions == 1
        told = [m for m in caplog.messages if "stood still" in m]  # A busy machine adds others.
        times = [[float(word) for word in m.split() if word[0].isdigit()] for m in told]
        late_s, computed_s = max(times)
        assert late_s >= 2.0
        assert computed_s < 1.0  # It slept.
        await call.read()
        call.cancel()


@pytest.mark.parametrize("change", ["draining", "stale"])
async def test_unfit_workers_get_nothing(tmp_path: Path, change: str) -> None:
    async with gateway(tmp_path, plain, num_decode=2) as mesh:
        if change == "draining":
            mesh.workers[0].is_draining = True
        else:
            mesh.workers[0].loop_age_s = 10.0
        known = next(mesh.app.fleet.workers("decode"))
        await mesh.wait(lambda: known.problem(asyncio.get_running_loop().time()))
        for _ in range(4):
            assert await text_of(mesh) == TEXT
        assert not mesh.workers[0].submits
        assert len(mesh.workers[1].submits) == 4


async def test_wrong_worker_is_told(tmp_path: Path) -> None:
    async with gateway(tmp_path, plain, wait=False) as mesh:
        mesh.workers[0].model = "another"
        await mesh.workers[0].stop(keeps_port=True)
        await mesh.workers[0].start(int(mesh.workers[0].address.rsplit(":", 1)[1]))

        async def problem() -> str:
            fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
            return str(fleet.workers[0].problem)

        async with asyncio.timeout(60):
            while "another" not in await problem():
                await asyncio.sleep(0.05)


async def test_repeated_deltas_are_delivered_once(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], chunk=2, repeat_deltas=True)

    async with gateway(tmp_path, script) as mesh:
        assert await text_of(mesh) == TEXT
        parts = [message async for message in chat(mesh)]
        ids = [i for message in parts for choice in message.choices for i in choice.token_ids]
        assert ids == TOKENS


async def test_missing_tokens_are_an_error_in_the_end(tmp_path: Path) -> None:
    """They are asked for again, of whoever is there, as often as an attempt may be lost."""

    class Lossy(FakeWorker):
        def _send_tokens(self, run, sample, first, ids, event):  # type: ignore[no-untyped-def]
            if first != 2:
                super()._send_tokens(run, sample, first, ids, event)

    async with gateway(tmp_path, plain) as mesh:
        mesh.workers[0].__class__ = Lossy
        error = await failure_of(chat(mesh))
        assert isinstance(error, PeerUnavailable)
        assert "missing" in error.message
        assert len(mesh.workers[0].submits) > 1


@pytest.mark.parametrize("face", ["typed", "rest", "rest-whole"])
async def test_disconnect_cancels_at_the_worker(tmp_path: Path, face: str) -> None:
    async with gateway(tmp_path, endless, step_s=0.01) as mesh:
        worker = mesh.workers[0]
        if face == "typed":
            call = chat(mesh)
        else:
            body = {"messages": USER, "stream": face == "rest"}
            call = mesh.openai.ChatCompletions(HttpBody(data=json.dumps(body).encode()))
        if face == "rest-whole":
            reading = asyncio.create_task(call.read())
            await mesh.wait(lambda: worker.submits)
            reading.cancel()
        else:
            await call.read()
        call.cancel()
        await mesh.wait(lambda: worker.cancels)
        assert worker.cancels[0].request_id == worker.submits[0].request_id
        assert not worker.cancels[0].HasField("sample")
        await mesh.wait(lambda: not mesh.app._admission.num_running)


async def test_cancel_by_id(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless, step_s=0.01) as mesh:
        call = chat(mesh)
        first = await call.read()
        assert not (await mesh.typed.Cancel(gateway_pb2.CancelRequest())).found
        cancel = gateway_pb2.CancelRequest(request_id=first.request_id)
        assert (await mesh.typed.Cancel(cancel)).found
        messages = await rest_of(call)
        finishes = [choice.finish_reason for m in messages for choice in m.choices]
        assert finishes[-1] == common_pb2.FINISH_REASON_CANCELLED
        assert messages[-1].HasField("usage")
        await mesh.wait(lambda: mesh.workers[0].cancels)
        assert not (await mesh.typed.Cancel(cancel)).found


@pytest.mark.parametrize("reads", [False, True])
async def test_deadline(tmp_path: Path, reads: bool) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], hang_after=3 if reads else 0)

    async with gateway(tmp_path, script) as mesh:
        request = gateway_pb2.ChatRequest(
            messages=[gateway_pb2.ChatMessage(role="user", content="hi")], stream=reads
        )
        request.timeout.FromMilliseconds(2000)
        error = await failure_of(mesh.typed.Chat(request))
        assert isinstance(error, DeadlineExceeded)
        assert mesh.workers[0].submits[0].total_timeout.ToMilliseconds() <= 2000
        await mesh.wait(lambda: mesh.workers[0].cancels)


async def test_client_that_never_reads(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if submit.cache_salt == "slow":
            return Script(tokens=[TOKENS * 8000], chunk=2000)
        return Script(tokens=[TOKENS * 3])

    tokens = 300_000
    async with (
        gateway(tmp_path, script, max_unsent_bytes=16 << 10, max_context_tokens=tokens) as mesh,
        narrow_stub(mesh) as stub,
    ):
        slow = stub.Complete(
            gateway_pb2.CompleteRequest(
                token_ids=common_pb2.TokenIds(ids=[5]), stream=True, cache_salt="slow"
            )
        )
        await slow.initial_metadata()
        await mesh.wait(lambda: mesh.workers[0].cancels)
        # The others are not disturbed meanwhile.
        texts = await asyncio.gather(*(text_of(mesh, max_tokens=500) for _ in range(8)))
        assert texts == [TEXT * 3] * 8
        await mesh.wait(lambda: not mesh.app._admission.num_running)
        error = await failure_of(slow)
        assert isinstance(error, SlowClient)


async def test_slow_reader_gets_merged_deltas(tmp_path: Path) -> None:
    tokens = TOKENS * 500

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[tokens], chunk=4)

    async with gateway(
        tmp_path,
        script,
        max_context_tokens=100_000,
        max_unsent_bytes=8 << 20,
        step_s=0.0,
        metrics_port=0,
    ) as mesh:
        async with narrow_stub(mesh) as stub:
            call = stub.Complete(
                gateway_pb2.CompleteRequest(token_ids=common_pb2.TokenIds(ids=[5]), stream=True)
            )
            parts = [await call.read()]
            # Flow control stops the gateway long before the worker is done.
            read = mesh.app.metrics.registry.get_sample_value
            name = "weft_inter_token_latency_seconds_count"
            await mesh.wait(lambda: read(name) == len(tokens) - 4)
            parts += await rest_of(call)
        ids = [i for message in parts for choice in message.choices for i in choice.token_ids]
        text = "".join(choice.text for message in parts for choice in message.choices)
        assert ids == tokens
        assert text == TEXT * 500
        assert len(parts) < len(tokens) / 8


async def test_requests_are_told_that_all_workers_have_lost_their_weights(tmp_path: Path) -> None:
    """Also those that a worker gets before the gateway has heard of it."""
    workers: list[FakeWorker] = []
    lost = Event.Failed(error=common_pb2.ErrorDetail(code="WEIGHTS_INCOMPLETE", message="none"))

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        for worker in workers:
            worker.weights_state = "failed"
        return Script(tokens=[TOKENS], fail=lost, fail_after=0)

    async with gateway(tmp_path, script, step_s=0.3, resume_timeout_s=600.0) as mesh:
        workers += mesh.workers
        for _ in range(2):
            error = await failure_of(chat(mesh))
            assert (error.http_status, error.reason) == (503, "WEIGHTS_INCOMPLETE")


async def test_answer_does_not_wait_for_a_lost_report(tmp_path: Path) -> None:
    class Deaf(FakeWorker):
        def _cancel(self, cancel, runs, event):  # type: ignore[no-untyped-def]
            pass

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], hang_after=len(TOKENS) - 1)

    async with gateway(tmp_path, script) as mesh:
        mesh.workers[0].__class__ = Deaf
        assert await text_of(mesh, stop="text that") == TEXT[: TEXT.index("text that")]
        await mesh.wait(lambda: not mesh.app._admission.num_running)


async def test_overload_and_drain(tmp_path: Path) -> None:
    async with gateway(
        tmp_path,
        endless,
        step_s=0.01,
        max_running_requests=2,
        max_queued_requests=1,
        drain_grace_s=60.0,
    ) as mesh:
        running = [chat(mesh), chat(mesh)]
        for call in running:
            await call.read()
        queued = chat(mesh)
        await mesh.wait(lambda: mesh.app._admission.num_queued == 1 or queued.done())
        error = await failure_of(chat(mesh))
        assert isinstance(error, Overloaded)
        assert error.http_status == 429
        assert error.retry_after_s
        draining = asyncio.create_task(mesh.app.drain())
        await asyncio.sleep(0)
        refused = await failure_of(chat(mesh))
        assert isinstance(refused, Draining)
        assert (refused.http_status, refused.retryable) == (503, True)
        assert refused.retry_after_s
        with pytest.raises(grpc.aio.AioRpcError) as unready:
            await mesh.openai.Ready(Empty())
        assert isinstance(from_rpc_error(unready.value), Draining)
        running[0].cancel()
        assert (await queued.read()).choices  # admitted before the drain: it is served
        assert not draining.done()
        queued.cancel()
        running[1].cancel()
        await asyncio.wait_for(draining, 60)


async def test_load_is_spread(tmp_path: Path) -> None:
    async with gateway(tmp_path, plain, num_decode=2, decode_policy="round_robin") as mesh:
        for _ in range(6):
            await text_of(mesh)
        assert [len(worker.submits) for worker in mesh.workers] == [3, 3]
    # Scripted workers tell of no requests that they run: no report is to come between them.
    async with gateway(tmp_path, endless, num_decode=2, step_s=0.01, load_interval_s=3.0) as mesh:
        mesh.workers[0].running_requests = 3
        known = list(mesh.app.fleet.workers("decode"))
        seen = [worker.report for worker in known]
        await mesh.wait(lambda: known[0].load.num_requests == 3)
        await mesh.wait(lambda: known[1].report is not seen[1])
        calls = [chat(mesh) for _ in range(5)]
        for call in calls:
            await call.read()
        assert sorted(len(worker.submits) for worker in mesh.workers) == [1, 4]
        for call in calls:
            call.cancel()


async def test_prefill_candidates(tmp_path: Path) -> None:
    async with gateway(tmp_path, plain, num_prefill=3, max_prefill_candidates=2) as mesh:
        busy = mesh.workers[1]
        busy.queued_tokens = 10_000
        known = list(mesh.app.fleet.workers("prefill"))
        await mesh.wait(lambda: known[0].load.queued_tokens == 10_000)
        await mesh.wait(lambda: all(one.report for one in known))
        await text_of(mesh)
        candidates = mesh.workers[0].submits[0].prefill_candidates
        by_id = {worker.worker_id: worker for worker in mesh.workers}
        assert len(candidates) == 2
        for candidate in candidates:
            worker = by_id[candidate.worker_id]
            assert worker is not busy
            assert (candidate.address, candidate.epoch) == (worker.address, worker.epoch)
        for worker in mesh.workers[2:]:
            await worker.stop()
        now = asyncio.get_running_loop().time
        workers = list(mesh.app.fleet.workers("prefill"))
        await mesh.wait(lambda: [w.problem(now()) == "" for w in workers].count(True) == 1)
        await text_of(mesh)
        left = mesh.workers[0].submits[1].prefill_candidates
        assert [candidate.worker_id for candidate in left] == [busy.worker_id]
        await mesh.openai.Ready(Empty())


async def test_metrics_count(tmp_path: Path) -> None:
    async with gateway(tmp_path, plain, metrics_port=0) as mesh:
        await text_of(mesh, max_tokens=5)
        await failure_of(chat(mesh, model="nope"))
        read = mesh.app.metrics.registry.get_sample_value
        await mesh.wait(lambda: read("weft_requests_total", {"outcome": "model_not_found"}) == 1)
        assert read("weft_requests_total", {"outcome": "ok"}) == 1
        assert read("weft_request_duration_seconds_count") == 1  # of the one that was served
        assert read("weft_generation_tokens_total") == 5
        assert read("weft_prompt_tokens_total") == len(mesh.workers[0].prompts[0])
        assert read("weft_time_to_first_token_seconds_count") == 1
        assert read("weft_inter_token_latency_seconds_count") == 4
        assert read("weft_time_per_output_token_seconds_count") == 1
        gaps_s = read("weft_inter_token_latency_seconds_sum")
        assert read("weft_time_per_output_token_seconds_sum") == pytest.approx(gaps_s / 4)
        assert read("weft_decode_workers") == 1


@pytest.mark.parametrize("lengths", [(2, 6), (6, 2)])
async def test_a_prompt_is_counted_as_the_sample_that_began_first_tells(
    tmp_path: Path, lengths: tuple[int, int]
) -> None:
    """Siblings begin with its pages, later, whichever ends first."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        fill = common_pb2.FillTimeline(
            source=common_pb2.FILL_SOURCE_PREFILL, bytes=1 << 20, worker_id="prefill-0"
        )
        first = common_pb2.Timeline(
            worker_id="decode-0",
            queued_time=duration(0.1),
            first_token_time=duration(2.0),
            finish_time=duration(3.0),
            fills=[fill],
        )
        sibling = common_pb2.Timeline(
            worker_id="decode-0",
            queued_time=duration(2.0),
            first_token_time=duration(2.01),
            finish_time=duration(3.5),
        )
        tokens = [[TOKENS[0]] * length for length in lengths]
        return Script(tokens=tokens, timelines=[first, sibling])

    async with gateway(tmp_path, script, metrics_port=0) as mesh:
        await mesh.json("ChatCompletions", {"model": MODEL, "messages": USER, "n": 2})
        read = mesh.app.metrics.registry.get_sample_value
        await mesh.wait(lambda: read("weft_requests_total", {"outcome": "ok"}) == 1)
        assert read("weft_request_queue_time_seconds_sum") == pytest.approx(0.1)
        assert read("weft_request_prefill_time_seconds_sum") == pytest.approx(1.9)
        assert read("weft_fills_total", {"source": "prefill", "outcome": "ok"}) == 1
        assert read("weft_time_per_output_token_seconds_count") == 2


async def test_a_prompt_that_never_left_the_queue_was_there_until_its_end(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        timeline = common_pb2.Timeline(worker_id="decode-0", finish_time=duration(60.0))
        return Script(tokens=[TOKENS], timelines=[timeline])

    async with gateway(tmp_path, script, metrics_port=0) as mesh:
        await text_of(mesh)
        read = mesh.app.metrics.registry.get_sample_value
        await mesh.wait(lambda: read("weft_request_queue_time_seconds_count") == 1)
        assert read("weft_request_queue_time_seconds_sum") == 60.0
        assert read("weft_request_prefill_time_seconds_count") == 0
