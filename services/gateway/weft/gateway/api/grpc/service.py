"""The typed gRPC face: weft.v1.GatewayService."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from weft.common.rpc.errors import Context
from weft.contract.codec.walk import enum_names
from weft.contract.request import (
    CallParams,
    Constraint,
    Reasoning,
    SamplingParams,
    StopCriteria,
)
from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.api.adapter_calls import AdapterCalls
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.contents import ContentBuilder
from weft.gateway.api.end_session import end_session
from weft.gateway.api.grpc.pooling import PooledCalls
from weft.gateway.api.parameters import given_in
from weft.gateway.api.tools import (
    NO_TOOLS,
    Tool,
    ToolUse,
    check_tools,
    json_object,
    past_call,
    use_tools,
)
from weft.gateway.api.worker_calls import WorkerCalls
from weft.gateway.catalogue import Catalogue, ResolvedModel, ServedModel
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.generation.answer import Delta
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.generation.prompt_outputs import PromptScores
from weft.gateway.request import (
    CallFacts,
    ChatPrompt,
    MediaFile,
    Prompt,
    RawRequest,
    TextPrompt,
    TokenPrompt,
)
from weft.gateway.text.answer import AnswerParser, AnswerPart, joined
from weft.gateway.text.answer.make import parser_maker
from weft.gateway.text.parts import Content
from weft.gateway.validate import check_ids, check_not_streamed, invalid, unsupported
from weft.gateway.warnings import begin_warnings, current_warnings
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

_BREAKER_STATES = enum_names(gateway_pb2.BreakerState.DESCRIPTOR)
_TOOL_CHOICES = {
    gateway_pb2.TOOL_MODE_UNSPECIFIED: "auto",
    gateway_pb2.TOOL_MODE_AUTO: "auto",
    gateway_pb2.TOOL_MODE_NONE: "none",
    gateway_pb2.TOOL_MODE_REQUIRED: "required",
}
AnyRequest = gateway_pb2.ChatRequest | gateway_pb2.CompleteRequest
PooledRequest = gateway_pb2.EmbedRequest | gateway_pb2.RerankRequest | gateway_pb2.ScoreRequest


class GrpcFace(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(
        self,
        pipeline: RequestPipeline,
        models: Catalogue,
        fleet: Fleet,
        adapters: AdapterCalls,
        workers: WorkerCalls,
        max_body_bytes: int,
    ) -> None:
        self._pipeline = pipeline
        self._pooled = PooledCalls(pipeline)
        self._models = models
        self._fleet = fleet
        self._adapters = adapters
        self._workers = workers
        self._max_body_bytes = max_body_bytes

    async def Chat(self, request: gateway_pb2.ChatRequest, context: Context) -> None:  # type: ignore[override]
        self._check_size(request)
        for name in ("reasoning", "alternatives"):
            given = {field.name for field, _ in request.sampling.constraint.ListFields()}
            if name in given:
                raise invalid(
                    f"sampling.constraint.{name}", "is found by the gateway in chats; leave it out"
                )
        facts = call_facts(context, "chatcmpl")
        tools, use = _tool_use(request)
        messages, files = _messages(request.messages)
        prompt = ChatPrompt(messages=messages, files=files, tools=tools)
        translated = _translate(request, facts, prompt, use)
        await self._answer(translated, request.stream, context, gateway_pb2.ChatResponse)

    async def Complete(self, request: gateway_pb2.CompleteRequest, context: Context) -> None:  # type: ignore[override]
        self._check_size(request)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid("prompt", "give a text or token_ids")
        prompt: Prompt = (
            TextPrompt(text=request.text)
            if kind == "text"
            else TokenPrompt(ids=tuple(request.token_ids.ids))
        )
        translated = _translate(request, call_facts(context, "cmpl"), prompt)
        await self._answer(translated, request.stream, context, gateway_pb2.CompleteResponse)

    async def Embed(
        self, request: gateway_pb2.EmbedRequest, context: Context
    ) -> gateway_pb2.EmbedResponse:
        self._check_size(request)
        return await self._pooled.embed(request, context)

    async def Rerank(
        self, request: gateway_pb2.RerankRequest, context: Context
    ) -> gateway_pb2.RerankResponse:
        self._check_size(request)
        return await self._pooled.rerank(request, context)

    async def Score(
        self, request: gateway_pb2.ScoreRequest, context: Context
    ) -> gateway_pb2.ScoreResponse:
        self._check_size(request)
        return await self._pooled.score(request, context)

    async def _answer(
        self,
        raw: RawRequest,
        is_streamed: bool,
        context: Context,
        response: type[gateway_pb2.ChatResponse] | type[gateway_pb2.CompleteResponse],
    ) -> None:
        created = Timestamp()
        created.GetCurrentTime()
        async with self._pipeline.open(raw) as answer:
            model, make_parser = answer.model, None
            if isinstance(raw.prompts[0], ChatPrompt):
                make_parser = parser_maker(
                    answer.request, answer.card, answer.generations[0].prompt
                )
            choices = _Choices(make_parser)
            scores = answer.generations[0].prompt_scores
            await begin_answer(context, raw.request_id, headers=answer.headers)
            collected: dict[int, list[Delta]] = {}
            while deltas := await answer.next_deltas():
                if is_streamed:
                    await context.write(
                        response(
                            request_id=raw.request_id,
                            model=model,
                            create_time=created,
                            choices=[choices.of([delta]) for delta in deltas],
                        )
                    )
                else:
                    for delta in deltas:
                        collected.setdefault(delta.sample, []).append(delta)
            await answer.settle()
            last = response(
                request_id=raw.request_id,
                model=model,
                create_time=created,
                choices=[choices.of(collected[index], scores) for index in sorted(collected)],
                usage=answer.usage(),
                timeline=answer.timelines()[0],
                warnings=current_warnings(),
            )
        await context.write(last)

    def _check_size(self, request: AnyRequest | PooledRequest) -> None:
        if request.ByteSize() > self._max_body_bytes:
            raise invalid("request", f"larger than {self._max_body_bytes} bytes")

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: Context
    ) -> gateway_pb2.TokenizeResponse:
        begin_warnings()
        resolved = await self._models.find(request.model)
        prompt: Prompt
        if request.messages and request.text:
            raise invalid("text", "contradicts messages: give one of text and messages")
        if request.messages:
            messages, files = _messages(request.messages)
            prompt = ChatPrompt(messages=messages, files=files)
        else:
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            prompt = TextPrompt(text=request.text, add_special_tokens=add)
        ids = await resolved.served.preparer.tokenize(await self._models.card(resolved), prompt)
        return gateway_pb2.TokenizeResponse(
            tokens=common_pb2.TokenIds(ids=ids),
            max_context_tokens=resolved.served.context_tokens,
            warnings=current_warnings(),
        )

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeResponse:
        resolved = await self._models.find(request.model)
        card = await self._models.card(resolved)
        check_ids("tokens", request.tokens.ids, card.vocabulary_size)
        (text,) = await resolved.served.preparer.detokenize(card, [request.tokens.ids])
        return gateway_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        described: list[gateway_pb2.Model] = []
        for served in self._models:
            adapters = self._models.adapters_of(served)
            described += [_describe(served), *(_describe_adapter(one) for one in adapters)]
        return gateway_pb2.ListModelsResponse(models=described)

    async def GetModel(
        self, request: gateway_pb2.GetModelRequest, context: Context
    ) -> gateway_pb2.GetModelResponse:
        resolved = await self._models.named(request.model)
        is_base = resolved.entry is None
        model = _describe(resolved.served) if is_base else _describe_adapter(resolved)
        return gateway_pb2.GetModelResponse(model=model)

    async def Cancel(
        self, request: gateway_pb2.CancelRequest, context: Context
    ) -> gateway_pb2.CancelResponse:
        found = self._pipeline.cancel(request.request_id, current_tenant.get())
        return gateway_pb2.CancelResponse(found=found)

    async def DrainWorker(
        self, request: gateway_pb2.DrainWorkerRequest, context: Context
    ) -> gateway_pb2.DrainWorkerResponse:
        self._workers.check_caller(context)
        return await self._workers.drain(request, context)

    async def UndrainWorker(
        self, request: gateway_pb2.UndrainWorkerRequest, context: Context
    ) -> gateway_pb2.UndrainWorkerResponse:
        self._workers.check_caller(context)
        return await self._workers.undrain(request, context)

    async def LoadAdapter(
        self, request: gateway_pb2.LoadAdapterRequest, context: Context
    ) -> gateway_pb2.LoadAdapterResponse:
        self._adapters.check_caller()
        return await self._adapters.load(request, context)

    async def UnloadAdapter(
        self, request: gateway_pb2.UnloadAdapterRequest, context: Context
    ) -> gateway_pb2.UnloadAdapterResponse:
        self._adapters.check_caller()
        return await self._adapters.unload(request, context)

    async def ListAdapters(
        self, request: gateway_pb2.ListAdaptersRequest, context: Context
    ) -> gateway_pb2.ListAdaptersResponse:
        return await self._adapters.list(request, context)

    async def EndSession(
        self, request: gateway_pb2.EndSessionRequest, context: Context
    ) -> gateway_pb2.EndSessionResponse:
        num_told = end_session(self._fleet, request.session_id, request.cache_salt or None)
        return gateway_pb2.EndSessionResponse(workers=num_told)

    async def GetFleet(
        self, request: gateway_pb2.GetFleetRequest, context: Context
    ) -> gateway_pb2.GetFleetResponse:
        now = asyncio.get_running_loop().time()
        response = gateway_pb2.GetFleetResponse(load=self._pipeline.load())
        for worker in self._fleet.workers():
            problem = worker.fault(now)
            response.workers.add(
                worker_id="" if worker.info is None else worker.info.worker_id,
                address=worker.endpoint.address,
                role=worker.role,
                healthy=not problem,
                problem=problem,
                breaker=_BREAKER_STATES.numbers[worker.breaker.state(now).value],
                consecutive_failures=worker.breaker.num_failures,
                model=worker.model,
            )
        return response


def _describe(served: ServedModel) -> gateway_pb2.Model:
    problem = served.problem()
    return gateway_pb2.Model(
        name=served.model.name,
        create_time=Timestamp(seconds=served.model.created),
        max_context_tokens=served.context_tokens,
        task=served.task,
        ready=not problem,
        problem=problem,
    )


def _describe_adapter(resolved: ResolvedModel) -> gateway_pb2.Model:
    entry, adapter = resolved.entry, resolved.adapter
    assert entry is not None
    assert adapter is not None
    problem = resolved.served.adapter_problem(adapter)
    return gateway_pb2.Model(
        name=entry.name,
        create_time=Timestamp(seconds=int(entry.created)),
        max_context_tokens=resolved.served.context_tokens,
        task=resolved.served.task,
        parent=entry.model,
        ready=not problem,
        problem=problem,
    )


def _messages(
    messages: Sequence[gateway_pb2.ChatMessage],
) -> tuple[tuple[dict[str, Any], ...], tuple[MediaFile, ...]]:
    translated: list[dict[str, Any]] = []
    files: list[MediaFile] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not message.role:
            raise invalid(f"{where}.role", "is empty; give user, assistant or system")
        given: dict[str, Any] = {"name": message.name, "tool_call_id": message.tool_call_id}
        if message.tool_calls:
            given["tool_calls"] = [
                past_call(call.id, call.name, call.arguments) for call in message.tool_calls
            ]
        more = {name: value for name, value in given.items() if value}
        content = _content(message, where, files)
        translated.append({"role": message.role, "content": content, **more})
    return tuple(translated), tuple(files)


def _content(message: gateway_pb2.ChatMessage, where: str, files: list[MediaFile]) -> Content:
    if not message.parts:
        return message.content
    if message.content:
        raise invalid(f"{where}.parts", "contradict content: give one of them")
    built = ContentBuilder(files, is_of_tool=message.role == "tool")
    for number, part in enumerate(message.parts):
        place = f"{where}.parts[{number}]"
        kind = part.WhichOneof("part")
        if kind is None:
            raise invalid(place, "is empty; give a text, an image, audio or a video")
        if kind == "text":
            built.add_text(part.text)
        elif kind == "image":
            detail, of = "low" if part.image.coarse else None, f"{place}.image"
            source, path = _file(part.image, of)
            built.add_image(source, kind=kind, where=path, type_param=of, detail=detail)
        else:
            of = f"{place}.{kind}"
            source, path = _file(part.audio if kind == "audio" else part.video, of)
            built.add_file(source, modality=kind, kind=kind, where=path, type_param=of)
    return built.content


def _file(
    file: gateway_pb2.ImageFile | gateway_pb2.AudioFile | gateway_pb2.VideoFile, place: str
) -> tuple[str | bytes, str]:
    """What was sent of a file, and the path of that."""
    if not file.url:
        return file.data, place
    if file.data:
        raise invalid(f"{place}.url", "contradicts data: give one of them")
    if ":" not in file.url:
        raise invalid(f"{place}.url", "is no URL")
    return file.url, f"{place}.url"


def _tools(tools: Sequence[gateway_pb2.Tool]) -> tuple[Tool, ...]:
    translated: list[Tool] = []
    for index, tool in enumerate(tools):
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters:
            where = f"tools[{index}].parameters"
            function["parameters"] = json_object(tool.parameters, where)
        translated.append({"type": "function", "function": function})
    return check_tools(list(enumerate(translated)))


def _tool_use(request: gateway_pb2.ChatRequest) -> tuple[tuple[Tool, ...], ToolUse]:
    choice = request.tool_choice
    mode = _TOOL_CHOICES.get(choice.mode)
    if mode is None:
        raise invalid("tool_choice.mode", f"{choice.mode} is not a mode")
    tools = () if mode == "none" else _tools(request.tools)
    most = 1 if choice.single else None
    return tools, use_tools(tools, choice.name or mode, is_named=bool(choice.name), most=most)


def _translate(
    request: AnyRequest, facts: CallFacts, prompt: Prompt, use: ToolUse = NO_TOOLS
) -> RawRequest:
    sampling = request.sampling
    for name in ("time_tokens", "beams"):
        if sampling.HasField(name):
            raise unsupported(f"sampling.{name}", "of transcriptions alone")
    given = {
        **given_in(request, CallParams),
        **given_in(sampling, SamplingParams),
        **given_in(request.stop, StopCriteria),
        **_targets(request.targets),
    }
    constraint = _constraint(sampling.constraint) if sampling.HasField("constraint") else None
    if constraint is not None and use.constraint is not None:
        raise invalid(
            "sampling.constraint",
            "contradicts the tool_choice, under which the answer is calls; set its mode to AUTO",
        )
    if request.HasField("logprobs"):
        given["top_logprobs"] = request.logprobs.top_logprobs
        if request.logprobs.scaled:
            given["logprobs_mode"] = "processed_logprobs"
    if request.HasField("prompt_logprobs"):
        check_not_streamed("prompt_logprobs", request.stream)
        given["prompt_logprobs"] = request.prompt_logprobs.top_logprobs
    if request.HasField("timeout"):
        given["timeout"] = request.timeout.ToNanoseconds() / 1e9
    return RawRequest(
        call=facts,
        model=request.model,
        prompts=(prompt,),
        given=given,
        names={"constraint": "sampling.constraint" if use.constraint is None else use.param},
        constraint=constraint if use.constraint is None else use.constraint,
        calls=use.calls,
    )


def _targets(given: gateway_pb2.LatencyTargets) -> dict[str, float]:
    names = {"first_token": "ttft_target_ms", "between_tokens": "itl_target_ms"}
    return {names[one.name]: value.ToNanoseconds() / 1e6 for one, value in given.ListFields()}


def _constraint(given: common_pb2.Constraint) -> Constraint:
    kind = given.WhichOneof("kind")
    if kind is None:
        raise invalid(
            "sampling.constraint", "give json_schema, regex, ebnf, choice or structural_tag"
        )
    reasoning = None
    if given.HasField("reasoning"):
        told = given.reasoning
        reasoning = Reasoning(
            begin=told.begin if told.HasField("begin") else None,
            end=tuple(told.end),
            until=told.until if told.HasField("until") else None,
        )
    is_choice = kind == "choice"
    return Constraint(
        kind=kind,
        text="" if is_choice else getattr(given, kind),
        choices=tuple(given.choice.choices),
        whitespace=given.whitespace_pattern if given.HasField("whitespace_pattern") else None,
        reasoning=reasoning,
        alternatives=tuple(given.alternatives),
    )


class _Choices:
    def __init__(self, make_parser: Callable[[], AnswerParser] | None) -> None:
        self._make_parser = make_parser
        self._parsers: dict[int, AnswerParser] = {}

    def of(self, deltas: Sequence[Delta], scores: PromptScores | None = None) -> gateway_pb2.Choice:
        """Sets the choice's text only once: a protobuf message keeps the memory of every text that
        a field of it ever had.
        """
        sample, text = deltas[0].sample, "".join([delta.text for delta in deltas])
        reason = deltas[-1].finish_reason or common_pb2.FINISH_REASON_UNSPECIFIED
        part = AnswerPart(content=text)
        if self._make_parser is not None:
            parser = self._parsers.get(sample)
            if parser is None:
                parser = self._parsers[sample] = self._make_parser()
            part = parser.push(text, is_last=deltas[-1].finish_reason is not None)
            if reason == common_pb2.FINISH_REASON_STOP and parser.has_called:
                reason = common_pb2.FINISH_REASON_TOOL_CALLS
        return gateway_pb2.Choice(
            index=sample,
            text=part.content,
            token_ids=chain.from_iterable(delta.ids for delta in deltas),
            logprobs=chain.from_iterable(delta.logprobs for delta in deltas),
            finish_reason=reason,
            prompt_logprobs=() if scores is None else scores.entries,
            reasoning=part.reasoning,
            tool_calls=[
                gateway_pb2.ToolCall(**asdict(call))
                for call in (joined(part.calls) if len(deltas) > 1 else part.calls)
            ],
        )
