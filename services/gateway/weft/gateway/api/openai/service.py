"""The REST face over gRPC: weft.v1.OpenAIService."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.common.rpc.errors import Context
from weft.contract.errors import Draining, PeerUnavailable, RequestNotFound
from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.api.adapter_calls import AdapterCalls
from weft.gateway.api.answer import EVENTS, JSON, json_body
from weft.gateway.api.audio.calls import AudioCalls
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.end_session import end_session
from weft.gateway.api.openai.adapters import (
    LoadAdapterBody,
    UnloadAdapterBody,
    adapter_json,
    as_in_the_body,
    load_order,
)
from weft.gateway.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EndSessionBody,
    GenerationBody,
    TokenizeBody,
)
from weft.gateway.api.openai.chunks import (
    DONE,
    AnswerWriter,
    ChatWriter,
    CompletionWriter,
    to_json,
    usage_json,
    weft_json,
)
from weft.gateway.api.openai.document import openapi_document
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.openai.prompt_logprobs import PromptLogprobs
from weft.gateway.api.openai.translate import (
    chat_request,
    completion_request,
    is_echo_alone,
    tokenize_prompt,
)
from weft.gateway.api.relay import EdgeFace, PlainStream, RelayedStream
from weft.gateway.catalogue import Catalogue, ResolvedModel
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.request import RawRequest, TextPrompt, TokenPrompt
from weft.gateway.text.answer.make import parser_maker
from weft.gateway.text.detokenize import make_detokenizer
from weft.gateway.validate import check_ids
from weft.v1 import common_pb2, openai_pb2, openai_pb2_grpc

_READY_RETRY_S = 1.0
_LARGE = 32 << 10
_LOGPROB_CHARS = 100
"""Least number of characters of one token's log-probabilities."""
_ID_CHARS = 6
_SHOWN_CHARS = 100


class OpenAIFace(openai_pb2_grpc.OpenAIServiceServicer):
    def __init__(
        self,
        pipeline: RequestPipeline,
        models: Catalogue,
        fleet: Fleet,
        adapters: AdapterCalls,
        bodies: BodyParser,
        relays: EdgeFace,
        audio: AudioCalls,
    ) -> None:
        self._pipeline = pipeline
        self._models = models
        self._fleet = fleet
        self._adapters = adapters
        self._relays = relays
        self._audio = audio
        self.bodies = self._bodies = bodies
        """Parses the bodies of all dialects."""

    def close(self) -> None:
        self._bodies.close()

    async def ChatCompletions(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        facts = call_facts(context, "chatcmpl")
        body, raw = await self._bodies.parse(
            ChatBody, request, lambda body: chat_request(body, facts)
        )

        def write(answer: Answer) -> AnswerWriter:
            return ChatWriter(
                raw.request_id,
                answer.model,
                answer.card.vocabulary,
                include_usage=_includes_usage(body),
                make_parser=parser_maker(answer.request, answer.card, answer.generations[0].prompt),
                shows_reasoning=body.include_reasoning is not False,
            )

        await self._answer(raw, body, write, context)

    async def Completions(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        facts = call_facts(context, "cmpl")
        body, raw = await self._bodies.parse(
            CompletionBody, request, lambda body: completion_request(body, facts)
        )
        echoes = await self._echoes(raw) if body.echo else ()

        def write(answer: Answer) -> AnswerWriter:
            return CompletionWriter(
                raw.request_id,
                answer.model,
                answer.card.vocabulary,
                include_usage=_includes_usage(body),
                echoes=echoes,
                samples_per_prompt=answer.request.sampling.n,
                make_detokenizer=lambda number: make_detokenizer(
                    answer.card.vocabulary,
                    answer.generations[number].prompt.ids,
                    answer.request.skip_special_tokens,
                ),
            )

        await self._answer(raw, body, write, context)

    async def Transcriptions(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        await self._audio.run(request, context, translates=False)

    async def Translations(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        await self._audio.run(request, context, translates=True)

    async def _answer(
        self,
        raw: RawRequest,
        body: GenerationBody,
        write: Callable[[Answer], AnswerWriter],
        context: Context,
    ) -> None:
        async with self._pipeline.open(raw) as answer:
            writer = write(answer)
            writer.prompt_logprobs = _prompt_logprobs(body, answer)
            if _shows_usage_so_far(body):
                writer.usage_so_far = answer.usage
            if body.return_token_ids:
                writer.prompt_ids = [generation.prompt.ids for generation in answer.generations]
            if body.stream:
                with self._relays.stream_of(context, EVENTS) as out:
                    headers = (*answer.headers, *out.headers)
                    await begin_answer(context, raw.request_id, EVENTS, headers)
                    last = await self._stream(answer, body, writer, out)
            else:
                await begin_answer(context, raw.request_id, JSON, answer.headers)
                last = await self._collect(answer, body, writer)
        await context.write(last)

    async def _stream(
        self,
        answer: Answer,
        body: GenerationBody,
        writer: AnswerWriter,
        out: RelayedStream | PlainStream,
    ) -> HttpBody:
        await answer.stream(writer.events, out)
        fields = {}
        if _includes_usage(body) or body.weft_timeline:
            await answer.settle()
            fields = _closing_fields(answer, body, with_usage=_includes_usage(body))
        last = writer.last_event(fields) + DONE if fields else DONE
        return HttpBody(content_type=EVENTS, data=last)

    async def _collect(
        self, answer: Answer, body: GenerationBody, writer: AnswerWriter
    ) -> HttpBody:
        parts: dict[int, list[Delta]] = {}
        while deltas := await answer.next_deltas():
            for delta in deltas:
                parts.setdefault(delta.sample, []).append(delta)
        await answer.settle()
        choices = [_join(parts[index]) for index in sorted(parts)]
        fields = _closing_fields(answer, body, with_usage=True)
        if isinstance(body, CompletionBody) and is_echo_alone(body):
            choices = [_ended_at_once(choice) for choice in choices]
            usage = answer.usage()
            usage.completion_tokens = 0
            fields["usage"] = usage_json(usage)
        size = sum(len(choice.text) + len(choice.logprobs) * _LOGPROB_CHARS for choice in choices)
        scores = [one.prompt_scores.entries for one in answer.generations if one.prompt_scores]
        size += sum(map(len, scores)) * _LOGPROB_CHARS
        if body.return_token_ids:
            size += _ID_CHARS * sum(len(choice.ids) for choice in choices)
            size += _ID_CHARS * sum(one.num_prompt_tokens for one in answer.generations)
        return await _build(size, lambda: writer.whole(choices, fields))

    async def _echoes(self, raw: RawRequest) -> list[str]:
        resolved = await self._models.find(raw.model)
        given = [prompt.text for prompt in raw.prompts if isinstance(prompt, TextPrompt)]
        if given:
            return given
        card = await self._models.card(resolved)
        lists = [prompt.ids for prompt in raw.prompts if isinstance(prompt, TokenPrompt)]
        for ids in lists:
            check_ids("prompt", ids, card.vocabulary_size)
        return await resolved.served.preparer.detokenize(card, lists)

    async def Models(self, request: Empty, context: Context) -> HttpBody:
        resolved = [
            one
            for served in self._models
            for one in (ResolvedModel(served), *self._models.adapters_of(served))
        ]
        data = [_describe(one) for one in resolved]
        ids = [one["id"] for one in data]
        for_anthropic = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
        return json_body({"object": "list", "data": data, **for_anthropic})

    async def RetrieveModel(
        self, request: openai_pb2.RetrieveModelRequest, context: Context
    ) -> HttpBody:
        return json_body(_describe(await self._models.named(request.model)))

    async def TokenizeText(self, request: HttpBody, context: Context) -> HttpBody:
        body, prompt = await self._bodies.parse(TokenizeBody, request, tokenize_prompt)
        resolved = await self._models.find(body.model or "")
        card = await self._models.card(resolved)
        ids = await resolved.served.preparer.tokenize(card, prompt)
        answer: dict[str, object] = {
            "count": len(ids),
            "max_model_len": resolved.served.context_tokens,
            "tokens": ids,
            "token_strs": None,
        }

        def build() -> bytes:
            if body.return_token_strs:
                answer["token_strs"] = [card.tokenizer.id_to_token(i) or "" for i in ids]
            return to_json(answer)

        return await _build(len(ids), build)

    async def CountChatTokens(self, request: HttpBody, context: Context) -> HttpBody:
        facts = call_facts(context, "chatcmpl")
        _, raw = await self._bodies.parse(ChatBody, request, lambda body: chat_request(body, facts))
        resolved = await self._models.find(raw.model)
        card = await self._models.card(resolved)
        ids = await resolved.served.preparer.tokenize(card, raw.prompts[0])
        return json_body({"input_tokens": len(ids)})

    async def DetokenizeTokens(self, request: HttpBody, context: Context) -> HttpBody:
        body, ids = await self._bodies.parse(DetokenizeBody, request, lambda body: body.tokens)
        resolved = await self._models.find(body.model or "")
        card = await self._models.card(resolved)
        check_ids("tokens", ids, card.vocabulary_size)
        (text,) = await resolved.served.preparer.detokenize(card, [ids])
        return await _build(len(text), lambda: to_json({"prompt": text}))

    async def LoadLoraAdapter(self, request: HttpBody, context: Context) -> HttpBody:
        self._adapters.check_caller()
        body, order = await self._bodies.parse(LoadAdapterBody, request, load_order)
        is_renamed = bool(body.base_model_name and not body.model)
        with as_in_the_body("base_model_name" if is_renamed else "model"):
            order = replace(order, timeout_s=context.time_remaining())
            entry = await self._adapters.load_order(order)
        left_out = {"left_out": self._adapters.left_out(entry)} if entry.is_lenient else {}
        return json_body(adapter_json(entry, "loaded") | left_out)

    async def UnloadLoraAdapter(self, request: HttpBody, context: Context) -> HttpBody:
        self._adapters.check_caller()
        body, _ = await self._bodies.parse(UnloadAdapterBody, request, lambda body: None)
        with as_in_the_body():
            entry = await self._adapters.unload_name(body.lora_name, context.time_remaining())
        return json_body(adapter_json(entry, "unloaded"))

    async def EndSession(self, request: HttpBody, context: Context) -> HttpBody:
        body, _ = await self._bodies.parse(EndSessionBody, request, lambda body: None)
        num_told = end_session(self._fleet, body.session_id, body.cache_salt)
        return json_body({"status": "success", "workers": num_told})

    async def CancelRequestById(
        self, request: openai_pb2.CancelRequestByIdRequest, context: Context
    ) -> HttpBody:
        if not self._pipeline.cancel(request.request_id, current_tenant.get()):
            raise RequestNotFound(
                f"there is no running request `{request.request_id[:_SHOWN_CHARS]}`; it may have "
                "ended",
                stage="decode",
                param="request_id",
            )
        return json_body({"id": request.request_id, "status": "cancelled"})

    async def Ready(self, request: Empty, context: Context) -> HttpBody:
        return await self.check_ready()

    async def check_ready(self) -> HttpBody:
        """Answers a readiness probe. Raises PeerUnavailable if no model can be served now."""
        if self._pipeline.is_draining:
            raise Draining("not ready: shutting down", stage="queue", retry_after_s=_READY_RETRY_S)
        problems = {one.model.name: one.problem() for one in self._models}
        if all(problems.values()):
            told = [f"{name}: {problem}" for name, problem in problems.items()]
            raise PeerUnavailable(
                f"not ready: {'; '.join(told if len(told) > 1 else problems.values())}",
                stage="route",
                retry_after_s=_READY_RETRY_S,
            )
        if missing := self._models.missing_adapters():
            raise PeerUnavailable(
                f"not ready: adapters that are not loaded yet: {', '.join(missing)}",
                stage="adapter",
                retry_after_s=_READY_RETRY_S,
            )
        answer: dict[str, object] = {"status": "ready"}
        if len(problems) > 1:
            answer["models"] = {name: problem or "ready" for name, problem in problems.items()}
        return json_body(answer)

    async def OpenApi(self, request: Empty, context: Context) -> HttpBody:
        return HttpBody(content_type=JSON, data=self._document)

    @cached_property
    def _document(self) -> bytes:
        return to_json(openapi_document())


def _describe(resolved: ResolvedModel) -> dict[str, object]:
    served, entry = resolved.served, resolved.entry
    created = served.model.created if entry is None else int(entry.created)
    return {
        "id": resolved.name,
        "object": "model",
        "created": created,
        "owned_by": "weft",
        "max_model_len": served.context_tokens,
        "root": served.model.name if entry is None else entry.path,
        "parent": None if entry is None else entry.model,
        "default_sampling_params": served.model.sampling,
        "task": served.task,
        "type": "model",
        "display_name": resolved.name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _includes_usage(body: GenerationBody) -> bool:
    return bool(body.stream_options is not None and body.stream_options.include_usage)


def _shows_usage_so_far(body: GenerationBody) -> bool:
    options = body.stream_options
    return bool(options and options.include_usage and options.continuous_usage_stats)


def _prompt_logprobs(body: GenerationBody, answer: Answer) -> PromptLogprobs | None:
    if answer.request.prompt_logprobs is None:
        return None
    return PromptLogprobs(
        answer.card.vocabulary,
        answer.generations,
        num_listed=body.prompt_logprobs,
        num_echoed=body.logprobs if isinstance(body, CompletionBody) and body.echo else None,
    )


def _closing_fields(answer: Answer, body: GenerationBody, *, with_usage: bool) -> dict[str, object]:
    fields: dict[str, object] = {}
    if with_usage:
        fields["usage"] = usage_json(answer.usage())
    if body.weft_timeline:
        fields["weft"] = weft_json(
            answer.request.request_id, answer.trace.trace_id, answer.timelines()
        )
    if "logprobs_mode" in answer.request.raw.given and answer.request.top_logprobs is not None:
        fields["logprobs_mode"] = answer.request.logprobs_mode
    samples = [sample for one in answer.generations for sample in one.samples]
    if body.return_token_ids and any(sample.weight_versions for sample in samples):
        fields["weight_versions"] = [
            [
                {"version": span.version, "start": span.start, "end": span.end}
                for span in sample.weight_versions
            ]
            for sample in samples
        ]
    return fields


def _ended_at_once(choice: Delta) -> Delta:
    """The choice without its one token, which was drawn only to score the prompt."""
    reason = choice.finish_reason
    if reason != common_pb2.FINISH_REASON_CANCELLED:
        reason = common_pb2.FINISH_REASON_LENGTH
    return choice._replace(text="", ids=(), logprobs=(), finish_reason=reason, stop_reason=None)


def _join(parts: list[Delta]) -> Delta:
    return Delta(
        parts[0].sample,
        "".join([part.text for part in parts]),
        [one for part in parts for one in part.ids],
        [entry for part in parts for entry in part.logprobs],
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


async def _build(size: int, build: Callable[[], bytes]) -> HttpBody:
    """Builds large answers in a thread; `size` is in characters or numbers."""
    data = build() if size <= _LARGE else await asyncio.to_thread(build)
    return HttpBody(content_type=JSON, data=data)
