"""Separates a text's reasoning from the answer that follows, in which stop strings count."""

from __future__ import annotations

from weft.gateway.text.answer.formats import ReasoningFormat


class ReasoningGate:
    """Splits a sample's text at the end of its reasoning, as the text arrives. `begins_reasoning`
    says that the text begins within the reasoning.
    """

    def __init__(self, reasoning: ReasoningFormat, begins_reasoning: bool) -> None:
        self._opener = "" if begins_reasoning else reasoning.opener
        marks = (reasoning.end or reasoning.closer, reasoning.until)
        self._marks = [mark for mark in marks if mark]
        """The text that must come before the answer begins."""
        self._is_begun = begins_reasoning
        self._held = ""
        """Text whose end may begin a mark. Until the opener is known, it has not been returned."""
        self._blanks: list[str] = []
        """Blanks before it, while they have not been returned either."""

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Takes more text; returns the reasoning's part, with its marks, and the answer's part.
        Text is held back only until it is known whether it begins with reasoning.
        """
        if not self._marks:
            return "", text
        if not self._is_begun:
            begin = 0 if self._held else len(text) - len(text.lstrip())
            self._blanks.append(text[:begin])
            bare = self._held = self._held + text[begin:]
            if len(bare) < len(self._opener) and self._opener.startswith(bare) and not is_last:
                return "", ""
            text, self._held = "".join((*self._blanks, bare)), ""
            self._blanks.clear()
            if not bare.startswith(self._opener):
                self._marks.clear()
                return "", text
            self._is_begun = True
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
