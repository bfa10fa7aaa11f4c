"""Request bodies of Ollama's API, as far as supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from weft.contract.request import CallParams, SamplingParams, StopCriteria
from weft.gateway.api.dialect_bodies import DialectBody, Few, Many, PastPart, StrictPart
from weft.gateway.api.hosted import HostedTool, kind_of_tool
from weft.gateway.api.parameters import with_parameters
from weft.gateway.api.pooling.bodies import Inputs
from weft.gateway.api.unserved import left_out, refused, unused

Think = bool | Literal["low", "medium", "high"]


OF_OPTIONS = (SamplingParams, StopCriteria)
"""Parameters that the field `options` has."""
if TYPE_CHECKING:
    _WithOptions = StrictPart
    _WithParameters = DialectBody
else:
    _WithOptions = with_parameters(StrictPart, "ollama", of=OF_OPTIONS)
    _WithParameters = with_parameters(DialectBody, "ollama", of=(CallParams,))


class OptionsBody(_WithOptions):
    """The field `options`."""

    refuses_unknown = True

    num_predict: int | None = Field(
        None, description="most tokens generated; -1 or -2, or absent: up to the context"
    )
    repeat_last_n: int | None = Field(
        None,
        description="0: no repeat_penalty; -1: the whole text; 64, the default of Ollama's "
        "clients: the whole text, with a warning; others are not supported beside a repeat_penalty",
    )
    typical_p: float | None = refused("this kind of sampling", 1, asks_when_empty=True)
    tfs_z: float | None = refused("this kind of sampling", 1, asks_when_empty=True)
    mirostat: int | None = refused("Mirostat sampling")
    mirostat_tau: float | None = unused("a parameter of mirostat")
    mirostat_eta: float | None = unused("a parameter of mirostat")
    penalize_newline: bool | None = refused(
        "penalties without those of line breaks", True, asks_when_empty=True
    )
    embedding_only: bool | None = refused("embeddings")
    logits_all: bool | None = unused()
    vocab_only: bool | None = refused("a vocabulary without a model")
    # Where and how Ollama runs a model: here the operators decide.
    num_ctx: int | None = unused("the context is the model's")
    num_keep: int | None = unused("no prompt is ever cut")
    num_batch: int | None = unused()
    num_gpu: int | None = unused()
    main_gpu: int | None = unused()
    num_thread: int | None = unused()
    numa: bool | None = unused()
    low_vram: bool | None = unused()
    f16_kv: bool | None = unused()
    use_mmap: bool | None = unused()
    use_mlock: bool | None = unused()


class CalledFunction(PastPart):
    """The field `function` of a call."""

    name: str = Field(description="the function's", min_length=1)
    arguments: dict[str, Any] | None = None
    index: int | None = unused()


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
    images: Many[Any] | None = Field(
        None, description="for models that take them: base64 each, ahead of the content"
    )
    audios: Any = Field(None, description="not supported: Ollama has no place for them")
    videos: Any = Field(None, description="not supported: Ollama has no place for them")
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

    type: str | None = Field(None, description="`function`, the default")
    function: FunctionBody


Tool = Annotated[
    Annotated[ToolBody, Tag("Own")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(kind_of_tool("function")),
]


class GenerationBody(_WithParameters):
    """Fields common to chats and generations."""

    stream: bool | None = Field(None, description="answer as lines of JSON; default true")
    format: str | dict[str, Any] | None = Field(
        None, description='`"json"`, or a JSON schema that the text must be valid under'
    )
    options: OptionsBody | None = Field(None, description="sampling and limits")
    keep_alive: float | str | None = unused("served models stay loaded")
    think: Think | None = Field(
        None, description="reasoning, for models that reason; absent: as the template has it"
    )
    logprobs: bool | None = Field(None, description="return log-probabilities")
    truncate: bool | None = left_out("no prompt is ever cut")
    shift: bool | None = left_out("no answer goes on past the context")


class ChatBody(GenerationBody):
    """Body of POST /api/chat."""

    file_fields = (("messages", "*", "images"),)

    messages: Many[MessageBody] | None = Field(
        None, description="the conversation; without one the answer says that the model is loaded"
    )
    tools: Few[Tool] | None = Field(None, description="functions that the model may call")


class GenerateBody(GenerationBody):
    """Body of POST /api/generate."""

    file_fields = (("images",),)

    prompt: str | None = Field(
        None, description="the user's message; without one the answer says that the model is loaded"
    )
    system: str | None = Field(None, description="the system message")
    raw: bool | None = Field(None, description="continue `prompt` without the chat template")
    suffix: str | None = refused("text behind the completion")
    images: Many[Any] | None = Field(
        None, description="for models that take them: base64 each, ahead of the prompt"
    )
    audios: Any = refused("audio: Ollama has no place for it")
    videos: Any = refused("videos: Ollama has no place for them")
    template: str | None = refused("a chat template of the request's own")
    context: Many[int] | None = refused("a conversation as tokens; use /api/chat")
    width: int | None = refused("images")
    height: int | None = refused("images")
    steps: int | None = refused("images")


if TYPE_CHECKING:
    _Pooled = DialectBody
else:
    _Pooled = with_parameters(DialectBody, "pooling")


class EmbeddingBody(_Pooled):
    """Fields common to bodies for vectors."""

    options: OptionsBody | None = unused("they are about texts")
    keep_alive: float | str | None = unused("served models stay loaded")


class EmbedBody(EmbeddingBody):
    """Body of POST /api/embed."""

    input: str | Inputs[str] | None = Field(
        None, description="a text, or texts; without one there are no vectors"
    )
    truncate: bool | None = Field(
        None, description="cut longer texts to the model's context, default true; else a 400"
    )
    dimensions: int | None = Field(None, description="leading entries of each vector")


class EmbedPromptBody(EmbeddingBody):
    """Body of POST /api/embeddings."""

    prompt: str | None = Field(None, description="the text; without one there is no vector")


class ShowBody(DialectBody):
    """Body of POST /api/show."""

    name: str | None = Field(None, description="older name of `model`")
    verbose: bool | None = unused()
    system: str | None = unused()
    template: str | None = unused()
    options: dict[str, Any] | None = unused()
