"""Writes answers as Anthropic's messages, whole and as named events."""

from __future__ import annotations

from typing import Any

from weft.gateway.api.answer import EVENTS, named_event
from weft.gateway.api.blocks import Block, BlockReader, Step, num_reasoning_tokens
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.text.answer.call_reader import parse_json
from weft.gateway.text.answer.make import parser_maker
from weft.v1 import common_pb2


class MessageWriter:
    content_type = EVENTS

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        request, prompt = answer.request, answer.generations[0].prompt
        asked = request.stop.max_tokens
        self._is_bounded = asked is not None and asked > prompt.max_tokens
        self._reader = BlockReader(parser_maker(request, answer.card, prompt))
        self._frame: dict[str, object] = {
            "id": request.request_id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
        }

    def begin(self) -> bytes:
        message = {
            **self._frame,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        return named_event("message_start", {"type": "message_start", "message": message})

    def push(self, delta: Delta) -> bytes:
        return b"".join([_event(step) for step in self._reader.push(delta)])

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_event("message_delta", delta) + named_event(
            "message_stop", {"type": "message_stop"}
        )

    def whole(self) -> dict[str, object]:
        content = [_whole(block) for block in self._reader.blocks]
        return {**self._frame, "content": content, **self._stop(), "usage": self._usage()}

    def _stop(self) -> dict[str, object]:
        reader, sequence = self._reader, None
        reason = "end_turn"
        if reader.finish_reason == common_pb2.FINISH_REASON_LENGTH:
            reason = "model_context_window_exceeded" if self._is_bounded else "max_tokens"
        elif reader.finish_reason == common_pb2.FINISH_REASON_CANCELLED:
            reason = "abort"
        elif isinstance(reader.stop_reason, str):
            reason, sequence = "stop_sequence", reader.stop_reason
        elif reader.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}

    def _usage(self) -> dict[str, object]:
        usage = self._answer.usage()
        reasoning = num_reasoning_tokens(self._answer, self._reader.blocks)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": reasoning},
        }


def _event(step: Step) -> bytes:
    index = step.block.number
    if step.what == "begin":
        event: dict[str, Any] = {"content_block": _empty(step.block)}
        return named_event(
            "content_block_start", {"type": "content_block_start", "index": index, **event}
        )
    if step.what == "end":
        return named_event("content_block_stop", {"type": "content_block_stop", "index": index})
    kinds = {
        "reasoning": ("thinking_delta", "thinking"),
        "text": ("text_delta", "text"),
        "call": ("input_json_delta", "partial_json"),
    }
    kind, field = kinds[step.block.kind]
    delta = {"type": kind, field: step.text}
    return named_event(
        "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
    )


def _empty(block: Block) -> dict[str, object]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole(block: Block) -> dict[str, object]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    call = {"type": "tool_use", "id": block.call_id, "name": block.name}
    return {**call, "input": object_or_text(block.text)}


def object_or_text(arguments: str) -> object:
    """Arguments stay a text if they are no object, as in a call that was cut off."""
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return arguments
