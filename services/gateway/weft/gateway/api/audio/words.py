"""Words of a transcript and when they are spoken, found as in OpenAI's program and transformers."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no whole character yet."""
_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Codes of languages that write no spaces between words: each character counts as one."""
_JOINED_TO_NEXT = "\"'\u201c\u00bf([{-"
_JOINED_TO_LAST = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a\u201d)]}\u3001"


class Word(NamedTuple):
    """A word of a transcript."""

    start_s: float
    end_s: float
    text: str
    """As it stands in the transcript, with the space before it."""


class _Part(NamedTuple):
    text: str
    first: int
    """Number of its first token."""
    end: int
    """Number of the token after its last one."""


def split_words(
    ids: Sequence[int],
    times_s: Sequence[tuple[float, float]],
    decode: Callable[[Sequence[int]], str],
    language: str,
) -> list[Word]:
    """The words of tokens of text, each of which begins and ends at one of `times_s`."""
    parts = _characters(ids, decode)
    if language not in _WITHOUT_SPACES:
        parts = _between_spaces(parts)
    return [
        Word(times_s[part.first][0], times_s[part.end - 1][1], part.text)
        for part in _with_marks(parts)
    ]


def _characters(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[_Part]:
    """The smallest parts that are whole characters."""
    whole, parts, first, length = decode(ids), list[_Part](), 0, 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[first:end])
        at = length + text.find(_UNKNOWN)
        is_whole = _UNKNOWN not in text or at >= len(whole) or whole[at] == _UNKNOWN
        if is_whole or end == len(ids):
            parts.append(_Part(text, first, end))
            first, length = end, length + len(text)
    return parts


def _between_spaces(parts: Sequence[_Part]) -> list[_Part]:
    words = list[_Part]()
    for part in parts:
        begins = part.text.startswith(" ") or part.text.strip() in string.punctuation
        if begins or not words:
            words.append(part)
        else:
            words[-1] = _Part(words[-1].text + part.text, words[-1].first, part.end)
    return words


def _with_marks(parts: Sequence[_Part]) -> list[_Part]:
    """Marks belong to the word that they stand at."""
    words = list[_Part]()
    for part in reversed(parts):
        is_before = part.text.startswith(" ") and part.text.strip() in _JOINED_TO_NEXT
        if words and is_before:
            words[-1] = _Part(part.text + words[-1].text, part.first, words[-1].end)
        else:
            words.append(part)
    joined = list[_Part]()
    for part in reversed(words):
        if joined and not joined[-1].text.endswith(" ") and part.text in _JOINED_TO_LAST:
            joined[-1] = _Part(joined[-1].text + part.text, joined[-1].first, part.end)
        else:
            joined.append(part)
    return joined
