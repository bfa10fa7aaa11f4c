"""Conversion of Anthropic's bodies to the gateway's own request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.contract.request import Constraint
from weft.gateway.api.anthropic.bodies import (
    BlockBody,
    EditBody,
    KeepBody,
    MessageBody,
    MessagesBody,
    OutputFormatBody,
    PromptBody,
    ToolBody,
)
from weft.gateway.api.contents import ContentBuilder
from weft.gateway.api.hosted import own_tools
from weft.gateway.api.parameters import client_names, given_parameters
from weft.gateway.api.tools import ToolUse, check_tools, past_call, use_tools
from weft.gateway.api.unserved import leave_out
from weft.gateway.long_text import LongText
from weft.gateway.request import CallFacts, ChatPrompt, MediaFile, RawRequest
from weft.gateway.text.parts import Content
from weft.gateway.validate import invalid, unsupported

TOO_LONG = "prompt is too long: {tokens} tokens > {context} maximum"
PARTS = {".function.parameters": ".input_schema", ".function.": "."}
_CLEAR_THINKING = "clear_thinking_20251015"
_IMAGE_FIELDS = {"base64": "data", "url": "url"}
"""Where an image is, by the type of its source."""


def messages_request(body: MessagesBody, facts: CallFacts) -> RawRequest:
    """Raises InvalidRequest if the body asks for what is not supported, or its fields contradict
    each other.
    """
    prompt, use = messages_prompt(body)
    constraint, param = use.constraint, use.param
    wanted, wanted_param = _format_of(body)
    if wanted is not None and constraint is None:  # Otherwise the answer consists of calls.
        schema = json.dumps(wanted.schema_, ensure_ascii=False)
        constraint, param = Constraint(kind="json_schema", text=schema), f"{wanted_param}.schema"
    return RawRequest(
        call=facts,
        model=body.model or "",
        prompts=(prompt,),
        given=given_parameters(body, "anthropic"),
        names={**client_names("anthropic"), "constraint": param},
        constraint=constraint,
        calls=use.calls,
        lowers_max_tokens=True,
    )


def messages_prompt(body: PromptBody) -> tuple[ChatPrompt, ToolUse]:
    """The conversation of a body, and the calls that its answer may have. Raises InvalidRequest for
    content other than text and calls, or if fields contradict each other.
    """
    if body.thread is not None:
        if body.thread.type != "create":
            raise unsupported("thread.type", "conversations that the server keeps")
        leave_out("thread", "no conversation is kept")
    if not body.messages:
        raise invalid("messages", "at least one message is needed")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    files: list[MediaFile] = []
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{number}]", files)
    _edit(body, messages)
    is_continued = body.messages[-1].role == "assistant"
    choice = body.tool_choice
    tools = _tools(body)
    is_named = choice is not None and choice.type == "tool"
    if is_continued and choice is not None and choice.type in ("any", "tool"):
        raise invalid("tool_choice", "contradicts a last message of the assistant's")
    if choice is not None and is_named and not choice.name:
        raise invalid("tool_choice.name", "is needed with type tool")
    kinds = {"any": "required", "none": "none", "auto": "auto"}
    use = use_tools(
        tools,
        (choice.name or "")
        if choice is not None and is_named
        else kinds["auto" if choice is None else choice.type],
        is_named=is_named,
        most=1 if choice is not None and choice.disable_parallel_tool_use else None,
    )
    prompt = ChatPrompt(
        messages=tuple(messages),
        files=tuple(files),
        tools=() if choice is not None and choice.type == "none" else tools,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        template_variables=_thinking(body),
    )
    return prompt, use


def _edit(body: PromptBody, messages: list[dict[str, Any]]) -> None:
    edits = (body.context_management.edits if body.context_management else None) or ()
    for number, edit in enumerate(edits):
        where = f"context_management.edits[{number}]"
        if edit.type != _CLEAR_THINKING:
            raise unsupported(f"{where}.type", f"edits of type `{edit.type[:80]}`")
        num_kept = _num_kept_turns(edit, where)
        if num_kept is None:
            leave_out(where, "all thinking is kept anyway")
        else:
            _clear_thinking(messages, num_kept)


def _num_kept_turns(edit: EditBody, where: str) -> int | None:
    keep = KeepBody(type="thinking_turns", value=1) if edit.keep is None else edit.keep
    kind = keep if isinstance(keep, str) else keep.type
    if kind == "all":
        return None
    if isinstance(keep, str) or kind != "thinking_turns":
        raise invalid(f"{where}.keep", "must be all, or have the type all or thinking_turns")
    if keep.value is None or keep.value < 1:
        raise invalid(f"{where}.keep.value", "must be at least 1")
    return keep.value


def _clear_thinking(messages: list[dict[str, Any]], num_kept: int) -> None:
    """Everything between two messages of the user is one turn."""
    num_turns, is_in_turn = 0, False
    for message in reversed(messages):
        if message["role"] == "assistant":
            num_turns += not is_in_turn
            is_in_turn = True
            if num_turns > num_kept:
                message.pop("reasoning_content", None)
        elif message["role"] != "tool":
            is_in_turn = False


def _thinking(body: PromptBody) -> dict[str, Any]:
    thinking = body.thinking
    is_on = thinking is not None and thinking.type != "disabled"
    told: dict[str, Any] = {"enable_thinking": is_on}
    if body.output_config is not None:
        effort = body.output_config.effort
        told |= {} if effort is None else {"reasoning_effort": effort}
    return told


def _format_of(body: PromptBody) -> tuple[OutputFormatBody | None, str]:
    newer = None if body.output_config is None else body.output_config.format
    if newer is not None and body.output_format is not None:
        raise invalid("output_format", "contradicts output_config.format: give one of them")
    if newer is not None:
        return newer, "output_config.format"
    return body.output_format, "output_format"


def _tools(body: PromptBody) -> tuple[Mapping[str, Any], ...]:
    is_wanted = body.tool_choice is None or body.tool_choice.type != "none"
    own = own_tools(body.tools, is_wanted=is_wanted)
    if body.mcp_servers:
        what = "tools that only another server calls"
        if is_wanted and not own:
            raise unsupported("mcp_servers", f"{what}, without other tools")
        leave_out("mcp_servers", what)
    return check_tools([(number, _tool(number, tool)) for number, tool in own])


def _tool(number: int, tool: ToolBody) -> dict[str, Any]:
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise unsupported(f"tools[{number}].allowed_callers", "calls by other tools alone")
    given = {"description": tool.description, "parameters": tool.input_schema}
    described = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **described}}


def _messages(message: MessageBody, where: str, files: list[MediaFile]) -> Iterator[dict[str, Any]]:
    """Chat templates have a message of its own for each tool result."""
    content, role = message.content, message.role
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield _assistant(content, where)
    else:
        others = []
        for number, block in enumerate(content):
            if block.type == "tool_result" and role == "user":
                yield _result(block, f"{where}.content[{number}]", files)
            else:
                others.append((number, block))
        if others or not content:
            built = ContentBuilder(files)
            for number, block in others:
                place = f"{where}.content[{number}]"
                if block.type == "image":
                    _add_image(built, block, place)
                else:
                    built.add_text(_text_of(block, place))
            yield {"role": role, "content": built.content}


def _assistant(blocks: Sequence[BlockBody], where: str) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            leave_out(place, "reasoning that only Anthropic can read")
        elif block.type == "tool_use":
            if not block.name:
                raise invalid(f"{place}.name", "is missing")
            given = block.input or {}
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append(past_call(block.id or "", block.name, text))
        else:
            texts.append(_text_of(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _result(block: BlockBody, where: str, files: list[MediaFile]) -> dict[str, Any]:
    if not block.tool_use_id:
        raise invalid(f"{where}.tool_use_id", "is missing")
    given = block.content or ""
    content: Content = ""
    if isinstance(given, str):
        content = given
    else:
        built = ContentBuilder(files, is_of_tool=True)
        for number, part in enumerate(given):
            place = f"{where}.content[{number}]"
            if part.type == "text":
                built.add_text(_text_of(part, place))
            elif part.type == "image":
                _add_image(built, part, place)
            else:
                built.leave_out(part.type, place)
        content = built.content
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _add_image(content: ContentBuilder, block: BlockBody, where: str) -> None:
    source = block.source or {}
    kind = str(source.get("type", ""))
    if kind not in _IMAGE_FIELDS and not content.is_of_tool:
        raise invalid(f"{where}.source.type", f"must be base64 or url, not {kind[:80]!r}")
    name = _IMAGE_FIELDS.get(kind, "data")
    given = source.get(name)
    content.add_image(
        given if isinstance(given, str | LongText) else None,
        kind=block.type,
        where=f"{where}.source.{name}",
        type_param=f"{where}.type",
    )


def _text(content: str | Sequence[BlockBody], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([_text_of(block, f"{where}[{i}]") for i, block in enumerate(content)])


def _text_of(block: BlockBody, where: str) -> str:
    if block.type != "text":
        raise unsupported(f"{where}.type", f"content `{block.type[:80]}`")
    if block.text is None:
        raise invalid(f"{where}.text", "is missing")
    return block.text
