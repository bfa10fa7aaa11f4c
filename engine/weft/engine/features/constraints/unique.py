"""Keeps arrays free of duplicates, since a grammar cannot remember earlier items, and numbers free
of the multiples of excluded steps, for which llguidance has no form.

`UniqueMatcher` follows the text that a sample writes. From each mask it clears the tokens that
would end an item equal to an earlier one of its array, and those after which every possible item
would be equal to one. It also clears those that would end an excluded number, or begin nothing
else. A second matcher of the same grammar, whose tokens are single bytes, shows which bytes may
come within an item. Where a grammar has more than JSON, the second grammar has a mark before each
schema that is watched, so it also shows where a schema's text begins.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from weft.engine.features.constraints.domains import END, MARK, key_of, tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from weft.engine.features.constraints.excluded import NumberSet
    from weft.engine.features.constraints.places import Place

UNCLEAR = "two parts begin alike, and one is a schema with uniqueItems: give each a text before it"
"""Error message for a text in which duplicates cannot be recognised."""
_TWICE = "an item is twice, or a number is excluded"
_BLANKS = b" \t\n\r"
_QUOTE, _BACKSLASH = b'"\\'
_OUTSIDE_STRINGS = re.compile(
    rb'(?P<string>"(?:[^"\\]|\\.)*+"?)|[ \t\n\r]+'
    rb"|(?P<whole>-?[0-9]+)(?P<digits>\.(?:[0-9]*[1-9])?)?0*+(?=[,\]}])",
    re.DOTALL,
)
_OPEN_NUMBER = re.compile(rb"(?:^|[\[:,])(?:-?[0-9]+\.(?:[0-9]*0)?|-?0|-)$")
"""The beginning of a number that may become a second spelling of a value: `1.`, `1.50`, `-0`, `-`,
`0`.
"""


_OF_NUMBERS = b"-.0123456789"
_DIGIT = re.compile(rb"[-0-9]")
_LATER_NUMBER = re.compile(rb'[",:\[\]{}].*[-0-9]', re.DOTALL)
_BEGUN_NUMBER = re.compile(rb"[\[{].*[-0-9]", re.DOTALL)
_UP_TO_QUOTE = re.compile(rb'[^"\\]*')
_ARRAY_AND_ITEM = re.compile(rb"\[[^\]]*,")


class Matcher(Protocol):
    """The part of llguidance's matcher that this package uses."""

    def deep_copy(self) -> Matcher: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_accepting(self) -> bool: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def consume_token(self, sampled_token: int) -> bool: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def compute_bitmask(self) -> bytes: ...
    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


Words = npt.NDArray[np.uint32]
"""Bits of tokens."""


class Vocabulary:
    """The spelling of each token, and sets of tokens as masks."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.spelled = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        numbers = range(len(self.spelled))
        self._by_text = dict(zip(reversed(self.spelled), reversed(numbers), strict=True))
        of_text = map(self._by_text.__getitem__, self.spelled)
        self._again = [token for token, first in enumerate(of_text) if token != first]
        """Tokens that spell the same text as another token."""
        self._blanks = {b""} | {
            spelled[: len(spelled) - len(spelled.lstrip(_BLANKS))]
            for spelled in self.spelled
            if spelled[:1].isspace()
        }
        """Blanks that tokens begin with."""
        self.quotes = self._those(b'"' in one for one in self.spelled)
        """Tokens that may end a string."""
        self.structural = self._those(
            one.translate(None, b'",:[]{}') != one for one in self.spelled
        )
        """Tokens that, outside of strings, may end a value or begin one of several tokens."""
        self.arrays = self._those(b"[" in one and _may_end_item(one) for one in self.spelled)
        """Tokens that may begin an array and end an item of it."""
        self.numerals = self._those(
            one != b"" and not one.strip(_OF_NUMBERS) for one in self.spelled
        )
        """Tokens that have nothing but characters of numbers."""
        self.with_digits = self._those(_DIGIT.search(one) is not None for one in self.spelled)
        self.later_numbers = self._those(
            _LATER_NUMBER.search(one) is not None for one in self.spelled
        )
        """Tokens that may begin a number after other parts of JSON."""
        self.begun_numbers = self._those(
            # llguidance spells a token that has no text by its number.
            _BEGUN_NUMBER.search(one) is not None and one != b"<[%d]>" % token
            for token, one in enumerate(self.spelled)
        )
        """Tokens that may begin an array or an object and a number in it."""
        self.zeros = self._those(one[-1:] in (b"-", b"0", b".") for one in self.spelled)
        """Tokens that may be the last digits of a number so far."""

    def spelled_as(self, text: bytes, *, is_string: bool) -> Iterator[int]:
        """Tokens that spell a text, in a string, or outside of strings, where blanks may precede
        it.
        """
        for blanks in (b"",) if is_string else self._blanks:
            if (token := self._by_text.get(blanks + text)) is not None:
                yield token
                yield from (one for one in self._again if self.spelled[one] == blanks + text)

    def _those(self, are_in: Iterable[bool]) -> Words:
        bits = np.fromiter(are_in, bool, len(self.spelled))
        return np.packbits(np.pad(bits, (0, -len(bits) % 32)), bitorder="little").view(np.uint32)


class _Level(NamedTuple):
    place: Place
    is_array: bool
    inner: Place | None
    """Place of the next value; None: its name has not come yet."""
    start: int
    """Where the item of an array, or the last name of an object, begins in the text."""
    number: int = 0
    """Number of the next item."""
    seen: frozenset[Hashable] | None = None
    """The items of an array without duplicates; None: it may have duplicates."""
    exhausted: frozenset[bytes] = frozenset()
    """Beginnings of items, without blanks, after which all items are among those seen."""
    ended: tuple[int, int] | None = None
    """Where the item is that the last token has ended."""
    is_text: bool = False
    """Whether this is a number that is the whole text."""


class _State(NamedTuple):
    """The facts known after a token."""

    length: int
    """Length of the text."""
    levels: tuple[_Level, ...] = ()
    is_string: bool = False
    is_escaped: bool = False
    number: bytes = b""
    """The number that has begun and may go on, at a place whose numbers are watched."""


class _Wrong(Exception):
    """A token that may not come."""


class UniqueMatcher:
    """A grammar's matcher that allows no duplicate in some arrays, and not all numbers at some
    places. It takes over both matchers.

    Args:
        by_bytes: Matcher of the same grammar with the tokens of `byte_tokens`.
        roots: The places of the texts after each mark; without marks, the place of the whole text
            alone.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        by_bytes: LLMatcher,
        roots: Sequence[Place],
        vocabulary: Vocabulary,
        *,
        has_marks: bool,
    ) -> None:
        self._matcher, self._by_bytes = matcher, by_bytes
        self._roots, self._vocabulary, self._has_marks = roots, vocabulary, has_marks
        self._has_numbers = any(root.has_numbers_within for root in roots)
        self._text: list[int] = []
        """Bytes and marks."""
        self._num_followed = 0
        """Bytes and marks of the text that `by_bytes` has consumed."""
        self._states = [_State(0)]
        """Before the first token, and after each token so far."""
        self._problem = ""

    def deep_copy(self) -> UniqueMatcher:
        copied = UniqueMatcher(
            self._matcher.deep_copy(),
            self._by_bytes.deep_copy(),
            self._roots,
            self._vocabulary,
            has_marks=self._has_marks,
        )
        copied._text, copied._states = [*self._text], [*self._states]
        copied._num_followed, copied._problem = self._num_followed, self._problem
        return copied

    def is_error(self) -> bool:
        return bool(self._problem) or self._matcher.is_error()

    def get_error(self) -> str:
        return self._problem or self._matcher.get_error()

    def is_accepting(self) -> bool:
        if self._problem or not self._matcher.is_accepting():
            return False
        state = self._states[-1]
        return not state.number or _may_end_number(state)

    def rollback(self, num_tokens: int) -> bool:
        del self._states[len(self._states) - num_tokens :]
        del self._text[self._states[-1].length :]
        if self._num_followed > len(self._text):
            self._by_bytes.rollback(self._num_followed - len(self._text))
            self._num_followed = len(self._text)
        return self._matcher.rollback(num_tokens)

    def consume_token(self, sampled_token: int) -> bool:
        if self._problem or not self._matcher.consume_token(sampled_token):
            return False
        if self._is_wrong(sampled_token):
            self._problem = f"token {sampled_token} doesn't satisfy the grammar: {_TWICE}"
            return False
        self._follow(sampled_token)
        return not self._problem

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for number, token in enumerate(tokens):
            if self._matcher.try_consume_tokens([token]) == 0:
                return number
            if self._is_wrong(token):
                self._matcher.rollback(1)
                return number
            self._follow(token)
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

    # -- masks -------------------------------------------------------------------------------------

    def _refine(self, mask: Words) -> None:
        state, words = self._states[-1], self._vocabulary
        size = min(len(mask), len(words.arrays))
        mask = mask[:size]
        if not state.levels:
            mask &= ~words.arrays[:size]
            if self._has_numbers:
                mask &= ~words.begun_numbers[:size]
                if self._begins_with_number():
                    self._clear_wrong(mask, mask & words.with_digits[:size])
            return
        if self._has_numbers:
            self._refine_numbers(mask, state)
        unique = [level for level in state.levels if level.seen is not None]
        wanted = mask & (words.quotes if state.is_string else words.structural)[:size]
        if not unique:
            wanted &= words.arrays[:size]
        elif not state.is_string:
            wanted |= mask & words.zeros[:size]
        for token in _tokens_in(wanted):
            if self._is_wrong(token):
                _clear(mask, token)
        for level in unique:
            begun = self._begun(level) if level.exhausted else b""
            for begin in level.exhausted:
                if begin.startswith(begun):
                    rest = begin[len(begun) :]
                    for token in words.spelled_as(rest, is_string=state.is_string):
                        _clear(mask, token)

    def _refine_numbers(self, mask: Words, state: _State) -> None:
        """Clears tokens that would end a number which may not come, or begin none that may."""
        words, size = self._vocabulary, len(mask)
        numbers = _numbers_at(state.levels[-1])
        if numbers is None or state.is_string:
            self._clear_wrong(mask, mask & words.later_numbers[:size])
            return
        numerals = mask & words.numerals[:size]
        for token in _tokens_in(numerals):
            if not numbers.may_become(state.number + words.spelled[token]):
                _clear(mask, token)
        rest = mask & ~numerals
        self._clear_wrong(mask, rest if state.number else rest & words.with_digits[:size])

    def _clear_wrong(self, mask: Words, tokens: Words) -> None:
        for token in _tokens_in(tokens):
            if self._is_wrong(token):
                _clear(mask, token)

    def _begins_with_number(self) -> bool:
        """Whether the text has not begun, and may be nothing but a watched number."""
        if self._has_marks or self._roots[0].numbers is None:
            return False
        return not bytes(self._text).strip(_BLANKS)

    def _begun(self, level: _Level) -> bytes:
        """The part of an array's item that has been written, without blanks."""
        return _plain(bytes(self._text[level.start :]))

    def _is_wrong(self, token: int) -> bool:
        """Whether a token, which the grammar allows, ends an item that its array has, or leaves
        only such items.
        """
        state = self._states[-1]
        spelled = self._vocabulary.spelled[token]
        if not state.levels:
            return self._is_wrong_at_first(token)
        if state.number and not spelled:
            return not _may_end_number(state)
        try:
            reader = _Reader(self._text, state)
            behind = spelled[reader.read(spelled) :]
        except (_Wrong, RecursionError):
            return True
        if behind and _may_end_item(behind):
            return True
        return any(self._ends(level, reader) for level in reader.levels if level.seen is not None)

    def _is_wrong_at_first(self, token: int) -> bool:
        """Whether a token, which the grammar allows outside of objects and arrays, ends an item or
        a number, or begins a number that may not come.
        """
        words, at, bit = self._vocabulary, token // 32, token % 32
        if words.arrays[at] >> bit & 1:
            return True
        if self._has_numbers and words.begun_numbers[at] >> bit & 1:
            return True
        begun = words.spelled[token].strip(_BLANKS)
        if not (self._begins_with_number() and begun[:1] and begun[:1] in _OF_NUMBERS):
            return False
        numbers = self._roots[0].numbers
        assert numbers is not None
        return not numbers.may_become(begun)

    def _ends(self, level: _Level, reader: _Reader) -> bool:
        """Whether no new item can come in an array after the text read so far."""
        if not level.seen:
            return False
        begun = reader.since(level.start)
        if level.ended is not None and begun and level.ended[1] <= level.start:
            # Exhausted beginnings are known only after the token.
            return not (begun == b'"' and level.place.has_many_strings)
        if level.exhausted and _plain(begun) in level.exhausted:
            return True
        if reader.is_string or not _OPEN_NUMBER.search(_plain(begun)):
            return False
        self._catch_up()
        added = [*reader.tail]
        if self._by_bytes.try_consume_tokens(added) < len(added):
            return False  # The grammar does not allow it, whatever the items are.
        is_open = self._is_open(level, begun)
        self._by_bytes.rollback(len(added))
        return not is_open

    def _is_open(self, level: _Level, begun: bytes) -> bool:
        """Whether a new item can begin so, at the place of `by_bytes`."""
        assert level.seen is not None
        is_scalar = begun[0] not in b'"[{'
        may_come = [byte for byte in tokens_of(self._by_bytes.compute_bitmask()) if byte < MARK]
        # Bytes that need a look ahead come last: a number may have zeros without end.
        for byte in sorted(may_come, key=b"-0.".__contains__):
            whole = begun
            if byte in _BLANKS and not is_scalar and not _in_string(begun):
                continue  # The same item continues without it.
            if not (is_scalar and byte in b",] \t\n\r"):
                whole = begun + bytes([byte])
                is_end = byte in b'"]}' and _is_whole(whole)
                if is_scalar or not is_end:
                    if self._goes_on(level, whole, byte):
                        return True
                    continue
            if key_of(whole) not in level.seen:
                return True
        return False

    def _goes_on(self, level: _Level, begun: bytes, byte: int) -> bool:
        if level.exhausted and _plain(begun) in level.exhausted:
            return False
        if byte not in b"-0." or not _OPEN_NUMBER.search(_plain(begun)) or _in_string(begun):
            return True
        self._by_bytes.consume_token(byte)
        is_open = self._is_open(level, begun)
        self._by_bytes.rollback(1)
        return is_open

    # -- following a text --------------------------------------------------------------------------

    def _follow(self, token: int) -> None:
        state, spelled = self._states[-1], self._vocabulary.spelled[token]
        while spelled and not state.levels:
            state = self._outside(state, spelled[0])
            spelled = spelled[1:]
        if spelled:
            reader = _Reader(self._text, state)
            num_read = reader.read(spelled)
            self._text += spelled[:num_read]
            levels = tuple(
                level if level.ended is None else self._exhaust(level) for level in reader.levels
            )
            state = _State(
                len(self._text), levels, reader.is_string, reader.is_escaped, reader.number
            )
            for byte in spelled[num_read:]:
                state = self._outside(state, byte)
        self._states.append(state)

    def _outside(self, state: _State, byte: int) -> _State:
        """The state after a byte outside of the texts of schemas; the byte may begin one."""
        is_begun = self._has_marks or bytes(self._text).strip(_BLANKS)
        root = None if is_begun else self._roots[0]
        if self._has_marks:
            self._catch_up()
            may_come = tokens_of(self._by_bytes.compute_bitmask())
            marks = [one for one in may_come if MARK <= one < END and self._begins(one, byte)]
            if len(marks) + (byte in may_come) > 1:
                self._problem = UNCLEAR
            elif marks:
                root = self._roots[marks[0] - MARK]
                self._text += marks
        self._text.append(byte)
        here = len(self._text)
        if root is not None and root.numbers is not None and byte in _OF_NUMBERS:
            level = _Level(root, is_array=False, inner=root, start=here - 1, is_text=True)
            return _State(here, (level,), number=bytes([byte]))
        if root is None or byte not in b"[{":
            return _State(here)
        return _State(len(self._text), (_opened(root, byte, len(self._text)),))

    def _begins(self, mark: int, byte: int) -> bool:
        """Whether a schema's text, whose place a mark shows, may begin with a byte."""
        begins = self._by_bytes.try_consume_tokens([mark, byte])
        self._by_bytes.rollback(begins)
        return begins == 2

    def _catch_up(self, length: int | None = None) -> None:
        """Moves `by_bytes` to a place of the text, by default to its end."""
        length = len(self._text) if length is None else length
        if length < self._num_followed:
            self._by_bytes.rollback(self._num_followed - length)
        elif length > self._num_followed:
            self._by_bytes.try_consume_tokens(self._text[self._num_followed : length])
        self._num_followed = length

    def _exhaust(self, level: _Level) -> _Level:
        """Notes the beginnings after which no new item can come since the last one has ended."""
        assert level.ended is not None
        start, end = level.ended
        at = end - (self._text[end - 1] in b'"]}')
        found = set(level.exhausted)
        while at > start:
            self._catch_up(at)
            begun = bytes(self._text[start:at])
            if self._is_open(level._replace(exhausted=frozenset(found)), begun):
                break
            found.add(_plain(begun))
            at -= 1
        return level._replace(exhausted=frozenset(found), ended=None)


class _Reader:
    """Reads more of a JSON text. `state` is the state after `text`."""

    def __init__(self, text: list[int], state: _State) -> None:
        self._text, self._length = text, state.length
        self.levels = [*state.levels]
        self.is_string, self._is_escaped = state.is_string, state.is_escaped
        self.number = state.number
        self.tail = bytearray()

    @property
    def is_escaped(self) -> bool:
        return self._is_escaped

    def since(self, start: int) -> bytes:
        if start >= self._length:
            return bytes(self.tail[start - self._length :])
        return bytes(self._text[start : self._length]) + bytes(self.tail)

    def read(self, spelled: bytes) -> int:
        """Reads bytes up to the end of the JSON text and returns their number. Raises _Wrong if
        they end an item that its array already has, or a number that may not come, or begin one
        that can become none that may.
        """
        at = 0
        while at < len(spelled) and self.levels:
            if self.is_string and not self._is_escaped:
                plain = _UP_TO_QUOTE.match(spelled, at)
                assert plain is not None
                self.tail += plain[0]
                at = plain.end()
            if at < len(spelled):
                (self._in_string if self.is_string else self._outside_string)(spelled[at])
                at += 1
        if self.number:
            numbers = _numbers_at(self.levels[-1])
            if numbers is not None and not numbers.may_become(self.number):
                raise _Wrong
        return at

    def _here(self) -> int:
        return self._length + len(self.tail)

    def _in_string(self, byte: int) -> None:
        self.tail.append(byte)
        if self._is_escaped or byte != _QUOTE:
            self._is_escaped = byte == _BACKSLASH and not self._is_escaped
            return
        self.is_string = False
        level = self.levels[-1]
        if level.inner is None:
            name = json.loads(self.since(level.start))
            self.levels[-1] = level._replace(inner=level.place.property(name))
        else:
            self._end_item()

    def _follow_number(self, byte: int) -> None:
        """Follows a byte outside of strings at a place whose numbers are watched."""
        level = self.levels[-1]
        numbers = _numbers_at(level)
        if numbers is None:
            return
        if byte in _OF_NUMBERS:
            self.number += bytes([byte])
        elif self.number:
            if not numbers.has(self.number):
                raise _Wrong
            self.number = b""
            if level.is_text:
                self.levels.pop()

    def _outside_string(self, byte: int) -> None:
        self._follow_number(byte)
        if not self.levels:
            self.tail.append(byte)
            return
        level = self.levels[-1]
        if byte in b",] \t\n\r" and level.is_array:
            self._end_item()
            level = self.levels[-1]
        is_item_begun = level.is_array and self._here() > level.start
        self.tail.append(byte)
        here = self._here()
        if byte in _BLANKS:
            if not is_item_begun:
                self.levels[-1] = level._replace(start=here)
        elif byte == _QUOTE:
            self.is_string = True
            if level.inner is None:
                self.levels[-1] = level._replace(start=here - 1)
        elif byte in b"[{":
            self.levels.append(_opened(level.inner, byte, here))
        elif byte in b"]}":
            self.levels.pop()
            if self.levels:
                self._end_item()
        elif byte == ord(","):
            number = level.number + 1
            inner = level.place.item(number) if level.is_array else None
            self.levels[-1] = level._replace(number=number, inner=inner, start=here)

    def _end_item(self) -> None:
        level, here = self.levels[-1], self._here()
        if level.seen is None or here <= level.start:
            return
        key = key_of(self.since(level.start)[: here - level.start])
        if key in level.seen or level.ended is not None:
            raise _Wrong
        ended = level.start, here
        self.levels[-1] = level._replace(seen=level.seen | {key}, start=here, ended=ended)


def _opened(place: Place | None, byte: int, here: int) -> _Level:
    assert place is not None
    is_array = byte == ord("[")
    seen = frozenset[Hashable]() if is_array and place.is_unique else None
    return _Level(place, is_array, place.item(0) if is_array else None, here, seen=seen)


def _numbers_at(level: _Level) -> NumberSet | None:
    """The numbers that may come at a level's next value, if they are watched."""
    return level.inner.numbers if level.inner is not None else None


def _may_end_number(state: _State) -> bool:
    numbers = _numbers_at(state.levels[-1])
    return numbers is None or numbers.has(state.number)


def _may_end_item(spelled: bytes) -> bool:
    """Whether a text may begin an array and end an item of it."""
    return _ARRAY_AND_ITEM.search(spelled) is not None


def _plain(begun: bytes) -> bytes:
    """The text with one spelling of each number, and without blanks outside of strings."""
    return _OUTSIDE_STRINGS.sub(_plain_part, begun)


def _plain_part(found: re.Match[bytes]) -> bytes:
    if found["whole"] is None:
        return found["string"] or b""
    digits = found["digits"] or b""
    number: bytes = found["whole"] + (digits if len(digits) > 1 else b"")
    return b"0" if number == b"-0" else number


def _is_whole(written: bytes) -> bool:
    try:
        json.loads(written)
    except ValueError:
        return False
    return True


def _in_string(begun: bytes) -> bool:
    return any(
        found["string"] and found.end() == len(begun) and not _is_whole(found["string"])
        for found in _OUTSIDE_STRINGS.finditer(begun)
    )


def _tokens_in(words: Words) -> Iterator[int]:
    for at in np.flatnonzero(words).tolist():
        left = int(words[at])
        while left:
            lowest = left & -left
            yield at * 32 + lowest.bit_length() - 1
            left ^= lowest


def _clear(mask: Words, token: int) -> None:
    mask[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
