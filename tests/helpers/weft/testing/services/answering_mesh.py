"""A gateway whose one worker answers with a text that the test sets."""

from __future__ import annotations

from typing import Any

from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness
from weft.v1 import common_pb2, decode_pb2


class Mesh:
    """A gateway whose worker answers with a text that the test sets."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        """What is asked, unless a test gives other messages."""
        self.text = ""
        self.is_cut = False
        self.harness: Harness

    def script(self, submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        ids = self.harness.ids(self.text)
        return Script(
            tokens=[ids if self.is_cut else [*ids, self.harness.end]],
            top_logprobs=0 if submit.HasField("logprobs") else None,
        )

    @property
    def prompt(self) -> str:
        """The last prompt's text."""
        (submit,) = self.harness.workers[0].submits[-1:]
        ids = list(submit.prompt.ids)
        return self.harness.tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def constraint(self) -> common_pb2.Constraint:
        return self.harness.workers[0].submits[-1].sampling.constraint

    async def whole(self, **fields: Any) -> tuple[dict[str, Any], str]:
        """Message and finish reason, the same as in the stream's chunks."""
        body = {"messages": self.messages, **fields}
        answer = await self.harness.json("ChatCompletions", body)
        (choice,) = answer["choices"]
        message: dict[str, Any] = choice["message"]
        streamed, reason = joined(await self.harness.events("ChatCompletions", body))
        told = {name: value for name, value in message.items() if value is not None}
        for call in told.get("tool_calls", []) + streamed.get("tool_calls", []):
            assert len(call.pop("id")) > 8
        assert {"content": "", **streamed} == {"content": "", **told}
        assert reason == choice["finish_reason"]
        return message, reason


def joined(events: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that a client makes of a stream."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    reason = ""
    for event in events:
        (choice,) = event["choices"]
        reason = choice["finish_reason"] or reason
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for one in value:
                    if one["index"] == len(calls):
                        calls.append({"id": "", "type": "", "function": {"name": ""}})
                        calls[-1] |= {"id": one["id"], "type": one["type"]}
                        calls[-1]["function"] = {"name": one["function"]["name"], "arguments": ""}
                    function = calls[one["index"]]["function"]
                    function["arguments"] += one["function"]["arguments"]
            elif isinstance(value, str):
                message[name] = message.get(name, "") + value
    if not message["content"] and calls:
        del message["content"]
    return message | ({"tool_calls": calls} if calls else {}), reason
