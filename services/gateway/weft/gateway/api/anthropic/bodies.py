"""Request bodies of Anthropic's Messages API, as far as supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from weft.gateway.api.dialect_bodies import DialectBody, Few, Many, PastPart, StrictPart
from weft.gateway.api.hosted import HostedTool, kind_of_tool
from weft.gateway.api.parameters import parameter_field, with_parameters
from weft.gateway.api.unserved import left_out, refused, unused

Hint = dict[str, Any]


class BlockBody(PastPart):
    """One block of a message's content."""

    type: str = Field(
        description="text, thinking, tool_use, tool_result or, for models that take images, image; "
        "others are not supported"
    )
    source: Hint | None = Field(
        None, description='of an image: {"type": "base64", "media_type": ..., "data": ...}'
    )
    text: str | None = Field(None, description="of a text")
    thinking: str | None = Field(None, description="of a thinking block")
    id: str | None = Field(None, description="of a tool_use")
    name: str | None = Field(None, description="of a tool_use: the tool's")
    input: dict[str, Any] | str | None = Field(
        None, description="of a tool_use: its arguments; a text, as of a call that was cut off"
    )
    tool_use_id: str | None = Field(None, description="of a tool_result: the call's")
    content: str | Many[BlockBody] | None = Field(
        None, description="of a tool_result: a text, or blocks of text and images"
    )
    is_error: bool | None = unused("of a tool_result")
    cache_control: Hint | None = unused()


class MessageBody(StrictPart):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"] = Field(
        description="an assistant's last message is continued"
    )
    content: str | Many[BlockBody]


class ToolBody(StrictPart):
    """A tool that the model may call."""

    type: Literal["custom"] | None = Field(None, description="`custom`, the default")
    name: str = Field(description="1 to 64 letters, digits, `_`, `-`, `.`")
    description: str | None = Field(None, description="for the model")
    input_schema: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    cache_control: Hint | None = unused()
    strict: bool | None = Field(
        None, description="not used: demanded calls are always valid, others never enforced"
    )
    eager_input_streaming: bool | None = unused()
    parameters: Any = refused("give input_schema instead")
    function: Any = refused("give name, description and input_schema instead")
    input_examples: Any = left_out("examples of calls")
    defer_loading: bool | None = left_out("the model is told of every tool")
    allowed_callers: Few[str] | None = Field(None, description="only `direct`")


Tool = Annotated[
    Annotated[ToolBody, Tag("Own")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(kind_of_tool("custom")),
]


class ToolChoiceBody(StrictPart):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="with type tool")
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call")


class ThinkingBody(StrictPart):
    """The field `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None, description="a hint without effect: max_tokens alone bounds an answer"
    )
    display: str | None = left_out("reasoning is shown as it is", "summarized")
    block_binding: Any = left_out("reasoning is not signed")


class MetadataBody(StrictPart):
    """The field `metadata`."""

    user_id: str | None = unused()


class OutputFormatBody(StrictPart):
    """The field `format` of `output_config`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="what the text must be valid under")


class OutputConfigBody(StrictPart):
    """The field `output_config`."""

    format: OutputFormatBody | None = None
    effort: str | None = Field(None, description="a variable for the chat template")
    task_budget: Any = left_out("max_tokens alone bounds an answer")


class KeepBody(StrictPart):
    """The field `keep` of an edit."""

    type: str
    value: int | None = Field(None, description="with type thinking_turns: their number")


class EditBody(StrictPart):
    """An edit of `context_management`."""

    type: str = Field(description="`clear_thinking_20251015`; others are not supported")
    keep: str | KeepBody | None = Field(
        None, description="turns that keep their thinking blocks; default the last one"
    )


class ContextManagementBody(StrictPart):
    """The field `context_management`."""

    edits: Few[EditBody] | None = None


class ThreadBody(StrictPart):
    """The field `thread`."""

    type: str = Field(description="`create`, which is left out with a warning")
    previous_message_id: str | None = refused("conversations that the server keeps")


class PromptBody(DialectBody):
    """Fields common to messages and the count of their tokens."""

    file_fields = tuple(
        ("messages", *("*", "content") * depth, "*", "source", name)
        for depth in (1, 2)
        for name in ("data", "url")
    )

    messages: Many[MessageBody] = Field(description="the conversation, at least one message")
    system: str | Many[BlockBody] | None = Field(None, description="a text, or text blocks")
    tools: Few[Tool] | None = Field(None, description="tools that the model may call")
    tool_choice: ToolChoiceBody | None = Field(
        None, description="auto, the default; any, or a tool: the answer is such calls; none"
    )
    thinking: ThinkingBody | None = Field(
        None, description="reasoning, for models that reason; absent: disabled"
    )
    output_config: OutputConfigBody | None = Field(None, description="the form of the text")
    output_format: OutputFormatBody | None = Field(
        None, description="older name of output_config.format"
    )
    cache_control: Hint | None = unused()
    context_management: ContextManagementBody | None = Field(
        None, description="what the model reads of the conversation"
    )
    compaction: Any = refused("a summary of the conversation")
    mcp_servers: Few[Any] | None = Field(None, description="tools that only another server calls")
    thread: ThreadBody | None = Field(None, description="state that the server keeps")
    speed: str | None = left_out("there is one speed", "standard")


if TYPE_CHECKING:
    _WithParameters = PromptBody
else:
    _WithParameters = with_parameters(PromptBody, "anthropic")


class MessagesBody(_WithParameters):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(description="most tokens generated")
    metadata: MetadataBody | None = Field(None)
    service_tier: str | None = unused()
    stop_sequences: Few[str] | None = parameter_field("stop")
    stream: bool | None = Field(None, description="answer as server-sent events")
    container: Any = refused("containers")
    diagnostics: Any = left_out("diagnostics")
    inference_geo: str | None = refused("places of computation")
    fallbacks: Any = left_out("no other model answers")
    fallback_credit_token: Any = left_out("billing")
    billing_policy: Any = left_out("billing")


class CountTokensBody(PromptBody):
    """Body of POST /v1/messages/count_tokens."""
