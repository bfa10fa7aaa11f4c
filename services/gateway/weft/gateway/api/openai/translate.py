"""Conversion of OpenAI bodies to the gateway's own request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from weft.gateway.api.call import check_client_id
from weft.gateway.api.contents import ContentBuilder
from weft.gateway.api.hosted import own_tools
from weft.gateway.api.openai.bodies import (
    AllowedToolsBody,
    AudioUrlBody,
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    ImageUrlBody,
    Message,
    TokenizeBody,
    ToolBody,
    ToolChoiceBody,
    VideoUrlBody,
)
from weft.gateway.api.openai.constrain import (
    CONSTRAINING,
    GivenConstraint,
    constraint_of,
    whitespace_of,
)
from weft.gateway.api.parameters import client_names, given_parameters, settle_logprobs
from weft.gateway.api.tools import (
    NO_TOOLS,
    ToolUse,
    check_tools,
    only_tools,
    past_call,
    use_tools,
)
from weft.gateway.request import (
    CallFacts,
    ChatPrompt,
    MediaFile,
    Prompt,
    RawRequest,
    TextPrompt,
    TokenPrompt,
)
from weft.gateway.text.parts import Content
from weft.gateway.validate import check_not_streamed, check_parameters, invalid, unsupported

_DEFAULT_COMPLETION_TOKENS = 16
"""Default for completions, as OpenAI's and vLLM's; a chat may fill the context."""

_OF_THE_REQUEST = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Names that are fields of the request, and so must not be template variables."""


def chat_request(body: ChatBody, facts: CallFacts) -> RawRequest:
    """Raises InvalidRequest if the body asks for what is not supported, or its fields contradict
    each other.
    """
    for name in ("functions", "function_call"):
        if getattr(body, name) not in (None, "none", []):
            raise unsupported(name, "functions are given as tools, chosen by tool_choice")
    if body.modalities is not None and set(body.modalities) - {"text"}:
        raise unsupported("modalities", "output other than text")
    if body.echo:
        raise unsupported("echo", "chats do not repeat their messages")
    if body.add_special_tokens:
        raise unsupported("add_special_tokens", "special tokens beside the chat template's")
    given, names = given_parameters(body, "openai"), dict(client_names("openai"))
    if body.top_logprobs is not None:
        given["top_logprobs"] = body.top_logprobs
    settle_logprobs(given, "logprobs: true", is_wanted=bool(body.logprobs))
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    prompt, tool_use = chat_prompt(body), NO_TOOLS
    if body.tools or body.tool_choice is not None:
        prompt, tool_use = _chosen_tools(body, prompt)
    return _raw_request(body, facts, (prompt,), given, names, tool_use)


def _chosen_tools(body: ChatBody, prompt: ChatPrompt) -> tuple[ChatPrompt, ToolUse]:
    choice = body.tool_choice
    if choice == "none":
        prompt = replace(prompt, tools=())
    if isinstance(choice, AllowedToolsBody):
        allowed, choice = choice.allowed_tools, choice.allowed_tools.mode
        names = [one.function.name for one in allowed.tools]
        prompt = replace(prompt, tools=only_tools(prompt.tools, names))
    tool_use = use_tools(
        prompt.tools,
        choice.function.name if isinstance(choice, ToolChoiceBody) else choice or "auto",
        is_named=isinstance(choice, ToolChoiceBody),
        most=1 if body.parallel_tool_calls is False else None,
    )
    return prompt, tool_use


def completion_request(body: CompletionBody, facts: CallFacts) -> RawRequest:
    """Every prompt of the body becomes one of the request's. Raises InvalidRequest as
    `chat_request` does.
    """
    if body.include_reasoning is False:
        raise unsupported("include_reasoning", "the text of a completion is not taken apart")
    given, names = given_parameters(body, "openai"), dict(client_names("openai"))
    given["max_tokens"] = _completion_tokens(body)
    names["top_logprobs"] = "logprobs"
    if body.logprobs is not None:
        given["top_logprobs"] = body.logprobs
        if body.echo:
            _echo_logprobs(given, names)
    return _raw_request(body, facts, _text_prompts(body), given, names)


def _echo_logprobs(given: dict[str, Any], names: dict[str, str]) -> None:
    """The prompt's log-probabilities are shown with the echoed prompt."""
    listed, echoed = given.get("prompt_logprobs"), given["top_logprobs"]
    if listed is None:
        names["prompt_logprobs"] = "echo"
    else:
        # The number of the other field may be larger.
        check_parameters({"prompt_logprobs": listed}, names, 0)
    given["prompt_logprobs"] = echoed if listed is None else max(listed, echoed)


def is_echo_alone(body: CompletionBody) -> bool:
    """Whether the answer is the prompt, with nothing after it."""
    return bool(body.echo) and body.max_tokens == 0 and not body.stream


def _completion_tokens(body: CompletionBody) -> int:
    if is_echo_alone(body):
        return 1  # To score a prompt, one token is drawn, which is not shown.
    return _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def tokenize_prompt(body: TokenizeBody) -> Prompt:
    """Raises InvalidRequest unless the body has exactly one of prompt and messages."""
    if body.messages is not None and body.prompt is not None:
        raise invalid("prompt", "contradicts messages: give one of prompt and messages")
    if body.messages is not None:
        return chat_prompt(body)
    if body.prompt is None:
        raise invalid("prompt", "give a prompt or messages")
    return TextPrompt(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)


def chat_prompt(body: ChatBody | TokenizeBody) -> ChatPrompt:
    """The conversation of a body, its content parts joined. Raises InvalidRequest if a message is
    empty or has content other than text, or fields contradict each other.
    """
    if not body.messages:
        raise invalid("messages", "at least one message is needed")
    variables = body.chat_template_kwargs or {}
    for name in _OF_THE_REQUEST:
        if variables.get(name) is not None:
            raise invalid(
                "chat_template_kwargs", f"`{name}` is a field of the request; give it there"
            )
    continues = bool(body.continue_final_message)
    add_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and add_prompt:
        raise invalid(
            "continue_final_message", "contradicts add_generation_prompt: true; set one of them"
        )
    files: list[MediaFile] = []
    return ChatPrompt(
        messages=tuple(_message(i, message, files) for i, message in enumerate(body.messages)),
        files=tuple(files),
        add_generation_prompt=add_prompt,
        continue_final_message=continues,
        template_variables={**_effort(body), **variables},
        tools=_tools(body),
    )


def _raw_request(
    body: GenerationBody,
    facts: CallFacts,
    prompts: tuple[Prompt, ...],
    given: Mapping[str, Any],
    names: Mapping[str, str],
    tool_use: ToolUse = NO_TOOLS,
) -> RawRequest:
    if body.best_of not in (None, given.get("n", 1)):
        raise unsupported("best_of", "choosing among more answers than n")
    constraint = _constraint(body, tool_use)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream: true")
    if given.get("prompt_logprobs") is not None:
        check_not_streamed(names.get("prompt_logprobs", "prompt_logprobs"), bool(body.stream))
    if constraint is not None:
        names = {**names, "constraint": constraint.param}
    return RawRequest(
        call=facts,
        own_id=_own_name(body),
        model=body.model or "",
        prompts=prompts,
        given=given,
        names=names,
        constraint=None if constraint is None else constraint.value,
        calls=tool_use.calls,
        is_echo_alone=isinstance(body, CompletionBody) and is_echo_alone(body),
    )


def _constraint(body: GenerationBody, tool_use: ToolUse) -> GivenConstraint | None:
    is_free = body.model_fields_set.isdisjoint(CONSTRAINING)
    constraint = None if is_free else constraint_of(body)
    whitespace = None if is_free else whitespace_of(body)
    if constraint is not None and tool_use.constraint is not None and not _is_format(constraint):
        raise invalid(
            constraint.param,
            "contradicts tool_choice, under which the answer is calls; set tool_choice to auto",
        )
    if tool_use.constraint is not None:
        constraint = GivenConstraint(tool_use.param, tool_use.constraint)
    if constraint is not None and whitespace is not None:
        value = replace(constraint.value, whitespace=whitespace)
        constraint = GivenConstraint(constraint.param, value)
    return constraint


def _own_name(body: GenerationBody) -> str:
    if body.request_id and body.rid and body.request_id != body.rid:
        raise invalid("rid", "contradicts request_id; give one of them")
    for param, name in (("request_id", body.request_id), ("rid", body.rid)):
        if name:
            check_client_id(param, name)
            return name
    return ""


def _message(index: int, message: Message, files: list[MediaFile]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.function_call is not None:
        raise unsupported(f"{where}.function_call", "calls are given as tool_calls")
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal or ""  # SDKs send back a turn without text with a `refusal`.
    if content is None:
        raise invalid(f"{where}.content", "is missing; give a text")
    built: Content = content if isinstance(content, str) else ""
    if not isinstance(content, str):
        built = _content(content, f"{where}.content", files, is_of_tool=message.role == "tool")
    translated: dict[str, Any] = {"role": message.role, "content": built}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            translated[name] = value
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        # Chat templates know it by either name.
        translated |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        translated["tool_calls"] = [
            past_call(call.id or "", call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    return translated


def _content(
    parts: Sequence[ContentPart], where: str, files: list[MediaFile], *, is_of_tool: bool
) -> Content:
    content = ContentBuilder(files, is_of_tool=is_of_tool)
    for number, part in enumerate(parts):
        place = f"{where}[{number}]"
        if part.type in ("text", "refusal"):
            text = part.text if part.type == "text" else part.refusal
            if text is None:
                raise invalid(f"{place}.{part.type}", "is missing")
            content.add_text(text)
        elif part.type == "image_url":
            given = part.image_url
            is_object = isinstance(given, ImageUrlBody)
            content.add_image(
                given.url if isinstance(given, ImageUrlBody) else given,
                kind=part.type,
                where=f"{place}.image_url.url" if is_object else f"{place}.image_url",
                type_param=f"{place}.type",
                detail=given.detail if isinstance(given, ImageUrlBody) else None,
                detail_param=f"{place}.image_url.detail",
            )
        elif part.type == "input_audio":
            audio = part.input_audio
            content.add_input_audio(
                audio.data if audio else None, audio.format if audio else None, place
            )
        elif part.type in ("audio_url", "video_url"):
            is_audio = part.type == "audio_url"
            sent = part.audio_url if is_audio else part.video_url
            is_object = isinstance(sent, AudioUrlBody | VideoUrlBody)
            content.add_file(
                sent.url if isinstance(sent, AudioUrlBody | VideoUrlBody) else sent,
                modality="audio" if is_audio else "video",
                kind=part.type,
                where=f"{place}.{part.type}.url" if is_object else f"{place}.{part.type}",
                type_param=f"{place}.type",
            )
        elif is_of_tool:
            content.leave_out(part.type, place)
        else:
            raise unsupported(f"{place}.type", f"content `{part.type}`")
    return content.content


def _is_format(constraint: GivenConstraint) -> bool:
    """A `response_format` applies to content and not to calls."""
    return constraint.param.startswith("response_format")


def _effort(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    told = {} if effort is None else {"reasoning_effort": effort}
    return {"enable_thinking": False, **told} if effort == "none" else told


def _tools(body: ChatBody | TokenizeBody) -> tuple[Mapping[str, Any], ...]:
    if not body.tools:
        return ()
    is_wanted = not isinstance(body, ChatBody) or body.tool_choice != "none"
    own = own_tools(body.tools, is_wanted=is_wanted)
    return check_tools([(number, _tool(tool)) for number, tool in own])


def _tool(tool: ToolBody) -> dict[str, Any]:
    function = tool.function
    given = {"description": function.description, "parameters": function.parameters}
    described = {name: value for name, value in given.items() if value is not None}
    return {"type": tool.type, "function": {"name": function.name, **described}}


def _text_prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    prompt = body.prompt
    add_special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt, add_special_tokens=add_special),)
    if prompt and isinstance(prompt[0], int):
        return (TokenPrompt(ids=tuple(prompt)),)
    return tuple(
        TextPrompt(text=item, add_special_tokens=add_special)
        if isinstance(item, str)
        else TokenPrompt(ids=tuple(item))
        for item in cast("list[str] | list[list[int]]", prompt)
    )
