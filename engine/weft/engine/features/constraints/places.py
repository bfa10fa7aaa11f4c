"""The position of a JSON text in its schema: the parts of a rewritten schema that may hold
there.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from weft.engine.features.constraints.excluded import (
    AMBIGUOUS_NUMBERS,
    EXCLUDED,
    AmbiguousNumbers,
    NumberSet,
    number_set,
)

Json = Any

UNIQUE = "x-unique"
"""Marks an array without duplicates in a rewritten schema; its value is the JSON pointer of the
array's schema as the client wrote it. llguidance ignores it.
"""
MAX_PLACES = 20_000
"""Most places of one schema that are looked at."""
_UNLISTED = "\0"
"""A name that no schema lists."""
_CODE = re.compile(r"\\x\{([0-9a-fA-F]{1,6})\}")


class Place:
    """The parts that may hold for a value; made by `Places`."""

    def __init__(
        self, places: Places, parts: Iterable[dict[str, Json]], nodes: tuple[dict[str, Json], ...]
    ) -> None:
        self._places, self._parts = places, tuple(parts)
        self.nodes = nodes
        self.is_unique = any(UNIQUE in node for node in nodes)
        """Whether an array here may have no value twice."""
        self.has_many_strings = False
        """Whether the possible items of an array without duplicates are more strings than it can
        have items.
        """
        marks = (node[EXCLUDED]["at"] for node in nodes if EXCLUDED in node)
        self.marked_at: str = next(marks, "")
        """JSON pointer of numbers here of which steps are excluded, if there are any."""
        self.has_numbers_within = False
        """Whether numbers here or further inside have steps that are excluded."""
        self._of_name: dict[str | None, Place] = {}
        self._of_index: dict[int, Place] = {}

    @functools.cached_property
    def numbers(self) -> NumberSet | None:
        """The numbers that may come here; None: the grammar by itself allows no others. Raises
        AmbiguousNumbers if that depends on more than the place.
        """
        if not self.marked_at:
            return None
        # Each part holds in one of several cases, and the grammar alone knows which has come.
        sets = {number_set(part, self._places.definitions) for part in self._parts}
        found = [one for one in sets if one.is_begun]
        if len(found) > 1 or not all(found):
            raise AmbiguousNumbers(f"at {self.marked_at}: {AMBIGUOUS_NUMBERS}")
        return found[0] if found else None

    def property(self, name: str) -> Place:
        is_listed = any(name in node.get("properties", ()) for node in self.nodes)
        is_free = not any("patternProperties" in node for node in self.nodes)
        key = name if is_listed else None
        if not (is_listed or is_free):
            return self._property(name)
        if key not in self._of_name:
            self._of_name[key] = self._property(name)
        return self._of_name[key]

    def _property(self, name: str) -> Place:
        found: list[Json] = []
        for node in self.nodes:
            parts = [
                part
                for pattern, part in node.get("patternProperties", {}).items()
                if _may_match(pattern, name)
            ]
            if name in node.get("properties", ()):
                parts.append(node["properties"][name])
            found += parts or [node.get("additionalProperties", True)]
        return self._places.of(found)

    def item(self, index: int) -> Place:
        most = max((len(node.get("prefixItems", ())) for node in self.nodes), default=0)
        index = min(index, most)
        if index not in self._of_index:
            self._of_index[index] = self._places.of(
                [_item(node, index) for node in self.nodes if node.get("type") == "array"]
            )
        return self._of_index[index]

    def inner(self) -> Iterator[Place]:
        """The places of properties and items that this one may have."""
        for name in {name for node in self.nodes for name in node.get("properties", ())}:
            yield self.property(name)
        for node in self.nodes:
            free = [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
            yield from (self._places.of([part]) for part in free if isinstance(part, dict))
        if arrays := self.arrays():
            most = max(len(node.get("prefixItems", ())) for node in arrays)
            yield from (self.item(index) for index in range(most + 1))

    def arrays(self) -> list[dict[str, Json]]:
        """The parts that allow arrays."""
        return [node for node in self.nodes if node.get("type") == "array"]

    def within(self) -> list[Place]:
        """This place and those inside of it. Raises ValueError if there are too many."""
        found, left = {id(self): self}, [self]
        while left:
            for place in left.pop().inner():
                if id(place) not in found:
                    found[id(place)] = place
                    left.append(place)
            if len(found) > MAX_PLACES:
                raise ValueError("is too complex: uniqueItems is not supported in it")
        return [*found.values()]


class Places:
    """The places of one rewritten schema."""

    def __init__(self, schema: dict[str, Json]) -> None:
        self.definitions: dict[str, Json] = schema.get("$defs", {})
        self._known: dict[tuple[frozenset[int], frozenset[int]], Place] = {}
        self.root = self.of([schema])

    def of(self, parts: Iterable[Json]) -> Place:
        """The place for which several parts may hold."""
        nodes: dict[int, dict[str, Json]] = {}
        given = {id(part): part for part in parts if isinstance(part, dict)}
        left = [*given.values()]
        while left:
            node = left.pop()
            if id(node) in nodes:
                continue
            nodes[id(node)] = node
            left += [part for part in _beside(node, self.definitions) if isinstance(part, dict)]
        key = frozenset(given), frozenset(nodes)
        if key not in self._known:
            self._known[key] = Place(self, given.values(), tuple(nodes.values()))
        return self._known[key]


def check_numbers(root: Place) -> None:
    """Raises AmbiguousNumbers if excluded numbers could not be recognised somewhere in a text, or
    are items of an array without duplicates. Else notes whether there are any.
    """
    within = root.within()
    places = [place for place in within if place.numbers is not None]
    root.has_numbers_within = bool(places)
    for place in within if places else ():
        inner = place.within() if place.is_unique else place.inner()
        marked = [one for one in inner if one.numbers is not None]
        if not marked:
            continue
        objects = [node for node in place.nodes if node.get("type") == "object"]
        num_patterns = sum(len(node.get("patternProperties", ())) for node in objects)
        is_joined = len(objects) > 1 or any("properties" in node for node in objects)
        if place.is_unique or num_patterns > 1 or (num_patterns and is_joined):
            raise AmbiguousNumbers(f"at {marked[0].marked_at}: {AMBIGUOUS_NUMBERS}")
        if objects and not num_patterns:
            _ = place.property(_UNLISTED).numbers


def _beside(node: dict[str, Json], definitions: dict[str, Json]) -> Iterator[Json]:
    if "$ref" in node:
        yield definitions[node["$ref"].rpartition("/")[2]]
    yield from itertools.chain(node.get("anyOf", ()), node.get("allOf", ()))


def _item(node: dict[str, Json], index: int) -> Json:
    first = node.get("prefixItems", ())
    return first[index] if index < len(first) else node.get("items", True)


def _may_match(pattern: str, name: str) -> bool:
    """Whether a pattern in llguidance's syntax matches a name. True if Python cannot decide."""
    try:
        written = _CODE.sub(lambda found: rf"\U{int(found[1], 16):08x}", pattern)
        return re.search(written, name) is not None
    except (re.error, OverflowError):
        return True
