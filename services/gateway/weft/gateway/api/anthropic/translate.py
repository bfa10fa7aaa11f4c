"""Conversion of Anthropic's bodies to the gateway's own request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from weft.contract.request import Constraint
from weft.gateway.api.anthropic.bodies import (
    BlockBody,
    MessageBody,
    MessagesBody,
    OutputFormatBody,
    PromptBody,
    ToolBody,
)
from weft.gateway.api.dialect_bodies import refuse
from weft.gateway.api.edge import CallFacts, call_fields
from weft.gateway.api.tools import ToolUse, check_tools, past_call, use_tools
from weft.gateway.request import ChatPrompt, GenerateRequest, Sampling, Stopping
from weft.gateway.validate import invalid, unsupported

NAMES = {"stop": "stop_sequences"}
"""Anthropic's names of fields, by those of the internal request."""
PARTS = {".function.parameters": ".input_schema", ".function.": "."}
_OF_PROMPTS = {
    "context_management": "edits of the context",
    "mcp_servers": "tools that the server calls",
}
_OF_MESSAGES = {
    "container": "containers",
    "diagnostics": "diagnostics",
    "inference_geo": "places of computation",
    "fallbacks": "other models for refusals",
}
_OF_TOOLS = {
    "input_examples": "examples of calls",
    "defer_loading": "tools that are searched for",
}


def messages_request(body: MessagesBody, facts: CallFacts) -> GenerateRequest:
    """Translates a body.

    Raises:
        InvalidRequest: It asks for what is not supported, or fields contradict each other.
    """
    refuse(body, _OF_MESSAGES)
    prompt, use = messages_prompt(body)
    constraint, param = use.constraint, use.param
    wanted, wanted_param = _format_of(body)
    if wanted is not None and constraint is None:  # Otherwise the answer consists of calls.
        schema = json.dumps(wanted.schema_, ensure_ascii=False)
        constraint, param = Constraint(kind="json_schema", text=schema), f"{wanted_param}.schema"
    sampling = {
        name: value
        for name in ("temperature", "top_p", "top_k", "seed")
        if (value := getattr(body, name)) is not None
    }
    if sampling.get("seed") == -1:
        del sampling["seed"]
    return GenerateRequest(
        **call_fields(body, facts),
        prompts=(prompt,),
        sampling=Sampling(**sampling, constraint=constraint),
        stopping=Stopping(max_tokens=body.max_tokens, stops=tuple(body.stop_sequences or ())),
        calls=use.calls,
        constraint_param=param if constraint is not None else "constraint",
    )


def messages_prompt(body: PromptBody) -> tuple[ChatPrompt, ToolUse]:
    """The conversation of a body, and the calls that its answer may have.

    Raises:
        InvalidRequest: It has content other than text and calls, or fields contradict each other.
    """
    refuse(body, _OF_PROMPTS)
    if body.speed not in (None, "standard"):
        raise unsupported("speed", f"speed `{body.speed[:80]}`")
    if not body.messages:
        raise invalid("messages", "at least one message is needed")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{number}]")
    is_continued = body.messages[-1].role == "assistant"
    choice = body.tool_choice
    tools = check_tools([_tool(number, tool) for number, tool in enumerate(body.tools or ())])
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
        tools=() if choice is not None and choice.type == "none" else tools,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        template_variables=_thinking(body),
    )
    return prompt, use


def _thinking(body: PromptBody) -> dict[str, Any]:
    """Variables about reasoning for the chat template."""
    thinking = body.thinking
    if thinking is not None and thinking.display not in (None, "summarized"):
        raise unsupported("thinking.display", "other ways to show it")
    is_on = thinking is not None and thinking.type != "disabled"
    told: dict[str, Any] = {"enable_thinking": is_on}
    if body.output_config is not None:
        refuse(body.output_config, {"task_budget": "a budget of tasks"}, "output_config.")
        if body.output_config.effort is not None:
            told["reasoning_effort"] = body.output_config.effort
    return told


def _format_of(body: PromptBody) -> tuple[OutputFormatBody | None, str]:
    newer = None if body.output_config is None else body.output_config.format
    if newer is not None and body.output_format is not None:
        raise invalid("output_format", "contradicts output_config.format: give one of them")
    if newer is not None:
        return newer, "output_config.format"
    return body.output_format, "output_format"


def _tool(number: int, tool: ToolBody) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    where = f"tools[{number}]"
    if tool.type not in (None, "custom"):
        raise unsupported(f"{where}.type", f"tools of type `{tool.type[:80]}`")
    refuse(tool, _OF_TOOLS, f"{where}.")
    if tool.allowed_callers not in (None, [], ["direct"]):
        raise unsupported(f"{where}.allowed_callers", "calls by other tools")
    given = {"description": tool.description, "parameters": tool.input_schema}
    described = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **described}}


def _messages(message: MessageBody, where: str) -> Iterator[dict[str, Any]]:
    """Converts a message to those of chat templates, in which each tool result is a message of its
    own.
    """
    content, role = message.content, message.role
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield _assistant(content, where)
    else:
        others = []
        for number, block in enumerate(content):
            if block.type == "tool_result" and role == "user":
                yield _result(block, f"{where}.content[{number}]")
            else:
                others.append((number, block))
        if others or not content:
            texts = [_text_of(block, f"{where}.content[{number}]") for number, block in others]
            yield {"role": role, "content": "\n".join(texts)}


def _assistant(blocks: Sequence[BlockBody], where: str) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            raise unsupported(f"{place}.type", "reasoning that only Anthropic can read")
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


def _result(block: BlockBody, where: str) -> dict[str, Any]:
    if not block.tool_use_id:
        raise invalid(f"{where}.tool_use_id", "is missing")
    content = _text(block.content or "", f"{where}.content")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


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
