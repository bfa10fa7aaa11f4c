"""Writes answers as Ollama's objects, whole and as lines."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from weft.gateway.api.answer import LINES
from weft.gateway.api.blocks import Block, BlockReader, Step
from weft.gateway.api.openai.chunks import FINISH_NAMES, to_json
from weft.gateway.api.openai.logprobs import chat_logprobs
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.text.answer.call_reader import parse_json
from weft.gateway.text.answer.make import parser_maker
from weft.v1 import common_pb2


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, *, is_chat: bool, is_end: bool) -> dict[str, object]:
    """The answer to a request that only asks for the model to be loaded, or unloaded."""
    empty: dict[str, object] = (
        {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    )
    return {
        "model": model,
        "created_at": now(),
        **empty,
        "done": True,
        "done_reason": "unload" if is_end else "load",
    }


class LineWriter:
    content_type = LINES

    def __init__(self, answer: Answer, model: str, *, is_chat: bool) -> None:
        """`model` is the model as the client named it. With `is_chat` the answer is a message
        instead of a text.
        """
        self._answer = answer
        self._model = model or answer.model
        self._is_chat = is_chat
        request, prompt = answer.request, answer.generations[0].prompt
        is_raw = not is_chat and not hasattr(request.prompts[0], "messages")
        self._reader = BlockReader(None if is_raw else parser_maker(request, answer.card, prompt))
        self._begin_ns = time.monotonic_ns()
        self._first_ns = self._last_ns = 0

    def begin(self) -> bytes:
        return b""

    def push(self, delta: Delta) -> bytes:
        self._last_ns = time.monotonic_ns()
        self._first_ns = self._first_ns or self._last_ns
        return b"".join([self._line(step) for step in self._reader.push(delta)])

    def end(self) -> bytes:
        return self._encode({**self._gained("", ""), **self._closing()})

    def whole(self) -> dict[str, object]:
        blocks = self._reader.blocks
        texts = {
            kind: "".join([block.text for block in blocks if block.kind == kind])
            for kind in ("text", "reasoning")
        }
        calls = [block for block in blocks if block.kind == "call"]
        entries = [entry for block in blocks for entry in block.logprobs]
        text = texts["text"] + "".join([one.text for one in calls if not _is_whole(one)])
        answer = self._gained(text, texts["reasoning"], [one for one in calls if _is_whole(one)])
        return {**self._frame(), **answer, **self._logprobs(entries), **self._closing()}

    def _line(self, step: Step) -> bytes:
        block = step.block
        if block.kind == "call":
            if step.what != "end":
                return b""
            # A call that was cut off is shown as text.
            gained = (
                self._gained("", "", [block]) if _is_whole(block) else self._gained(block.text, "")
            )
            return self._encode({**gained, "done": False})
        if step.what != "add" or not (step.text or step.logprobs):
            return b""
        is_text = block.kind == "text"
        gained = self._gained(step.text if is_text else "", "" if is_text else step.text)
        return self._encode({**gained, **self._logprobs(step.logprobs), "done": False})

    def _encode(self, fields: dict[str, object]) -> bytes:
        return to_json({**self._frame(), **fields}) + b"\n"

    def _frame(self) -> dict[str, object]:
        return {"model": self._model, "created_at": now()}

    def _gained(
        self, text: str, reasoning: str, calls: list[Block] | None = None
    ) -> dict[str, Any]:
        told: dict[str, Any] = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return {"response": text, **told}
        if calls:
            told["tool_calls"] = [_call(number, call) for number, call in enumerate(calls)]
        return {"message": {"role": "assistant", "content": text, **told}}

    def _logprobs(self, entries: Any) -> dict[str, object]:
        if not entries:
            return {}
        return {"logprobs": chat_logprobs(self._answer.card.vocabulary, entries)["content"]}

    def _closing(self) -> dict[str, object]:
        usage = self._answer.usage()
        reader = self._reader
        reason = reader.finish_reason or common_pb2.FINISH_REASON_STOP
        now_ns = time.monotonic_ns()
        first_ns = self._first_ns or now_ns
        (timeline,) = self._answer.timelines()[:1]
        queued_ns = timeline.queued_time.ToNanoseconds()
        return {
            "done": True,
            "done_reason": FINISH_NAMES.get(reason, "stop"),
            "total_duration": now_ns - self._begin_ns + queued_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(0, first_ns - self._begin_ns),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(0, (self._last_ns or now_ns) - first_ns),
        }


def _is_whole(block: Block) -> bool:
    try:
        return isinstance(parse_json(block.text or "{}"), dict)
    except ValueError:
        return False


def _call(number: int, block: Block) -> dict[str, object]:
    arguments = parse_json(block.text or "{}")
    function = {"index": number, "name": block.name, "arguments": arguments}
    return {"id": block.call_id, "function": function}
