"""Tells the reasoning of a text from what comes behind it, where stop strings count."""

from __future__ import annotations

from weft.gateway.text.answer.formats import ReasoningFormat


class ReasoningGate:
    """Parts a sample's text, as it comes, at the end of its reasoning.

    Args:
        reasoning: How it is written.
        begins_reasoning: The text begins within it.
    """

    def __init__(self, reasoning: ReasoningFormat, begins_reasoning: bool) -> None:
        self._opener = "" if begins_reasoning else reasoning.opener
        marks = (reasoning.end or reasoning.closer, reasoning.until)
        self._marks = [mark for mark in marks if mark]
        """The text that must come before the answer begins."""
        self._is_begun = begins_reasoning
        self._held = ""
        """Text whose end may begin a mark; of it, what has not been returned before the opener is
        known.
        """

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Takes more text; returns that of the reasoning, with the marks, then that of the answer.
        Text is held back only until it is known whether it begins with reasoning.
        """
        if not self._marks:
            return "", text
        if not self._is_begun:
            self._held += text
            bare = self._held.lstrip()
            if len(bare) < len(self._opener) and self._opener.startswith(bare) and not is_last:
                return "", ""
            if not bare.startswith(self._opener):
                self._marks.clear()
                text, self._held = self._held, ""
                return "", text
            text, self._held, self._is_begun = self._held, "", True
        free = 0
        seen, num_known = self._held + text, len(self._held)
        while self._marks:
            mark = self._marks[0]
            at = seen.find(mark, free)
            if at < 0:
                self._held = seen[max(free, len(seen) - len(mark) + 1) :]
                return text, ""
            free = at + len(mark)
            del self._marks[0]
        cut = free - num_known
        return text[:cut], text[cut:]
