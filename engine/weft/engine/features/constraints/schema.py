"""Brings JSON schemas into the part of the language that llguidance enforces, or refuses them.

llguidance enforces most keywords, refuses some, and enforces a few in a way that lets too much
through. So this module reads each schema keyword by keyword and rewrites it in JSON Schema 2020-12,
with keywords that llguidance enforces exactly. A part that cannot be written so is refused with the
JSON pointer of its place.

An object that lists properties has no others, and an array that lists items has no others, unless
the schema allows them (`additionalProperties`, `items`) or combines several schemas (`allOf`, or
keywords next to `$ref`, `anyOf` and `oneOf`).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from weft.contract import schema_formats as formats
from weft.contract.schema_keywords import (
    ASSERTING,
    COMBINING,
    NEVER,
    OF_TYPE,
    escaped,
)
from weft.engine.features.constraints.disjoint import are_disjoint, negated, type_names
from weft.engine.features.constraints.endless import without_endless
from weft.engine.features.constraints.excluded import (
    AMBIGUOUS_NUMBERS,
    excluded_steps,
    without_multiples,
)
from weft.engine.features.constraints.names import has_names
from weft.engine.features.constraints.numbers import FREE_NUMBERS, check_number, prepare_number
from weft.engine.features.constraints.patterns import convert_pattern, without_lookahead
from weft.engine.features.constraints.places import UNIQUE

Json = Any
"""A parsed JSON value of any type."""

MAX_UNIQUE = 64
"""Most items of an array without duplicates."""
MAX_CASES = 256
"""Most combinations of optional properties written out for a bound on their number."""
MAX_CONTAINED_AT = 16
"""Places at which the first item that `contains` demands may be."""
MAX_LOOKS = 2_500_000
"""Most looks at schemas that are compared, some seconds of work: alternatives that refer to one
another could be compared in exponentially many ways.
"""
MAX_DEPTH = 100
"""Most levels of schemas within one another; llguidance reads 128 of JSON."""
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_ANY: Json = {
    "anyOf": [
        {"type": ["null", "boolean", "string"]},
        {"$ref": "#/$defs/number"},
        {"type": "array", "items": {"$ref": "#/$defs/any"}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/any"}},
    ]
}
"""Any value. llguidance's own form of it allows numbers with endless digits."""
_SHARED: dict[str, Json] = {"any": _ANY, **FREE_NUMBERS}
"""Definitions that every rewritten schema can refer to."""
_VACUOUS: dict[str, tuple[Json, ...]] = {
    "properties": ({},),
    "patternProperties": ({},),
    "required": ([],),
    "additionalProperties": (True, {}),
    "items": (True, {}),
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "uniqueItems": (False,),
}
"""Values with which a keyword excludes nothing, and so implies no type either."""
_ALL_NAMES = ("", ".*", "^.*$", "^.*", ".*$")
_NAMES = (".", ".+", "^.+$", "^.")
"""Patterns of all names, and of all but the empty one."""
_BESIDE_PATTERNS = "beside patternProperties it is supported where these say the same of names"
_NOT_POSITIVE = "what it excludes cannot be told in positive terms"
_OVERLAP = "the schemas may overlap; use anyOf, or tell them apart by a constant"
_ESCAPED = "\b\t\n\f\r"
"""Control characters that have a short escape in JSON."""


def prepare_schema(
    text: str, *, is_closed: bool = True, excludes_steps: bool = True
) -> dict[str, Json]:
    """Rewrites a schema, given as JSON text, for llguidance. Arrays without duplicates are marked
    by `UNIQUE`, and numbers of which the multiples of a step are excluded by `EXCLUDED`;
    `UniqueMatcher` keeps them so. Raises ValueError if the text is no schema, or a part of it
    cannot be enforced; the message says where.

    Args:
        is_closed: Whether objects and arrays may have only what the schema lists.
        excludes_steps: Whether numbers may have the mark `EXCLUDED`. Else none comes where a step
            is excluded.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        message = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise ValueError(message) from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("is not a JSON schema: an object is expected")
    try:
        return _Rewriter(schema, is_closed=is_closed, excludes_steps=excludes_steps).run()
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _no_number(name: str) -> Json:
    raise ValueError(f"is not JSON: {name} is no number")


def _finite(written: str) -> float:
    value = float(written)
    return value if math.isfinite(value) else _no_number(written)


def _part_of(schema: Json, part: str) -> Json:
    """What one part of a JSON pointer names. Raises LookupError if there is nothing."""
    key = part.replace("~1", "/").replace("~0", "~")
    if isinstance(schema, list) and key.isdecimal():
        return schema[int(key)]
    if isinstance(schema, dict):
        return schema[key]
    raise LookupError(key)


class _Rewriter:
    def __init__(self, root: Json, *, is_closed: bool, excludes_steps: bool) -> None:
        self._root = root
        self._is_closed, self._excludes_steps = is_closed, excludes_steps
        given = root.get("$schema", "") if isinstance(root, dict) else ""
        self._require(isinstance(given, str), "#/$schema", "a string is expected")
        self._is_old = any(f"draft-0{number}/" in given for number in (3, 4, 6, 7))
        """Whether the schema's draft ignores keywords next to `$ref`."""
        self._definitions: dict[str, Json] = {}
        self._names: dict[tuple[str, bool, bool], str] = {}
        """Names of definitions, by the schema's place and whether it is closed and merged."""
        self._to_do: list[tuple[str, str, Json, bool, bool]] = []
        self._anchored: dict[str, list[tuple[str, Json]]] = {}
        """Places and schemas by the anchor that they have."""
        self._depth = 0
        self._num_looks = 0

    def run(self) -> dict[str, Json]:
        found = self.schema(self._root, "#", is_closed=self._is_closed)
        while self._to_do:
            name, at, schema, is_closed, is_merged = self._to_do.pop()
            self._definitions[name] = self.schema(
                schema, at, is_closed=is_closed, is_merged=is_merged
            )
        if found is True or found is False:
            self._require(found, "#", "no text satisfies it")
            found = self._any()
        found, definitions = without_endless(found, self._definitions)
        self._require(found is not False, "#", "no text satisfies it that ever ends")
        return {**found, "$defs": definitions} if definitions else found

    def schema(self, schema: Json, at: str, *, is_closed: bool, is_merged: bool = False) -> Json:
        """Rewrites the schema at a place.

        Args:
            at: Its JSON pointer.
            is_closed: Whether objects and arrays may have only what the schema lists.
            is_merged: Whether other schemas hold at the same place.
        """
        if isinstance(schema, bool):
            return self._any() if schema and not is_merged else schema
        self._require(isinstance(schema, dict), at, "a schema (an object or a boolean) is expected")
        if isinstance(schema.get("format"), str) and not formats.is_known(schema["format"]):
            schema = {name: value for name, value in schema.items() if name != "format"}
        if not is_merged and self._is_any(schema):
            return self._any()
        self._depth += 1
        self._require(self._depth <= MAX_DEPTH, at, "is nested too deeply")
        try:
            return self._object_of_keywords(schema, at, is_closed=is_closed, is_merged=is_merged)
        finally:
            self._depth -= 1

    def _object_of_keywords(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> Json:
        if self._is_old and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        for name in NEVER:
            if name in schema:
                raise ValueError(_at(f"{at}/{name}", "this keyword is not supported"))
        for name in _COUNTS:
            value = schema.get(name, 0)
            is_count = isinstance(value, int | float) and value == int(value) and value >= 0
            self._require(
                is_count and not isinstance(value, bool), f"{at}/{name}", "a count is expected"
            )
        is_content = self._is_old and "contentMediaType" in schema
        self._require(not is_content, f"{at}/contentMediaType", "this keyword is not supported")
        schema = self._with_values(schema, at)
        if "enum" in schema or "const" in schema:
            return self._listed(schema, at)
        schema, steps = self._with_excluded(schema, at)
        base = {name: schema[name] for name in schema if name in ASSERTING}
        if _is_vacuous(base):
            base = {}
        combined = [name for name in schema if name in COMBINING and self._says(schema, name)]
        several = len(combined) + bool(base) > 1 or is_merged
        if len(combined) == 1 and combined[0] == "allOf" and not base:
            several = several or len(schema["allOf"]) != 1
        # A property that another schema of the combination lists must stay allowed here.
        opens = {"dependentRequired"}
        closed = is_closed and (not several or set(combined) <= opens)
        parts: list[Json] = []
        if base:
            parts.append(self._typed(base, at, is_closed=closed, is_merged=several, steps=steps))
        for name in combined:
            write: Callable[..., list[Json]] = getattr(self, f"_{name.lstrip('$')}")
            parts += write(schema, f"{at}/{name}", is_closed=closed, is_merged=several)
        parts = [part for part in parts if part is not True]
        if any(part is False for part in parts):
            return False
        if not parts:
            return True if is_merged else self._any()
        return parts[0] if len(parts) == 1 else {"allOf": parts}

    def _with_values(self, schema: Mapping[str, Json], at: str) -> Mapping[str, Json]:
        """The schema with the values that a part of its `allOf` lists. The rest of the schema can
        then be checked against them, whereas llguidance finds no common text of some lists and
        schemas.
        """
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            listed = self.behind_references(part, f"{at}/allOf")
            if isinstance(listed, dict) and {"enum", "const"} & listed.keys():
                return {"enum": listed.get("enum", [listed.get("const")]), **schema}
        return schema

    def _with_excluded(
        self, schema: Mapping[str, Json], at: str
    ) -> tuple[Mapping[str, Json], list[Fraction]]:
        """The schema without a `not` of integers, or of multiples, and the step whose multiples
        that excludes.
        """
        found = None
        if "not" in schema:
            found = excluded_steps(self.behind_references(schema["not"], f"{at}/not"))
        if found is None:
            return schema, []
        step, has_other_types = found
        rest = {name: value for name, value in schema.items() if name != "not"}
        kinds = [kind for kind in _TYPES if has_other_types or kind in ("integer", "number")]
        if "type" in schema:
            given = self._kinds(schema["type"], f"{at}/type")
            kinds = [kind for kind in kinds if kind in given]
        elif named := _implied_types(schema):
            kinds = [kind for kind in kinds if kind in named]
        return {**rest, "type": kinds}, [step]

    def _says(self, schema: Mapping[str, Json], name: str) -> bool:
        return name != "if" or "then" in schema or "else" in schema

    def _is_any(self, schema: Mapping[str, Json]) -> bool:
        if self._is_old and "contentMediaType" in schema:
            return False
        if any(name in COMBINING or name in NEVER or name in ("enum", "const") for name in schema):
            return False
        return _is_vacuous({name: schema[name] for name in schema if name in ASSERTING})

    def _any(self) -> Json:
        self._shared("number")
        return self._shared("any")

    def _shared(self, name: str) -> Json:
        self._definitions[name] = _SHARED[name]
        return {"$ref": f"#/$defs/{name}"}

    # -- keywords that combine schemas -------------------------------------------------------------

    def _ref(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        place, target = self._resolve(schema["$ref"], at)
        key = place, is_closed, is_merged
        if key not in self._names:
            self._names[key] = name = f"d{len(self._names)}"
            self._to_do.append((name, place, target, is_closed, is_merged))
        return [{"$ref": f"#/$defs/{self._names[key]}"}]

    @functools.cached_property
    def _is_based(self) -> bool:
        return _has_base(self._root)

    def _resolve(self, reference: Json, at: str) -> tuple[str, Json]:
        """Place and schema that a reference names (RFC 6901, or an anchor)."""
        self._require(isinstance(reference, str), at, "a string is expected")
        base, _, fragment = reference.partition("#")
        own = self._root.get("$id", self._root.get("id", "")) if self._root is not True else ""
        is_own = not base or (isinstance(own, str) and own.partition("#")[0] == base)
        self._require(is_own, at, "only references into the schema are supported")
        self._require(not self._is_based, at, "an `$id` inside the schema is not supported")
        fragment = unquote(fragment)
        found = self._root
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchored:
                self._anchored[fragment] = [*_anchored(self._root, fragment, "#")]
            anchored = self._anchored[fragment]
            self._require(len(anchored) == 1, at, f"{reference!r} names nothing in the schema")
            return anchored[0]
        for part in fragment.split("/")[1:]:
            try:
                found = _part_of(found, part)
            except LookupError:
                raise ValueError(_at(at, f"{reference!r} names nothing in the schema")) from None
        return f"#{fragment}", found

    def behind_references(self, schema: Json, at: str = "#") -> Json:
        """The schema at the end of a chain of references without other keywords."""
        self._num_looks += 1
        self._require(self._num_looks <= MAX_LOOKS, at, "is too complex: too much is compared")
        for _ in range(32):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if not self._is_old and any(n in ASSERTING or n in COMBINING[1:] for n in schema):
                return schema
            _, schema = self._resolve(schema["$ref"], at)
        raise ValueError(_at(at, "a chain of references has no end"))

    def _allOf(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        parts = self._list(schema, "allOf", at)
        closed = is_closed and len(parts) == 1
        merged = is_merged or len(parts) > 1
        return [
            self.schema(part, f"{at}/{i}", is_closed=closed, is_merged=merged)
            for i, part in enumerate(parts)
        ]

    def _anyOf(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        parts = self._list(schema, "anyOf", at)
        return [self._either(parts, at, is_closed=is_closed, is_merged=is_merged)]

    def _either(self, parts: Sequence[Json], at: str, *, is_closed: bool, is_merged: bool) -> Json:
        found = [
            self.schema(part, f"{at}/{i}", is_closed=is_closed, is_merged=is_merged)
            for i, part in enumerate(parts)
        ]
        return _any_of(found)

    def _oneOf(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        """Rewrites `oneOf` to alternatives, each of which excludes all that it overlaps."""
        parts = self._list(schema, "oneOf", at)
        around = {name: schema[name] for name in ("type",) if name in schema}
        behind = [self.behind_references(part, at) for part in parts]
        overlaps: dict[int, list[int]] = {i: [] for i in range(len(parts))}
        for i, j in itertools.combinations(overlaps, 2):
            if not are_disjoint(behind[i], behind[j], self.behind_references, around):
                overlaps[i].append(j)
                overlaps[j].append(i)
        if not any(overlaps.values()):
            return [self._either(parts, at, is_closed=is_closed, is_merged=is_merged)]
        for i, others in overlaps.items():
            is_twice = _is_integer(behind[i]) and any(_is_any_number(behind[j]) for j in others)
            self._require(self._excludes_steps or not is_twice, at, AMBIGUOUS_NUMBERS)
        if len(parts) > 2 and (telling := self._telling(behind, overlaps)) is not None:
            return [self._told_apart(parts, telling, at)]
        opposites = {
            j: negated(behind[j], self.behind_references)
            for j in {j for others in overlaps.values() for j in others}
        }
        branches = []
        for i, others in overlaps.items():
            whole = [(parts[i], f"{at}/{i}")]
            for j in others:
                opposite = _either_of(opposites[j], _outside(behind[i], behind[j]))
                if opposite is None:
                    raise ValueError(_at(at, _OVERLAP))
                whole.append((opposite, f"{at}/{j}"))
            branches.append(self._all(whole))
        return [_any_of(branches)]

    def _telling(
        self, parts: Sequence[Json], overlaps: Mapping[int, list[int]]
    ) -> list[list[str]] | None:
        """For each of several schemas of objects, properties that distinguish it from those which
        it overlaps, once they are required; None: there are none.
        """
        found: list[list[str]] = []
        for i, others in overlaps.items():
            needed: list[str] = []
            for j in others:
                mine, yours = (_properties(parts[k]) for k in (i, j))
                names = [name for name in mine if name in yours]
                names.sort(key=lambda name: name not in needed)
                apart = (
                    name
                    for name in names
                    if are_disjoint(mine[name], yours[name], self.behind_references)
                )
                if (name := next(apart, None)) is None:
                    return None
                needed += [] if name in needed else [name]
            found.append(needed)
        return found

    def _told_apart(self, parts: Sequence[Json], telling: Sequence[list[str]], at: str) -> Json:
        """Alternatives, each with the properties that distinguish it."""
        cases = []
        for i, (part, names) in enumerate(zip(parts, telling, strict=True)):
            place = f"{at}/{i}"
            needed = [({"type": "object", "required": names}, place)] if names else []
            cases.append(self._all([(part, place), *needed]))
        return _any_of(cases)

    def _not(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        opposite = negated(self.behind_references(schema["not"], at), self.behind_references)
        if opposite is None:
            raise ValueError(_at(at, _NOT_POSITIVE))
        return [self.schema(opposite, at, is_closed=is_closed, is_merged=is_merged)]

    def _if(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        condition, around = schema["if"], at.rpartition("/")[0]
        opposite = negated(self.behind_references(condition, at), self.behind_references)
        if opposite is None:
            raise ValueError(_at(at, "what does not satisfy it cannot be told in positive terms"))
        then = self._all([(condition, at), (schema.get("then", True), f"{around}/then")])
        other = self._all([(opposite, at), (schema.get("else", True), f"{around}/else")])
        return [_any_of([then, other])]

    def _dependentRequired(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        return self._depending(self._mapping(schema, "dependentRequired", at), at)

    def _dependentSchemas(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        return self._depending(self._mapping(schema, "dependentSchemas", at), at)

    def _dependencies(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> list[Json]:
        return self._depending(self._mapping(schema, "dependencies", at), at)

    def _depending(self, given: Mapping[str, Json], at: str) -> list[Json]:
        """Rewrites a dependency: either the property is absent, or its conditions hold."""
        found = []
        others: Json = {"type": [kind for kind in _TYPES if kind != "object"]}
        for name, needed in given.items():
            place = f"{at}/{escaped(name)}"
            more = {"required": needed} if isinstance(needed, list) else needed
            there = self._all([({"type": "object", "required": [name]}, place), (more, place)])
            absent: Json = {"type": "object", "properties": {name: False}}
            found.append(_any_of([others, absent, there]))
        return found

    def _all(self, parts: Iterable[tuple[Json, str]]) -> Json:
        found = [
            self.schema(part, at, is_closed=False, is_merged=True)
            for part, at in parts
            if part is not True
        ]
        return False if any(part is False for part in found) else {"allOf": found}

    # -- values ------------------------------------------------------------------------------------

    def _listed(self, schema: Mapping[str, Json], at: str) -> Json:
        keyword = "enum" if "enum" in schema else "const"
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        self._require(isinstance(values, list), f"{at}/enum", "a list is expected")
        asserting = [
            name
            for name in schema
            if name in ASSERTING or name in COMBINING or name == "const"
            if name not in (keyword, "type") and self._says(schema, name)
        ]
        kinds = self._kinds(schema.get("type", list(_TYPES)), f"{at}/type")
        values = [value for value in values if not kinds.isdisjoint(type_names(value))]
        if asserting:
            values = self._valid(values, schema, at)
        kept = [value for value in values if _can_be_written(value)]
        if values and not kept:
            message = "is spelled with control characters, or is a number that is not exact"
            raise ValueError(_at(f"{at}/{keyword}", message))
        if not kept:
            return False
        return {"enum": [_plain(value) for value in kept]}

    def _valid(self, values: list[Json], schema: Mapping[str, Json], at: str) -> list[Json]:
        # Imported here: most schemas do not need it, and the import takes a tenth of a second.
        from jsonschema import validators

        kind = validators.validator_for(self._root, default=validators.Draft202012Validator)
        rest = {name: value for name, value in schema.items() if name not in ("$defs", "$id")}
        validator = kind(self._root).evolve(schema=rest)
        try:
            return [value for value in values if validator.is_valid(value)]
        except Exception as error:  # whatever a strange schema makes a validator raise
            raise ValueError(_at(at, f"cannot be checked: {error}")) from error

    def _kinds(self, given: Json, at: str) -> set[str]:
        kinds = given if isinstance(given, list) else [given]
        for kind in kinds:
            self._require(isinstance(kind, str) and kind in _TYPES, at, f"{kind!r} is not a type")
        return set(kinds)

    def _typed(
        self,
        schema: Mapping[str, Json],
        at: str,
        *,
        is_closed: bool,
        is_merged: bool,
        steps: Sequence[Fraction] = (),
    ) -> Json:
        if "type" in schema:
            named = self._kinds(schema["type"], f"{at}/type")
        else:
            named = _implied_types(schema)
        kinds = [
            kind
            for kind in _TYPES
            if kind in named and (kind != "integer" or "number" not in named)
        ]
        parts: list[Json] = []
        plain = [kind for kind in kinds if kind in ("null", "boolean")]
        if plain:
            parts.append({"type": plain if len(plain) > 1 else plain[0]})
        for kind in kinds:
            if kind in ("integer", "number"):
                if steps and not self._excludes_steps:
                    continue
                if schema.keys().isdisjoint(OF_TYPE["number"]) and not (is_merged or steps):
                    parts.append(self._shared(kind))
                    continue
                number = prepare_number(
                    schema,
                    at,
                    is_integer=kind == "integer",
                    is_merged=is_merged,
                )
                number = self._without_multiples(number, steps, at) if steps else number
                parts += [] if number is False else [number]
            elif kind == "string":
                parts.append(self._string(schema, at))
            elif kind == "array":
                parts.append(self._array(schema, at, is_closed=is_closed, is_merged=is_merged))
            elif kind == "object":
                found = self._object(schema, at, is_closed=is_closed, is_merged=is_merged)
                parts += [] if found is False else [found]
        if not parts and (steps or is_merged):
            return False
        self._require(bool(parts), at, "no value satisfies it")
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _without_multiples(self, number: Json, steps: Sequence[Fraction], at: str) -> Json:
        """Marks numbers by the place in the client's schema; `at` may go on in a negation of it."""
        found, place = self._root, "#"
        for part in at.split("/")[1:]:
            try:
                found = _part_of(found, part)
            except LookupError:
                break
            place = f"{place}/{part}"
        return without_multiples(number, steps, place)

    def _string(self, schema: Mapping[str, Json], at: str) -> Json:
        out: dict[str, Json] = {"type": "string"}
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        if most is not None:
            self._require(most >= least, f"{at}/maxLength", f"{most} is below minLength, {least}")
            out["maxLength"] = int(most)
        if least:
            out["minLength"] = least
        patterns = []
        if "pattern" in schema:
            patterns += self._patterns(schema["pattern"], f"{at}/pattern")
        name = schema.get("format")
        self._require(isinstance(name, str | None), f"{at}/format", "a string is expected")
        if schema.get("contentEncoding") == "base64":
            patterns.append(f"^(?:{convert_pattern(formats.PATTERNS['base64'])})$")
        if name in formats.PATTERNS:
            patterns.append(f"^(?:{convert_pattern(formats.PATTERNS[name])})$")
        elif name in formats.BUILT_IN:
            out["format"] = formats.BUILT_IN[name]
        is_base64 = name in ("byte", "base64", "base64url") or "contentEncoding" in schema
        if most is None and (is_base64 or name in formats.PATTERNS or name in formats.BUILT_IN):
            bound = formats.MAX_BASE64_LENGTH if is_base64 else formats.MAX_LENGTH
            out["maxLength"] = max(least, bound)
        if patterns:
            out["pattern"] = patterns[0]
        if len(patterns) < 2:
            return out
        return {"allOf": [out, *({"type": "string", "pattern": more} for more in patterns[1:])]}

    def _patterns(self, pattern: Json, at: str) -> list[str]:
        """Patterns that all hold: that of the schema, and those of look-ahead at its start."""
        self._require(isinstance(pattern, str), at, "a string is expected")
        return [self._pattern(part, at) for part in without_lookahead(pattern)]

    def _pattern(self, pattern: Json, at: str) -> str:
        self._require(isinstance(pattern, str), at, "a string is expected")
        try:
            return convert_pattern(pattern)
        except ValueError as error:
            raise ValueError(_at(at, str(error))) from None

    # -- arrays ------------------------------------------------------------------------------------

    def _array(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> Json:
        first, rest = schema.get("prefixItems"), schema.get("items")
        first_at, rest_at = f"{at}/prefixItems", f"{at}/items"
        if isinstance(rest, list):
            first, first_at = rest, rest_at
            rest, rest_at = schema.get("additionalItems"), f"{at}/additionalItems"
        self._require(isinstance(first, list | None), first_at, "a list is expected")
        if rest is None and "unevaluatedItems" in schema:
            rest, rest_at = schema["unevaluatedItems"], f"{at}/unevaluatedItems"
            self._require(not is_merged, rest_at, "beside other schemas it is not supported")
        if rest is None:
            rest = not (is_closed and first)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        self._require(
            most is None or most >= least, f"{at}/maxItems", f"is below minItems, {least}"
        )
        is_unique = schema.get("uniqueItems", False)
        self._require(isinstance(is_unique, bool), f"{at}/uniqueItems", "a boolean is expected")
        is_unique = is_unique and (most is None or most > 1)
        if is_unique:
            message = f"is supported up to {MAX_UNIQUE} items"
            self._require(least <= MAX_UNIQUE, f"{at}/uniqueItems", message)
            most = MAX_UNIQUE if most is None else min(most, MAX_UNIQUE)
        out: dict[str, Json] = {"type": "array"}
        if is_unique:
            out[UNIQUE] = at
        if first:
            out["prefixItems"] = [
                self.schema(
                    part,
                    f"{first_at}/{i}",
                    is_closed=self._is_closed and not is_merged,
                    is_merged=is_merged,
                )
                for i, part in enumerate(first)
            ]
        if rest is not True or not is_merged:
            out["items"] = self.schema(
                rest, rest_at, is_closed=self._is_closed and not is_merged, is_merged=is_merged
            )
        if least:
            out["minItems"] = least
        if most is not None:
            out["maxItems"] = int(most)
        return self._containing(out, schema, (rest, rest_at), at) if "contains" in schema else out

    def _containing(
        self, array: dict[str, Json], schema: Mapping[str, Json], items: tuple[Json, str], at: str
    ) -> Json:
        """Adds `contains`: each choice of the places of items that satisfy it is a case. These are
        the first such items or, with a bound on their number, all of them.
        """
        place, wanted = f"{at}/contains", schema["contains"]
        least, most = int(schema.get("minContains", 1)), schema.get("maxContains")
        if self._is_old:
            least, most = 1, None
        if least == 0 and most is None:
            return array
        contained = self._all([(wanted, place), items])
        others = array.get("items", True)
        if most is not None:
            opposite = negated(self.behind_references(wanted, place), self.behind_references)
            self._require(opposite is not None, f"{at}/maxContains", _NOT_POSITIVE)
            others = self._all([(opposite, place), items])
        first = array.get("prefixItems", [])
        longest = array.get("maxItems", len(first) + MAX_CONTAINED_AT)
        cases: list[Json] = []
        for number in range(least, least + 1 if most is None else int(most) + 1):
            free = range(max(0, min(longest - len(first), _num_places(number))))
            for chosen in itertools.combinations(free, number):
                end = chosen[-1] + 1 if chosen else 0
                middle = [contained if i in chosen else others for i in range(end)]
                parts = [*first, *middle]
                if any(part is False for part in parts):
                    continue
                case = {**array, "prefixItems": parts, "items": others}
                cases.append({**case, "minItems": max(len(parts), array.get("minItems", 0))})
        self._require(bool(cases), place, "no array satisfies it")
        return _any_of(case for case in cases)

    # -- objects -----------------------------------------------------------------------------------

    def _object(
        self, schema: Mapping[str, Json], at: str, *, is_closed: bool, is_merged: bool
    ) -> Json:
        properties = self._mapping(schema, "properties", f"{at}/properties")
        patterns = self._mapping(schema, "patternProperties", f"{at}/patternProperties")
        required = schema.get("required", [])
        # Draft 3 and careless writers have a boolean here, at the property itself.
        self._require(
            isinstance(required, list) and all(isinstance(name, str) for name in required),
            f"{at}/required",
            "a list of names is expected",
        )
        others, others_at = schema.get("additionalProperties"), f"{at}/additionalProperties"
        if others is None and "unevaluatedProperties" in schema:
            others, others_at = schema["unevaluatedProperties"], f"{at}/unevaluatedProperties"
            self._require(not is_merged, others_at, "beside other schemas it is not supported")
        if others is None:
            has_enough = int(schema.get("minProperties", 0)) <= len(properties)
            others = not (is_closed and "properties" in schema and has_enough)
        out: dict[str, Json] = {"type": "object"}

        # llguidance adds patterns' schemas to those of listed properties that they match, and
        # multiplies the steps of both in 32 bits.
        parts = [*properties.values(), *patterns.values()]
        steps_meet = bool(properties and patterns) and '"multipleOf"' in json.dumps(parts)

        def inner(part: Json, place: str) -> Json:
            return self.schema(
                part,
                place,
                is_closed=self._is_closed and not is_merged,
                is_merged=is_merged or steps_meet,
            )

        named = {
            name: inner(part, f"{at}/properties/{escaped(name)}")
            for name, part in properties.items()
        }
        free: dict[str, Json] = {}
        for given, part in patterns.items():
            place = f"{at}/patternProperties/{escaped(given)}"
            pattern = self._pattern(given, place)
            if has_names(pattern, but=[*named]):
                # llguidance adds this to the listed properties that match the pattern.
                free[pattern] = inner(part, place)
                continue
            for name in named:
                if has_names(pattern, but=named.keys() - {name}):
                    own = properties[name], f"{at}/properties/{escaped(name)}"
                    named[name] = self._all([own, (part, place)])
        if "propertyNames" in schema:
            names, place = schema["propertyNames"], f"{at}/propertyNames"
            rest = (
                self._for_all_names(free, {*patterns}, names, place)
                if free
                else inner(others, others_at)
            )
            named, free = self._with_names(names, named, rest, place)
            others = False
        for name in required:
            if name in named or free or is_merged or others is not False:
                continue
            is_left_open = not {"additionalProperties", "propertyNames"} & schema.keys()
            message = f"{name!r} is required, but no such property is described"
            self._require(is_left_open, f"{at}/required", message)
            named[name] = inner(True, others_at)
        if named:
            out["properties"] = named
        if free:
            out["patternProperties"] = free
        if required:
            out["required"] = list(dict.fromkeys(required))
        if others is not True or not is_merged:
            out["additionalProperties"] = inner(others, others_at)
        return self._counted(out, schema, at)

    def _counted(self, out: dict[str, Json], schema: Mapping[str, Json], at: str) -> Json:
        """Adds bounds of the number of properties. Each allowed set of optional properties is a
        case.
        """
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        required, listed = out.get("required", []), out.get("properties", {})
        if most is None and least <= len(required):
            return out
        # Two properties with one name count once, so of freely named properties only one counts.
        is_free = "patternProperties" in out or out.get("additionalProperties", True) is not False
        optional = [name for name in listed if name not in required and listed[name] is not False]
        if 1 << len(optional) > MAX_CASES:
            message = "is not supported beside so many optional properties"
            self._require(
                most is None and least == 1 and not is_free, f"{at}/minProperties", message
            )
            return {**out, "minProperties": least}
        cases: list[Json] = []
        for number in range(len(optional) + 1):
            count = len(required) + number
            if least > count + is_free or (most is not None and count > most):
                continue
            for chosen in itertools.combinations(optional, number):
                left = {name: False for name in optional if name not in chosen}
                case = {**out, "required": [*required, *chosen], "properties": {**listed, **left}}
                if is_free and least > count:
                    case["minProperties"] = least
                if is_free and most is not None:
                    case["maxProperties"] = int(most)
                cases.append(case)
        name = "minProperties" if least else "maxProperties"
        self._require(
            bool(cases), f"{at}/{name}", "no object with the listed properties has so many or few"
        )
        return _any_of(cases)

    def _for_all_names(
        self, free: Mapping[str, Json], given: set[str], names: Json, at: str
    ) -> Json:
        """The schema of `patternProperties` that holds for all names which may come.

        Args:
            free: By pattern, rewritten.
            given: The patterns as they are in the schema.
        """
        has_no_empty = not self._valid([""], {"allOf": [names]}, at)
        is_all = given <= {*_ALL_NAMES, *(_NAMES if has_no_empty else ())}
        choices = self._choices(names, at)
        is_same = choices is not None and choices == ([], [*free])
        self._require(len(free) == 1 and (is_all or is_same), at, _BESIDE_PATTERNS)
        return next(iter(free.values()))

    def _with_names(
        self, names: Json, named: Mapping[str, Json], others: Json, at: str
    ) -> tuple[dict[str, Json], dict[str, Json]]:
        """Properties by name and by pattern whose names satisfy a schema."""
        choices = self._choices(names, at)
        if choices is None:
            return dict(named), {".*": others} if others is not False else {}
        values, patterns = choices
        kept = {name: part for name, part in named.items() if name in values}
        left = named.keys() - kept.keys()
        if left and patterns:
            has_format = isinstance(names, dict) and "format" in names
            self._require(not has_format, at, "a format beside properties is not supported")
            valid = self._valid([*left], {"allOf": [names]}, at)
            kept |= {name: part for name, part in named.items() if name in valid}
        if others is False:
            return kept, {}
        kept |= {value: others for value in values if value not in named}
        pattern = patterns[0] if len(patterns) == 1 else "|".join(f"(?:{one})" for one in patterns)
        return kept, {pattern: others} if patterns else {}

    def _choices(self, names: Json, at: str) -> tuple[list[str], list[str]] | None:
        """The values and patterns, one of which a name under a schema equals or matches; None: any
        name may come.
        """
        names = self.behind_references(names, at)
        if isinstance(names, bool):
            return None if names else ([], [])
        self._require(isinstance(names, dict), at, "a schema (an object or a boolean) is expected")
        if "string" not in self._kinds(names.get("type", "string"), f"{at}/type"):
            return [], []
        if "enum" in names or "const" in names:
            values = (self._listed(names, at) or {"enum": []})["enum"]
            return [value for value in values if isinstance(value, str)], []
        says = OF_TYPE["string"]
        own = {name: value for name, value in names.items() if name in says}
        combined = [name for name in COMBINING if name in names]
        parts = [self._own_choices(own, at)] if own else []
        for name in combined:
            parts.append(self._combined_choices(names[name], name, f"{at}/{name}"))
        parts = [part for part in parts if part is not None]
        self._require(len(parts) < 2, at, "several conditions of names at once are not supported")
        return parts[0] if parts else None

    def _combined_choices(
        self, given: Json, keyword: str, at: str
    ) -> tuple[list[str], list[str]] | None:
        if keyword == "not":
            opposite = negated(self.behind_references(given, at), self.behind_references)
            self._require(opposite is not None, at, _NOT_POSITIVE)
            return self._choices(opposite, at)
        is_known = keyword in ("anyOf", "oneOf", "allOf", "$ref")
        self._require(is_known, at, "is not supported for names")
        if keyword == "$ref":
            return self._choices(self._resolve(given, at)[1], at)
        self._require(isinstance(given, list) and bool(given), at, "a list of schemas is expected")
        if keyword == "oneOf":
            pairs = itertools.combinations(given, 2)
            is_apart = all(are_disjoint(*pair, self.behind_references) for pair in pairs)
            self._require(is_apart, at, _OVERLAP)
        parts = [self._choices(part, f"{at}/{i}") for i, part in enumerate(given)]
        known = [part for part in parts if part is not None]
        if keyword == "allOf":
            self._require(len(known) < 2, at, "several conditions of names are not supported")
            return known[0] if known else None
        if len(known) < len(parts):
            return None
        values, patterns = ([one for part in known for one in part[i]] for i in (0, 1))
        return list(dict.fromkeys(values)), list(dict.fromkeys(patterns))

    def _own_choices(
        self, keywords: Mapping[str, Json], at: str
    ) -> tuple[list[str], list[str]] | None:
        name = keywords.get("format")
        if name in formats.BUILT_IN and "pattern" not in keywords:
            pattern = formats.OF_NAMES.get(formats.BUILT_IN[name])
            self._require(pattern is not None, f"{at}/format", "is not supported for names")
            keywords = {"pattern": f"^(?:{pattern})$", **keywords}
        if "pattern" in keywords:
            keywords = {key: value for key, value in keywords.items() if key != "format"}
        written = self._string(keywords, at)
        if "format" in keywords and "maxLength" not in keywords:
            written.pop("maxLength", None)  # a bound for texts of random length
        rest = written.keys() - {"type"}
        if not rest:
            return None
        if rest == {"pattern"}:
            return [], [written["pattern"]]
        message = "patterns beside other conditions of names are not supported"
        self._require(rest <= {"minLength", "maxLength"}, at, message)
        bounds = f"{written.get('minLength', 0)},{written.get('maxLength', '')}"
        return [], [rf"^[\x{{0}}-\x{{10ffff}}]{{{bounds}}}$"]

    # -- checks ------------------------------------------------------------------------------------

    def _list(self, schema: Mapping[str, Json], name: str, at: str) -> list[Json]:
        given = schema[name]
        self._require(isinstance(given, list) and bool(given), at, "a list of schemas is expected")
        return list(given)

    def _mapping(self, schema: Mapping[str, Json], name: str, at: str) -> dict[str, Json]:
        given = schema.get(name, {})
        self._require(isinstance(given, dict), at, "an object is expected")
        return dict(given)

    @staticmethod
    def _require(is_right: bool, at: str, message: str) -> None:
        if not is_right:
            raise ValueError(_at(at, message))


def _implied_types(schema: Mapping[str, Json]) -> set[str]:
    """The types that a schema's keywords are about."""
    return {kind for kind, names in OF_TYPE.items() if set(names) & schema.keys()}


def _is_integer(schema: Json) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "integer"


def _is_any_number(schema: Json) -> bool:
    is_number = isinstance(schema, dict) and schema.get("type") == "number"
    return is_number and not any(name in schema for name in OF_TYPE["number"])


def _properties(schema: Json) -> dict[str, Json]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def _num_places(number: int) -> int:
    """At how many places a number of items may be, for at most `MAX_CASES` choices."""
    places = MAX_CONTAINED_AT
    while places > number and math.comb(places, number) > MAX_CASES:
        places -= 1
    return max(places, number)


def _outside(one: Json, other: Json) -> list[Json]:
    """Schemas of objects under one schema that have a property which the other does not allow."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return []
    is_shut = other.get("additionalProperties") is False and "patternProperties" not in other
    if not is_shut or "$ref" in other:
        return []
    names = one.get("properties", {}).keys() - other.get("properties", {}).keys()
    return [{"type": "object", "required": [name]} for name in sorted(names)]


def _either_of(schema: Json, others: list[Json]) -> Json:
    """A schema of what at least one of the schemas allows; None if there are no schemas."""
    found = ([schema] if schema is not None else []) + others
    return {"anyOf": found} if len(found) > 1 else found[0] if found else None


def _is_vacuous(asserting: Mapping[str, Json]) -> bool:
    """Whether keywords exclude nothing, whatever type a value has."""
    return all(
        any(type(value) is type(known) and value == known for known in _VACUOUS.get(name, ()))
        for name, value in asserting.items()
    )


def _any_of(parts: Iterable[Json]) -> Json:
    left = [part for part in parts if part is not False]
    if any(part is True for part in left):
        return True
    if len(left) < 2:
        return left[0] if left else False
    return {"anyOf": left}


def _at(at: str, message: str) -> str:
    return f"at {at}: {message}"


def _anchored(schema: Json, anchor: str, at: str) -> Iterable[tuple[str, Json]]:
    if isinstance(schema, dict):
        named = (schema.get("$anchor"), schema.get("$dynamicAnchor"))
        if anchor in named or f"#{anchor}" in (schema.get("$id"), schema.get("id")):
            yield at, schema
    items = schema.items() if isinstance(schema, dict) else enumerate(schema)
    for name, part in items:
        if isinstance(part, dict | list):
            yield from _anchored(part, anchor, f"{at}/{escaped(str(name))}")


def _has_base(schema: Json, *, is_root: bool = True) -> bool:
    """Whether a schema inside this one has an `$id`, which references may name."""
    if isinstance(schema, list):
        return any(_has_base(part, is_root=False) for part in schema)
    if not isinstance(schema, dict):
        return False
    own = schema.get("$id")
    if not is_root and isinstance(own, str) and not own.startswith("#"):
        return True
    return any(
        _has_base(part, is_root=False)
        for name, part in schema.items()
        if isinstance(part, dict | list) and name not in ("enum", "const", "examples", "default")
    )


def _can_be_written(value: Json) -> bool:
    if isinstance(value, str):
        return all(
            c in _ESCAPED or (c >= " " and c != "\x7f" and not "\ud800" <= c <= "\udfff")
            for c in value
        )
    if isinstance(value, list):
        return all(map(_can_be_written, value))
    if isinstance(value, dict):
        return all(map(_can_be_written, itertools.chain(value, value.values())))
    return isinstance(value, bool | None) or check_number(value)


def _plain(value: Json) -> Json:
    """The value with whole numbers as integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value
