"""Tools in the messages of a conversation, for chat templates that have no place for them.

The description asks for calls in Hermes' format, so that the parser finds them in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.gateway.text.parts import joined, wrapped

_INTRODUCTION = """\
You can call functions. Here is each of them, as JSON:
{tools}

To call one, write its name and arguments like this, one such block for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
You will be given what the calls return. Answer directly where no function is of use."""
RESULT_TAGS = ("<tool_response>", "</tool_response>")

Message = Mapping[str, Any]


def with_described_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The messages with tools, calls and results as text. Some messages have `tool_calls` or the
    role `tool`; `tools`, in OpenAI's form, may be empty.
    """
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            begin, end = RESULT_TAGS
            result = wrapped(message["content"], f"{begin}\n", f"\n{end}")
            if plain and plain[-1].get("is_result"):
                result = joined(plain.pop()["content"], result, "\n")
            # Results become a user's message, since many templates want users and assistants to
            # take turns.
            plain.append({"role": "user", "content": result, "is_result": True})
        elif message.get("tool_calls"):
            content = message["content"]
            calls = "\n".join([_call(one["function"]) for one in message["tool_calls"]])
            written = joined(content, calls, "\n") if content else calls
            plain.append({"role": message["role"], "content": written})
        else:
            plain.append(message)
    if not tools:
        return plain
    shown = "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in tools)
    text = _INTRODUCTION.format(tools=shown)
    if plain and plain[0]["role"] in ("system", "developer"):
        first = plain.pop(0)
        return [{**first, "content": joined(first["content"], text, "\n\n")}, *plain]
    return [{"role": "system", "content": text}, *plain]


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
