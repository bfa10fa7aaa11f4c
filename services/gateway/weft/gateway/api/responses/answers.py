"""Answers of the Responses API, as pydantic models: the documented shape of what is sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputItem(BaseModel):
    """One item of the output."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[dict[str, Any]] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None


class ResponseAnswer(BaseModel):
    """A response."""

    id: str = Field(description="names the gateway that keeps it")
    object: Literal["response"]
    status: Status
    created_at: int
    completed_at: int | None
    output: list[OutputItem]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    instructions: str | None
    metadata: dict[str, str]
    previous_response_id: str | None
    store: bool
    background: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str
    user: str | None


class ResponseEvent(BaseModel):
    """Event of POST /v1/responses with `stream`; its other fields are those of its type."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    delta: str | None = None


class ItemsAnswer(BaseModel):
    """Answer to GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CountAnswer(BaseModel):
    """Answer to POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedAnswer(BaseModel):
    """Answer to DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: bool
