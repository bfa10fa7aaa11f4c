"""Request bodies of Ollama's API, as far as supported."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from weft.gateway.api.dialect_bodies import DialectBody, Few, Many, PastPart, Stops, StrictPart

Think = bool | Literal["low", "medium", "high"]


class OptionsBody(StrictPart):
    """The field `options`."""

    num_predict: int | None = Field(
        None, description="most tokens generated; -1 or -2, or absent: up to the context"
    )
    temperature: float | None = Field(None, description="0 = greedy; 0 to 100, default the model's")
    top_k: int | None = Field(None, description="0 or -1 = all candidates, default the model's")
    top_p: float | None = Field(None, description="nucleus mass, above 0 to 1, default the model's")
    min_p: float | None = Field(None, description="0 to 1, default the model's")
    seed: int | None = Field(None, description="64-bit; same seed, same text; -1 = random")
    stop: str | Stops | None = Field(None, description="at most 16 strings of 256 bytes")
    repeat_penalty: float | None = Field(
        None, description="0.001 to 100, default 1; over the whole text"
    )
    presence_penalty: float | None = Field(None, description="-2 to 2, default 0")
    frequency_penalty: float | None = Field(None, description="-2 to 2, default 0")
    repeat_last_n: int | None = Field(
        None, description="0: no repeat_penalty; -1: the whole text; others are not supported"
    )
    typical_p: float | None = Field(None, description="only 1")
    tfs_z: float | None = Field(None, description="only 1")
    mirostat: int | None = Field(None, description="only 0")
    mirostat_tau: float | None = Field(None, description="without mirostat it has no effect")
    mirostat_eta: float | None = Field(None, description="without mirostat it has no effect")
    penalize_newline: bool | None = Field(None, description="only true: it is not set apart")
    embedding_only: bool | None = Field(None, description="only false")
    logits_all: bool | None = Field(None, description="accepted, without effect")
    vocab_only: bool | None = Field(None, description="only false")
    # Where and how Ollama runs a model: here the operators decide.
    num_ctx: int | None = Field(
        None, description="accepted, without effect: the context is the model's"
    )
    num_keep: int | None = Field(
        None, description="accepted, without effect: no prompt is ever cut"
    )
    num_batch: int | None = Field(None, description="accepted, without effect")
    num_gpu: int | None = Field(None, description="accepted, without effect")
    main_gpu: int | None = Field(None, description="accepted, without effect")
    num_thread: int | None = Field(None, description="accepted, without effect")
    numa: bool | None = Field(None, description="accepted, without effect")
    low_vram: bool | None = Field(None, description="accepted, without effect")
    f16_kv: bool | None = Field(None, description="accepted, without effect")
    use_mmap: bool | None = Field(None, description="accepted, without effect")
    use_mlock: bool | None = Field(None, description="accepted, without effect")


class CalledFunction(PastPart):
    """The field `function` of a call."""

    name: str = Field(description="the function's", min_length=1)
    arguments: dict[str, Any] | None = None
    index: int | None = Field(None, description="accepted, not used")


class ToolCallBody(PastPart):
    """A call in a message of the assistant."""

    id: str | None = Field(None, description="passed on to the chat template")
    function: CalledFunction


class MessageBody(PastPart):
    """One message of a conversation."""

    role: str = Field(
        description="system, user, assistant, tool, or what the template knows", min_length=1
    )
    content: str | None = Field(None, description="may be absent where there are calls")
    thinking: str | None = Field(None, description="of the assistant")
    images: Many[Any] | None = Field(None, description="not supported")
    tool_calls: Few[ToolCallBody] | None = Field(None, description="calls of the assistant")
    tool_name: str | None = Field(None, description="of a tool's result: passed on as `name`")
    tool_call_id: str | None = Field(None, description="of a tool's result: the call's")


class FunctionBody(PastPart):
    """The field `function` of a tool."""

    name: str = Field(description="1 to 64 letters, digits, `_`, `-`, `.`")
    description: str | None = Field(None, description="for the model")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")


class ToolBody(PastPart):
    """A function that the model may call."""

    type: str | None = Field(None, description="`function`; others are not supported")
    function: FunctionBody


class GenerationBody(DialectBody):
    """Fields common to chats and generations."""

    stream: bool | None = Field(None, description="answer as lines of JSON; default true")
    format: str | dict[str, Any] | None = Field(
        None, description='`"json"`, or a JSON schema that the text must be valid under'
    )
    options: OptionsBody | None = Field(None, description="sampling and limits")
    keep_alive: float | str | None = Field(
        None, description="accepted, without effect: served models stay loaded"
    )
    think: Think | None = Field(
        None, description="reasoning, for models that reason; absent: as the template has it"
    )
    logprobs: bool | None = Field(None, description="return log-probabilities")
    top_logprobs: int | None = Field(None, description="alternatives per position, 0 to 20")
    truncate: bool | None = Field(None, description="not supported: no prompt is ever cut")
    shift: bool | None = Field(None, description="not supported: no context is ever shifted")
    # Weft's own, the same as in other dialects.
    cache_salt: str | None = Field(None, description="separates cache entries; 128 bytes")
    priority: int | None = Field(None, description="less is more urgent")
    session_id: str | None = Field(None, description="names the chat, see docs/api.md")
    end_session: bool | None = Field(None, description="the chat is over with this request")


class ChatBody(GenerationBody):
    """Body of POST /api/chat."""

    messages: Many[MessageBody] | None = Field(
        None, description="the conversation; without one the answer says that the model is loaded"
    )
    tools: Few[ToolBody] | None = Field(None, description="functions that the model may call")


class GenerateBody(GenerationBody):
    """Body of POST /api/generate."""

    prompt: str | None = Field(
        None, description="the user's message; without one the answer says that the model is loaded"
    )
    system: str | None = Field(None, description="the system message")
    raw: bool | None = Field(None, description="continue `prompt` without the chat template")
    suffix: str | None = Field(None, description="not supported")
    images: Many[Any] | None = Field(None, description="not supported")
    template: str | None = Field(None, description="not supported")
    context: Many[int] | None = Field(None, description="not supported")
    width: int | None = Field(None, description="not supported")
    height: int | None = Field(None, description="not supported")
    steps: int | None = Field(None, description="not supported")


class ShowBody(DialectBody):
    """Body of POST /api/show."""

    name: str | None = Field(None, description="older name of `model`")
    verbose: bool | None = Field(None, description="accepted, without effect")
    system: str | None = Field(None, description="accepted, without effect")
    template: str | None = Field(None, description="accepted, without effect")
    options: dict[str, Any] | None = Field(None, description="accepted, without effect")
