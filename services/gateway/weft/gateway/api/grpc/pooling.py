"""Embeddings, ranks and scores of the typed gRPC face."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weft.gateway.api.edge import CallFacts, Context, begin_answer, call_facts, earliest
from weft.gateway.api.pooling.translate import pairs_of
from weft.gateway.api.pooling.vectors import score_of, vectors_of
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.generation.stream import TokenStream
from weft.gateway.request import GenerateRequest, PairPrompt, Prompt, TextPrompt, TokenPrompt, Wants
from weft.gateway.validate import invalid
from weft.gateway.warnings import current_warnings
from weft.v1 import gateway_pb2


class PooledCalls:
    """Converts typed requests for vectors, and vectors back. Has no logic of its own."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    async def embed(
        self, request: gateway_pb2.EmbedRequest, context: Context
    ) -> gateway_pb2.EmbedResponse:
        """See gateway.proto."""
        wants = Wants(
            output="embedding",
            dimensions=request.dimensions if request.HasField("dimensions") else None,
            truncate_tokens=_cut(request.call),
            prompt_name=request.prompt_name or None,
        )
        prompts = tuple(_input(number, one) for number, one in enumerate(request.inputs))
        facts = call_facts(context, "embd")
        async with self._run(request.model, request.call, prompts, wants, facts, context) as done:
            return gateway_pb2.EmbedResponse(
                request_id=facts.request_id,
                model=done.model,
                embeddings=[
                    gateway_pb2.Embedding(values=vectors_of(one)[0].tolist())
                    for one in done.generations
                ],
                usage=done.usage(),
                warnings=current_warnings(),
            )

    async def rerank(
        self, request: gateway_pb2.RerankRequest, context: Context
    ) -> gateway_pb2.RerankResponse:
        """See gateway.proto."""
        prompts = tuple(PairPrompt(first=request.query, second=one) for one in request.documents)
        wants = _scores(request.call, request.instruction)
        facts = call_facts(context, "rerank")
        async with self._run(request.model, request.call, prompts, wants, facts, context) as done:
            scores = [score_of(done, one) for one in done.generations]
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            return gateway_pb2.RerankResponse(
                request_id=facts.request_id,
                model=done.model,
                documents=[
                    gateway_pb2.RankedDocument(index=index, score=scores[index])
                    for index in order[: request.top_n or None]
                ],
                usage=done.usage(),
                warnings=current_warnings(),
            )

    async def score(
        self, request: gateway_pb2.ScoreRequest, context: Context
    ) -> gateway_pb2.ScoreResponse:
        """See gateway.proto."""
        prompts = pairs_of(request.first, request.second, ("first", "second"))
        wants = _scores(request.call, request.instruction)
        facts = call_facts(context, "score")
        async with self._run(request.model, request.call, prompts, wants, facts, context) as done:
            return gateway_pb2.ScoreResponse(
                request_id=facts.request_id,
                model=done.model,
                scores=[score_of(done, one) for one in done.generations],
                usage=done.usage(),
                warnings=current_warnings(),
            )

    @asynccontextmanager
    async def _run(
        self,
        model: str,
        call: gateway_pb2.PoolCall,
        prompts: tuple[Prompt, ...],
        wants: Wants,
        facts: CallFacts,
        context: Context,
    ) -> AsyncIterator[TokenStream]:
        """Runs a request to its end; its vectors are there within the block."""
        given = call.timeout.ToNanoseconds() / 1e9 if call.HasField("timeout") else None
        request = GenerateRequest(
            request_id=facts.request_id,
            client_request_id=facts.client_request_id,
            model=model,
            prompts=prompts,
            wants=wants,
            timeout_s=earliest(facts.timeout_s, given),
            first_token_timeout_s=facts.first_token_timeout_s,
            cache_salt=call.cache_salt,
            priority=call.priority,
            routing_key=facts.routing_key,
            worker=facts.worker,
            traceparent=facts.traceparent,
            targets=facts.targets,
            tenant=facts.tenant,
        )
        async with self._pipeline.open(request) as stream:
            while await stream.next_deltas():
                pass
            await stream.settle()
            await begin_answer(context, facts.request_id, headers=stream.headers)
            yield stream


def _scores(call: gateway_pb2.PoolCall, instruction: str) -> Wants:
    return Wants(output="classes", truncate_tokens=_cut(call), instruction=instruction)


def _cut(call: gateway_pb2.PoolCall) -> int | None:
    return call.truncate_tokens if call.HasField("truncate_tokens") else None


def _input(number: int, given: gateway_pb2.EmbedInput) -> Prompt:
    kind = given.WhichOneof("input")
    if kind is None:
        raise invalid(f"inputs[{number}]", "give a text or token_ids")
    if kind == "text":
        return TextPrompt(text=given.text)
    return TokenPrompt(ids=tuple(given.token_ids.ids))
