"""Request bodies of OpenAI's Responses API, as far as supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from weft.gateway.api.dialect_bodies import DialectBody, Few, Many, PastPart, StrictPart
from weft.gateway.api.hosted import HostedTool, kind_of_tool
from weft.gateway.api.parameters import few_entries, with_parameters
from weft.gateway.api.unserved import left_out, refused, unused

_MAX_METADATA = 16
_MAX_KEY_CHARS, _MAX_VALUE_CHARS = 64, 512

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=_MAX_KEY_CHARS)],
        Annotated[str, Field(max_length=_MAX_VALUE_CHARS)],
    ],
    Field(max_length=_MAX_METADATA),
    few_entries(_MAX_METADATA),
]


class InputAudioBody(PastPart):
    """The field `input_audio` of a part."""

    data: str = Field(description="the file, in base64")
    format: str | None = Field(None, description="wav, mp3, flac, ogg or opus")


class PartBody(PastPart):
    """One part of an item's content."""

    type: str = Field(
        description="input_text, output_text, text, refusal, reasoning_text, summary_text or, for "
        "models that take them, input_image, input_audio and input_video; others are not supported"
    )
    image_url: str | None = Field(
        None,
        description="of an image: `data:image/...;base64,...`; other URLs are not fetched",
    )
    file_id: str | None = Field(None, description="of an image: refused, no files are kept")
    detail: str | None = Field(
        None, description="of an image: `low` for fewer tokens, where the model allows it"
    )
    input_audio: InputAudioBody | None = Field(None, description="of a clip")
    video_url: str | None = Field(
        None,
        description="of a video: `data:video/...;base64,...`; other URLs are not fetched",
    )
    text: str | None = Field(None, description="of all but a refusal")
    refusal: str | None = Field(None, description="of a refusal")


class ItemBody(PastPart):
    """One item of the input."""

    type: str | None = Field(
        None,
        description="message, the default; function_call, function_call_output, reasoning, "
        "item_reference; others are not supported",
    )
    id: str | None = Field(None, description="of an item_reference: the item's")
    role: str | None = Field(None, description="of a message: system, developer, user, assistant")
    content: str | Many[PartBody] | None = Field(
        None, description="of a message or a reasoning item"
    )
    summary: Many[PartBody] | None = Field(None, description="of a reasoning item")
    call_id: str | None = Field(None, description="of a function_call and of its output")
    name: str | None = Field(None, description="of a function_call")
    namespace: str | None = Field(None, description="of a function_call: of its function")
    arguments: str | None = Field(None, description="of a function_call: a JSON object, as text")
    output: str | Many[PartBody] | None = Field(None, description="of a function_call_output")


class ToolBody(StrictPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: str | None = Field(None, description="1 to 64 letters, digits, `_`, `-`, `.`")
    description: str | None = Field(None, description="for the model")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(
        None, description="not used: demanded calls are always valid, others never enforced"
    )
    input_schema: Any = refused("give parameters instead")
    function: Any = refused("give name, description and parameters instead")
    defer_loading: bool | None = left_out("the model is told of every tool")
    allowed_callers: Few[str] | None = Field(None, description="with `direct`")
    output_schema: dict[str, Any] | None = unused("of what the function returns")


Function = Annotated[
    Annotated[ToolBody, Tag("Own")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(kind_of_tool("function")),
]


class NamespaceBody(StrictPart):
    """Functions under a common name."""

    type: Literal["namespace"]
    name: str = Field(description="goes ahead of the functions' names, with a dot")
    description: str | None = Field(None, description="for the model, ahead of the functions' own")
    tools: Few[Function] = Field(description="functions that the model may call")

    @property
    def functions(self) -> list[tuple[int, ToolBody]]:
        """The functions with their places."""
        return [(i, tool) for i, tool in enumerate(self.tools) if isinstance(tool, ToolBody)]


def qualified(namespace: str | None, name: str) -> str:
    """The name of a function as the model knows it."""
    return f"{namespace}.{name}" if namespace else name


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "Namespace" if kind == "namespace" else kind_of_tool("function")(tool)


Tool = Annotated[
    Annotated[ToolBody, Tag("Own")]
    | Annotated[NamespaceBody, Tag("Namespace")]
    | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(_kind_of_tool),
]


class ToolChoiceBody(StrictPart):
    """The field `tool_choice`, where it is an object."""

    type: str = Field(description="`function` or `allowed_tools`; others are not supported")
    name: str | None = Field(None, description="with type function")
    namespace: str | None = Field(None, description="with type function: of the function")
    mode: Literal["auto", "required"] | None = Field(None, description="with allowed_tools")
    tools: Few[dict[str, Any]] | None = Field(None, description="with allowed_tools")


class FormatBody(StrictPart):
    """The field `format` of `text`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="not used")
    description: str | None = Field(None, description="not used")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="what the text must be valid under"
    )
    strict: bool | None = Field(None, description="always strict: the text is valid")


class TextBody(StrictPart):
    """The field `text`."""

    format: FormatBody | None = None
    verbosity: str | None = left_out("answers of another length", "medium")


class ReasoningBody(StrictPart):
    """The field `reasoning`."""

    effort: str | None = Field(
        None,
        description="a variable for the chat template; `none` sets enable_thinking to false",
    )
    summary: str | None = unused("the reasoning itself is shown")
    generate_summary: str | None = unused("the reasoning itself is shown")


class StreamOptionsBody(StrictPart):
    """The field `stream_options`."""

    include_obfuscation: bool | None = unused()


if TYPE_CHECKING:
    _WithParameters = DialectBody
else:
    _WithParameters = with_parameters(DialectBody, "responses")


class ResponsesBody(_WithParameters):
    """Body of POST /v1/responses."""

    input: str | Many[ItemBody] | None = Field(
        None, description="a text, or the items of a conversation"
    )
    instructions: str | None = Field(None, description="the system message; it is not stored")
    previous_response_id: str | None = Field(
        None, description="the response whose conversation this one continues"
    )
    store: bool | None = Field(None, description="keep it, so that it can be continued; default")
    tools: Few[Tool] | None = Field(None, description="functions that may be called")
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceBody | None = Field(
        None, description="as in chats, with type and name of the function side by side"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    text: TextBody | None = Field(None, description="the form of the text")
    reasoning: ReasoningBody | None = Field(None, description="for models that reason")
    include: Few[str] | None = Field(
        None, description="`message.output_text.logprobs`; what is for other tools has no effect"
    )
    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_options: StreamOptionsBody | None = Field(None)
    metadata: Metadata | None = Field(None, description="returned with the response")
    truncation: str | None = left_out("no conversation is ever cut", "disabled")
    background: bool | None = refused("answers that nobody waits for")
    max_tool_calls: int | None = unused("it is of tools that the server calls")
    service_tier: str | None = unused()
    user: str | None = unused()
    safety_identifier: str | None = unused()
    prompt_cache_key: str | None = Field(
        None, description="the routing key, where none is given: see routing_key"
    )
    prompt_cache_retention: str | None = unused()
    prompt_cache_options: dict[str, Any] | None = unused()
    client_metadata: Any = left_out("labels of the client's own", asks_when_empty=True)
    conversation: Any = refused("conversations that are stored apart; use previous_response_id")
    prompt: Any = refused("prompts that are stored")
    context_management: Any = refused("edits of the context")
    background_options: Any = refused("answers that nobody waits for")
    moderation: Any = refused("moderation")
    image: Any = left_out("there are no images")
    access_programs: Any = left_out("access programs")
    # A field of chats that the Responses API itself does not have.
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="more variables for the chat template"
    )
