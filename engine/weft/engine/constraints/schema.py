"""Rewrites JSON schemas so that the grammar compiler enforces them exactly, or refuses them.

The compiler ignores what it does not know, which would give answers that the schema forbids. So a
schema is brought into the form that it knows, and refused, with the place, where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jsonschema import validators
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from weft.engine.constraints.numbers import NUMERIC, check_listed, prepare_numbers
from weft.engine.constraints.patterns import placeholder, prepare_pattern

Json = Any
"""A parsed JSON value of any type."""
Keep = Callable[[str, str], str]
"""Takes a pattern and its place, and returns what stands for it."""

_NEVER = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef"),
)
"""Keywords that cannot be expressed as a grammar here."""
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"),
    ),
    "array": (
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        *("additionalItems", "unevaluatedItems"),
    ),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": NUMERIC,
}
_BOUNDS = (
    *(("minLength", "maxLength"), ("minItems", "maxItems")),
    *(("minProperties", "maxProperties"), ("minimum", "maximum")),
)
_DECISIVE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords beside which the compiler ignores all others."""
_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "uuid"),
)
"""Formats that are enforced; others are annotations, as in the standard."""
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOURS})"
_WRITTEN = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""Formats of RFC 3339 as patterns: the compiler's own let every month have 31 days. No leap
seconds, which few libraries read.
"""
_TYPE_NAMES: dict[type, str] = {
    **{bool: "boolean", int: "number", float: "number", str: "string"},
    **{dict: "object", list: "array", type(None): "null"},
}
_WITH_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_WITH_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_WITH_SCHEMA = (
    *("items", "additionalProperties", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems"),
)


class PreparedSchema(NamedTuple):
    """A schema in the form that the compiler knows."""

    text: str
    """JSON; instead of patterns it has `placeholder`s."""
    patterns: tuple[str, ...]
    """Regular expressions of strings, by the numbers of their placeholders."""


def prepare_schema(text: str) -> PreparedSchema:
    """Rewrites a schema, given as JSON text, for compilation.

    Raises:
        ValueError: It is no schema, or asks for what cannot be enforced; the message says where.
    """
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise ValueError(message) from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("is not a JSON schema: an object is expected")
    try:
        preparer = _Preparer(schema)
        prepared = json.dumps(preparer.prepare(schema, "$"))
        return PreparedSchema(prepared, tuple(preparer.patterns))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


class _Preparer:
    """Rewrites one JSON schema into the subset that the grammar compiler supports."""

    def __init__(self, root: Json) -> None:
        if isinstance(root, dict) and not isinstance(root.get("$schema", ""), str):
            raise ValueError(_at("$.$schema", "a string is expected"))
        draft: type[Validator] = validators.validator_for(
            root, default=validators.Draft202012Validator
        )
        error = best_match(draft(draft.META_SCHEMA).iter_errors(root))
        if error is not None:
            raise ValueError(_at(error.json_path, error.message))
        self._root = root
        self._draft = draft
        self.patterns: list[str] = []
        """Patterns of strings met so far, prepared."""

    def _pattern(self, pattern: str, where: str) -> str:
        """Keeps a pattern; returns what stands for it."""
        self.patterns.append(prepare_pattern(pattern, where))
        return placeholder(len(self.patterns) - 1)

    def prepare(self, schema: Json, where: str) -> Json:
        """Rewrites the schema at `where`."""
        if isinstance(schema, bool):
            return schema
        for name in _NEVER:
            if name in schema:
                raise ValueError(_at(f"{where}.{name}", "this keyword is not supported"))
        if isinstance(schema.get("items"), list):
            schema = _with_prefix_items(schema)
        if "enum" in schema or "const" in schema:
            return self._values(schema, where)
        schema = self._parts(schema, where)
        decisive = [name for name in _DECISIVE if name in schema]
        if decisive:
            self._check_siblings(schema, decisive, where)
            return schema
        return self._typed(schema, where)

    def _parts(self, schema: Mapping[str, Json], where: str) -> dict[str, Json]:
        """Rewrites the schemas inside a schema."""
        out = dict(schema)
        for name in _WITH_SCHEMAS:
            if name in out:
                out[name] = {
                    key: self.prepare(part, f"{where}.{name}.{key}")
                    for key, part in out[name].items()
                }
        for name in _WITH_LISTS:
            if name in out:
                parts = enumerate(out[name])
                prepared = [self.prepare(part, f"{where}.{name}[{i}]") for i, part in parts]
                out[name] = [{} if part is True else part for part in prepared]
        for name in _WITH_SCHEMA:
            if name in out:
                out[name] = self.prepare(out[name], f"{where}.{name}")
        return out

    def _values(self, schema: Mapping[str, Json], where: str) -> dict[str, Json]:
        """The values of an enum or const that the other keywords allow."""
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        inner = {name: value for name, value in schema.items() if name != "$defs"}
        validator = self._draft(self._root).evolve(schema=inner)
        valid = [value for value in values if validator.is_valid(value)]
        if not valid:
            raise ValueError(_at(where, "none of the listed values is allowed by the rest"))
        check_listed(valid, where)
        return {"enum": valid, **{n: schema[n] for n in ("$defs", "definitions") if n in schema}}

    def _check_siblings(self, schema: dict[str, Json], decisive: list[str], where: str) -> None:
        asserting = {name for names in _OF_TYPE.values() for name in names} | {"type"}
        others = [n for n in schema if n in asserting or (n in _DECISIVE and n != decisive[0])]
        if others:
            message = f"beside {decisive[0]} it is not supported; put it inside"
            raise ValueError(_at(f"{where}.{others[0]}", message))
        if decisive[0] == "allOf" and len(schema["allOf"]) > 1:
            raise ValueError(_at(f"{where}.allOf", "more than one schema is not supported"))
        if decisive[0] == "oneOf":
            self._check_disjoint(schema["oneOf"], f"{where}.oneOf")
            schema["anyOf"] = schema.pop("oneOf")
        if decisive[0] == "$ref" and not str(schema["$ref"]).startswith(("#/", "#")):
            raise ValueError(_at(f"{where}.$ref", "only references into the schema are supported"))
        if decisive[0] == "$ref" and schema["$ref"] != "#":
            self._resolve(schema["$ref"], f"{where}.$ref")

    def _resolve(self, reference: str, where: str) -> Json:
        """The subschema that a local reference points to."""
        found = self._root
        for part in reference.removeprefix("#").split("/")[1:] or ["?"]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise ValueError(_at(where, f"{reference!r} names nothing in the schema"))
        return found

    def _check_disjoint(self, branches: list[Json], where: str) -> None:
        """Raises unless at most one branch can hold: then oneOf is anyOf."""
        resolved = [self._behind_references(branch, where) for branch in branches]
        for i, first in enumerate(resolved):
            for second in resolved[:i]:
                if not _are_disjoint(first, second, lambda s: self._behind_references(s, where)):
                    message = "the schemas may overlap; use anyOf, or tell them apart by a constant"
                    raise ValueError(_at(where, message))

    def _behind_references(self, schema: Json, where: str) -> Json:
        for _ in range(32):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._root if schema["$ref"] == "#" else self._resolve(schema["$ref"], where)
        raise ValueError(_at(where, "a chain of references has no end"))

    def _typed(self, schema: dict[str, Json], where: str) -> dict[str, Json]:
        """Rewrites a schema of one or more types, named or implied by its keywords."""
        if "type" not in schema:
            implied = [kind for kind, names in _OF_TYPE.items() if set(names) & schema.keys()]
            if not implied:
                return schema
            schema["type"] = implied[0] if len(implied) == 1 else implied
        for least, most in _BOUNDS:
            if least in schema and most in schema and schema[least] > schema[most]:
                message = f"{schema[most]} is below {least}, {schema[least]}"
                raise ValueError(_at(f"{where}.{most}", message))
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        prepared = prepare_numbers(schema, types, where)
        if prepared is not schema:
            return {**self.prepare(prepared, where)}
        if "string" in types:
            _prepare_string(schema, where, self._pattern)
        if "object" in types:
            _prepare_object(schema, where, self._pattern)
        if "array" in types:
            _prepare_array(schema, where)
        return schema


def _with_prefix_items(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Rewrites tuples as drafts up to 2019-09 wrote them."""
    out = {name: value for name, value in schema.items() if name != "additionalItems"}
    out["prefixItems"] = out.pop("items")
    if "additionalItems" in schema:
        out["items"] = schema["additionalItems"]
    return out


def _prepare_string(schema: dict[str, Json], where: str, keep: Keep) -> None:
    is_bounded = schema.get("minLength", 0) > 0 or "maxLength" in schema
    if schema.get("format") not in _FORMATS:
        schema.pop("format", None)
    for name in ("pattern", "format"):
        if name in schema and is_bounded:
            raise ValueError(_at(f"{where}.{name}", "is not supported beside a bound of length"))
    if "pattern" in schema:
        schema["pattern"] = keep(schema["pattern"], f"{where}.pattern")
        if "format" in schema:
            raise ValueError(_at(f"{where}.format", "is not supported beside a pattern"))
    elif schema.get("format") in _WRITTEN:
        pattern = f"^{_WRITTEN[schema.pop('format')]}$"
        schema["pattern"] = keep(pattern, f"{where}.format")


def _prepare_object(schema: dict[str, Json], where: str, keep: Keep) -> None:
    properties = schema.get("properties", {})
    has_patterns = bool(schema.get("patternProperties"))
    if not properties and not has_patterns and "propertyNames" not in schema:
        schema.setdefault("additionalProperties", True)
    others = schema.get("additionalProperties", False)
    if has_patterns:
        schema["patternProperties"] = {
            keep(pattern, f"{where}.patternProperties.{pattern}"): part
            for pattern, part in schema["patternProperties"].items()
        }
        if others is not False or len(schema["patternProperties"]) > 1 or properties:
            message = "is supported alone only: one pattern, without other properties"
            raise ValueError(_at(f"{where}.patternProperties", message))
    if "propertyNames" in schema and (properties or has_patterns):
        raise ValueError(_at(f"{where}.propertyNames", "is not supported beside other properties"))
    missing = [name for name in schema.get("required", []) if name not in properties]
    if missing and (others is False or has_patterns):
        message = f"{missing[0]!r} is required, but no such property is described"
        raise ValueError(_at(f"{where}.required", message))
    if missing:
        schema["properties"] = {**properties, **dict.fromkeys(missing, others)}
    # The same name twice would be one property: counting names that are free is not enough.
    is_free = has_patterns or others is not False
    if is_free and schema.get("minProperties", 0) > max(1, len(schema.get("required", []))):
        message = "is supported up to the number of required properties where names are free"
        raise ValueError(_at(f"{where}.minProperties", message))


def _prepare_array(schema: dict[str, Json], where: str) -> None:
    if schema.pop("uniqueItems", False):
        raise ValueError(_at(f"{where}.uniqueItems", "this keyword is not supported"))
    if "prefixItems" not in schema:
        schema.setdefault("items", True)


def _are_disjoint(first: Json, second: Json, resolve: Callable[[Json], Json]) -> bool:
    """Whether no value is valid under both schemas, as far as types and constants show."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first is False or second is False
    listed = [_listed(schema) for schema in (first, second)]
    if listed[0] and listed[1]:
        return not any(_same(a, b) for a in listed[0] for b in listed[1])
    types = [_types_of(schema) for schema in (first, second)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types[0] != {"object"} or types[1] != {"object"}:
        return False
    shared = set(first.get("required", ())) & set(second.get("required", ()))
    pairs = (
        (resolve(first.get("properties", {}).get(n)), resolve(second.get("properties", {}).get(n)))
        for n in shared
    )
    return any(
        isinstance(a, dict) and isinstance(b, dict) and _are_disjoint(a, b, resolve)
        for a, b in pairs
    )


def _listed(schema: Mapping[str, Json]) -> list[Json]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _same(first: Json, second: Json) -> bool:
    """Whether two values are equal in JSON, where 1 and 1.0 are, and neither is `true`."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[n], second[n]) for n in first)
    return bool(first == second)


def _types_of(schema: Mapping[str, Json]) -> set[str]:
    """Names of the JSON types that a schema allows; empty: unknown."""
    if listed := _listed(schema):
        return {_TYPE_NAMES[type(value)] for value in listed}
    given = schema.get("type", [])
    names = [given] if isinstance(given, str) else given
    return {"number" if name == "integer" else name for name in names}


def _at(where: str, message: str) -> str:
    return f"at {where}: {message}"
