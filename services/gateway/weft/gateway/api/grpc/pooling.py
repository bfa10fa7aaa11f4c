"""Embeddings, ranks and scores of the typed gRPC face."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weft.common.rpc.errors import Context
from weft.contract.request import CallParams
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.parameters import given_in
from weft.gateway.api.pooling.translate import pairs_of
from weft.gateway.api.pooling.vectors import score_of, vectors_of
from weft.gateway.generation.answer import Answer
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.request import (
    CallFacts,
    PairPrompt,
    PoolingOptions,
    Prompt,
    RawRequest,
    TextPrompt,
    TokenPrompt,
)
from weft.gateway.validate import invalid
from weft.gateway.warnings import current_warnings
from weft.v1 import gateway_pb2


class PooledCalls:
    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    async def embed(
        self, request: gateway_pb2.EmbedRequest, context: Context
    ) -> gateway_pb2.EmbedResponse:
        wanted = PoolingOptions(
            output="embedding",
            dimensions=request.dimensions if request.HasField("dimensions") else None,
            truncate_tokens=_cut(request.call),
            prompt_name=request.prompt_name or None,
        )
        prompts = tuple(_input(number, one) for number, one in enumerate(request.inputs))
        facts = call_facts(context, "embd")
        async with self._run(request.model, request.call, prompts, wanted, facts, context) as done:
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
        prompts = tuple(PairPrompt(first=request.query, second=one) for one in request.documents)
        wanted = _scores(request.call, request.instruction)
        facts = call_facts(context, "rerank")
        async with self._run(request.model, request.call, prompts, wanted, facts, context) as done:
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
        prompts = pairs_of(request.first, request.second, ("first", "second"))
        wanted = _scores(request.call, request.instruction)
        facts = call_facts(context, "score")
        async with self._run(request.model, request.call, prompts, wanted, facts, context) as done:
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
        wanted: PoolingOptions,
        facts: CallFacts,
        context: Context,
    ) -> AsyncIterator[Answer]:
        """The request has ended, and its vectors are complete, within the block."""
        given = given_in(call, CallParams)
        if call.HasField("timeout"):
            given["timeout"] = call.timeout.ToNanoseconds() / 1e9
        raw = RawRequest(call=facts, model=model, prompts=prompts, given=given, pooling=wanted)
        async with self._pipeline.open(raw) as answer:
            while await answer.next_deltas():
                pass
            await answer.settle()
            await begin_answer(context, facts.request_id, headers=answer.headers)
            yield answer


def _scores(call: gateway_pb2.PoolCall, instruction: str) -> PoolingOptions:
    return PoolingOptions(output="classes", truncate_tokens=_cut(call), instruction=instruction)


def _cut(call: gateway_pb2.PoolCall) -> int | None:
    return call.truncate_tokens if call.HasField("truncate_tokens") else None


def _input(number: int, given: gateway_pb2.EmbedInput) -> Prompt:
    kind = given.WhichOneof("input")
    if kind is None:
        raise invalid(f"inputs[{number}]", "give a text or token_ids")
    if kind == "text":
        return TextPrompt(text=given.text)
    return TokenPrompt(ids=tuple(given.token_ids.ids))
