"""Writes answers as response objects, whole and as named events in their official order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from weft.contract.errors import WeftError
from weft.gateway.api.answer import EVENTS, named_event
from weft.gateway.api.blocks import Block, BlockReader, Step, num_reasoning_tokens
from weft.gateway.api.openai.logprobs import chat_logprobs
from weft.gateway.api.responses.bodies import (
    NamespaceBody,
    ResponsesBody,
    ToolBody,
    qualified,
)
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.request import RawRequest
from weft.gateway.text.answer.make import parser_maker
from weft.gateway.text.detokenize import Vocabulary
from weft.v1 import common_pb2

PREFIX = "resp_"
_ITEMS = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""Prefixes of items' ids, by the kind of block."""
_STATUSES = {
    common_pb2.FINISH_REASON_LENGTH: "incomplete",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_OVERLOADED = 429


class ResponseWriter:
    content_type = EVENTS

    def __init__(
        self,
        body: ResponsesBody,
        answer: Answer,
        keep: Callable[[Mapping[str, object]], None],
    ) -> None:
        """Calls `keep` with the finished response before the client has it."""
        self._answer = answer
        self._keep = keep
        self._vocabulary: Vocabulary = answer.card.vocabulary
        request, prompt = answer.request, answer.generations[0].prompt
        self._reader = BlockReader(parser_maker(request, answer.card, prompt))
        self._has_logprobs = request.top_logprobs is not None
        self._frame = _frame(answer.raw, body, answer.model)
        self._called_as = _called_as(body)
        self._suffix = request.request_id.removeprefix(PREFIX)
        self._num_events = 0
        self.has_begun = False
        """Whether the first event was made."""

    def begin(self) -> bytes:
        self.has_begun = True
        response = self.response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def push(self, delta: Delta) -> bytes:
        steps = self._reader.push(delta)
        return b"".join([self._step(step) for step in steps]) if self.has_begun else b""

    def end(self) -> bytes:
        response = self.whole()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self._event(f"response.{kind}", response=response)

    def whole(self) -> dict[str, object]:
        reason = self._reader.finish_reason or common_pb2.FINISH_REASON_STOP
        response = self.response(_STATUSES.get(reason, "completed"))
        self._keep(response)
        return response

    def failed(self, error: WeftError) -> bytes:
        """The last event of a stream that fails."""
        code = "rate_limit_exceeded" if error.http_status == _OVERLOADED else "server_error"
        told = {"code": code, "message": error.message, "type": error.reason.lower()}
        response = {**self.response("failed"), "error": told}
        return self._event("response.failed", response=response)

    def response(self, status: str) -> dict[str, object]:
        """The response as it is now, with a status."""
        is_incomplete, has_ended = status == "incomplete", status != "in_progress"
        return {
            **self._frame,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [self._item(block) for block in self._reader.blocks],
            "usage": self._usage() if has_ended else None,
        }

    def _usage(self) -> dict[str, object]:
        usage = self._answer.usage()
        reasoning = num_reasoning_tokens(self._answer, self._reader.blocks)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_prompt_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _step(self, step: Step) -> bytes:
        block = step.block
        where: dict[str, object] = {"item_id": self._id(block), "output_index": block.number}
        if block.kind == "call":
            return self._call_step(step, where)
        part: dict[str, object] = {**where, "content_index": 0}
        kind = "output_text" if block.kind == "text" else "reasoning_text"
        if step.what == "begin":
            # Clients append the deltas that follow, of which the block may have some by now.
            empty = self._part(Block(block.number, block.kind))
            return self._added(block) + self._event(
                "response.content_part.added", **part, part=empty
            )
        is_text = block.kind == "text"
        if step.what == "add":
            shown = {"logprobs": self._logprobs(step.logprobs)} if is_text else {}
            return self._event(f"response.{kind}.delta", **part, delta=step.text, **shown)
        shown = {"logprobs": self._logprobs(block.logprobs)} if is_text else {}
        return b"".join(
            (
                self._event(f"response.{kind}.done", **part, text=block.text, **shown),
                self._event("response.content_part.done", **part, part=self._part(block)),
                self._done(block),
            )
        )

    def _call_step(self, step: Step, where: Mapping[str, object]) -> bytes:
        kind = "response.function_call_arguments"
        if step.what == "begin":
            return self._added(step.block)
        if step.what == "add":
            return self._event(f"{kind}.delta", **where, delta=step.text)
        block = step.block
        named = self._called_as.get(block.name, {"name": block.name})
        told = {"name": named["name"], "arguments": block.text}
        return self._event(f"{kind}.done", **where, **told) + self._done(step.block)

    def _added(self, block: Block) -> bytes:
        item = self._item(Block(block.number, block.kind, block.call_id, block.name))
        if block.kind != "call":
            item["content"] = []
        return self._event("response.output_item.added", output_index=block.number, item=item)

    def _done(self, block: Block) -> bytes:
        item = self._item(block)
        return self._event("response.output_item.done", output_index=block.number, item=item)

    def _id(self, block: Block) -> str:
        return f"{_ITEMS[block.kind]}_{self._suffix}_{block.number}"

    def _item(self, block: Block) -> dict[str, Any]:
        item = {"id": self._id(block), "status": self._status(block)}
        if block.kind == "text":
            return {
                **item,
                "type": "message",
                "role": "assistant",
                "content": [self._part(block)],
            }
        if block.kind == "reasoning":
            return {
                **item,
                "type": "reasoning",
                "summary": [],
                "content": [self._part(block)],
                "encrypted_content": None,
            }
        return {
            **item,
            "type": "function_call",
            "call_id": block.call_id,
            **self._called_as.get(block.name, {"name": block.name}),
            "arguments": block.text,
        }

    def _status(self, block: Block) -> str:
        if not block.is_ended:
            return "in_progress"
        reader = self._reader
        is_cut = block is reader.blocks[-1] and reader.finish_reason in _STATUSES
        return "incomplete" if is_cut else "completed"

    def _part(self, block: Block) -> dict[str, object]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._logprobs(block.logprobs),
        }

    def _logprobs(self, entries: Any) -> object:
        if not self._has_logprobs or not entries:
            return []
        return chat_logprobs(self._vocabulary, entries)["content"]


def _shown_tools(body: ResponsesBody) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    for tool in body.tools or ():
        if isinstance(tool, ToolBody):
            shown.append(tool.model_dump(exclude_unset=True))
        elif isinstance(tool, NamespaceBody) and tool.functions:
            space = tool.model_dump(exclude_unset=True, exclude={"tools"})
            inner = [function.model_dump(exclude_unset=True) for _, function in tool.functions]
            shown.append({**space, "tools": inner})
    return shown


def _called_as(body: ResponsesBody) -> dict[str, dict[str, str]]:
    """Clients' names of the functions in namespaces, by the names that the model knows."""
    return {
        qualified(one.name, function.name or ""): {
            "name": function.name or "",
            "namespace": one.name,
        }
        for one in body.tools or ()
        if isinstance(one, NamespaceBody)
        for _, function in one.functions
    }


def _frame(raw: RawRequest, body: ResponsesBody, model: str) -> dict[str, object]:
    text, reasoning = body.text, body.reasoning
    has_format = text is not None and text.format is not None
    form: object = {"type": "text"}
    if text is not None and has_format and text.format is not None:
        form = text.format.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice
    if choice is not None and not isinstance(choice, str):
        shown: object = choice.model_dump(exclude_none=True)
    else:
        shown = choice or "auto"
    return {
        "id": raw.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": raw.given.get("max_tokens"),
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": raw.given.get("temperature"),
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": shown,
        "tools": _shown_tools(body),
        "top_logprobs": raw.given.get("top_logprobs", 0),
        "top_p": raw.given.get("top_p"),
        "truncation": "disabled",
        "user": body.user,
    }
