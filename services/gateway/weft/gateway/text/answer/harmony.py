"""Parses gpt-oss's answers: messages in channels, written with special tokens.

```
<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
```
"""

from __future__ import annotations

import re

from weft.gateway.text.answer.call_reader import BLANKS, ObjectEnd
from weft.gateway.text.answer.parser import AnswerParser, AnswerPart, CallPart, new_id

_MESSAGE = "<|message|>"
_OPENERS = ("<|start|>", "<|channel|>")
_BARE_RECIPIENT = "to="
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = (*_OPENERS, *_ENDS)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_LONGEST = max(map(len, _MARKS))
_MAX_HEADER = 512
_HEADER = re.compile(
    r"(?:<\|start\|>\s*+[\w.:-]{0,64})?(?:\s*+to=(?P<to>[^\s<]++))?\s*+"
    r"(?:<\|channel\|>\s*+(?P<channel>[\w-]{0,64})"
    r"(?:(?:\s++|(?<=\s))to=(?P<then>[^\s<]++))?(?:(?:\s++|(?<=\s))[\w/+.-]{1,64})?)?\s*+"
    r"(?:<\|constrain\|>\s*+[\w/+.-]{0,64}\s*+)?"
)
"""A message's header, before its text: role, recipient, channel, kind of content."""
_FUNCTION = re.compile(r"functions\.([\w.-]{1,256})")


class HarmonyParser:
    """Parser of messages in channels: `analysis` is reasoning, a message to a function is a call,
    everything else is content. A malformed header is content too.

    Args:
        shows_calls: Whether there are tools; if not, messages to functions are content.
        shows_reasoning: Whether reasoning is shown separately; if not, it is content.
        id_length: As in `ToolFormat`.
        max_calls: Most calls; further ones are left out. None: any number.
        answer: Parser of the channel `final`, if a constraint has made its text calls; None: the
            text is content.
    """

    def __init__(
        self,
        *,
        shows_calls: bool = False,
        shows_reasoning: bool = True,
        id_length: int = 24,
        max_calls: int | None = None,
        answer: AnswerParser | None = None,
    ) -> None:
        self._shows_calls = shows_calls
        self._shows_reasoning = shows_reasoning
        self._id_length = id_length
        self._max_calls = max_calls
        self._answer = answer
        self._held = ""
        self._is_header = True
        """Whether the next text is a message's header, or a text without one."""
        self._channel = ""
        self._function = ""
        """The function that the current message calls; empty: none."""
        self._is_open = self._is_announced = False
        """Whether the current message is a call, and whether it has been passed on."""
        self._end = ObjectEnd()
        self._has_more = False
        """Whether the current message continues after the arguments of its call."""
        self._is_complete = True
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        own = self._num_calls > 0 and self._is_complete
        return own or (self._answer is not None and self._answer.has_called)

    def push(self, text: str, *, is_last: bool = False) -> AnswerPart:
        part = AnswerPart()
        self._held += text
        while self._header(part, is_last) if self._is_header else self._body(part, is_last):
            pass
        if is_last and self._is_open:
            self._end_call(part)
        if is_last and self._answer is not None:
            _add(part, self._answer.push("", is_last=True))
        return part

    # Both states return whether the other one continues with the text.

    def _header(self, part: AnswerPart, is_last: bool) -> bool:
        text = self._held.lstrip(BLANKS)
        begins = text.startswith((*_OPENERS, _BARE_RECIPIENT))
        if not begins:
            marks = (*_OPENERS, _BARE_RECIPIENT, *_ENDS)
            is_open = any(mark.startswith(text) for mark in marks)
            if is_open and not is_last and len(self._held) <= _MAX_HEADER:
                return False
            self._open("", "")
            return bool(self._held)
        header, mark, _ = text[: _MAX_HEADER + len(_MESSAGE)].partition(_MESSAGE)
        found = _HEADER.fullmatch(header) if mark else None
        if found is not None:
            self._open(found["channel"] or "", found["then"] or found["to"] or "")
            self._held = text[len(header) + len(mark) :]
            return True
        is_over = len(text) > _MAX_HEADER or any(one in text for one in _ENDS)
        if not mark and not is_over and not is_last:
            return False
        # An unknown message is shown together with its mark, or the mark would be found again.
        shown = next(one for one in (*_OPENERS, _BARE_RECIPIENT) if text.startswith(one))
        self._open("", "")
        self._show(part, self._held[: len(self._held) - len(text)] + shown)
        self._held = text[len(shown) :]
        return True

    def _open(self, channel: str, recipient: str) -> None:
        found = _FUNCTION.fullmatch(recipient) if self._shows_calls else None
        self._is_header, self._channel = False, channel
        self._function, self._is_open = "" if found is None else found[1], False
        if found is not None:
            self._end, self._is_open, self._is_complete = ObjectEnd(), True, False
            self._num_calls += 1
            self._is_announced = self._has_more = False

    def _body(self, part: AnswerPart, is_last: bool) -> bool:
        found = _MARK.search(self._held)
        if found is None:
            size = 0
            if not is_last:
                longest = min(len(self._held), _LONGEST - 1)
                ends = (size for size in range(longest, 0, -1) if self._is_mark_begun(size))
                size = next(ends, 0)
            cut = len(self._held) - size
            self._show(part, self._held[:cut])
            self._held = self._held[cut:]
            return False
        self._show(part, self._held[: found.start()])
        if self._is_open:
            self._end_call(part)
        is_end = found[0] in _ENDS
        self._held = self._held[found.end() if is_end else found.start() :]
        self._is_header = True
        return bool(self._held)

    def _is_mark_begun(self, size: int) -> bool:
        end = self._held[-size:]
        return any(mark.startswith(end) for mark in _MARKS)

    def _show(self, part: AnswerPart, text: str) -> None:
        if not text:
            return
        if self._is_open:
            self._add_arguments(part, text)
        elif self._channel == "analysis" and self._shows_reasoning:
            part.reasoning += text
        elif self._channel == "final" and self._answer is not None:
            _add(part, self._answer.push(text))
        else:
            part.content += text

    def _add_arguments(self, part: AnswerPart, text: str) -> None:
        if self._is_complete:
            self._show_behind(part, text)
            return
        if not self._is_announced:
            text = text.lstrip(BLANKS)
        text, behind = self._end.push(text)
        if behind is not None:
            self._is_complete = True
            self._show_behind(part, behind)
        if self._max_calls is not None and self._num_calls > self._max_calls:
            return
        index = self._num_calls - 1
        if text and not self._is_announced:
            self._is_announced = True
            part.calls.append(CallPart(index, new_id(self._id_length), self._function, text))
        elif text:
            part.calls.append(CallPart(index, "", "", text))

    def _show_behind(self, part: AnswerPart, text: str) -> None:
        """Text after the object of a call is content, not a part of its arguments."""
        shown = text if self._has_more else text.lstrip(BLANKS)
        self._has_more = self._has_more or bool(shown)
        part.content += shown

    def _end_call(self, part: AnswerPart) -> None:
        """A call without arguments has `{}`."""
        if not self._is_announced:
            self._add_arguments(part, "{}")
        self._is_open = False


def _add(part: AnswerPart, more: AnswerPart) -> None:
    part.content += more.content
    part.reasoning += more.reasoning
    part.calls += more.calls
