"""The keywords of JSON Schema that assert something, and the words of a schema that do not."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from weft.contract import schema_formats as formats

Json = Any

OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"),
    ),
    "array": (
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "additionalItems", "unevaluatedItems"),
    ),
    "string": ("minLength", "maxLength", "pattern", "format", "contentEncoding"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
ASSERTING = frozenset({"type", *itertools.chain(*OF_TYPE.values())})
COMBINING = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
NEVER = ("$dynamicRef", "$recursiveRef")
"""Keywords that are refused."""
KEYWORDS = frozenset((*ASSERTING, *COMBINING, *NEVER, "enum", "const"))
"""Keywords that assert something. All other words of a schema are annotations."""
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly"),
        *("writeOnly", "contentMediaType", "contentSchema", "then", "else", "definitions"),
        *("id", "discriminator", "externalDocs", "xml", "strict"),
    )
)
"""Annotations of the standard, of OpenAPI, and of OpenAI's bodies."""
_OF_NAMES = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords whose value has a schema for each name, so that a name in it is no keyword."""
_OF_SCHEMAS = frozenset(
    (
        *("additionalProperties", "propertyNames", "unevaluatedProperties", "items", "prefixItems"),
        *("contains", "additionalItems", "unevaluatedItems", "allOf", "anyOf", "oneOf", "not"),
        *("if", "then", "else"),
    )
)
"""Keywords whose value is a schema or a list of schemas."""


class Unknown(NamedTuple):
    """A part of a schema that asserts nothing because JSON Schema does not define it."""

    name: str
    """The keyword, or `format` with its value."""
    at: str
    """JSON pointer of its first place."""
    meant: str
    """The keyword that it seems to be a misspelling of; empty: none."""


def unknown_parts(schema: Json) -> list[Unknown]:
    """Unknown keywords and formats of a schema, each once.

    Words that begin with `x-` or `$` are extensions and count as known.
    """
    found: dict[str, Unknown] = {}
    for name, at in _unknown(schema, "#"):
        found.setdefault(name, Unknown(name, at, _meant(name)))
    return [*found.values()]


def _unknown(schema: Json, at: str) -> Iterator[tuple[str, str]]:
    """Names and places of unknown words. Does not recurse, however deep the schema is."""
    left: list[tuple[Json, str]] = [(schema, at)]
    while left:
        here, place = left.pop()
        if isinstance(here, list):
            left += [(part, f"{place}/{i}") for i, part in enumerate(here)][::-1]
            continue
        if not isinstance(here, dict):
            continue
        inner: list[tuple[Json, str]] = []
        for name, value in here.items():
            there = f"{place}/{escaped(name)}"
            if name in _OF_NAMES and isinstance(value, dict):
                inner += [(part, f"{there}/{escaped(key)}") for key, part in value.items()]
            elif name in _OF_SCHEMAS:
                inner.append((value, there))
            elif name == "format" and isinstance(value, str) and not formats.is_known(value):
                yield f"format: {value}", there
            elif not (name in KEYWORDS or name in _ANNOTATIONS or name.startswith(("x-", "$"))):
                yield name, there
        left += inner[::-1]


@functools.lru_cache(maxsize=1024)
def _meant(name: str) -> str:
    if len(name) > 40 or name.startswith("format: "):
        return ""
    lowered = {keyword.lower(): keyword for keyword in KEYWORDS}
    plain = name.lower().replace("_", "").replace("-", "")
    close = difflib.get_close_matches(plain, lowered, n=1, cutoff=0.82)
    return lowered[close[0]] if close else ""


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
