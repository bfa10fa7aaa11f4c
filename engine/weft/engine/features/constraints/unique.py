"""Keeps arrays of strings free of duplicates, beside a grammar, which cannot count them.

A schema names its arrays with `uniqueItems` by their `Spot`. `UniqueMatcher` follows the text that
a sample writes, and clears the tokens from each mask that would end a string of such an array as
one that the array has already. A string has one spelling in these grammars, so spellings are
compared. Strings of the array have no bound that a few values could exhaust, so some token is left.
"""

from __future__ import annotations

import bisect
import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_ITEMS = 64
"""Most strings of an array without duplicates."""
_QUOTE = ord('"')


class Spot(NamedTuple):
    """Where arrays are: what is the same for all arrays of one property."""

    name: str | None
    """The innermost property that the array is in; None: it is in none."""
    depth: int
    """Number of arrays from the property to this one, itself included."""


Spots = Mapping[Spot, int | None]
"""Where arrays of strings without duplicates are, and the most characters of a string there."""


class Matcher(Protocol):
    """What is used of llguidance's matcher."""

    def deep_copy(self) -> Matcher: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_accepting(self) -> bool: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def consume_token(self, sampled_token: int) -> bool: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def compute_bitmask(self) -> bytes: ...
    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


class _Level(NamedTuple):
    """An object or an array that is open."""

    spot: Spot
    """Of an array: its own; of an object: that of the last name in it, with depth 0."""
    is_array: bool
    items: frozenset[bytes] | None
    """The strings of an array without duplicates so far; None: it may have duplicates."""
    most: int | None = None
    """Most characters of such a string; None: any number."""


class _Place(NamedTuple):
    """A place in a JSON text."""

    levels: tuple[_Level, ...] = ()
    string: bytes | None = None
    """What the open string has so far, as it is spelled; None: no string is open."""
    is_escaped: bool = False
    """Whether a backslash was the last character of the string."""
    is_name: bool = True
    """Whether the next string of an object is a name."""
    is_twice: bool = False
    """Whether an array has a string twice."""

    @property
    def items(self) -> frozenset[bytes] | None:
        """The strings that the innermost open array has so far; None: it may have duplicates, or
        no array is open.
        """
        return self.levels[-1].items if self.levels else None


class Vocabulary:
    """The spelling of each token, in order.

    Args:
        tokenizer: The model's tokens.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.spelled = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        self._ids = sorted(range(len(self.spelled)), key=self.spelled.__getitem__)
        self._sorted = [self.spelled[token] for token in self._ids]
        num_words = -(-len(self.spelled) // 32)
        self.several = [np.full(num_words, 0xFFFFFFFF, np.uint32) for _ in range(4)]
        """Masks without the tokens that have as many quotes as the index, or more."""
        for token, spelled in enumerate(self.spelled):
            for least in range(1, min(3, spelled.count(_QUOTE)) + 1):
                _clear(self.several[least], token)

    def beginning_with(self, prefix: bytes) -> Iterator[int]:
        """The tokens whose spelling begins so."""
        at = bisect.bisect_left(self._sorted, prefix)
        while at < len(self._sorted) and self._sorted[at].startswith(prefix):
            yield self._ids[at]
            at += 1

    def spelled_as(self, text: bytes) -> Iterator[int]:
        """The tokens with this spelling."""
        end = bisect.bisect_right(self._sorted, text)
        yield from self._ids[bisect.bisect_left(self._sorted, text) : end]


class UniqueMatcher:
    """A grammar's matcher that allows no duplicate in some arrays.

    Args:
        matcher: Of the grammar; it is taken over.
        spots: Where the arrays are that have no duplicates.
        vocabulary: Of the model.
        places: Of the text, behind each token so far and before the first.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        spots: Spots,
        vocabulary: Vocabulary,
        places: Sequence[_Place] = (_Place(),),
    ) -> None:
        self._matcher = matcher
        self._spots = spots
        self._vocabulary = vocabulary
        self._places = [*places]
        self._problem = ""

    def deep_copy(self) -> UniqueMatcher:
        return UniqueMatcher(self._matcher.deep_copy(), self._spots, self._vocabulary, self._places)

    def is_error(self) -> bool:
        return bool(self._problem) or self._matcher.is_error()

    def get_error(self) -> str:
        return self._problem or self._matcher.get_error()

    def is_accepting(self) -> bool:
        return not self._problem and self._matcher.is_accepting()

    def rollback(self, num_tokens: int) -> bool:
        del self._places[len(self._places) - num_tokens :]
        return self._matcher.rollback(num_tokens)

    def consume_token(self, sampled_token: int) -> bool:
        place = self._behind(self._places[-1], self._vocabulary.spelled[sampled_token])
        if place.is_twice:
            self._problem = (
                f"token {sampled_token} doesn't satisfy the grammar: an item comes twice"
            )
        if self._problem or not self._matcher.consume_token(sampled_token):
            return False
        self._places.append(place)
        return True

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for number, token in enumerate(tokens):
            place = self._behind(self._places[-1], self._vocabulary.spelled[token])
            if place.is_twice or self._matcher.try_consume_tokens([token]) == 0:
                return number
            self._places.append(place)
        return len(tokens)

    def compute_bitmask(self) -> bytes:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8).copy()
        self._refine(mask.view(np.uint32))
        return mask.tobytes()

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        row = np.zeros(trg_byte_size // 4, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._refine(row)
        ctypes.memmove(trg_pointer, row.ctypes.data, row.nbytes)

    def _refine(self, mask: npt.NDArray[np.uint32]) -> None:
        """Clears the tokens that would end a string as one that its array has already.

        A token may open, end and open strings at once. Tokens with so many quotes that they could
        end a second string unseen are cleared as well: each can be written as shorter ones.
        """
        place, words = self._places[-1], self._vocabulary
        items = place.items
        least = 3 if items is None or place.string is not None else 2
        several = words.several[least]
        mask[: len(several)] &= several[: len(mask)]
        if items is None or place.string is None:
            return
        most = place.levels[-1].most
        for item in items:
            if not item.startswith(place.string):
                continue
            rest = item[len(place.string) :]
            for token in words.beginning_with(rest + b'"'):
                _clear(mask, token)
            if rest and most is not None and len(_value(item)) >= most:
                # Behind the whole item, nothing but its end could come.
                for token in words.spelled_as(rest):
                    _clear(mask, token)

    def _behind(self, place: _Place, spelled: bytes) -> _Place:
        """The place behind more bytes."""
        for byte in spelled:
            place = (
                self._in_string(place, byte)
                if place.string is not None
                else self._step(place, byte)
            )
        return place

    def _in_string(self, place: _Place, byte: int) -> _Place:
        assert place.string is not None
        level = place.levels[-1] if place.levels else None
        is_name = level is not None and not level.is_array and place.is_name
        is_kept = is_name or place.items is not None
        if place.is_escaped or byte != _QUOTE:
            is_escaped = byte == ord("\\") and not place.is_escaped
            string = place.string + bytes([byte]) if is_kept else b""
            return place._replace(string=string, is_escaped=is_escaped)
        string, place = place.string, place._replace(string=None)
        if level is None:
            return place
        if is_name:
            level = level._replace(spot=Spot(_value(string), 0))
        elif level.items is not None:
            place = place._replace(is_twice=place.is_twice or string in level.items)
            level = level._replace(items=level.items | {string})
        return place._replace(levels=(*place.levels[:-1], level))

    def _step(self, place: _Place, byte: int) -> _Place:
        if byte == _QUOTE:
            return place._replace(string=b"")
        if byte in b"[{":
            around = place.levels[-1].spot if place.levels else Spot(None, 0)
            spot = Spot(around.name, around.depth + 1) if byte == ord("[") else around
            is_unique = byte == ord("[") and spot in self._spots
            level = _Level(spot, byte == ord("["), None)
            if is_unique:
                level = level._replace(items=frozenset(), most=self._spots[spot])
            return place._replace(levels=(*place.levels, level), is_name=True)
        if byte in b"]}":
            return place._replace(levels=place.levels[:-1], is_name=False)
        if byte in b":,":
            return place._replace(is_name=byte == ord(","))
        return place


def _clear(mask: npt.NDArray[np.uint32], token: int) -> None:
    mask[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def _value(string: bytes) -> str:
    """The string that is spelled so between its quotes."""
    return str(json.loads(b'"' + string + b'"'))
