"""Tools in the messages of a conversation, for chat templates that have no place for them.

The description asks for calls in Hermes' format, so that the parser finds them in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
            result = f"\n{message['content']}\n".join(RESULT_TAGS)
            if plain and plain[-1].get("is_result"):
                result = f"{plain.pop()['content']}\n{result}"
            # Results become a user's message, since many templates want users and assistants to
            # take turns.
            plain.append({"role": "user", "content": result, "is_result": True})
        elif message.get("tool_calls"):
            texts = [message["content"]] if message["content"] else []
            texts += [_call(one["function"]) for one in message["tool_calls"]]
            plain.append({"role": message["role"], "content": "\n".join(texts)})
        else:
            plain.append(message)
    if not tools:
        return plain
    shown = "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in tools)
    text = _INTRODUCTION.format(tools=shown)
    if plain and plain[0]["role"] in ("system", "developer"):
        first = plain.pop(0)
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *plain]
    return [{"role": "system", "content": text}, *plain]


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
