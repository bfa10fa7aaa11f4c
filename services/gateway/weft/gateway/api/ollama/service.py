"""Ollama's API over gRPC: weft.v1.OllamaService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import TypeVar

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.common.rpc.errors import Context
from weft.contract.tasks import Task
from weft.contract.version import version
from weft.gateway.api.answer import JSON, LINES, field_names, json_body, run_answer
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.ollama.bodies import (
    ChatBody,
    EmbedBody,
    EmbeddingBody,
    EmbedPromptBody,
    GenerateBody,
    GenerationBody,
    ShowBody,
)
from weft.gateway.api.ollama.translate import (
    TOO_LONG,
    chat_request,
    embed_prompt_request,
    embed_request,
    generation_request,
    model_name,
    unloads,
)
from weft.gateway.api.ollama.writer import LineWriter, loaded
from weft.gateway.api.openai.chunks import to_json
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.pooling.vectors import vectors_of
from weft.gateway.api.relay import EdgeFace
from weft.gateway.api.unserved import leave_out
from weft.gateway.catalogue import Catalogue, ResolvedModel
from weft.gateway.generation.answer import Answer
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.request import CallFacts, RawRequest
from weft.gateway.text.model_card import ModelCard
from weft.gateway.validate import invalid
from weft.v1 import dialects_pb2_grpc

API_VERSION = "0.12.0"
"""The version of Ollama's API that this face speaks, since clients compare it with what they need.
"""
B = TypeVar("B", bound=EmbeddingBody)
_NEVER = "9999-12-31T23:59:59Z"
"""When a served model is unloaded."""


class OllamaFace(dialects_pb2_grpc.OllamaServiceServicer):
    def __init__(
        self,
        pipeline: RequestPipeline,
        models: Catalogue,
        bodies: BodyParser,
        relays: EdgeFace,
    ) -> None:
        self._pipeline = pipeline
        self._models = models
        self._bodies = bodies
        self._relays = relays

    async def Chat(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        with field_names({}, {}, TOO_LONG):
            facts = call_facts(context, "chat")
            body, generate = await self._bodies.parse(
                ChatBody, request, lambda body: chat_request(body, facts)
            )
            await self._answer(generate, body, context, is_chat=True)

    async def Generate(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        facts = call_facts(context, "gen")
        body, generate = await self._bodies.parse(
            GenerateBody, request, lambda body: generation_request(body, facts)
        )
        with field_names({"messages": "prompt"}, {}, TOO_LONG):
            await self._answer(generate, body, context, is_chat=False)

    async def _answer(
        self,
        request: RawRequest | None,
        body: GenerationBody,
        context: Context,
        *,
        is_chat: bool,
    ) -> None:
        is_streamed = body.stream is not False
        resolved = await self._models.find(model_name(body.model))
        if body.think and not (await self._models.card(resolved)).reasoning:
            raise invalid("think", f"the model `{resolved.name}` does not reason; leave it out")
        named = body.model or resolved.name
        if request is None:
            is_end = unloads(body)
            if is_end:
                leave_out("keep_alive", "served models stay loaded")
            line = to_json(loaded(named, is_chat=is_chat, is_end=is_end)) + b"\n"
            kind = LINES if is_streamed else JSON
            await begin_answer(context, "load", kind)
            await context.write(HttpBody(content_type=kind, data=line))
            return
        await run_answer(
            self._pipeline,
            request,
            lambda answer: LineWriter(answer, named, is_chat=is_chat),
            context,
            self._relays,
            is_streamed=is_streamed,
        )

    async def Embed(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        begin_ns = time.monotonic_ns()

        def write(body: EmbedBody, answer: Answer | None) -> Mapping[str, object]:
            return {
                "model": body.model or ("" if answer is None else answer.model),
                "embeddings": _vectors(answer),
                "total_duration": time.monotonic_ns() - begin_ns,
                "load_duration": 0,
                "prompt_eval_count": 0 if answer is None else answer.usage().prompt_tokens,
            }

        await self._embed(EmbedBody, request, embed_request, write, context)

    async def EmbedPrompt(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]

        def write(body: EmbedPromptBody, answer: Answer | None) -> Mapping[str, object]:
            return {"embedding": next(iter(_vectors(answer)), [])}

        await self._embed(EmbedPromptBody, request, embed_prompt_request, write, context)

    async def _embed(
        self,
        cls: type[B],
        request: HttpBody,
        translate: Callable[[B, CallFacts], RawRequest | None],
        write: Callable[[B, Answer | None], Mapping[str, object]],
        context: Context,
    ) -> None:
        with field_names({}, {}):
            facts = call_facts(context, "embd")
            body, wanted = await self._bodies.parse(
                cls, request, lambda body: translate(body, facts)
            )
            if wanted is None:
                await self._models.find(model_name(body.model))
                await begin_answer(context, facts.request_id, JSON)
                await context.write(json_body(write(body, None)))
                return
            async with self._pipeline.open(wanted) as answer:
                while await answer.next_deltas():
                    pass
                await answer.settle()
                await begin_answer(context, wanted.request_id, JSON, answer.headers)
                data = await asyncio.to_thread(lambda: to_json(write(body, answer)))
        await context.write(HttpBody(content_type=JSON, data=data))

    async def ListTags(self, request: Empty, context: Context) -> HttpBody:
        return json_body({"models": [_describe(one) for one in self._resolved()]})

    async def ListRunning(self, request: Empty, context: Context) -> HttpBody:
        running = [
            {
                **_describe(one),
                "expires_at": _NEVER,
                "size_vram": 0,
                "context_length": one.served.context_tokens,
            }
            for one in self._resolved()
            if not one.served.problem()
        ]
        return json_body({"models": running})

    async def ShowModel(self, request: HttpBody, context: Context) -> HttpBody:
        body, _ = await self._bodies.parse(ShowBody, request, lambda body: None)
        resolved = await self._models.find(model_name(body.model or body.name))
        card = await self._models.card(resolved)
        described = _describe(resolved)
        kind = card.model_type or "unknown"
        facts = {
            "general.parameter_count": card.num_parameters,
            f"{kind}.embedding_length": card.hidden_size,
        }
        return json_body(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "license": "",
                "details": described["details"],
                "model_info": {
                    "general.architecture": kind,
                    "general.basename": resolved.name,
                    f"{kind}.context_length": resolved.served.context_tokens,
                    f"{kind}.vocab_size": card.vocabulary_size,
                    **{name: number for name, number in facts.items() if number},
                },
                "capabilities": _capabilities(resolved.served.task, card),
                "modified_at": described["modified_at"],
            }
        )

    async def GetVersion(self, request: Empty, context: Context) -> HttpBody:
        return json_body({"version": API_VERSION, "weft": version()})

    def _resolved(self) -> list[ResolvedModel]:
        return [
            one
            for served in self._models
            for one in (ResolvedModel(served), *self._models.adapters_of(served))
        ]


def _capabilities(task: Task, card: ModelCard) -> list[str]:
    if task != "generate":
        return ["embedding"] if task == "embed" else []
    found = ["completion"]
    if card.images is not None:
        found.append("vision")
    if card.template is not None:
        found.append("tools")
    if card.reasoning is not None:
        found.append("thinking")
    return found


def _vectors(answer: Answer | None) -> list[list[float]]:
    return [] if answer is None else [vectors_of(one)[0].tolist() for one in answer.generations]


def _size(num_parameters: int) -> str:
    """A number of parameters as Ollama writes it, such as "134.52M"; empty: not known."""
    if not num_parameters:
        return ""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.{1 if name == 'B' else 2}f}{name}"
    return str(num_parameters)


def _describe(resolved: ResolvedModel) -> dict[str, object]:
    """The gateway does not know sizes and digests of weights. The digest is of the name, since
    Ollama's own client ends with an error where there is none.
    """
    served, entry = resolved.served, resolved.entry
    created = served.model.created if entry is None else int(entry.created)
    parent = "" if entry is None else served.model.name
    return {
        "name": resolved.name,
        "model": resolved.name,
        "modified_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "size": 0,
        "digest": sha256(resolved.name.encode()).hexdigest() if entry is None else entry.digest,
        "details": {
            "parent_model": parent,
            "format": "safetensors",
            "family": served.model.model_type,
            "families": [served.model.model_type],
            "parameter_size": _size(served.model.num_parameters),
            "quantization_level": "",
        },
    }
