"""Ollama's API over gRPC: weft.v1.OllamaService."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.contract.tasks import Task
from weft.gateway.api.answer import LINES, field_names, json_body, run_answer
from weft.gateway.api.edge import Context, begin_answer, call_facts
from weft.gateway.api.ollama.bodies import ChatBody, GenerateBody, GenerationBody, ShowBody
from weft.gateway.api.ollama.translate import (
    NAMES,
    TOO_LONG,
    chat_request,
    generation_request,
    model_name,
)
from weft.gateway.api.ollama.writer import LineWriter, loaded
from weft.gateway.api.openai.chunks import to_json
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.server.version import version
from weft.gateway.catalogue import Catalogue, ResolvedModel
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.request import GenerateRequest
from weft.gateway.text.model_card import ModelCard
from weft.gateway.validate import invalid
from weft.v1 import dialects_pb2_grpc

_NEVER = "9999-12-31T23:59:59Z"
"""When a served model is unloaded."""


class OllamaFace(dialects_pb2_grpc.OllamaServiceServicer):
    """Parses bodies, converts them, and writes answers. Has no logic of its own."""

    def __init__(self, pipeline: RequestPipeline, models: Catalogue, bodies: BodyParser) -> None:
        self._pipeline = pipeline
        self._models = models
        self._bodies = bodies

    async def Chat(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        """See dialects.proto."""
        with field_names(NAMES, {}, TOO_LONG):
            facts = call_facts(context, "chat")
            body, generate = await self._bodies.parse(
                ChatBody, request, lambda body: chat_request(body, facts)
            )
            await self._answer(generate, body, context, is_chat=True)

    async def Generate(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        """See dialects.proto."""
        with field_names({**NAMES, "messages": "prompt"}, {}, TOO_LONG):
            facts = call_facts(context, "gen")
            body, generate = await self._bodies.parse(
                GenerateBody, request, lambda body: generation_request(body, facts)
            )
            await self._answer(generate, body, context, is_chat=False)

    async def _answer(
        self,
        request: GenerateRequest | None,
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
            line = to_json(loaded(named, is_chat=is_chat)) + b"\n"
            kind = LINES if is_streamed else "application/json"
            await begin_answer(context, "load", kind)
            await context.write(HttpBody(content_type=kind, data=line))
            return
        await run_answer(
            self._pipeline,
            request,
            lambda stream: LineWriter(request, stream, named, is_chat=is_chat),
            context,
            is_streamed=is_streamed,
        )

    async def ListTags(self, request: Empty, context: Context) -> HttpBody:
        """See dialects.proto."""
        return json_body({"models": [_describe(one) for one in self._resolved()]})

    async def ListRunning(self, request: Empty, context: Context) -> HttpBody:
        """See dialects.proto."""
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
        """See dialects.proto."""
        body, _ = await self._bodies.parse(ShowBody, request, lambda body: None)
        resolved = await self._models.find(model_name(body.model or body.name))
        card = await self._models.card(resolved)
        described = _describe(resolved)
        return json_body(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "license": "",
                "details": described["details"],
                "model_info": {
                    "general.architecture": "weft",
                    "general.basename": resolved.name,
                    "weft.context_length": resolved.served.context_tokens,
                    "weft.vocab_size": card.vocabulary_size,
                },
                "capabilities": _capabilities(resolved.served.task, card),
                "modified_at": described["modified_at"],
            }
        )

    async def GetVersion(self, request: Empty, context: Context) -> HttpBody:
        """See dialects.proto."""
        return json_body({"version": version()})

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
    if card.template is not None:
        found.append("tools")
    if card.reasoning is not None:
        found.append("thinking")
    return found


def _describe(resolved: ResolvedModel) -> dict[str, object]:
    """A model as lists show it. The gateway does not know sizes and digests of weights; the digest
    is of the name, since Ollama's own client ends with an error where there is none.
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
            "family": served.model.name,
            "families": [served.model.name],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
