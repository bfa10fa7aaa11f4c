"""Takes a sample's text apart, as it comes, into content, reasoning and calls of tools."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from weft.gateway.text.answer.call_reader import CallReader
from weft.gateway.text.answer.formats import END_THINK, THINK, ToolFormat
from weft.gateway.text.answer.tagged_call import OPENER, TaggedCallReader, Tools

_BLANKS = " \t\r\n"
_MAX_BLANKS = 256
"""Most blanks that are held back."""
_BARE_NAME = re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?=\{)", re.ASCII)
"""What is before a call's arguments where it is no object; Mistral's id of the call is not used."""
_BARE_BEGINNING = re.compile(r"[\w.-]{1,256}(?:\[[A-Z_]{0,7}\]?\w{0,64}){0,2}\s{0,8}", re.ASCII)
"""What may become that."""
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of one call."""

    index: int
    """Of the call, in its sample."""
    id: str
    """Id of the call; empty but in its first part, which has the name."""
    name: str
    arguments: str
    """Text to add to the arguments."""


@dataclass(slots=True)
class AnswerPart:
    """What a text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class AnswerParser(Protocol):
    """Parses one sample's text."""

    @property
    def has_called(self) -> bool:
        """Whether the sample ends in order to have tools called, as the API says: not if it had to
        be a call of one function.
        """
        ...

    def push(self, text: str, *, is_last: bool = False) -> AnswerPart:
        """Takes more of the sample's text; nothing follows what `is_last`."""
        ...


class NamedCallParser:
    """Of a text that a constraint made the arguments of one function."""

    def __init__(self, name: str, id_length: int) -> None:
        self._name = name
        self._id = new_id(id_length)

    @property
    def has_called(self) -> bool:
        """See `AnswerParser`."""
        return False

    def push(self, text: str, *, is_last: bool = False) -> AnswerPart:
        """See `AnswerParser.push`."""
        if not text:
            return AnswerPart()
        id_, self._id = self._id, ""
        return AnswerPart(calls=[CallPart(0, id_, self._name if id_ else "", text)])


class TextParser:
    """Of a text that the model writes freely. What may become a tag is held back until it is known,
    and so are blanks that may turn out to stand beside one, where they are left out.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        *,
        has_reasoning: bool = False,
        begins_reasoning: bool = False,
        is_continued: bool = False,
        is_demanded: bool = False,
        max_calls: int | None = None,
        schemas: Tools = (),
    ) -> None:
        """Prepares the parser.

        Args:
            tools: How calls are written; None: none are looked for.
            has_reasoning: The text may begin with reasoning.
            begins_reasoning: It does, and the opening tag stands in the prompt.
            is_continued: The prompt ends within a text that this one continues.
            is_demanded: The text is calls; what is left of one that was cut off is left out.
            max_calls: Further calls are left out; None: there may be any number.
            schemas: Tools that may be called, for formats that need to know the types of values.
        """
        self._num_calls = 0
        self._tools = tools
        self._max_calls = max_calls
        self._schemas = schemas
        self._call: CallReader | TaggedCallReader = CallReader()
        self._held = ""
        """Text whose meaning is not known yet."""
        self._opening: str | None = None
        """Text that announced a call, which is content if none follows; None: one has followed."""
        self._skips_blanks = has_reasoning and not is_continued
        self._is_demanded = is_demanded
        self._is_complete = True
        """Whether the last call has ended."""
        self._first = self._first_call if tools is not None and not tools.opener else self._content
        self._state = self._first
        if has_reasoning and begins_reasoning:
            self._state = self._reasoning
        elif has_reasoning and not is_continued:
            self._state = self._maybe_reasoning

    @property
    def has_called(self) -> bool:
        """See `AnswerParser`."""
        return self._num_calls > 0 and self._is_complete

    def push(self, text: str, *, is_last: bool = False) -> AnswerPart:
        """See `AnswerParser.push`."""
        part = AnswerPart()
        self._held += text
        goes_on = True
        while goes_on:
            if self._skips_blanks:
                self._held = self._held.lstrip(_BLANKS)
                if not self._held:
                    break
                self._skips_blanks = False
            goes_on = self._state(part, is_last)
        return part

    # Each state takes what it can of the text, and tells whether another state goes on with it.

    def _maybe_reasoning(self, part: AnswerPart, is_last: bool) -> bool:
        if not is_last and _is_beginning(self._held, THINK):
            return False
        self._state = self._first
        if self._held.startswith(THINK):
            self._state, self._skips_blanks = self._reasoning, True
            self._held = self._held.removeprefix(THINK)
        return True

    def _reasoning(self, part: AnswerPart, is_last: bool) -> bool:
        before, tag, behind = self._held.partition(END_THINK)
        if tag:
            part.reasoning += before.rstrip(_BLANKS)
            self._state, self._held, self._skips_blanks = self._first, behind, True
            return True
        shown = _before_tag(before, END_THINK, is_last)
        part.reasoning += shown
        self._held = before[len(shown) :]
        return False

    def _content(self, part: AnswerPart, is_last: bool) -> bool:
        if self._tools is None:
            part.content, self._held = part.content + self._held, ""
            return False
        before, tag, behind = self._held.partition(self._tools.opener)
        if tag:
            shown = before.rstrip(_BLANKS)
            part.content += shown
            self._opening = before[len(shown) :] + tag
            self._state, self._held = self._before_call, behind
            return True
        shown = _before_tag(before, self._tools.opener, is_last)
        part.content += shown
        self._held = before[len(shown) :]
        return False

    def _first_call(self, part: AnswerPart, is_last: bool) -> bool:
        """At the beginning of a text that has calls there, or none."""
        assert self._tools is not None
        text, opener = self._held.lstrip(_BLANKS), self._tools.hidden_opener
        is_open = _is_beginning(text, opener) or not text
        if is_open and not is_last and len(self._held) <= _MAX_BLANKS:
            return False
        if not text.startswith(("{", opener)):
            self._tools, self._state = None, self._content
            return True
        self._opening, self._state = "", self._before_call
        if text.startswith(opener):
            self._opening, self._held = opener, text.removeprefix(opener)
        return True

    def _before_call(self, part: AnswerPart, is_last: bool) -> bool:
        """Before a call, or behind the last one of a list."""
        assert self._tools is not None
        text, is_bare = self._held.lstrip(_BLANKS), self._tools.has_bare_names
        if is_bare:
            if not is_last and _is_beginning(text, self._tools.opener):
                return False
            text = text.removeprefix(self._tools.opener)
        text = text.lstrip(_BLANKS + self._tools.separators)
        if self._opening is not None:
            self._opening += self._held[: len(self._held) - len(text)]
        self._held = text
        if text.startswith("{"):
            self._state, self._call = self._in_call, CallReader()
            return True
        if self._tools.has_tags:
            if text.startswith(OPENER):
                self._state, self._call = self._in_call, TaggedCallReader(self._schemas)
                return True
            if not is_last and _is_beginning(text, OPENER):
                return False
        if is_bare and (named := _BARE_NAME.match(text)):
            self._state, self._call = self._in_call, CallReader(named.group(1))
            self._held = text[named.end() :]
            return True
        if is_bare and not is_last and _BARE_BEGINNING.fullmatch(text):
            return False
        if text or is_last:
            self._give_up(part, "")
        return bool(text)

    def _in_call(self, part: AnswerPart, is_last: bool) -> bool:
        assert self._tools is not None
        call, text, self._held = self._call, self._held, ""
        is_new = not call.name
        try:
            arguments = call.push(text)
        except ValueError:
            self._held = call.rest or ""
            self._give_up(part, call.text)
            return bool(self._held)
        if call.name:
            self._opening, self._is_complete = None, call.rest is not None
            self._note(part, is_new, arguments)
        elif is_last:
            self._give_up(part, call.text)
        if call.rest is None:
            return False
        self._held = call.rest
        self._state = self._behind_call if self._tools.closer else self._before_call
        return bool(self._held)

    def _behind_call(self, part: AnswerPart, is_last: bool) -> bool:
        """Before the closing tag; without it a call is one all the same."""
        assert self._tools is not None
        self._held = text = self._held.lstrip(_BLANKS + self._tools.separators)
        closer = self._tools.closer
        if text.startswith("{"):
            self._state = self._before_call
            return True
        if not is_last and (not text or _is_beginning(text, closer)):
            return False
        self._held, self._state, self._skips_blanks = text.removeprefix(closer), self._content, True
        return True

    def _give_up(self, part: AnswerPart, text: str) -> None:
        """What was read for a call is none: content, like what follows."""
        if not self._is_demanded:
            part.content += (self._opening or "") + text
        self._opening, self._state = None, self._content
        if not self._tools or not self._tools.opener:
            self._tools = None

    def _note(self, part: AnswerPart, is_new: bool, arguments: str) -> None:
        assert self._tools is not None
        self._num_calls += is_new
        if self._max_calls is not None and self._num_calls > self._max_calls:
            return
        if is_new:
            id_, name = new_id(self._tools.id_length), self._call.name
            part.calls.append(CallPart(self._num_calls - 1, id_, name, arguments))
        elif arguments:
            part.calls.append(CallPart(self._num_calls - 1, "", "", arguments))


def joined(calls: Sequence[CallPart]) -> list[CallPart]:
    """One part for each call, with all of its arguments."""
    whole: dict[int, list[CallPart]] = {}
    for call in calls:
        whole.setdefault(call.index, []).append(call)
    return [
        replace(parts[0], arguments="".join([part.arguments for part in parts]))
        for parts in whole.values()
    ]


def new_id(length: int) -> str:
    """A call's id: nine characters where a format checks them, else with OpenAI's prefix."""
    drawn = "".join(secrets.choice(_ID_CHARS) for _ in range(length))
    return drawn if length == 9 else f"call_{drawn}"


def _is_beginning(text: str, tag: str) -> bool:
    """Whether a text is the beginning of a tag, but not all of it."""
    return len(text) < len(tag) and tag.startswith(text)


def _before_tag(text: str, tag: str, is_last: bool) -> str:
    """The part of a text without the tag that surely stands before one, without blanks at its end,
    if they are few; all of it where nothing follows.
    """
    if is_last:
        return text
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            text = text[:-size]
            break
    bare = text.rstrip(_BLANKS)
    return bare if len(text) - len(bare) <= _MAX_BLANKS else text
