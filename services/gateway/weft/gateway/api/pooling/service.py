"""Embeddings, ranks, scores and classes over gRPC: weft.v1.PoolingService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import Context
from weft.gateway.api.answer import JSON, field_names
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.openai.chunks import to_json
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.pooling.bodies import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingsBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from weft.gateway.api.pooling.translate import (
    OUTPUTS,
    classify_request,
    cohere_request,
    documents_of,
    embeddings_request,
    pooling_request,
    rerank_request,
    score_request,
)
from weft.gateway.api.pooling.vectors import probabilities, score_of, shown, vectors_of, written
from weft.gateway.generation.answer import Answer
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.request import CallFacts, RawRequest
from weft.v1 import dialects_pb2_grpc

B = TypeVar("B", bound=PoolBody)
_LARGE = 1 << 14
"""Number of vector entries above which an answer is built in a thread."""


class PoolingFace(dialects_pb2_grpc.PoolingServiceServicer):
    def __init__(self, pipeline: RequestPipeline, bodies: BodyParser) -> None:
        self._pipeline = pipeline
        self._bodies = bodies

    async def CreateEmbeddings(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]

        def write(body: EmbeddingsBody, answer: Answer) -> Mapping[str, object]:
            output = OUTPUTS[body.output_type or "dense"]
            data = [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": shown(answer, one, output, body.encoding_format).data,
                }
                for index, one in enumerate(answer.generations)
            ]
            return {**_head(answer, "list"), "data": data}

        await self._answer(EmbeddingsBody, request, embeddings_request, "embd", write, context)

    async def EmbedTexts(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]

        def write(body: CohereEmbedBody, answer: Answer) -> Mapping[str, object]:
            vectors = [vectors_of(one)[0] for one in answer.generations]
            kinds = body.embedding_types or ["float"]
            return {
                "id": answer.raw.request_id,
                "response_type": "embeddings_by_type",
                "embeddings": {kind: [written(one, kind) for one in vectors] for kind in kinds},
                "texts": body.texts,
                "meta": {"billed_units": {"input_tokens": answer.usage().prompt_tokens}},
            }

        await self._answer(CohereEmbedBody, request, cohere_request, "embd", write, context)

    async def PoolTexts(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]

        def write(body: PoolingBody, answer: Answer) -> Mapping[str, object]:
            output = OUTPUTS[body.task or "embed"]
            made = [shown(answer, one, output, body.encoding_format) for one in answer.generations]
            data = [
                {"object": "pooling", "index": index, "data": one.data, "shape": one.shape}
                for index, one in enumerate(made)
            ]
            return {**_head(answer, "list"), "data": data}

        await self._answer(PoolingBody, request, pooling_request, "pool", write, context)

    async def ClassifyTexts(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]

        def write(body: ClassifyBody, answer: Answer) -> Mapping[str, object]:
            data, labels = [], answer.card.labels
            for index, one in enumerate(answer.generations):
                probs = probabilities(vectors_of(one)[0])
                best = max(range(len(probs)), key=probs.__getitem__)
                data.append(
                    {
                        "index": index,
                        "label": labels[best] if best < len(labels) else None,
                        "probs": probs,
                        "num_classes": len(probs),
                    }
                )
            return {**_head(answer, "list"), "data": data}

        await self._answer(ClassifyBody, request, classify_request, "classify", write, context)

    async def ScorePairs(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]

        def write(body: ScoreBody, answer: Answer) -> Mapping[str, object]:
            data = [
                {"object": "score", "index": index, "score": score_of(answer, one)}
                for index, one in enumerate(answer.generations)
            ]
            return {**_head(answer, "list"), "data": data}

        await self._answer(ScoreBody, request, score_request, "score", write, context)

    async def RerankDocuments(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]

        def write(body: RerankBody, answer: Answer) -> Mapping[str, object]:
            texts = documents_of(body)
            scores = [score_of(answer, one) for one in answer.generations]
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            results: list[dict[str, object]] = []
            for index in order[: body.top_n]:
                result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
                if body.return_documents is not False:
                    result["document"] = {"text": texts[index]}
                results.append(result)
            head = _head(answer, "")
            return {**{name: head[name] for name in ("id", "model", "usage")}, "results": results}

        await self._answer(RerankBody, request, rerank_request, "rerank", write, context)

    async def _answer(
        self,
        cls: type[B],
        request: HttpBody,
        translate: Callable[[B, CallFacts], RawRequest],
        prefix: str,
        write: Callable[[B, Answer], Mapping[str, object]],
        context: Context,
    ) -> None:
        facts = call_facts(context, prefix)
        body, wanted = await self._bodies.parse(cls, request, lambda body: translate(body, facts))
        with field_names(cls.names, {}):
            async with self._pipeline.open(wanted) as answer:
                while await answer.next_deltas():
                    pass
                await answer.settle()
                await begin_answer(context, wanted.request_id, JSON, answer.headers)
                vectors = [one.vectors for one in answer.generations if one.vectors is not None]
                size = sum(one.num_rows * one.width for one in vectors)

                def build() -> bytes:
                    return to_json(write(body, answer))

                data = build() if size <= _LARGE else await asyncio.to_thread(build)
        await context.write(HttpBody(content_type=JSON, data=data))


def _head(answer: Answer, kind: str) -> dict[str, object]:
    usage = answer.usage()
    return {
        "id": answer.raw.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": answer.model,
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
    }
