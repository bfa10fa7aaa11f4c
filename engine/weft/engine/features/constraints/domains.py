"""How many values schemas allow, as far as it matters for arrays without duplicates."""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from weft.engine.features.constraints.excluded import EXCLUDED
from weft.engine.features.constraints.names import NOTHING
from weft.engine.features.constraints.places import UNIQUE, Place, Places, check_numbers
from weft.engine.features.constraints.schema import MAX_UNIQUE
from weft.engine.features.constraints.vocabulary import tokenizer_of

Json = Any

MAX_MARKS = 256
"""Most schemas with arrays without duplicates within one grammar."""
MARK = 256
"""The first token of `byte_tokens` that is no byte."""
END = MARK + MAX_MARKS
_MAX_STEPS = 4000
"""Most bytes that are tried to find values; after that, a schema counts as having many."""
_BLANKS = frozenset(b" \t\n\r")
_CLOSING = frozenset(b'"]}')
_DECODER = json.JSONDecoder(parse_float=Decimal)
_FORM = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}


@functools.cache
def byte_tokens() -> LLTokenizer:
    """A vocabulary of all bytes, of marks that have no text, and of the end."""
    marks = [b""] * MAX_MARKS
    return tokenizer_of([*(bytes([byte]) for byte in range(256)), *marks, b""], [END])


def tokens_of(mask: bytes) -> list[int]:
    """The tokens that a mask allows, in order."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def key_of(written: bytes) -> Hashable:
    """A key that is equal for equal values of JSON, and for them alone. Strings have one spelling
    in the grammars of this package.
    """
    return written if written.startswith(b'"') else _key_of(written)


@functools.lru_cache(maxsize=256)
def _key_of(written: bytes) -> Hashable:
    return _key(_DECODER.decode(written.decode()))


def _key(value: Json) -> Hashable:
    if isinstance(value, dict):
        return "object", frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return ("boolean", value) if isinstance(value, bool) else value


def is_watched(schema: Json) -> bool:
    """Whether a rewritten schema has marks that `UniqueMatcher` obeys."""
    written = json.dumps(schema)
    return UNIQUE in written or EXCLUDED in written


def watched_places(schema: dict[str, Json]) -> Place:
    """Bounds arrays without duplicates in a rewritten schema by the number of values that their
    items can have, so that wherever an item may come, some new item is possible. Returns the place
    of the whole text. Raises ValueError if an array cannot be kept free of duplicates, and
    AmbiguousNumbers as `check_numbers` does.
    """
    places = Places(schema)
    check_numbers(places.root)
    count = _Counter(places.definitions).count
    for place in places.root.within():
        if not place.is_unique:
            continue
        arrays = place.arrays()
        at = next(node[UNIQUE] for node in arrays if UNIQUE in node)
        _check_orders(place, at, count)
        listed = any(isinstance(one, list) for node in place.nodes for one in node.get("enum", ()))
        if len(arrays) == 1 and not listed:
            _bound(arrays[0], at, count)
        elif listed or not _have_many(arrays, count):
            message = "beside other schemas of the array, it is supported for items of many values"
            raise ValueError(f"at {at}/uniqueItems: {message}")
        parts = [part for node in arrays for part in _parts(node)]
        place.has_many_strings = all(count(part)[1] >= MAX_UNIQUE for part in parts)
    return places.root


def _num_first(array: dict[str, Json]) -> int:
    return len(array.get("prefixItems", ()))


def _parts(array: dict[str, Json]) -> list[Json]:
    rest = array.get("items", True)
    return [*array.get("prefixItems", ()), *([] if rest is False else [rest])]


def _bound(array: dict[str, Json], at: str, count: Any) -> None:
    first, most = array.get("prefixItems", []), array.get("maxItems", MAX_UNIQUE)
    for index, part in enumerate(first):
        if count(part)[0] <= index:
            most = min(most, index)
    most = min(most, max(len(first), count(array.get("items", True))[0]))
    least = array.get("minItems", 0)
    if least > most:
        message = f"an array of {least} items needs more than {most} different values"
        raise ValueError(f"at {at}/uniqueItems: {message}")
    array["maxItems"] = most


def _have_many(arrays: list[dict[str, Json]], count: Any) -> bool:
    """Whether items of each of several arrays, and of all of them at once, have many values."""
    if any(count(part)[0] < MAX_UNIQUE for array in arrays for part in _parts(array)):
        return False
    if any("prefixItems" in array for array in arrays):
        return True
    together = [array.get("items", True) for array in arrays]
    both: int = count({"allOf": [part for part in together if part is not True]})[0]
    return both == 0 or both >= MAX_UNIQUE


def _check_orders(place: Place, at: str, count: Any) -> None:
    """Checks that an object among the items can always get one more of its free names. An object is
    the same in whatever order these come, so not all of its texts are recognised as already taken.
    """
    parts = (place.item(index) for index in range(1 + max(map(_num_first, place.arrays()))))
    for inner in {id(one): one for part in parts for one in part.within()}.values():
        few = (count(part)[0] < MAX_UNIQUE for node in inner.arrays() for part in _parts(node))
        if inner.is_unique and any(few):
            message = "is not supported for items that have arrays without duplicates of few values"
            raise ValueError(f"at {at}/uniqueItems: {message}")
        for node in inner.nodes:
            patterns = node.get("patternProperties", {})
            is_free = node.get("type") == "object" and (
                patterns or node.get("additionalProperties", True) is not False
            )
            if not is_free:
                continue
            names = [{"type": "string", "pattern": pattern} for pattern in patterns]
            if "maxProperties" in node or any(count(name)[0] < MAX_UNIQUE for name in names):
                message = "is not supported for objects with few names that are not listed"
                raise ValueError(f"at {at}/uniqueItems: {message}")


class _Counter:
    def __init__(self, definitions: dict[str, Json]) -> None:
        self._definitions = definitions
        self._counts: dict[str, tuple[int, int]] = {}

    def count(self, schema: Json) -> tuple[int, int]:
        if schema is True:
            return MAX_UNIQUE, MAX_UNIQUE
        if schema is False:
            return 0, 0
        key = json.dumps(schema)
        if key not in self._counts:
            self._counts[key] = self._count(schema)
        return self._counts[key]

    def _count(self, schema: dict[str, Json]) -> tuple[int, int]:
        if schema == {"type": "string"}:
            return MAX_UNIQUE, MAX_UNIQUE
        whole = {**schema, "$defs": self._definitions, "x-guidance": _FORM}
        lark = f'%llguidance {{"no_forcing": true}}\nstart: %json {json.dumps(whole)}'
        matcher = LLMatcher(byte_tokens(), lark, log_level=0)
        begin = [] if matcher.is_error() else tokens_of(matcher.compute_bitmask())
        if matcher.is_error():
            # Compiling the whole schema reports any other error.
            few = 0 if NOTHING.search(matcher.get_error()) else MAX_UNIQUE
            return few, few
        num_strings = 0
        if ord('"') in begin:
            matcher.consume_token(ord('"'))
            num_strings = len(_some_values(matcher, b'"'))
            matcher.rollback(1)
        is_done = begin == [ord('"')] or num_strings >= MAX_UNIQUE
        return num_strings if is_done else len(_some_values(matcher, b"")), num_strings


def _some_values(matcher: LLMatcher, begin: bytes) -> set[Hashable] | range:
    """Different values whose text begins so, up to `MAX_UNIQUE` of them."""
    found = set[Hashable]()
    text, steps = bytearray(begin), 0
    stack = [_next(matcher)]
    while stack and len(found) < MAX_UNIQUE:
        token = next(stack[-1], None)
        if token is None:
            stack.pop()
            if stack:
                matcher.rollback(1)
                text.pop()
        elif token == END:
            found.add(key_of(bytes(text)))
        else:
            steps += 1
            if steps > _MAX_STEPS or not matcher.consume_token(token):
                return range(MAX_UNIQUE)
            text.append(token)
            stack.append(_next(matcher))
    matcher.rollback(len(text) - len(begin))
    return found


def _next(matcher: LLMatcher) -> Iterator[int]:
    """Allowed tokens; the end token first, then closing brackets and quotes."""
    may_come = [token for token in tokens_of(matcher.compute_bitmask()) if token not in _BLANKS]
    return iter(sorted(may_come, key=lambda token: (token != END, token not in _CLOSING)))
