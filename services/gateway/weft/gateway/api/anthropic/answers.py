"""Answers of the Messages API, as pydantic models: the documented shape of what is sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class AnswerBlock(BaseModel):
    """One block of an answer."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(None, description="of a thinking block: empty")
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = Field(
        None, description="of a tool_use; a text where the call was cut off"
    )


class UsageAnswer(BaseModel):
    """Token counts of a message."""

    input_tokens: int = Field(description="prompt tokens that were not cached")
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class MessageAnswer(BaseModel):
    """Body of the answer to POST /v1/messages without `stream`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "model_context_window_exceeded",
        "stop_sequence",
        "tool_use",
        "abort",
    ]
    stop_sequence: str | None
    stop_details: None = None
    usage: UsageAnswer


class MessageEvent(BaseModel):
    """Event of POST /v1/messages with `stream`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: dict[str, Any] | None = None
    index: int | None = None
    content_block: AnswerBlock | None = None
    delta: dict[str, Any] | None = None
    usage: UsageAnswer | None = None


class CountAnswer(BaseModel):
    """Body of the answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class ErrorDetails(BaseModel):
    """What failed."""

    type: str
    message: str


class ErrorAnswer(BaseModel):
    """Body of a failure."""

    type: Literal["error"]
    error: ErrorDetails
    request_id: str | None
