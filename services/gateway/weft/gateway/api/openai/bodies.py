"""Request bodies of the OpenAI API, as far as supported, with vLLM's extensions.

Unknown fields are refused (`parse.py`), and so are those of other servers that would change the
answer (`foreign.py`); `null` is the same as absent. Types are strict. Ranges are checked later for
both faces (`weft.gateway.validate`), but lengths are checked here, so that checking has a bounded
cost: a list ends at its first bad item, and lists of objects are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError
from weft.gateway.api.hosted import HostedTool, kind_of_tool
from weft.gateway.api.openai.foreign import (
    HARMLESS,
    OF_FORMATS,
    OF_TOOLS,
    UNSERVED,
    refuse_foreign,
)
from weft.gateway.api.parameters import Ids, Int, parameter_field, with_parameters
from weft.gateway.api.unserved import unserved_fields, unused
from weft.gateway.long_text import LongText
from weft.gateway.settings import MAX_PROMPTS
from weft.gateway.validate import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    unsupported,
)

_HISTORY = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
"""Configuration of parts that clients send back from earlier answers."""
# `refuse_unknown` checks this after validation, since a gateway can be set to ignore such fields.
_CONFIG = _HISTORY | ConfigDict(json_schema_extra={"additionalProperties": False})
_MAX_PARTS = 1024
OWN_TOOLS = ("function",)
"""Types of tools that the model is shown."""


def _one_choice(value: object) -> object:
    """Refuses a wrong choice of tools itself, since a union's message would list its members."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or value in ("none", "auto", "required"):
        return value
    if kind in ("function", "allowed_tools"):
        return value
    raise PydanticCustomError(
        "tool_choice",
        'Input should be none, auto, required, {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    )


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
Messages = Annotated[list["Message"], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Parts = Annotated[list["ContentPart"], Field(fail_fast=True, max_length=_MAX_PARTS)]
Tool = Annotated[
    Annotated["ToolBody", Tag("Own")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(kind_of_tool(*OWN_TOOLS)),
]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
AllowedToolList = Annotated[
    list["AllowedTool"], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)
]
ToolCalls = Annotated[list["ToolCallBody"], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)]
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]


@cache
def names_of(model: type[BaseModel]) -> frozenset[str]:
    """Names of the fields of an object in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Part(NamedTuple):
    """Objects of a body in which unknown fields are refused."""

    path: tuple[str, ...]
    """Names of fields that lead to it; `*` is every item of a list."""
    model: type[BaseModel]
    of_others: frozenset[str] = frozenset()
    """As `Body.of_others`."""


if TYPE_CHECKING:
    FileText = str | LongText
else:

    def _is_text(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        return value if isinstance(value, LongText) else validate(value)

    FileText = Annotated[str, WrapValidator(_is_text)]

_FILE_FIELDS = (
    ("messages", "*", "content", "*", "image_url", "url"),
    ("messages", "*", "content", "*", "image_url"),
    ("messages", "*", "content", "*", "input_audio", "data"),
    ("messages", "*", "content", "*", "audio_url", "url"),
    ("messages", "*", "content", "*", "audio_url"),
    ("messages", "*", "content", "*", "video_url", "url"),
    ("messages", "*", "content", "*", "video_url"),
)


class Body(BaseModel):
    """Base of all bodies."""

    model_config = _CONFIG

    of_others: ClassVar[frozenset[str]] = frozenset()
    """Further fields that are no error: those that `check_given` judges, and harmless ones."""
    keeps_unknown: ClassVar[bool] = False
    """Whether the parsed body has its unknown fields, which `settle` judges."""
    parts: ClassVar[tuple[Part, ...]] = ()
    """Objects that decide what is generated; messages are not among them."""
    file_fields: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Paths of fields that may be a `LongText`, as in `objects_at`."""

    model: str | None = Field(None, description="a served model; may be absent where there is one")

    @classmethod
    def check_given(cls, value: Mapping[str, Any]) -> None:
        """Checks the fields of valid JSON that this body does not have. Raises InvalidRequest for a
        refused one.
        """

    def settle(self, *, ignores_unknown: bool = False) -> None:
        """Leaves out the declared fields that the model can do without, and raises InvalidRequest
        for the other unserved ones. With `ignores_unknown` it also leaves out unknown fields that
        the body has taken, whatever they may mean.
        """
        for name, shown, unserved in unserved_fields(type(self)):
            unserved.judge(shown, getattr(self, name))


class StreamOptions(BaseModel):
    """The field `stream_options`."""

    model_config = _CONFIG

    include_usage: bool | None = Field(None, description="send a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(
        None, description="show the usage so far in every chunk"
    )


class ImageUrlBody(BaseModel):
    """The field `image_url` of a part."""

    model_config = _HISTORY

    url: FileText = Field(description="`data:image/...;base64,...`; other URLs are not fetched")
    detail: str | None = Field(None, description="`low`: fewer tokens, where the model allows it")


class InputAudioBody(BaseModel):
    """The field `input_audio` of a part."""

    model_config = _HISTORY

    data: FileText = Field(description="the file, in base64")
    format: str | None = Field(None, description="wav, mp3, flac, ogg or opus")


class AudioUrlBody(BaseModel):
    """The field `audio_url` of a part."""

    model_config = _HISTORY

    url: FileText = Field(description="`data:audio/...;base64,...`; other URLs are not fetched")


class VideoUrlBody(BaseModel):
    """The field `video_url` of a part."""

    model_config = _HISTORY

    url: FileText = Field(description="`data:video/...;base64,...`; other URLs are not fetched")


class ContentPart(BaseModel):
    """One part of a message's content."""

    model_config = _HISTORY

    type: str = Field(
        description="`text`, `refusal` or, for models that take them, `image_url`, `input_audio`, "
        "`audio_url` and `video_url`; others are not supported"
    )
    text: str | None = Field(None, description="of a text part")
    image_url: ImageUrlBody | FileText | None = Field(None, description="of an image")
    input_audio: InputAudioBody | None = Field(None, description="of a clip")
    audio_url: AudioUrlBody | FileText | None = Field(None, description="of a clip")
    video_url: VideoUrlBody | FileText | None = Field(None, description="of a video")
    refusal: str | None = Field(None, description="of a refusal, which counts as text")


class CalledFunction(BaseModel):
    """The field `function` of a call."""

    model_config = _HISTORY

    name: Annotated[str, Field(min_length=1)] = Field(description="the function's")
    arguments: str | dict[str, Any] | list[Any] | None = Field(
        None,
        description="a JSON object, as text; of anything else an object is made for the template",
    )


class ToolCallBody(BaseModel):
    """A call in a message of the assistant."""

    model_config = _HISTORY

    id: str | None = Field(None, description="passed on to the chat template")
    type: Literal["function"] | None = Field(None)
    function: CalledFunction


class FunctionBody(BaseModel):
    """The field `function` of a tool."""

    model_config = _CONFIG

    name: str = Field(description="1 to 64 letters, digits, `_`, `-`, `.`")
    description: str | None = Field(None, description="for the model")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments; absent = there are none"
    )
    strict: bool | None = Field(
        None, description="not used: demanded calls are always valid, others never enforced"
    )


class ToolBody(BaseModel):
    """A function that the model may call."""

    model_config = _CONFIG

    type: Literal["function"]
    function: FunctionBody


class ChosenFunction(BaseModel):
    """The field `function` of `tool_choice`."""

    model_config = _CONFIG

    name: str


class AllowedTool(BaseModel):
    """One of the tools that are allowed."""

    model_config = _CONFIG

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(BaseModel):
    """The field `allowed_tools` of `tool_choice`."""

    model_config = _CONFIG

    mode: Literal["auto", "required"] = Field(description="whether one of them must be called")
    tools: AllowedToolList = Field(description="those of `tools` that may be called")


class AllowedToolsBody(BaseModel):
    """The field `tool_choice`, where it names the tools that may be called."""

    model_config = _CONFIG

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolChoiceBody(BaseModel):
    """The field `tool_choice`, where it names a function."""

    model_config = _CONFIG

    type: Literal["function"]
    function: ChosenFunction


def _kind_of_choice(value: object) -> str:
    """Tags are written like names of classes, which paths of errors leave out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "Function", "allowed_tools": "Allowed"}.get(str(kind), "Word")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[ToolChoiceBody, Tag("Function")]
    | Annotated[AllowedToolsBody, Tag("Allowed")],
    Discriminator(_kind_of_choice),
    BeforeValidator(_one_choice),
]


class Message(BaseModel):
    """One message of a conversation."""

    model_config = _HISTORY

    role: Annotated[str, Field(min_length=1)] = Field(
        description="system, developer, user, assistant, tool, or what the chat template knows"
    )
    content: str | Parts | None = Field(
        None, description="text, or text parts; an assistant's may be absent"
    )
    name: str | None = Field(None, description="passed on to the chat template")
    tool_calls: ToolCalls | None = Field(None, description="calls that the assistant made")
    tool_call_id: str | None = Field(
        None, description="of a tool's result: the call's; passed on to the chat template"
    )
    reasoning: str | None = Field(
        None, description="of the assistant; passed on to the chat template"
    )
    reasoning_content: str | None = Field(None, description="older name of `reasoning`")
    refusal: str | None = Field(
        None, description="of the assistant, in place of the content; counts as text"
    )
    function_call: Any = Field(None, description="not supported; see tool_calls")


class JsonSchemaFormat(BaseModel):
    """The field `json_schema` of `response_format`."""

    model_config = _CONFIG

    name: str | None = Field(None, description="not used")
    description: str | None = Field(None, description="not used")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="what the answer must be valid under; absent = any object"
    )
    strict: bool | None = Field(None, description="always strict: the answer is valid")


class ResponseFormat(BaseModel):
    """The field `response_format`."""

    model_config = _CONFIG

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="with type json_schema")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="with type json_object: as llama.cpp takes a schema"
    )
    format: dict[str, Any] | None = Field(
        None, description="with type structural_tag: xgrammar's form of a text of several parts"
    )
    structures: Items[dict[str, Any]] | None = Field(
        None, description="with type structural_tag: the older form, with triggers"
    )
    triggers: Items[str] | None = Field(None, description="with structures")


class StructuredOutputs(BaseModel):
    """The field `structured_outputs`, vLLM's name for constraints; exactly one of its fields is
    set.
    """

    model_config = _CONFIG

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, description="matches the whole text")
    choice: Choices | None = Field(None, description="the text is one of these")
    grammar: str | None = Field(None, description="GBNF from `root` on, or Lark from `start` on")
    json_object: bool | None = Field(None, description="any JSON object")
    structural_tag: str | dict[str, Any] | None = Field(
        None,
        description="xgrammar's `format` of a text of several parts, or the older form: "
        "structures and triggers",
    )
    whitespace_pattern: str | None = Field(
        None, description="regular expression of the blanks between two tokens of JSON"
    )
    disable_any_whitespace: bool | None = Field(
        None, description="JSON without blanks between its tokens"
    )
    disable_additional_properties: bool | None = Field(None, description="not supported")


_TOOL_PARTS = (
    Part(("tools", "*"), ToolBody, frozenset({"cache_control", *OF_TOOLS})),
    # `get_json_schema` of Transformers adds `return`. OpenAI's API has no such field.
    Part(("tools", "*", "function"), FunctionBody, frozenset({"return", *OF_TOOLS})),
)


if TYPE_CHECKING:

    class _WithParameters(Body):
        prompt_logprobs: int | None

else:
    _WithParameters = with_parameters(Body, "openai", Int)


class GenerationBody(_WithParameters):
    """Fields common to chat and completions."""

    of_others = HARMLESS | UNSERVED.keys()
    parts: ClassVar[tuple[Part, ...]] = (
        Part(("stream_options",), StreamOptions, frozenset({"include_obfuscation"})),
        Part(("response_format",), ResponseFormat, frozenset(OF_FORMATS)),
        Part(("response_format", "json_schema"), JsonSchemaFormat),
        Part(("structured_outputs",), StructuredOutputs),
    )

    @classmethod
    def check_given(cls, value: Mapping[str, Any]) -> None:
        refuse_foreign(value)

    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    user: str | None = unused()
    request_id: str | None = Field(
        None,
        description="the request's name in logs and for its cancellation, beside the header "
        "X-Request-Id; 1 to 64 of `A-Za-z0-9._:-`",
    )
    rid: str | None = Field(None, description="another name of request_id")
    weft_timeline: bool | None = Field(None, description="add `weft.timeline` to the answer")
    return_token_ids: bool | None = Field(None, description="ids of the prompt and of the answer")
    response_format: ResponseFormat | None = Field(None, description="JSON, or text")
    guided_json: str | dict[str, Any] | None = Field(None, description="a JSON schema")
    guided_regex: str | None = Field(None, description="matches the whole text")
    guided_choice: Choices | None = Field(None, description="the text is one of these")
    guided_grammar: str | None = Field(None, description="GBNF, beginning at `root`")
    guided_whitespace_pattern: str | None = Field(
        None, description="regular expression of the blanks between two tokens of JSON"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's newer form of the `guided_` fields; one constraint in all"
    )
    best_of: Int | None = parameter_field("n", "only equal to n")
    include_reasoning: bool | None = Field(
        None, description="false: a chat's answer is sent without its reasoning; default true"
    )


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    parts = (*GenerationBody.parts, *_TOOL_PARTS)
    file_fields = _FILE_FIELDS

    messages: Messages = Field(description="the conversation, at least one message")
    max_completion_tokens: Int | None = parameter_field("max_tokens", "newer name of max_tokens")
    logprobs: bool | None = Field(None, description="return log-probabilities")
    top_logprobs: Int | None = parameter_field("top_logprobs")
    tools: Tools | None = Field(None, description="functions that the model may call")
    tool_choice: ToolChoice | None = Field(
        None,
        description="none: no tool is shown; auto, the default: the model decides; required, or a "
        "function: the answer is such calls and nothing else; allowed_tools: auto or required "
        "with some of the tools",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call; default true"
    )
    echo: bool | None = Field(None, description="not supported")
    add_special_tokens: bool | None = Field(
        None, description="only false: the chat template writes special tokens itself"
    )
    functions: Any = Field(None, description="not supported; see tools")
    function_call: Any = Field(None, description="not supported; see tool_choice")
    modalities: Items[str] | None = Field(None, description="`['text']`; others not supported")
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = Field(None, description="continue the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="more variables for the chat template, such as enable_thinking"
    )
    reasoning_effort: str | None = Field(
        None,
        description="a variable for the chat template; `none` sets enable_thinking to false",
    )


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    of_others = GenerationBody.of_others | ChatBody.model_fields.keys()

    @classmethod
    def check_given(cls, value: Mapping[str, Any]) -> None:
        super().check_given(value)
        for name in ChatBody.model_fields.keys() - cls.model_fields.keys():
            if value.get(name):
                raise unsupported(name, "a field of /v1/chat/completions")

    prompt: str | Ids | Prompts[str] | Prompts[Ids] = Field(
        description="a text, several texts, token ids, or several lists of token ids"
    )
    max_tokens: Int | None = parameter_field("max_tokens", "most tokens generated, default 16")
    logprobs: Int | None = parameter_field("top_logprobs")
    echo: bool | None = Field(
        None,
        description="begin with the prompt's text; with logprobs, they begin with those of the "
        "prompt's tokens: only with n: 1, not streamed",
    )
    add_special_tokens: bool | None = Field(None, description="of the tokenizer, default true")


class TokenizeBody(Body):
    """Body of POST /tokenize, as vLLM's. Either `prompt` or `messages`."""

    parts = _TOOL_PARTS
    file_fields = _FILE_FIELDS

    prompt: str | None = Field(None, description="a text")
    messages: Messages | None = Field(None, description="a conversation")
    tools: Tools | None = Field(None, description="for messages: shown to the model")
    add_special_tokens: bool | None = Field(None, description="for a text; default true")
    add_generation_prompt: bool | None = Field(None, description="for messages; default true")
    continue_final_message: bool | None = Field(None, description="for messages")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="for messages")
    return_token_strs: bool | None = Field(None, description="add `token_strs`")


class DetokenizeBody(Body):
    """Body of POST /detokenize, as vLLM's."""

    tokens: Ids = Field(description="token ids")


class EndSessionBody(Body):
    """Body of POST /v1/end_session."""

    model: str | None = Field(None, description="not used")
    session_id: str = Field(description="as in the chat's requests, 1 to 128 bytes")
    cache_salt: str | None = Field(None, description="as in the chat's requests")
