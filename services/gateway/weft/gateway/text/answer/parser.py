"""Splits a sample's text into content, reasoning and tool calls, as the text arrives."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from weft.gateway.text.answer.call_reader import BLANKS
from weft.gateway.text.answer.formats import ReasoningFormat, ToolFormat
from weft.gateway.text.answer.syntaxes import Reader, Tools, names_of
from weft.gateway.text.answer.tagged_call import TagReader, WholeReader

_MAX_BLANKS = 256
"""Most blanks that are held back."""
_State = Callable[["AnswerPart", bool], bool]
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of one call."""

    index: int
    """Index of the call in its sample."""
    id: str
    """Id of the call, in its first part, which also has the name; empty in later parts."""
    name: str
    arguments: str
    """Text to add to the arguments."""


@dataclass(slots=True)
class AnswerPart:
    """The part of an answer that a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class AnswerParser(Protocol):
    """Parses one sample's text."""

    @property
    def has_called(self) -> bool:
        """Whether the sample's finish reason is `tool_calls`. It is not if `tool_choice` named a
        function.
        """
        ...

    def push(self, text: str, *, is_last: bool = False) -> AnswerPart:
        """Takes more of the sample's text; `is_last` marks the end."""
        ...


class NamedCallParser:
    """Parser of a text that a constraint has made the arguments of the function `name`, perhaps
    after reasoning, which `before` parses.
    """

    def __init__(self, name: str, id_length: int, before: AnswerParser | None = None) -> None:
        self._name = name
        self._id = new_id(id_length)
        self._before = before

    @property
    def has_called(self) -> bool:
        return False

    def push(self, text: str, *, is_last: bool = False) -> AnswerPart:
        part = AnswerPart(content=text)
        if self._before is not None:
            part = self._before.push(text, is_last=is_last)
        if part.content:
            id_, self._id = self._id, ""
            part.calls = [CallPart(0, id_, self._name if id_ else "", part.content)]
            part.content = ""
        return part


class TextParser:
    """Parser of a text that the model writes freely. Text that may become a tag is held back until
    its meaning is known. So are blanks that may be next to a tag, where they are left out.

    No text is lost: text that is no tag, call or reasoning is content, and so is a call that is not
    valid or ends before its function's name. `ToolFormat.hides_marks` leaves out marks alone.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        *,
        reasoning: ReasoningFormat | None = None,
        begins_reasoning: bool = False,
        is_continued: bool = False,
        is_demanded: bool = False,
        is_answer_else: bool = False,
        max_calls: int | None = None,
        schemas: Tools = (),
    ) -> None:
        """Prepares the parser.

        Args:
            tools: Format of calls; None: the text has no calls.
            reasoning: Format of the reasoning with which the text may begin; None: it has none.
            begins_reasoning: Whether the text begins within the reasoning.
            is_continued: Whether the text continues a text at the end of the prompt.
            is_demanded: Whether the text consists of calls; the rest of a call that was cut off is
                dropped.
            is_answer_else: Whether a text that does not begin with calls has none.
            max_calls: Most calls; further ones are left out. None: any number.
            schemas: Tools that may be called, for formats that need to know the types of values.
        """
        self._num_calls = 0
        self._tools = tools
        self._reasons = reasoning
        self._max_calls = max_calls
        self._schemas = schemas
        self._call: Reader | None = None
        self._held = ""
        """Text whose meaning is not known yet."""
        self._opening = ""
        """Text that announced a call; it is content if no call follows."""
        self._is_bare = False
        """Whether a call that has no opener may have begun."""
        self._is_behind = False
        """Whether a call has ended, and only blanks and tails have followed it."""
        self._skips_blanks = reasoning is not None and not is_continued
        self._is_demanded = is_demanded
        self._is_complete = True
        """Whether the last call has ended."""
        is_first = tools is not None and (is_answer_else or not tools.openers)
        self._first: _State = self._first_call if is_first else self._content
        self._state: _State = self._first
        if reasoning is not None and begins_reasoning:
            self._state = self._opened_reasoning
        elif reasoning is not None and not is_continued:
            self._state = self._maybe_reasoning

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0 and self._is_complete

    def push(self, text: str, *, is_last: bool = False) -> AnswerPart:
        part = AnswerPart()
        self._held += text
        goes_on = True
        while goes_on:
            if self._skips_blanks:
                self._held = self._held.lstrip(BLANKS)
                if not self._held:
                    break
                self._skips_blanks = False
            goes_on = self._state(part, is_last)
        return part

    # Each state consumes what it can of the text, and returns whether another state continues.

    def _maybe_reasoning(self, part: AnswerPart, is_last: bool) -> bool:
        assert self._reasons is not None
        return self._after_opener(self._reasons.opener, self._first, is_last)

    def _opened_reasoning(self, part: AnswerPart, is_last: bool) -> bool:
        """Models may open reasoning again that the prompt has opened."""
        assert self._reasons is not None
        return self._after_opener(self._reasons.opener, self._reasoning, is_last)

    def _after_opener(self, opener: str, otherwise: _State, is_last: bool) -> bool:
        text = self._held
        if not is_last and _is_beginning(text, opener):
            return False
        self._state = otherwise
        if text.startswith(opener):
            self._state, self._skips_blanks = self._reasoning, True
            self._held = text.removeprefix(opener)
        return True

    def _reasoning(self, part: AnswerPart, is_last: bool) -> bool:
        assert self._reasons is not None
        closer = self._reasons.closer
        before, tag, behind = self._held.partition(closer)
        if tag:
            part.reasoning += before.rstrip(BLANKS)
            self._state, self._held, self._skips_blanks = self._first, behind, True
            return True
        shown = _before_tag(before, (closer,), is_last)
        part.reasoning += shown
        self._held = before[len(shown) :]
        return False

    def _content(self, part: AnswerPart, is_last: bool) -> bool:
        if self._tools is None or not self._tools.openers:
            part.content, self._held = part.content + self._held, ""
            return False
        tools = self._tools
        tags = (*tools.openers, *tools.bare_openers, *(tools.tokens if tools.hides_marks else ()))
        found = [(at, -len(tag), tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if found:
            at, _, tag = min(found)
            self._is_behind = False
            if tag not in tools.openers and tag not in tools.bare_openers:
                part.content += self._held[:at]
                self._held = self._held[at + len(tag) :]
                return True
            shown = self._held[:at] if tools.keeps_blanks else self._held[:at].rstrip(BLANKS)
            part.content += shown
            self._is_bare = tag in tools.bare_openers
            if self._is_bare:
                self._opening, self._held = self._held[len(shown) : at], self._held[at:]
                self._state = self._before_call
                return True
            self._opening = self._held[len(shown) : at + len(tag)]
            self._state, self._held = self._before_call, self._held[at + len(tag) :]
            return True
        shown = _before_tag(self._held, tags, is_last, keeps_blanks=tools.keeps_blanks)
        part.content += shown
        self._held = self._held[len(shown) :]
        return False

    def _first_call(self, part: AnswerPart, is_last: bool) -> bool:
        """Handles a text that has calls only if it begins with one."""
        assert self._tools is not None
        tools, text = self._tools, self._held.lstrip(BLANKS)
        tags = tools.openers or tools.beginnings
        if not text.startswith(tags):
            is_open = not text or any(_is_beginning(text, tag) for tag in tags)
            if is_open and not is_last and len(self._held) <= _MAX_BLANKS:
                return False
            self._tools, self._state = None, self._content
        elif tools.openers:
            self._state = self._content
        else:
            self._state = self._before_call
        return True

    def _before_call(self, part: AnswerPart, is_last: bool) -> bool:
        assert self._tools is not None
        tools, text = self._tools, self._held.lstrip(BLANKS)
        joints = tools.separators
        if self._is_behind:
            joints = (*joints, *tools.openers)
        taken = self._held[: len(self._held) - len(text)]
        while mark := _first_of(text, (*joints, *(tools.tails if self._is_behind else ()))):
            if not is_last and any(_is_beginning(text, one) for one in joints):
                break  # The text may become a longer mark.
            # Text between two calls is content if no other call follows.
            if mark in joints and self._is_behind:
                self._is_behind, self._opening, taken = False, "", ""
                joints = tools.separators
            bare = text[len(mark) :].lstrip(BLANKS)
            taken, text = taken + text[: len(text) - len(bare)], bare
        self._held = text
        if not self._is_behind:
            self._opening += taken
        elif tools.closer and text.startswith(tools.closer):
            self._held = text.removeprefix(tools.closer)
            self._state, self._skips_blanks = self._content, not tools.keeps_blanks
            self._is_behind = False
            return True
        for syntax in tools.syntaxes:
            if begun := syntax.begin(text, self._schemas, tools.ends):
                self._call, self._held = begun.reader, begun.text
                if self._is_bare and isinstance(begun.reader, TagReader):
                    self._call = WholeReader(begun.reader, names_of(self._schemas))
                self._state, self._is_bare = self._in_call, False
                return True
        marks = (*joints, *((*tools.tails, tools.closer) if self._is_behind else ()))
        if self._is_behind and tools.keeps_blanks:
            self._held = taken[len(taken.rstrip(BLANKS)) :] + text
        is_long = len(self._held) - len(text) > _MAX_BLANKS
        if not is_last and not is_long and self._may_go_on(text, marks):
            return False
        if self._is_behind:
            self._state, self._skips_blanks = self._content, not tools.keeps_blanks
            self._is_behind = False
            return bool(self._held)
        self._give_up(part, "")
        return bool(text)

    def _may_go_on(self, text: str, marks: Sequence[str]) -> bool:
        """Whether more text could make it a call, or a mark next to one."""
        assert self._tools is not None
        if not text or any(_is_beginning(text, mark) for mark in marks):
            return True
        return any(syntax.may_begin(text) for syntax in self._tools.syntaxes)

    def _in_call(self, part: AnswerPart, is_last: bool) -> bool:
        assert self._tools is not None
        assert self._call is not None
        call, text, self._held = self._call, self._held, ""
        is_new = not call.name
        try:
            arguments = call.push(text)
        except ValueError:
            self._held = call.rest or ""
            self._give_up(part, call.text)
            return bool(self._held)
        if is_last and call.rest is None:
            arguments += call.finish()
        if call.name:
            self._is_complete = call.rest is not None
            self._note(part, is_new, arguments)
        elif is_last:
            self._give_up(part, call.text)
        if call.rest is None:
            return False
        self._held, self._state, self._is_behind = call.rest, self._before_call, True
        return bool(self._held)

    def _give_up(self, part: AnswerPart, text: str) -> None:
        """The text that was read as a call is not one: it is content, and so is the text
        after it.
        """
        if not self._is_demanded:
            shown = self._opening + text
            for mark in self._tools.tokens if self._tools and self._tools.hides_marks else ():
                shown = shown.replace(mark, "")
            part.content += shown
        self._opening, self._state, self._is_behind = "", self._content, False
        if not self._tools or not self._tools.openers:
            self._tools = None

    def _note(self, part: AnswerPart, is_new: bool, arguments: str) -> None:
        assert self._tools is not None
        assert self._call is not None
        self._num_calls += is_new
        if self._max_calls is not None and self._num_calls > self._max_calls:
            return
        if is_new:
            id_, name = self._call.id or new_id(self._tools.id_length), self._call.name
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
    """True only if a part of the tag is still missing."""
    return len(text) < len(tag) and tag.startswith(text)


def _first_of(text: str, marks: Sequence[str]) -> str:
    """The longest of the marks with which a text begins; empty: none."""
    return max((mark for mark in marks if text.startswith(mark)), key=len, default="")


def _before_tag(
    text: str, tags: Sequence[str], is_last: bool, *, keeps_blanks: bool = False
) -> str:
    """The part of a text that is certainly before a tag. A few blanks at its end are left out
    unless these are kept; the last text is returned as a whole.
    """
    if is_last:
        return text
    longest = max(map(len, tags))
    firsts = {tag[0] for tag in tags}
    for size in range(min(len(text), longest - 1), 0, -1):
        if text[-size] not in firsts:
            continue
        end = text[-size:]
        if any(_is_beginning(end, tag) for tag in tags):
            text = text[:-size]
            break
    bare = text if keeps_blanks else text.rstrip(BLANKS)
    return bare if len(text) - len(bare) <= _MAX_BLANKS else text
