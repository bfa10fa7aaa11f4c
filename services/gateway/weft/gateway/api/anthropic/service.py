"""The Messages API over gRPC: weft.v1.AnthropicService."""

from __future__ import annotations

from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import Context
from weft.gateway.api.answer import field_names, json_body, run_answer
from weft.gateway.api.anthropic.bodies import CountTokensBody, MessagesBody
from weft.gateway.api.anthropic.translate import (
    PARTS,
    TOO_LONG,
    messages_prompt,
    messages_request,
)
from weft.gateway.api.anthropic.writer import MessageWriter
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.relay import EdgeFace
from weft.gateway.catalogue import Catalogue
from weft.gateway.generation.pipeline import RequestPipeline
from weft.v1 import dialects_pb2_grpc


class AnthropicFace(dialects_pb2_grpc.AnthropicServiceServicer):
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

    async def CreateMessage(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        with field_names({}, PARTS, TOO_LONG):
            facts = call_facts(context, "msg", "_")
            body, raw = await self._bodies.parse(
                MessagesBody, request, lambda body: messages_request(body, facts)
            )
            await run_answer(
                self._pipeline,
                raw,
                MessageWriter,
                context,
                self._relays,
                is_streamed=bool(body.stream),
                headers=_id_header(facts.request_id),
            )

    async def CountTokens(self, request: HttpBody, context: Context) -> HttpBody:
        with field_names({}, PARTS, TOO_LONG):
            facts = call_facts(context, "msg", "_")
            body, (prompt, _) = await self._bodies.parse(CountTokensBody, request, messages_prompt)
            resolved = await self._models.find(body.model or "")
            card = await self._models.card(resolved)
            ids = await resolved.served.preparer.tokenize(card, prompt)
        await begin_answer(context, facts.request_id, headers=_id_header(facts.request_id))
        return json_body({"input_tokens": len(ids)})


def _id_header(request_id: str) -> tuple[tuple[str, str], ...]:
    return (("request-id", request_id),)
