"""Conversion of deltas to OpenAI's JSON: whole answers, and server-sent events from pre-encoded
pieces.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from google.protobuf.json_format import MessageToDict
from weft.gateway.api.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from weft.gateway.api.openai.prompt_logprobs import PromptLogprobs
from weft.gateway.generation.answer import Delta
from weft.gateway.text.answer import AnswerParser, CallPart, joined
from weft.gateway.text.detokenize import Detokenizer, Vocabulary
from weft.v1 import common_pb2

DONE = b"data: [DONE]\n\n"
_PART_ITEMS = 256
"""Most items of a list that are encoded at once, where lists may be very long."""
_NOT_ASKED = {"prompt_logprobs": None, "prompt_token_ids": None}
"""Fields about the prompt that whole answers have in any case, because clients of vLLM read them
unasked.
"""
_MESSAGE = {"refusal": None, "reasoning": None, "reasoning_content": None}
"""Fields that whole messages have in any case, for the same clients."""
FINISH_NAMES = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "abort",
}
"""Finish reasons as vLLM, SGLang and Ollama name them."""
_to_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


_LINE_ENDS = {"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}
"""Characters at which some clients cut lines, as JSON may spell them."""


def to_json(value: object) -> bytes:
    """Serialises a value as compact JSON in UTF-8, without any character that may end a line."""
    return _to_line(_to_text(value))


def text_to_json(text: str) -> bytes:
    """`to_json` of a text, for which the encoder's own preparations would take most of the time."""
    if text.isascii():
        return encode_basestring(text).encode()
    return _to_line(encode_basestring(text))


def _to_line(text: str) -> bytes:
    if not text.isascii() and any(end in text for end in _LINE_ENDS):
        for end, spelled in _LINE_ENDS.items():
            text = text.replace(end, spelled)
    return text.encode()


def large_to_json(value: object) -> bytes:
    """Encodes in parts, since the encoder holds Python's lock while it encodes a value."""
    if isinstance(value, dict):
        items = [to_json(key) + b":" + large_to_json(item) for key, item in value.items()]
        return b"{" + b",".join(items) + b"}"
    if isinstance(value, list) and len(value) > _PART_ITEMS:
        starts = range(0, len(value), _PART_ITEMS)
        return b"[" + b",".join([to_json(value[i : i + _PART_ITEMS])[1:-1] for i in starts]) + b"]"
    return to_json(value)


def usage_json(usage: common_pb2.Usage) -> dict[str, object]:
    """Builds OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_prompt_tokens,
            "audio_tokens": usage.audio_prompt_tokens,
        },
    }


def _usage_tail(usage: common_pb2.Usage) -> bytes:
    return b'],"usage":%b}\n\n' % to_json(usage_json(usage))


def weft_json(
    request_id: str, trace_id: str, timelines: Sequence[common_pb2.Timeline]
) -> dict[str, object]:
    """The extension object requested by `weft_timeline`."""
    shown = [
        MessageToDict(
            timeline,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        for timeline in timelines
    ]
    extension: dict[str, object] = {"request_id": request_id, "timeline": shown[0]}
    if trace_id:
        extension["trace_id"] = trace_id
    if len(shown) > 1:
        extension["timelines"] = shown
    return extension


class AnswerWriter(ABC):
    """Writes one request's answer, streamed or whole."""

    # What each event touches lies together: a gateway goes through thousands of writers a step.
    __slots__ = ("__dict__", "_tail", "prompt_ids", "usage_so_far")

    object_name: str
    chunk_name: str

    def __init__(
        self, request_id: str, model: str, vocabulary: Vocabulary, *, include_usage: bool = False
    ) -> None:
        """With `include_usage` every chunk has a `usage` field, null until the last. `vocabulary`
        is for log-probabilities.
        """
        self.prompt_logprobs: PromptLogprobs | None = None
        """Log-probabilities of prompts in a whole answer; None: none are shown."""
        self.usage_so_far: Callable[[], common_pb2.Usage] | None = None
        """Returns the usage that every chunk of a stream shows; None: chunks show none."""
        self.prompt_ids: Sequence[Sequence[int]] | None = None
        """Each prompt's token ids, if the answer shows token ids; else None."""
        self._vocabulary = vocabulary
        self._created = int(time.time())
        self._request_id = request_id
        self._model = model
        self._head = b"data: " + to_json(self._frame(self.chunk_name))[:-1] + b',"choices":['
        self._set_tail(b'],"usage":null}\n\n' if include_usage else b"]}\n\n")

    def _set_tail(self, tail: bytes) -> None:
        self._tail = tail

    def _frame(self, name: str) -> dict[str, object]:
        return {
            "id": self._request_id,
            "object": name,
            "created": self._created,
            "model": self._model,
        }

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Encodes deltas as consecutive events."""
        if self.usage_so_far is not None:
            self._set_tail(_usage_tail(self.usage_so_far()))
        if len(deltas) == 1:
            return self._event(deltas[0])
        return b"".join([self._event(delta) for delta in deltas])

    @abstractmethod
    def _event(self, delta: Delta) -> bytes: ...

    def last_event(self, fields: Mapping[str, object]) -> bytes:
        """An event without choices, with the given fields."""
        frame = {**self._frame(self.chunk_name), "choices": [], **fields}
        return b"data: " + to_json(frame) + b"\n\n"

    def whole(self, deltas: Sequence[Delta], fields: Mapping[str, object]) -> bytes:
        """Builds a whole answer of one complete delta for each sample, in order. `fields` are added
        to it: usage and extensions.
        """
        is_large = self.prompt_logprobs is not None or self.prompt_ids is not None
        encode = large_to_json if is_large else to_json
        # Choices are encoded one by one, since the encoder holds Python's lock while it encodes a
        # value.
        choices = b",".join([encode(self._whole_choice(delta)) for delta in deltas])
        head = to_json(self._frame(self.object_name))[:-1]
        more = b"," + encode(fields)[1:] if fields else b"}"
        return b"".join((head, b',"choices":[', choices, b"]", more))

    @abstractmethod
    def _whole_choice(self, delta: Delta) -> dict[str, object]: ...

    def _has_rare(self, delta: Delta) -> bool:
        return bool(delta.logprobs) or (self.prompt_ids is not None and bool(delta.ids))

    def _ids(self, delta: Delta) -> dict[str, object]:
        return {} if self.prompt_ids is None else {"token_ids": list(delta.ids)}


class ChatWriter(AnswerWriter):
    """Writes chat.completion and chat.completion.chunk objects."""

    __slots__ = ("_make_parser", "_prefixes", "_suffix")

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self,
        request_id: str,
        model: str,
        vocabulary: Vocabulary,
        *,
        include_usage: bool = False,
        make_parser: Callable[[], AnswerParser] | None = None,
        shows_reasoning: bool = True,
    ) -> None:
        """Without `make_parser` a sample's whole text is content. `shows_reasoning` says whether
        the reasoning that the parser finds is sent.
        """
        super().__init__(request_id, model, vocabulary, include_usage=include_usage)
        self._make_parser = make_parser
        self._shows_reasoning = shows_reasoning
        self._parsers: dict[int, AnswerParser] = {}
        self._calling: set[int] = set()
        """Samples of which a part of a call was sent."""
        self._prefixes: dict[int, bytes] = {}

    def _set_tail(self, tail: bytes) -> None:
        super()._set_tail(tail)
        self._suffix = b'},"logprobs":null,"finish_reason":null}' + tail

    def _event(self, delta: Delta) -> bytes:
        prefix = self._prefixes.get(delta.sample)
        opening = b""
        if prefix is None:
            prefix, opening = self._open(delta.sample)
        if self._make_parser is not None:
            body = self._parsed(delta, self._make_parser)
        elif delta.logprobs or (self.prompt_ids is not None and delta.ids):
            body = self._whole_event(delta, {"content": delta.text})
        elif delta.text:
            body = b"".join((prefix, b'"content":', text_to_json(delta.text), self._suffix))
        else:
            body = b""
        if delta.finish_reason is None:
            return opening + body
        end = _end(self._finish(delta), delta)
        return b"".join((opening, body, prefix, b'},"logprobs":null,', end, self._tail))

    def whole(self, deltas: Sequence[Delta], fields: Mapping[str, object]) -> bytes:
        of_prompt: dict[str, object] = dict(_NOT_ASKED)
        if self.prompt_logprobs is not None:
            of_prompt.update(self.prompt_logprobs.of_chat())
        if self.prompt_ids is not None:
            of_prompt["prompt_token_ids"] = list(self.prompt_ids[0])
        return super().whole(deltas, {**fields, **of_prompt})

    def _open(self, index: int) -> tuple[bytes, bytes]:
        prefix = self._head + b'{"index":%d,"delta":{' % index
        tail = self._suffix
        if self.usage_so_far is not None and not self._prefixes:
            # The first event shows the usage before any token, like vLLM's.
            usage = common_pb2.Usage(prompt_tokens=self.usage_so_far().prompt_tokens)
            tail = self._suffix.removesuffix(self._tail) + _usage_tail(usage)
        if self.prompt_ids is not None and not self._prefixes:
            ids = to_json(list(self.prompt_ids[0]))
            tail = self._suffix.removesuffix(self._tail) + b'],"prompt_token_ids":' + ids
            tail += self._tail[1:]
        self._prefixes[index] = prefix
        return prefix, prefix + b'"role":"assistant","content":"","refusal":null' + tail

    def _parsed(self, delta: Delta, make_parser: Callable[[], AnswerParser]) -> bytes:
        parser = self._parsers.get(delta.sample)
        if parser is None:
            parser = self._parsers[delta.sample] = make_parser()
        part = parser.push(delta.text, is_last=delta.finish_reason is not None)
        added: dict[str, object] = {}
        if part.reasoning and self._shows_reasoning:
            added["reasoning"] = added["reasoning_content"] = part.reasoning
        if part.content:
            added["content"] = part.content
        if part.calls:
            if delta.sample not in self._calling:
                self._calling.add(delta.sample)
                added.setdefault("content", None)
            added["tool_calls"] = [_call_delta(call) for call in part.calls]
        return self._whole_event(delta, added) if added or self._has_rare(delta) else b""

    def _finish(self, delta: Delta) -> str:
        reason = delta.finish_reason or common_pb2.FINISH_REASON_UNSPECIFIED
        parser = self._parsers.get(delta.sample)
        if reason == common_pb2.FINISH_REASON_STOP and parser is not None and parser.has_called:
            return "tool_calls"
        return FINISH_NAMES.get(reason, "stop")

    def _whole_event(self, delta: Delta, added: Mapping[str, object]) -> bytes:
        logprobs = chat_logprobs(self._vocabulary, delta.logprobs) if delta.logprobs else None
        choice = {
            "index": delta.sample,
            # Tokens without a text, such as an end token, give an empty content, since clients
            # concatenate contents.
            "delta": added or {"content": ""},
            "logprobs": logprobs,
            "finish_reason": None,
            **self._ids(delta),
        }
        return self._head + to_json(choice) + self._tail

    def _whole_choice(self, delta: Delta) -> dict[str, object]:
        return {
            "index": delta.sample,
            "message": {"role": "assistant", **self._message(delta)},
            "logprobs": (
                chat_logprobs(self._vocabulary, delta.logprobs) if delta.logprobs else None
            ),
            "finish_reason": self._finish(delta),
            "stop_reason": delta.stop_reason,
            "token_ids": None,
            **self._ids(delta),
        }

    def _message(self, delta: Delta) -> dict[str, object]:
        if self._make_parser is None:
            return {"content": delta.text, **_MESSAGE}
        parser = self._parsers[delta.sample] = self._make_parser()
        part = parser.push(delta.text, is_last=True)
        has_text = bool(part.content) or not part.calls
        message: dict[str, object] = {
            "content": part.content if has_text else None,
            **_MESSAGE,
        }
        if part.reasoning and self._shows_reasoning:
            message["reasoning"] = message["reasoning_content"] = part.reasoning
        if part.calls:
            message["tool_calls"] = [_call(call) for call in joined(part.calls)]
        return message


def _end(finish_reason: str, delta: Delta) -> bytes:
    reasons = (to_json(finish_reason), to_json(delta.stop_reason))
    return b'"finish_reason":%b,"stop_reason":%b}' % reasons


def _call(call: CallPart) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: CallPart) -> dict[str, object]:
    if call.id:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


class CompletionWriter(AnswerWriter):
    """Writes text_completion objects, whole and streamed."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        vocabulary: Vocabulary,
        *,
        include_usage: bool = False,
        echoes: Sequence[str] = (),
        samples_per_prompt: int = 1,
        make_detokenizer: Callable[[int], Detokenizer] | None = None,
    ) -> None:
        """`echoes` has the text of each prompt, with which its choices begin; empty: no echo.
        `make_detokenizer` takes the prompt's number and makes a detokenizer like those of its
        choices' texts, which log-probabilities need.
        """
        super().__init__(request_id, model, vocabulary, include_usage=include_usage)
        self._echoes = echoes
        self._samples_per_prompt = samples_per_prompt
        self._make_detokenizer = make_detokenizer
        self._begun: set[int] = set()
        """Choices of which an event was written."""
        self._offsets: dict[int, TextOffsets] = {}

    def _event(self, delta: Delta) -> bytes:
        if self._has_rare(delta) or delta.sample not in self._begun:
            return self._head + to_json(self._choice(delta)) + self._tail
        end = b'"finish_reason":null}'
        if delta.finish_reason is not None:
            end = _end(FINISH_NAMES.get(delta.finish_reason, "stop"), delta)
        return b"".join(
            (
                self._head,
                b'{"index":%d,"text":' % delta.sample,
                text_to_json(delta.text),
                b',"logprobs":null,',
                end,
                self._tail,
            )
        )

    def _whole_choice(self, delta: Delta) -> dict[str, object]:
        choice = self._choice(delta)
        for name in (*_NOT_ASKED, "token_ids"):
            choice.setdefault(name, None)
        return choice

    def _choice(self, delta: Delta) -> dict[str, object]:
        number = delta.sample // self._samples_per_prompt
        is_first = delta.sample not in self._begun
        self._begun.add(delta.sample)
        echo = self._echoes[number] if self._echoes and is_first else ""
        logprobs = self._logprobs(delta, number) if delta.logprobs else None
        reason = delta.finish_reason
        choice: dict[str, object] = {
            "index": delta.sample,
            "text": echo + delta.text,
            "logprobs": logprobs,
            "finish_reason": None if reason is None else FINISH_NAMES.get(reason, "stop"),
            **self._ids(delta),
        }
        if reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.prompt_ids is not None and is_first:
            choice["prompt_token_ids"] = list(self.prompt_ids[number])
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.add_to_choice(choice, number, echo)
        return choice

    def _logprobs(self, delta: Delta, number: int) -> dict[str, list[Any]]:
        offsets = self._offsets.get(delta.sample)
        if offsets is None:
            assert self._make_detokenizer is not None
            begin = len(self._echoes[number]) if self._echoes else 0
            offsets = TextOffsets(self._make_detokenizer(number), begin)
            self._offsets[delta.sample] = offsets
        found = offsets.take(entry.token_id for entry in delta.logprobs)
        return completion_logprobs(self._vocabulary, delta.logprobs, found)
