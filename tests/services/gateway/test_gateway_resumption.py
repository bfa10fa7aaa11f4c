"""Streams whose decode worker is lost: they go on elsewhere, nothing repeated, nothing missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import (
    DeadlineExceeded,
    Draining,
    PeerUnavailable,
    WeftError,
    WeightsIncomplete,
)
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Event, FakeWorker, Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2

TOKENIZER = byte_level_bpe()
TEXT = "A stop 你好 🚀 that every worker writes."
TOKENS = TOKENIZER.encode(TEXT).ids
OTHER_TEXT = "Another sample, shorter."
OTHER = TOKENIZER.encode(OTHER_TEXT).ids
NEVER = 10**9
ScriptOf = Callable[[decode_pb2.Submit, list[int]], Script]


def breaking(*after: int, tokens: Sequence[Sequence[int]] = (TOKENS,), **fields: Any) -> ScriptOf:
    """Attempt i cuts its Session after after[i - 1] steps; later ones finish."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        steps = after[submit.attempt - 1] if submit.attempt <= len(after) else NEVER
        return Script(tokens=tokens, break_after=steps, **fields)

    return script


def hanging(after: int) -> ScriptOf:
    """The first attempt stops after so many steps, and does not end; later ones finish."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], hang_after=after if submit.attempt == 1 else NEVER)

    return script


def failing(code: str, after: int, attempts: int = 1) -> ScriptOf:
    """The first attempts are handed back with this reason."""
    failed = Event.Failed(
        error=common_pb2.ErrorDetail(code=code, retryable=True, message="no", worker_id="w")
    )

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        is_failing = submit.attempt <= attempts
        return Script(tokens=[TOKENS], fail=failed, fail_after=after if is_failing else NEVER)

    return script


def request_of(**fields: Any) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="hi")], stream=True, **fields
    )


class Collected:
    """Everything that a typed stream brought."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.logprobs: list[common_pb2.TokenLogprob] = []
        self.reasons: dict[int, common_pb2.FinishReason.ValueType] = {}
        self.last = gateway_pb2.ChatResponse()
        self.error: WeftError | None = None

    async def read(self, call: Any) -> Collected:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        return self

    def _take(self, message: gateway_pb2.ChatResponse) -> None:
        self.last = message
        for choice in message.choices:
            number = choice.index
            assert number not in self.reasons, "something came after the end"
            self.texts[number] = self.texts.get(number, "") + choice.text
            self.ids.setdefault(number, []).extend(choice.token_ids)
            self.logprobs += choice.logprobs
            if choice.finish_reason:
                self.reasons[number] = choice.finish_reason


async def collect(mesh: Harness, **fields: Any) -> Collected:
    return await Collected().read(mesh.typed.Chat(request_of(**fields)))


def submits_of(mesh: Harness) -> list[decode_pb2.Submit]:
    """Of all workers, by attempt."""
    submits = [submit for worker in mesh.workers for submit in worker.submits]
    return sorted(submits, key=lambda submit: submit.attempt)


@pytest.mark.parametrize("what", ["submit", "end"])
async def test_a_lost_message_is_noticed(tmp_path: Path, what: str) -> None:
    """Long before the deadline: the worker is asked for what is silent, and does not know it."""
    async with gateway(tmp_path, breaking(), num_decode=2) as mesh:
        for worker in mesh.workers:
            setattr(worker, f"num_{what}s_to_lose", 1)
        got = await collect(mesh)
        assert got.error is None
        assert (got.texts[0], got.ids[0]) == (TEXT, TOKENS)
        lost = got.last.timeline.lost_attempts
        assert {attempt.code for attempt in lost} == {"PEER_UNAVAILABLE"}
        assert all("lost" in attempt.message for attempt in lost)
        assert 1 <= len(lost) <= len(mesh.workers)


async def test_a_gap_in_the_tokens_is_mended(tmp_path: Path) -> None:
    class Lossy(FakeWorker):
        def _send_tokens(self, run, sample, first, ids, event):  # type: ignore[no-untyped-def]
            if first != 2 or run.submit.attempt > 1:
                super()._send_tokens(run, sample, first, ids, event)

    async with gateway(tmp_path, breaking(), num_decode=2) as mesh:
        for worker in mesh.workers:
            worker.__class__ = Lossy
        got = await collect(mesh)
        assert got.error is None
        assert (got.texts[0], got.ids[0]) == (TEXT, TOKENS)
        (lost,) = got.last.timeline.lost_attempts
        assert "missing" in lost.message
        assert lost.generated_tokens == 2


async def test_every_place_of_a_loss(tmp_path: Path) -> None:
    """Also inside characters of several bytes, and before the first token."""
    place = 0

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return breaking(place)(submit, prompt)

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        for place in range(len(TOKENS)):
            for worker in mesh.workers:
                worker.submits.clear()
            got = await collect(mesh)
            assert got.error is None
            assert got.texts == {0: TEXT}
            assert got.ids == {0: TOKENS}
            first, second = submits_of(mesh)
            assert (first.attempt, second.attempt) == (1, 2)
            assert first.request_id == second.request_id
            assert first.sampling == second.sampling
            assert [len(worker.submits) for worker in mesh.workers] == [1, 1]
            assert [list(entry.tokens.ids) for entry in second.progress] == (
                [TOKENS[:place]] if place else []
            )
            assert got.last.usage.completion_tokens == len(TOKENS)
            (lost,) = got.last.timeline.lost_attempts
            assert (lost.attempt, lost.code) == (1, "PEER_UNAVAILABLE")
            assert lost.generated_tokens == place
            assert lost.pause.ToNanoseconds() > 0


@pytest.mark.parametrize("include", [False, True])
async def test_inside_a_stop_string(tmp_path: Path, include: bool) -> None:
    stop = "好 🚀 that"
    place = 0

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return breaking(place)(submit, prompt)

    expected = TEXT[: TEXT.index(stop)] + (stop if include else "")
    async with gateway(tmp_path, script, num_decode=2) as mesh:
        for place in range(len(TOKENS)):  # noqa: B007, the script reads it
            criteria = common_pb2.StopCriteria(stop=[stop], include_stop_in_output=include)
            got = await collect(mesh, stop=criteria)
            assert got.error is None
            assert got.texts == {0: expected}
            assert got.reasons == {0: common_pb2.FINISH_REASON_STOP}


async def test_several_losses_of_several_samples(tmp_path: Path) -> None:
    script = breaking(3, len(OTHER), 1, 0, 2, tokens=(TOKENS, OTHER))
    async with gateway(tmp_path, script, num_decode=2, max_attempts=6) as mesh:
        got = await collect(mesh, sampling=common_pb2.SamplingParams(n=3, seed=4))
        assert got.texts == {0: TEXT, 1: OTHER_TEXT, 2: TEXT}
        assert got.ids == {0: TOKENS, 1: OTHER, 2: TOKENS}
        # A sample that has ended is not run again.
        submits = submits_of(mesh)
        ended = [[e.sample for e in submit.progress if e.finished] for submit in submits]
        assert ended == [[], [], [1], [1], [1], [1]]
        usage = got.last.usage
        assert usage.completion_tokens == 2 * len(TOKENS) + len(OTHER)
        assert usage.prompt_tokens == submits[0].prompt_length
        lost = got.last.timeline.lost_attempts
        assert [entry.attempt for entry in lost] == [1, 2, 3, 4, 5]
        assert [entry.generated_tokens for entry in lost][:2] == [9, 3 * len(OTHER) + 6]


async def test_log_probabilities_go_on(tmp_path: Path) -> None:
    options = common_pb2.LogprobOptions(top_logprobs=2)
    async with gateway(tmp_path, breaking(), num_decode=1) as mesh:
        whole = await collect(mesh, logprobs=options)
    async with gateway(tmp_path, breaking(4, 3), num_decode=2) as mesh:
        got = await collect(mesh, logprobs=options)
    assert len(got.logprobs) == len(TOKENS)
    assert got.logprobs == whole.logprobs


async def test_rest_streams_and_whole_answers(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "weft_timeline": True}
    async with gateway(tmp_path, breaking(5), num_decode=2) as mesh:
        events = await mesh.events("ChatCompletions", dict(body))
        text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
        assert text == TEXT
        answer = await mesh.json("ChatCompletions", body)
        assert answer["choices"][0]["message"]["content"] == TEXT
        for content in (events[-1], answer):
            timeline = ParseDict(content["weft"]["timeline"], common_pb2.Timeline())
            (lost,) = timeline.lost_attempts
            assert lost.worker_id in ("decode-0", "decode-1")
            assert lost.worker_id != timeline.worker_id
            assert (lost.code, lost.generated_tokens) == ("PEER_UNAVAILABLE", 5)


async def test_the_end_was_drawn_but_its_word_lost(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if submit.attempt == 1:
            return Script(tokens=[TOKENS], break_after=len(TOKENS) + 1, hides_end=True)
        return Script(tokens=[TOKENS])

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        got = await collect(mesh)
        assert got.texts == {0: TEXT}
        assert got.ids == {0: TOKENS}
        assert got.reasons == {0: common_pb2.FINISH_REASON_LENGTH}


async def test_long_progress_is_sent_in_parts(tmp_path: Path) -> None:
    num_tokens = 100_000
    tokens = [[TOKENS[i % 7]] * num_tokens for i in range(2)]

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        is_first = submit.attempt == 1
        chunk = 45_000 if is_first else num_tokens
        return Script(tokens=tokens, chunk=chunk, break_after=2 if is_first else NEVER)

    async with gateway(
        tmp_path, script, num_decode=2, max_context_tokens=300_000, max_unsent_bytes=64 << 20
    ) as mesh:
        call = mesh.typed.Complete(
            gateway_pb2.CompleteRequest(
                token_ids=common_pb2.TokenIds(ids=[5] * 40_000),
                sampling=common_pb2.SamplingParams(n=2),
                stop=common_pb2.StopCriteria(max_tokens=num_tokens),
                stream=True,
            )
        )
        got = await Collected().read(call)
        assert got.ids == dict(enumerate(tokens))
        resumed = next(w for w in mesh.workers if w.submits[0].attempt == 2)
        assert resumed.generated == [{i: ids[:90_000] for i, ids in enumerate(tokens)}]
        assert resumed.prompts == [[5] * 40_000]
        assert max(worker.largest_message_bytes for worker in mesh.workers) < 256 << 10


# ---- limits ------------------------------------------------------------------------------------


async def test_attempts_are_bounded(tmp_path: Path) -> None:
    async with gateway(tmp_path, breaking(*[1] * 9), num_decode=2, max_attempts=3) as mesh:
        got = await collect(mesh)
        assert isinstance(got.error, PeerUnavailable)
        assert got.error.retryable
        assert got.error.retry_after_s
        assert got.error.worker_id.startswith("decode-")
        assert got.error.attempt == 3
        # What had come is delivered before the error.
        assert got.ids == {0: TOKENS[:3]}
        assert len(submits_of(mesh)) == 3


async def test_nobody_takes_it_in_time(tmp_path: Path) -> None:
    async with gateway(tmp_path, breaking(3), resume_timeout_s=0.3) as mesh:
        call = mesh.typed.Chat(request_of())
        await call.read()
        await mesh.workers[0].stop()
        got = await Collected().read(call)
        assert isinstance(got.error, PeerUnavailable)
        assert got.error.worker_id == "decode-0"
        await mesh.wait(lambda: not mesh.app._admission.num_running)


def broken(after: int) -> ScriptOf:
    """Attempts fail after so many steps, since an update of the weights has failed."""
    detail = common_pb2.ErrorDetail(code="WEIGHTS_INCOMPLETE", message="a mixture", worker_id="w")
    failed = Event.Failed(error=detail)

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], fail=failed, fail_after=after)

    return script


PATIENT = {"resume_timeout_s": 86_400.0, "request_timeout_s": 86_400.0, "max_attempts": 64}


async def test_no_answer_waits_for_weights_that_no_worker_has(tmp_path: Path) -> None:
    scripts = list[Script]()

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        scripts.append(replace(broken(3)(submit, prompt), hang_after=3))
        return scripts[-1]

    async with gateway(tmp_path, script, **PATIENT) as mesh:
        call, got = mesh.typed.Chat(request_of()), Collected()
        got._take(await call.read())
        mesh.workers[0].weights_state = "failed"
        await mesh.wait(lambda: mesh.app.catalogue.base(MODEL).problem())
        scripts[0].hang_after = 1 << 30
        await got.read(call)
        assert isinstance(got.error, WeightsIncomplete)
        assert got.ids == {0: TOKENS[:3]}
        assert len(scripts) == 1


async def test_a_gateway_says_that_no_worker_has_weights(tmp_path: Path) -> None:
    async with gateway(tmp_path, breaking(), num_decode=2, **PATIENT) as mesh:
        for worker in mesh.workers:
            worker.weights_state, worker.weights_problem = "failed", "the update lacks lm_head"
        await mesh.wait(lambda: mesh.app.catalogue.base(MODEL).problem())
        got = await collect(mesh)
        assert isinstance(got.error, WeightsIncomplete)
        assert "the update lacks lm_head; send the whole update again" in got.error.message
        assert not any(worker.submits for worker in mesh.workers)
        # One of them can serve again.
        mesh.workers[1].weights_state = "ready"
        await mesh.wait(lambda: not mesh.app.catalogue.base(MODEL).problem())
        assert (await collect(mesh)).ids == {0: TOKENS}


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_worker_with_weights_takes_over(tmp_path: Path, num_tokens: int) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        is_first = submit.attempt == 1
        return broken(num_tokens)(submit, prompt) if is_first else Script(tokens=[TOKENS])

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        got = await collect(mesh)
        assert got.error is None
        assert got.ids == {0: TOKENS}
        assert [len(worker.submits) for worker in mesh.workers] == [1, 1]


async def restart(mesh: Harness, script: ScriptOf) -> FakeWorker:
    """A new incarnation at the address of the first worker."""
    old = mesh.workers[0]
    new = FakeWorker(MODEL, old.vocabulary_size, script, worker_id=old.worker_id)
    mesh.workers.append(new)
    await new.start(int(old.address.rsplit(":", 1)[1]))
    return new


async def begin_then_stop(mesh: Harness, **fields: Any) -> tuple[Any, Collected]:
    """A stream that has brought something and then lost its only worker."""
    call = mesh.typed.Chat(request_of(**fields))
    got = Collected()
    got._take(await call.read())
    await mesh.workers[0].stop(keeps_port=True)
    await mesh.wait(lambda: not mesh.workers[0].address or not is_open(mesh))
    return call, got


def is_open(mesh: Harness) -> bool:
    session = next(mesh.app.fleet.workers("decode")).session
    return session is not None and session.is_open


async def test_no_answer_is_cut_by_a_worker_with_a_smaller_context(tmp_path: Path) -> None:
    """It has come when the answer's length was settled by those that were there."""
    async with gateway(tmp_path, breaking(10, 3), num_decode=2, step_s=0.02) as mesh:
        call = mesh.typed.Chat(request_of())
        got = Collected()
        got._take(await call.read())
        owner = next(worker for worker in mesh.workers if worker.submits)
        for worker in mesh.app.fleet.workers("decode"):
            if worker.info is not None and worker.endpoint.address != owner.address:
                worker.info.max_context_tokens = 16
        await got.read(call)
        assert got.error is None
        assert got.texts == {0: TEXT}
        assert [submit.attempt for submit in owner.submits] == [1, 2, 3], "it was waited for"


async def test_the_same_worker_comes_back(tmp_path: Path) -> None:
    async with gateway(tmp_path, hanging(3)) as mesh:
        call, got = await begin_then_stop(mesh)
        await asyncio.sleep(0.3)
        new = await restart(mesh, breaking())
        await got.read(call)
        assert got.error is None
        assert got.texts == {0: TEXT}
        assert [submit.attempt for submit in new.submits] == [2]
        (lost,) = got.last.timeline.lost_attempts
        assert lost.pause.ToNanoseconds() > 0.3e9


async def test_cancelled_between_two_owners(tmp_path: Path) -> None:
    async with gateway(tmp_path, hanging(3)) as mesh:
        call, got = await begin_then_stop(mesh)
        cancel = gateway_pb2.CancelRequest(request_id=got.last.request_id)
        assert (await mesh.typed.Cancel(cancel)).found
        await got.read(call)
        assert got.reasons == {0: common_pb2.FINISH_REASON_CANCELLED}
        new = await restart(mesh, breaking())
        await mesh.ready()
        assert not new.submits


@pytest.mark.parametrize("how", ["disconnect", "deadline"])
async def test_ended_between_two_owners(tmp_path: Path, how: str) -> None:
    timeout_s = 4.0 if how == "deadline" else 60.0
    async with gateway(tmp_path, hanging(3), request_timeout_s=timeout_s) as mesh:
        call, got = await begin_then_stop(mesh)
        if how == "disconnect":
            call.cancel()
        else:
            await got.read(call)
            assert isinstance(got.error, DeadlineExceeded)
        await mesh.wait(lambda: not mesh.app._admission.num_running)
        new = await restart(mesh, breaking())
        await mesh.ready()
        await asyncio.sleep(0.1)
        assert not new.submits


async def test_a_resumption_does_not_wait_for_a_slow_reader(tmp_path: Path) -> None:
    async with gateway(tmp_path, breaking(6), num_decode=2) as mesh:
        call = mesh.typed.Chat(request_of())
        # Nobody reads.
        await mesh.wait(lambda: len(submits_of(mesh)) == 2)
        got = await Collected().read(call)
        assert got.texts == {0: TEXT}


async def test_a_stalled_worker_is_left(tmp_path: Path) -> None:
    """What it says when it runs again is not taken."""
    async with gateway(tmp_path, breaking(), num_decode=2, step_s=0.03) as mesh:
        for worker in mesh.workers:
            worker.stale_after_s = 1.0
        call = mesh.typed.Chat(request_of())
        got = Collected()
        got._take(await call.read())
        (victim,) = (worker for worker in mesh.workers if worker.submits)
        victim.is_frozen = True
        await mesh.wait(lambda: len(submits_of(mesh)) >= 2)
        victim.is_frozen = False
        await got.read(call)
        assert got.texts == {0: TEXT}
        assert got.ids == {0: TOKENS}


# ---- drained and busy workers ------------------------------------------------------------------


async def test_a_draining_worker_hands_back(tmp_path: Path) -> None:
    """That costs no attempt."""
    async with gateway(tmp_path, failing("DRAINING", 4), num_decode=2, max_attempts=1) as mesh:
        got = await collect(mesh)
        assert got.texts == {0: TEXT}
        assert [entry.code for entry in got.last.timeline.lost_attempts] == ["DRAINING"]


async def test_a_request_that_only_draining_workers_saw_is_refused_at_once(tmp_path: Path) -> None:
    draining = failing("DRAINING", 0, attempts=1000)
    async with gateway(tmp_path, draining) as mesh:
        mesh.workers[0].accepts_nothing = True
        began = time.monotonic()
        assert isinstance((await collect(mesh)).error, Draining)
        assert time.monotonic() - began < 20  # The limit of resumption is 60 s.


async def test_a_begun_stream_outlasts_busy_workers(tmp_path: Path) -> None:
    overloaded = failing("OVERLOADED", 0, attempts=4)

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return (breaking(4) if submit.attempt == 1 else overloaded)(submit, prompt)

    async with gateway(tmp_path, script, num_decode=2, max_attempts=2) as mesh:
        got = await collect(mesh)
        assert got.texts == {0: TEXT}
        codes = [entry.code for entry in got.last.timeline.lost_attempts]
        assert codes == ["PEER_UNAVAILABLE", "OVERLOADED", "OVERLOADED", "OVERLOADED"]


async def test_faults_of_the_request_are_not_repeated(tmp_path: Path) -> None:
    failed = Event.Failed(error=common_pb2.ErrorDetail(code="INTERNAL", message="no"))

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], fail=failed, fail_after=3)

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        got = await collect(mesh)
        assert got.error is not None
        assert got.error.reason == "INTERNAL"
        assert len(submits_of(mesh)) == 1


# ---- a worker that fails again and again -------------------------------------------------------


async def fleet_of(mesh: Harness) -> dict[str, gateway_pb2.FleetWorker]:
    fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
    return {worker.worker_id: worker for worker in fleet.workers}


def end_rest(mesh: Harness, worker_id: str) -> None:
    """Lets the time of an open breaker be over."""
    for worker in mesh.app.fleet.workers("decode"):
        if worker.info is not None and worker.info.worker_id == worker_id:
            worker.breaker._open_until = 0.0


async def test_a_failing_worker_rests_until_it_is_well(tmp_path: Path) -> None:
    failed = Event.Failed(
        error=common_pb2.ErrorDetail(code="PEER_UNAVAILABLE", retryable=True, message="no device")
    )
    sick: set[str] = set()

    async with gateway(
        tmp_path,
        breaking(),
        num_decode=2,
        decode_policy="round_robin",
        breaker_failures=2,
        breaker_open_s=60.0,
    ) as mesh:
        first = mesh.workers[0]

        def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
            return Script(tokens=[TOKENS], fail=failed, fail_after=0 if sick else NEVER)

        first.script = script
        sick.add("decode-0")
        while (await fleet_of(mesh))["decode-0"].breaker != gateway_pb2.BREAKER_STATE_OPEN:
            # Clients notice nothing.
            assert (await collect(mesh)).texts == {0: TEXT}
            await asyncio.sleep(0.12)
        seen = (await fleet_of(mesh))["decode-0"]
        assert not seen.healthy
        assert seen.consecutive_failures == 2
        assert "no device" in seen.problem
        num_asked = len(first.submits)
        for _ in range(4):
            assert (await collect(mesh)).texts == {0: TEXT}
        assert len(first.submits) == num_asked
        # One request tries it; it is still sick, and rests longer.
        end_rest(mesh, "decode-0")
        assert (await fleet_of(mesh))["decode-0"].breaker == gateway_pb2.BREAKER_STATE_HALF_OPEN
        for _ in range(4):
            assert (await collect(mesh)).texts == {0: TEXT}
        assert len(first.submits) == num_asked + 1
        assert (await fleet_of(mesh))["decode-0"].breaker == gateway_pb2.BREAKER_STATE_OPEN
        sick.clear()
        end_rest(mesh, "decode-0")
        while (await fleet_of(mesh))["decode-0"].breaker != gateway_pb2.BREAKER_STATE_CLOSED:
            assert (await collect(mesh)).texts == {0: TEXT}
            await asyncio.sleep(0.05)
        assert (await fleet_of(mesh))["decode-0"].healthy
        assert (await fleet_of(mesh))["decode-1"].consecutive_failures == 0


async def test_nobody_but_a_resting_worker(tmp_path: Path) -> None:
    """A client is told at once, and when to come again."""
    failed = Event.Failed(error=common_pb2.ErrorDetail(code="INTERNAL", message="no device"))

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], fail=failed, fail_after=0)

    async with gateway(tmp_path, script, breaker_failures=1, breaker_open_s=30.0) as mesh:
        assert (await collect(mesh)).error is not None
        got = await collect(mesh)
        assert isinstance(got.error, PeerUnavailable)
        assert got.error.retryable
        assert got.error.retry_after_s
        assert len(mesh.workers[0].submits) == 1
        # The gateway itself is well.
        await mesh.ready()
