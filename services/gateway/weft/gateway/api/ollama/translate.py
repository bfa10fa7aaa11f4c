"""Conversion of Ollama's bodies to the gateway's own request."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from weft.contract.request import CallParams, Constraint
from weft.gateway.api.contents import ContentBuilder
from weft.gateway.api.hosted import own_tools
from weft.gateway.api.ollama.bodies import (
    OF_OPTIONS,
    ChatBody,
    EmbedBody,
    EmbeddingBody,
    EmbedPromptBody,
    GenerateBody,
    GenerationBody,
    MessageBody,
    OptionsBody,
    ToolBody,
)
from weft.gateway.api.parameters import client_names, given_parameters, settle_logprobs
from weft.gateway.api.tools import (
    NO_TOOLS,
    ToolUse,
    check_tools,
    past_call,
    use_tools,
)
from weft.gateway.api.unserved import leave_out
from weft.gateway.long_text import LongText
from weft.gateway.request import (
    CallFacts,
    ChatPrompt,
    MediaFile,
    PoolingOptions,
    Prompt,
    RawRequest,
    TextPrompt,
)
from weft.gateway.text.parts import Content
from weft.gateway.validate import invalid, unsupported

_TAG = ":latest"
_DEFAULT_LAST_N = 64
"""Ollama's default of `repeat_last_n`, which its clients send unasked."""
_ZERO = re.compile(r"[+-]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""A duration of nothing, as Ollama reads them."""
_NAMES = client_names("ollama", "options.", OF_OPTIONS)
TOO_LONG = (
    "prompt too long; exceeded max context length by {above} tokens: it has {tokens} of at most "
    "{context}"
)


def model_name(name: str | None) -> str:
    """A model's name without the tag that Ollama's clients append."""
    return (name or "").removesuffix(_TAG)


def unloads(body: GenerationBody) -> bool:
    """Whether a request without a prompt asks to unload the model; otherwise it asks to load it."""
    wanted = body.keep_alive
    if isinstance(wanted, str):
        return _ZERO.fullmatch(wanted.strip()) is not None
    return wanted == 0


def embed_request(body: EmbedBody, facts: CallFacts) -> RawRequest | None:
    """Translates a body for vectors; None: there are no texts."""
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    cut = None if body.truncate is False else 0
    wanted = PoolingOptions(
        output="embedding", dimensions=body.dimensions, normalises=True, truncate_tokens=cut
    )
    return _vectors(body, facts, texts, wanted)


def embed_prompt_request(body: EmbedPromptBody, facts: CallFacts) -> RawRequest | None:
    """Translates a body for one vector; None: there is no text."""
    texts = [body.prompt] if body.prompt else []
    wanted = PoolingOptions(output="embedding", normalises=False, truncate_tokens=0)
    return _vectors(body, facts, texts, wanted)


def _vectors(
    body: EmbeddingBody, facts: CallFacts, texts: Sequence[str], wanted: PoolingOptions
) -> RawRequest | None:
    if not texts:
        return None
    return RawRequest(
        call=facts,
        model=model_name(body.model),
        prompts=tuple(TextPrompt(text=text) for text in texts),
        given=given_parameters(body, "pooling"),
        pooling=wanted,
    )


def chat_request(body: ChatBody, facts: CallFacts) -> RawRequest | None:
    """Translates a chat; None: it only asks for the model to be loaded. Raises InvalidRequest if it
    asks for what is not supported, or fields contradict each other.
    """
    tools = check_tools([(number, _tool(tool)) for number, tool in own_tools(body.tools)])
    files: list[MediaFile] = []
    messages = [_message(number, one, files) for number, one in enumerate(body.messages or ())]
    if not messages:
        return None
    is_continued = messages[-1]["role"] == "assistant"
    prompt = ChatPrompt(
        messages=tuple(messages),
        files=tuple(files),
        tools=tools,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        template_variables=_thinking(body),
    )
    return _request(body, facts, prompt, use_tools(tools, "auto"))


def generation_request(body: GenerateBody, facts: CallFacts) -> RawRequest | None:
    """Translates a generation; None and errors as in `chat_request`."""
    if not body.prompt and not body.images:
        return None
    if body.raw:
        if body.images:
            raise invalid("images", "contradict raw: only a chat template has places for them")
        if body.system:
            raise invalid("system", "contradicts raw: write it into the prompt")
        if body.think is not None:
            raise invalid("think", "contradicts raw: write it into the prompt")
        return _request(body, facts, TextPrompt(text=body.prompt or ""), NO_TOOLS)
    files: list[MediaFile] = []
    content = _content(ContentBuilder(files), body.images, "images", body.prompt or "")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": body.system})
    messages.append({"role": "user", "content": content})
    prompt = ChatPrompt(
        messages=tuple(messages), files=tuple(files), template_variables=_thinking(body)
    )
    return _request(body, facts, prompt, NO_TOOLS)


def _request(body: GenerationBody, facts: CallFacts, prompt: Prompt, use: ToolUse) -> RawRequest:
    options = body.options or OptionsBody.model_validate({})
    constraint = _constraint(body)
    given = {**_of_options(options), **given_parameters(body, "ollama", (CallParams,))}
    settle_logprobs(given, "logprobs: true", is_wanted=bool(body.logprobs))
    return RawRequest(
        call=facts,
        model=model_name(body.model),
        prompts=(prompt,),
        given=given,
        names={**_NAMES, "constraint": "format"},
        constraint=constraint,
        calls=use.calls,
        lowers_max_tokens=True,
    )


def _of_options(options: OptionsBody) -> dict[str, Any]:
    given = given_parameters(options, "ollama", OF_OPTIONS)
    if given.get("max_tokens") in (-1, -2):
        del given["max_tokens"]
    if options.repeat_last_n == 0:
        given.pop("repetition_penalty", None)
    elif given.get("repetition_penalty", 1) == 1:
        pass
    elif options.repeat_last_n == _DEFAULT_LAST_N:
        leave_out("options.repeat_last_n", "repeat_penalty applies to the whole text")
    elif options.repeat_last_n not in (None, -1):
        raise unsupported("options.repeat_last_n", "a penalty over a part of the text")
    return given


def _constraint(body: GenerationBody) -> Constraint | None:
    given = body.format
    if given is None or given == "":
        return None
    if given == "json":
        given = {"type": "object", "additionalProperties": True}
    if isinstance(given, str):
        raise invalid("format", f'must be "json" or a JSON schema, not {given[:80]!r}')
    return Constraint(kind="json_schema", text=json.dumps(given, ensure_ascii=False))


def _thinking(body: GenerationBody) -> dict[str, Any]:
    think = body.think
    if think is None:
        return {}
    effort = {} if isinstance(think, bool) else {"reasoning_effort": think}
    return {"enable_thinking": bool(think), **effort}


def _message(number: int, message: MessageBody, files: list[MediaFile]) -> dict[str, Any]:
    where = f"messages[{number}]"
    if message.content is None and not message.tool_calls and not message.images:
        raise invalid(f"{where}.content", "is missing; give a text")
    for name in ("audios", "videos"):
        if getattr(message, name):
            raise unsupported(f"{where}.{name}", "the field")
    text, is_of_tool = message.content or "", message.role == "tool"
    built = ContentBuilder(files, is_of_tool=is_of_tool)
    if is_of_tool and text:
        built.add_text(text)
        text = ""
    content = _content(built, message.images, f"{where}.images", text)
    translated: dict[str, Any] = {"role": message.role, "content": content}
    named = {
        "reasoning_content": message.thinking,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    translated |= {name: value for name, value in named.items() if value}
    if message.tool_calls:
        translated["tool_calls"] = [
            past_call(
                call.id or "",
                call.function.name,
                json.dumps(call.function.arguments or {}, ensure_ascii=False),
            )
            for call in message.tool_calls
        ]
    return translated


def _content(
    content: ContentBuilder, images: Sequence[Any] | None, where: str, text: str
) -> Content:
    """Images come ahead of a user's text, as Ollama has them."""
    for number, image in enumerate(images or ()):
        content.add_image(
            image if isinstance(image, str | LongText) else None,
            kind="image",
            where=f"{where}[{number}]",
            type_param=where,
        )
    if text:
        content.add_text(text)
    return content.content


def _tool(tool: ToolBody) -> dict[str, Any]:
    function = tool.function
    given = {"description": function.description, "parameters": function.parameters}
    described = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": function.name, **described}}
