"""Answers of the OpenAI face, as pydantic models: the documented shape of what is sent.

Chunks are built from pre-encoded bytes (`chunks.py`), not from these models; tests compare the two.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from weft.contract.request import LogprobsMode

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Answer(BaseModel):
    """Base class: only documented fields are sent."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


StopReason = Annotated[
    str | int | None,
    Field(description="the stop string or stop token that ended it; of a stream in the last chunk"),
]
TokenIds = Annotated[list[int] | None, Field(description="only with `return_token_ids`")]


class PromptTokensDetails(Answer):
    """Details of the prompt's tokens in the usage."""

    cached_tokens: int = Field(description="prompt tokens found in a cache")
    audio_tokens: int = Field(description="prompt tokens that stand for audio")


class UsageAnswer(Answer):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class WeftAnswer(Answer):
    """Weft's own fields, only with `weft_timeline: true`."""

    request_id: str
    trace_id: str | None = Field(None, description="32 hex digits, unless tracing is off")
    timeline: dict[str, Any] | None = Field(
        None, description="weft.v1.Timeline of the first prompt, as protobuf's JSON"
    )
    timelines: list[dict[str, Any]] | None = Field(None, description="with several prompts")


class TopLogprobAnswer(Answer):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int]


class LogprobAnswer(TopLogprobAnswer):
    """Log-probability of one token of the answer."""

    top_logprobs: list[TopLogprobAnswer]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat choice."""

    content: list[LogprobAnswer]
    refusal: None = None


class FunctionAnswer(Answer):
    """What is called."""

    name: str
    arguments: str = Field(description="a JSON object, as text")


class ToolCallAnswer(Answer):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: FunctionAnswer


class ChatMessageAnswer(Answer):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where there are calls and no text")
    refusal: None = None
    reasoning: str | None = Field(None, description="what the model wrote to think")
    reasoning_content: str | None = Field(None, description="the same, by its older name")
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(Answer):
    """One choice of a chat completion."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: TokenIds = None


class PromptLogprobAnswer(Answer):
    """A prompt's token, or an alternative to it."""

    logprob: float
    rank: int | None = Field(
        description="among all tokens, 1 is the most likely; null: not among the alternatives"
    )
    decoded_token: str


PromptLogprobAnswers = list[dict[str, PromptLogprobAnswer] | None]
"""An entry for each token of a prompt, null for the first: by token id the token and its
alternatives.
"""


class WeightSpan(Answer):
    """Tokens of a choice that one version of the weights has drawn: start <= index < end."""

    version: str = Field(description="empty: of a worker that was lost, whose version is unknown")
    start: int
    end: int


WeightSpans = Annotated[
    list[list[WeightSpan]] | None,
    Field(
        description="only with `return_token_ids`, once weights were changed: of each choice, in "
        "order; empty: those of the start"
    ),
]


Mode = Annotated[
    LogprobsMode | None,
    Field(description="where the request has it: of which distribution `logprobs` are"),
]


class ChatAnswer(Answer):
    """Body of the answer to POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    weft: WeftAnswer | None = None
    prompt_logprobs: PromptLogprobAnswers | None = Field(
        None, description="only if asked for: of each prompt token, by token id; null for the first"
    )
    prompt_token_ids: TokenIds = None
    weight_versions: WeightSpans = None
    logprobs_mode: Mode = None


class FunctionDelta(Answer):
    """What a chunk adds to what is called."""

    name: str | None = Field(None, description="in the call's first chunk")
    arguments: str


class ToolCallDelta(Answer):
    """What a chunk adds to a call."""

    index: int
    id: str | None = Field(None, description="in the call's first chunk")
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Answer):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    token_ids: TokenIds = None


class ChatChunk(Answer):
    """Event of POST /v1/chat/completions with `stream`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None
    weft: WeftAnswer | None = None
    prompt_token_ids: TokenIds = Field(None, description="in the first chunk")


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion choice; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One choice of a completion, or of a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    prompt_logprobs: PromptLogprobAnswers | None = Field(
        None, description="only if asked for: of each prompt token, by token id; null for the first"
    )
    token_ids: TokenIds = None
    prompt_token_ids: TokenIds = Field(None, description="of a stream in a choice's first chunk")


class CompletionAnswer(Answer):
    """Body of the answer to POST /v1/completions; with `stream`, of each event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None
    weight_versions: WeightSpans = None
    logprobs_mode: Mode = None
    weft: WeftAnswer | None = None


class ModelAnswer(Answer):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="context length, in tokens")
    root: str = Field(description="of an adapter its folder; else the model")
    parent: str | None = Field(description="base model of an adapter")
    default_sampling_params: dict[str, float] = Field(
        description="what applies where a request does not say"
    )
    task: Literal["generate", "embed", "classify", "score"] = Field(
        description="text, embeddings, classes, or scores by the logits of yes and no"
    )
    type: Literal["model"] = Field(description="this and the next two are for Anthropic's clients")
    display_name: str
    created_at: str = Field(description="`created` by RFC 3339")


class EndSessionAnswer(Answer):
    """Body of the answer to POST /v1/end_session."""

    status: Literal["success"]
    workers: int = Field(description="that were told")


class CancelAnswer(Answer):
    """Body of the answer to POST /v1/requests/{request_id}/cancel."""

    id: str = Field(description="as in the path")
    status: Literal["cancelled"]


class ModelListAnswer(Answer):
    """Body of the answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: Literal[False] = Field(description="this and the next two: all are on one page")
    first_id: str
    last_id: str


class TokenizeAnswer(Answer):
    """Body of the answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class CountAnswer(Answer):
    """Body of the answer to POST /v1/chat/completions/input_tokens."""

    input_tokens: int


class DetokenizeAnswer(Answer):
    """Body of the answer to POST /detokenize."""

    prompt: str


class ReadyAnswer(Answer):
    """Body of the answer to GET /readyz with status 200."""

    status: Literal["ready"]
    models: dict[str, str] | None = Field(
        None, description="with several models: ready, or what each lacks"
    )


class ErrorBody(Answer):
    """Description of a failure."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Body of every failure, as the REST edge writes it."""

    error: ErrorBody
