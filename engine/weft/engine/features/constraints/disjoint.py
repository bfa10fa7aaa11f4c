"""Finds JSON schemas that have no value in common, and negates simple schemas."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from weft.contract.schema_keywords import KEYWORDS
from weft.engine.features.constraints.excluded import excluded_steps
from weft.engine.features.constraints.names import have_match_in_common
from weft.engine.features.constraints.patterns import convert_pattern

Json = Any
Resolve = Callable[[Json], Json]
"""Follows a schema's references to the schema that they name."""

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_SPELLED = re.compile(r"\^(?:(?P<one>[\w -]+)|\((?:\?:)?(?P<several>[\w -]+(?:\|[\w -]+)*)\))\$")
"""Patterns of one or more strings: `^success$`, `^(fail|error)$`."""
_OF_ONE_CLASS = re.compile(
    r"\^\[(?P<flip>\^?)(?P<kinds>(?:[^\\\[\]]|\\.)+)\]"
    r"(?:(?P<sign>[+*])|\{(?P<least>\d{1,4})(?P<comma>,(?P<most>\d{1,4})?)?\})\$"
)
"""Patterns of strings of one kind of characters: `^[0-9a-f]{24}$`, `^[^/]+$`."""
_WITH_ONE_OF = re.compile(
    r"\(*(?:\[(?P<flip>\^?)(?P<kinds>(?:[^\\\[\]]|\\.)+)\]|(?P<single>\\[^\w]|[\w ]))\)*"
)
"""Patterns of strings that have a character of one kind: `[^a-z]`, `(\\$)`."""
_BELOW = {"minLength": "maxLength", "minItems": "maxItems", "minProperties": "maxProperties"}
_ABOVE = {least: most for most, least in _BELOW.items()}
_OF_COUNT = {"Length": "string", "Items": "array", "Properties": "object"}
_BEYOND = {
    **{"minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum"},
    **{"exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum"},
}


def type_names(value: Json) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    if value is None:
        return {"null"}
    return {
        "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    }


def same(first: Json, second: Json) -> bool:
    """Whether two values are equal in JSON: 1 equals 1.0, and neither equals `true`."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[n], second[n]) for n in first)
    return bool(first == second)


def are_disjoint(
    first: Json, second: Json, resolve: Resolve, around: Mapping[str, Json] | None = None
) -> bool:
    """Whether no value is valid under both schemas, as far as types and constants show. `around`
    has keywords that hold in addition to both.
    """
    first, second = _plain(resolve(first)), _plain(resolve(second))
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first is False or second is False
    for one, other in ((first, second), (second, first)):
        parts = one.get("allOf")
        if isinstance(parts, list) and any(
            are_disjoint(part, other, resolve, around) for part in parts
        ):
            return True
        for name in ("anyOf", "oneOf"):
            parts = one.get(name)
            if isinstance(parts, list) and all(
                are_disjoint(part, other, resolve, around) for part in parts
            ):
                return True
    listed = [_listed(schema) for schema in (first, second)]
    if listed[0] is not None and listed[1] is not None:
        return not any(same(a, b) for a in listed[0] for b in listed[1])
    types = [_types_of(schema, around or {}) for schema in (first, second)]
    if not types[0] & types[1]:
        return True
    if types[0] & types[1] == {"number"} and _are_apart(first, second, resolve):
        return True
    if types[0] & types[1] == {"string"} and not _have_strings(first, second):
        return True
    if types[0] & types[1] != {"object"}:
        return False
    return _differ_in_a_property(first, second, resolve)


def _plain(schema: Json) -> Json:
    """The schema with an enum where a pattern spells all strings that it allows."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return schema
    pattern = schema.get("pattern")
    spelled = _SPELLED.fullmatch(pattern) if isinstance(pattern, str) else None
    if spelled is None or "enum" in schema:
        return schema
    rest = {name: value for name, value in schema.items() if name != "pattern"}
    return {**rest, "enum": (spelled["one"] or spelled["several"]).split("|")}


def _differ_in_a_property(
    first: Mapping[str, Json], second: Mapping[str, Json], resolve: Resolve
) -> bool:
    """Whether a property that one of two schemas requires is different in the other schema, or is
    not allowed there.
    """
    for one, other in ((first, second), (second, first)):
        names = one.get("required", ())
        for name in names if isinstance(names, list) else ():
            mine, yours = (_property(schema, name) for schema in (one, other))
            if are_disjoint(mine, yours, resolve):
                return True
    return False


def _property(schema: Mapping[str, Json], name: str) -> Json:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    is_shut = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return not is_shut


def _are_apart(first: Mapping[str, Json], second: Mapping[str, Json], resolve: Resolve) -> bool:
    for low, high in ((first, second), (second, first)):
        if low.get("type") == "integer" and _excludes_whole(high, resolve):
            return True
        most, least = low.get("maximum"), high.get("minimum")
        if isinstance(most, int | float) and isinstance(least, int | float) and most < least:
            return True
    return False


def _excludes_whole(schema: Mapping[str, Json], resolve: Resolve) -> bool:
    found = excluded_steps(resolve(schema.get("not")))
    return found is not None and found[0] == 1


def _have_strings(first: Mapping[str, Json], second: Mapping[str, Json]) -> bool:
    one, other = first.get("pattern"), second.get("pattern")
    if not (isinstance(one, str) and isinstance(other, str)):
        return True
    try:
        return have_match_in_common(convert_pattern(one), convert_pattern(other))
    except ValueError:
        return True


def _listed(schema: Mapping[str, Json]) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types_of(schema: Mapping[str, Json], around: Mapping[str, Json]) -> set[str]:
    if (listed := _listed(schema)) is not None:
        return {name for value in listed for name in type_names(value)} - {"integer"}
    given = schema.get("type", around.get("type", list(_TYPES)))
    names = given if isinstance(given, list) else [given]
    return {"number" if name == "integer" else str(name) for name in names}


def negated(schema: Json, resolve: Resolve) -> Json:
    """Negates a simple schema; None if that is not possible. No value is valid under both; some
    values may be valid under neither.
    """
    schema = _plain(resolve(schema))
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    found: list[Json] = []
    is_whole = True
    for name, value in schema.items():
        if name not in KEYWORDS or (name == "enum" and "const" in schema):
            continue
        opposites = _opposites(name, value, schema, resolve)
        is_whole = is_whole and opposites is not None
        found += opposites or ()
    if not found:
        return False if is_whole else None
    return found[0] if len(found) == 1 else {"anyOf": found}


def _opposites(
    name: str, value: Json, schema: Mapping[str, Json], resolve: Resolve
) -> list[Json] | None:
    """Schemas, one of which holds for each value that violates a keyword; None if unknown."""
    if name == "type":
        return _other_types(value)
    if name == "multipleOf" and excluded_steps({name: value}) is not None:
        return [{"type": "number", "not": {name: value}}]
    if name in ("const", "enum"):
        return _other_values([value] if name == "const" else value, schema.get("type"))
    if name == "required" and isinstance(value, list):
        return [{"type": "object", "properties": {each: False}} for each in value]
    if name == "properties" and isinstance(value, dict):
        opposites = {each: negated(part, resolve) for each, part in value.items()}
        found = [
            {"type": "object", "properties": {each: opposite}, "required": [each]}
            for each, opposite in opposites.items()
            if opposite is not None and opposite is not False
        ]
        return None if not found and None in opposites.values() else found
    if name == "pattern" and isinstance(value, str):
        return _other_characters(value)
    if name in _BELOW or name in _ABOVE:
        return _other_counts(name, value)
    if name in _BEYOND and isinstance(value, int | float) and not isinstance(value, bool):
        return [{"type": "number", _BEYOND[name]: value}]
    if name in ("anyOf", "allOf") and isinstance(value, list):
        of_parts = [negated(part, resolve) for part in value]
        if name == "anyOf":
            return None if None in of_parts else [{"allOf": of_parts}]
        return [opposite for opposite in of_parts if opposite is not None] or None
    if name == "not":
        return [value]
    return None


def _other_types(value: Json) -> list[Json]:
    given = {*value} if isinstance(value, list) else {value}
    left = [kind for kind in _TYPES if kind not in given]
    if "number" not in left or "integer" not in given:
        return [{"type": left}] if left else []
    left.remove("number")
    found: list[Json] = [{"type": left}] if left else []
    return [*found, {"type": "number", "not": {"type": "integer"}}]


def _other_counts(name: str, value: Json) -> list[Json] | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    kind = next(kind for what, kind in _OF_COUNT.items() if name.endswith(what))
    if name in _ABOVE:
        return [{"type": kind, _ABOVE[name]: value + 1}]
    return [{"type": kind, _BELOW[name]: value - 1}] if value else []


def _other_values(values: Json, kind: Json) -> list[Json] | None:
    if not isinstance(values, list):
        return None
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else [*_TYPES]
    found: list[Json] = []
    for each in kinds:
        alike = [value for value in values if each in type_names(value)]
        if not alike:
            found.append({"type": each})
        elif each == "boolean" and len({*alike}) == 1:
            found.append({"const": not alike[0]})
        elif each == "string":
            found.append({"type": "string", "pattern": _other_strings(alike)})
        elif each in ("integer", "number"):
            if all(value == int(value) for value in alike):
                found += _other_numbers(each, sorted(map(int, alike)))
        elif each == "array" and alike == [[]]:
            found.append({"type": "array", "minItems": 1})
        elif each == "object" and alike == [{}]:
            found.append({"type": "object", "minProperties": 1})
        # Other numbers, arrays and objects that are not listed cannot be described: none is
        # allowed.
    return found


def _other_numbers(kind: str, values: list[int]) -> list[Json]:
    found: list[Json] = [{"type": kind, "exclusiveMaximum": values[0]}]
    for low, high in itertools.pairwise(values):
        found.append({"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": high})
    return [*found, {"type": kind, "exclusiveMinimum": values[-1]}]


def _other_characters(pattern: str) -> list[Json] | None:
    if (found := _WITH_ONE_OF.fullmatch(pattern)) is not None:
        flip = "" if found["flip"] else "^"
        kinds = found["kinds"] or found["single"]
        return [{"type": "string", "pattern": f"^[{flip}{kinds}]*$"}]
    if (found := _OF_ONE_CLASS.fullmatch(pattern)) is None:
        return None
    flip = "" if found["flip"] else "^"
    others: list[Json] = [{"type": "string", "pattern": f"[{flip}{found['kinds']}]"}]
    least = int(found["least"] or found["sign"] == "+")
    most = found["most"] if found["comma"] else found["least"]
    if least:
        others.append({"type": "string", "maxLength": least - 1})
    if most:
        others.append({"type": "string", "minLength": int(most) + 1})
    return others


def _other_strings(values: list[str]) -> str:
    """A pattern of all other strings: each differs from the listed ones at some character."""
    rest: dict[str, list[str]] = {}
    for value in values:
        if value:
            rest.setdefault(value[0], []).append(value[1:])
    firsts = "".join(f"\\u{{{ord(first):x}}}" for first in rest)
    branches = [rf"[^{firsts}][^]*"] if firsts else ["[^]+"]
    branches += [
        rf"\u{{{ord(first):x}}}{_other_strings(tails)[1:-1]}" for first, tails in rest.items()
    ]
    if "" not in values:
        branches.append("")
    return f"^(?:{'|'.join(branches)})$"
