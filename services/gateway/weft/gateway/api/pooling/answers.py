"""Answers with vectors, ranks and scores, as pydantic models: the documented shape."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from weft.gateway.api.openai.answers import Answer

Vector = list[float] | str


class PoolUsage(Answer):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class SparseVector(Answer):
    """Lexical weights of one input."""

    indices: list[int] = Field(description="token ids, ascending")
    values: list[float] = Field(description="their weights, above 0")


class EmbeddingAnswer(Answer):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: Vector | list[list[float]] | SparseVector = Field(
        description="numbers, or base64 of float32; with `output_type` lists of numbers, or a "
        "sparse vector"
    )


class EmbeddingsAnswer(Answer):
    """Body of the answer to POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingAnswer]
    usage: PoolUsage


class PooledAnswer(Answer):
    """The vectors of one input."""

    object: Literal["pooling"]
    index: int
    data: Vector | list[list[float]] | SparseVector = Field(
        description="a vector, or one for each token; base64 holds them one after another"
    )
    shape: list[int] = Field(description="of the data: vectors and numbers in each, or numbers")


class PoolingAnswer(Answer):
    """Body of the answer to POST /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledAnswer]
    usage: PoolUsage


class ClassAnswer(Answer):
    """The classes of one input."""

    index: int
    label: str | None = Field(description="name of the most likely class")
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer):
    """Body of the answer to POST /v1/classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassAnswer]
    usage: PoolUsage


class PairScore(Answer):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(Answer):
    """Body of the answer to POST /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PoolUsage


class RankedText(Answer):
    """A ranked document's content."""

    text: str


class RankedDocument(Answer):
    """A document and its rank."""

    index: int = Field(description="of the document in the request")
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(Answer):
    """Body of the answer to POST /v1/rerank."""

    id: str
    model: str
    results: list[RankedDocument] = Field(description="best first")
    usage: PoolUsage
