"""What trainers ask for, in the forms of vLLM and of SGLang: weft.v1.TrainerService."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.common.version import version
from weft.contract.errors import WeftError
from weft.contract.weights import PauseMode, WeightStatus
from weft.gateway.admission.authenticate import bearer
from weft.gateway.api.answer import EVENTS, JSON, field_names, json_body
from weft.gateway.api.call import Context, begin_answer, call_facts
from weft.gateway.api.openai.chunks import DONE, large_to_json, to_json, usage_json
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.relay import EdgeFace
from weft.gateway.api.trainer.bodies import (
    CheckWeightsBody,
    ContinueGenerationBody,
    PauseGenerationBody,
    UpdateFromDiskBody,
)
from weft.gateway.api.trainer.token_answers import SglangWriter, VllmWriter
from weft.gateway.api.trainer.token_bodies import ContinueTokensBody, GenerateTokensBody
from weft.gateway.api.trainer.token_requests import continue_request, generate_request, is_list
from weft.gateway.catalogue import Catalogue
from weft.gateway.console.access import MeshAccess
from weft.gateway.console.weights import MeshWeights
from weft.gateway.generation.answer import Answer
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.validate import invalid
from weft.v1 import dialects_pb2, dialects_pb2_grpc

W = TypeVar("W", SglangWriter, VllmWriter)
_LARGE_TOKENS = 1024
_MODES: Mapping[str, PauseMode] = {
    "abort": "abort",
    "wait": "wait",
    "keep": "keep",
    "retract": "retract",
}
_SGLANG_MODES: Mapping[str, PauseMode] = {
    "abort": "abort",
    "in_place": "keep",
    "retract": "retract",
}


class TrainersOff(WeftError):
    """The settings do not allow trainers' calls."""

    reason = "TRAINERS_OFF"
    grpc_code = "NOT_FOUND"
    http_status = 404


class TrainerFace(dialects_pb2_grpc.TrainerServiceServicer):
    """Args:
    access: Tells who has the operators' token.
    is_on: Whether the settings allow these calls.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        weights: MeshWeights,
        access: MeshAccess,
        models: Catalogue,
        bodies: BodyParser,
        relays: EdgeFace,
        *,
        is_on: bool,
    ) -> None:
        self._pipeline = pipeline
        self._weights = weights
        self._access = access
        self._models = models
        self._bodies = bodies
        self._relays = relays
        self._is_on = is_on

    async def PauseWorkers(
        self, request: dialects_pb2.PauseWorkersRequest, context: Context
    ) -> HttpBody:
        token = self._token(context)
        mode = _MODES.get(request.mode or "abort")
        if mode is None:
            raise invalid("mode", f"must be one of {', '.join(_MODES)}")
        found = await self._weights.pause(mode, token)
        if request.clear_cache:
            await self._weights.flush(token)
        return _answer("paused", found)

    async def ResumeWorkers(self, request: Empty, context: Context) -> HttpBody:
        return _answer("resumed", await self._weights.resume(self._token(context)))

    async def IsPaused(self, request: Empty, context: Context) -> HttpBody:
        found = await self._weights.show(self._token(context), packed_digest=False)
        return json_body({"is_paused": any(status.pause for status in found.values())})

    async def PauseGeneration(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "pause")
        body, _ = await self._bodies.parse(PauseGenerationBody, _or_empty(request), _same)
        found = await self._weights.pause(_SGLANG_MODES[body.mode or "abort"], token)
        await begin_answer(context, facts.request_id)
        return _answer("paused", found)

    async def ContinueGeneration(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "continue")
        await self._bodies.parse(ContinueGenerationBody, _or_empty(request), _same)
        found = await self._weights.resume(token)
        await begin_answer(context, facts.request_id)
        return _answer("resumed", found)

    async def UpdateWeightsFromDisk(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "update")
        body, _ = await self._bodies.parse(UpdateFromDiskBody, request, _same)
        if body.abort_all_requests:
            await self._weights.pause("abort", token)
        found = await self._weights.refit(body.model_path, body.weight_version or "", token)
        if body.abort_all_requests and not body.keep_pause:
            found = await self._weights.resume(token)
        await begin_answer(context, facts.request_id)
        return _answer("weights changed", found)

    async def FlushCache(self, request: Empty, context: Context) -> HttpBody:
        flushed = await self._weights.flush(self._token(context))
        return json_body({"success": True, "message": f"{flushed} pages flushed"})

    async def CheckWeights(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "check")
        await self._bodies.parse(CheckWeightsBody, request, _same)
        found = await self._weights.show(token, packed_digest=True)
        await begin_answer(context, facts.request_id)
        return _answer("checksums", found)

    async def GenerateTokens(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        self._check_on()
        with field_names({"prompt": "input_ids"}, {}):
            facts = call_facts(context, "gen")
            body, raw = await self._bodies.parse(
                GenerateTokensBody, request, lambda body: generate_request(body, facts)
            )
            has_scores = "prompt_logprobs" in raw.given

            def write(answer: Answer) -> SglangWriter:
                return SglangWriter(
                    answer,
                    is_list=is_list(body),
                    names=body.rid if isinstance(body.rid, list) else (),
                    scores_from=(body.logprob_start_len or 0) if has_scores else None,
                    shows_texts=bool(body.return_text_in_logprobs),
                )

            async with self._pipeline.open(raw) as answer:
                writer = await self._collect(answer, write(answer), context, bool(body.stream))
                last: bytes = DONE
                if not body.stream:
                    last = await _encoded(writer, writer.whole)
            await context.write(HttpBody(content_type=_kind(bool(body.stream)), data=last))

    async def ContinueTokens(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        self._check_on()
        with field_names({"prompt": "token_ids"}, {}):
            facts = call_facts(context, "gen")
            body, raw = await self._bodies.parse(
                ContinueTokensBody, request, lambda body: continue_request(body, facts)
            )
            async with self._pipeline.open(raw) as answer:
                writer = await self._collect(answer, VllmWriter(answer), context, bool(body.stream))
                usage, options = usage_json(answer.usage()), body.stream_options
                if not body.stream:
                    last = await _encoded(writer, lambda: writer.whole(usage))
                elif options is not None and options.include_usage:
                    last = writer.last_event({"usage": usage}) + DONE
                else:
                    last = DONE
            await context.write(HttpBody(content_type=_kind(bool(body.stream)), data=last))

    async def _collect(self, answer: Answer, writer: W, context: Context, is_streamed: bool) -> W:
        """Gives all deltas to the writer, and sends its events if the answer is streamed."""
        if is_streamed:
            await self._send_events(answer, writer, context)
        else:
            await begin_answer(context, answer.request.request_id, JSON, answer.headers)
            while deltas := await answer.next_deltas():
                for delta in deltas:
                    writer.push(delta)
        await answer.settle()
        return writer

    async def _send_events(
        self, answer: Answer, writer: SglangWriter | VllmWriter, context: Context
    ) -> None:
        with self._relays.stream_of(context, EVENTS) as out:
            headers = (*answer.headers, *out.headers)
            await begin_answer(context, answer.request.request_id, EVENTS, headers)
            while deltas := await answer.next_deltas():
                for delta in deltas:
                    writer.push(delta)
                await out.send(b"".join([writer.event(delta) for delta in deltas]))

    async def ShowServer(
        self, request: dialects_pb2.ShowServerRequest, context: Context
    ) -> HttpBody:
        found = await self._weights.show(self._token(context), packed_digest=False)
        card = self._models.first.model
        return json_body(
            {
                "model_path": card.name,
                "served_model_name": card.name,
                "version": version(),
                "weight_version": _version(found),
                "workers": {worker: _told(status) for worker, status in found.items()},
            }
        )

    def _token(self, context: Context) -> str:
        """The operators' token of the call. Raises TrainersOff or as `check_operate`."""
        self._check_on()
        self._access.check_operate(context)
        return bearer(context.invocation_metadata())

    def _check_on(self) -> None:
        if not self._is_on:
            raise TrainersOff(
                "trainers' calls are off: start the gateway with --rl and --console operate",
                stage="authorize",
            )


def _kind(is_streamed: bool) -> str:
    return EVENTS if is_streamed else JSON


async def _encoded(writer: SglangWriter | VllmWriter, make: Callable[[], object]) -> bytes:
    """Encodes large answers in a thread."""
    if writer.num_tokens < _LARGE_TOKENS:
        return to_json(make())
    return await asyncio.to_thread(lambda: large_to_json(make()))


def _same(body: object) -> None: ...


def _or_empty(request: HttpBody) -> HttpBody:
    return request if request.data else HttpBody(content_type=JSON, data=b"{}")


def _answer(message: str, found: Mapping[str, WeightStatus]) -> HttpBody:
    return json_body(
        {
            "success": True,
            "message": message,
            "weight_version": _version(found),
            "workers": {worker: _told(status) for worker, status in found.items()},
        }
    )


def _version(found: Mapping[str, WeightStatus]) -> str:
    versions = {status.version for status in found.values()}
    return versions.pop() if len(versions) == 1 else ""


def _told(status: WeightStatus) -> dict[str, object]:
    told: dict[str, object] = {
        "state": status.state,
        "version": status.version,
        "model_digest": status.model_digest.hex(),
        "pause": status.pause,
        "updates": status.num_updates,
        "problem": status.problem,
    }
    if status.packed_digest:
        told["packed_digest"] = status.packed_digest.hex()
    return told
