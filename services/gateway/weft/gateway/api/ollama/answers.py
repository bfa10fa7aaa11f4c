"""Answers of Ollama's API, as pydantic models: the documented shape of what is sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class AnswerMessage(BaseModel):
    """What the model said, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Line(BaseModel):
    """A whole answer, or a line of a streamed one; the last one has counts and durations."""

    model: str
    created_at: str
    logprobs: list[dict[str, Any]] | None = None
    done: bool
    done_reason: Literal["stop", "length", "load", "unload", "abort"] | None = None
    total_duration: int | None = Field(None, description="nanoseconds")
    load_duration: int | None = Field(None, description="0: served models are loaded")
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = Field(None, description="nanoseconds to the first token")
    eval_count: int | None = None
    eval_duration: int | None = Field(None, description="nanoseconds from the first token on")


class ChatAnswer(Line):
    """Answer to POST /api/chat."""

    message: AnswerMessage


class GenerateAnswer(Line):
    """Answer to POST /api/generate."""

    response: str
    thinking: str | None = None


class ModelAnswer(BaseModel):
    """A model in a list."""

    name: str
    model: str
    modified_at: str
    size: int = Field(description="0: not known to the gateway")
    digest: str = Field(description="of an adapter's content, or of a model's name")
    details: dict[str, Any]
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class ModelsAnswer(BaseModel):
    """Answer to GET /api/tags and GET /api/ps."""

    models: list[ModelAnswer]


class ShowAnswer(BaseModel):
    """Answer to POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    license: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionAnswer(BaseModel):
    """Answer to GET /api/version."""

    version: str = Field(description="of Ollama's API, as its clients compare it")
    weft: str = Field(description="Weft's own version")


class EmbedAnswer(BaseModel):
    """Answer to POST /api/embed."""

    model: str
    embeddings: list[list[float]] = Field(description="of length 1, in the order of the inputs")
    total_duration: int = Field(description="nanoseconds")
    load_duration: int = Field(description="0: served models are loaded")
    prompt_eval_count: int = Field(description="tokens of all inputs")


class EmbeddingsAnswer(BaseModel):
    """Answer to POST /api/embeddings."""

    embedding: list[float] = Field(description="as the model has it; empty without a prompt")


class ErrorAnswer(BaseModel):
    """Body of a failure, or the last line of a stream that fails."""

    error: str
