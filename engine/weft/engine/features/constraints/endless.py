"""Schemas of values that go on for ever, as of an object that must contain another of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Any
"""A part of a schema as `schema` rewrites it."""
_OF_DEFINITIONS = "#/$defs/"


def without_endless(schema: Json, definitions: Mapping[str, Json]) -> tuple[Json, dict[str, Json]]:
    """A schema and its definitions without the parts that no finite value satisfies, so that a
    model cannot begin what it cannot end. False: no finite value satisfies the schema.

    Args:
        schema: Refers to `definitions` alone, as these do.
    """
    ending = set[str]()
    left = set(definitions)
    while found := {name for name in left if _ends(definitions[name], ending)}:
        ending |= found
        left -= found
    if not left:
        return schema, dict(definitions)
    return _pruned(schema, ending), {name: _pruned(definitions[name], ending) for name in ending}


def _ends(schema: Json, ending: set[str]) -> bool:
    """Whether a finite value may satisfy it, if values of the definitions `ending` may be finite.
    Combined schemas are looked at one by one.
    """
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema:
        return schema["$ref"].removeprefix(_OF_DEFINITIONS) in ending
    if "anyOf" in schema:
        return any(_ends(part, ending) for part in schema["anyOf"])
    if "allOf" in schema:
        return all(_ends(part, ending) for part in schema["allOf"])
    if schema.get("type") == "object":
        # A required name that `properties` lacks may match a pattern. The schemas of patterns are
        # not checked, so such a part counts as one that ends.
        others = "patternProperties" in schema or schema.get("additionalProperties", True)
        listed = schema.get("properties", {})
        wanted = [listed.get(name, others) for name in schema.get("required", ())]
        return all(_ends(part, ending) for part in wanted)
    if schema.get("type") == "array":
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        wanted = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        return all(_ends(part, ending) for part in wanted)
    return True


def _pruned(schema: Json, ending: set[str]) -> Json:
    if not _ends(schema, ending):
        return False
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    if "anyOf" in out:
        parts = [_pruned(part, ending) for part in out["anyOf"]]
        out["anyOf"] = [part for part in parts if part is not False]
    for name in ("allOf", "prefixItems"):
        if name in out:
            out[name] = [_pruned(part, ending) for part in out[name]]
    for name in ("properties", "patternProperties"):
        if name in out:
            out[name] = {key: _pruned(part, ending) for key, part in out[name].items()}
    for name in ("items", "additionalProperties"):
        if name in out:
            out[name] = _pruned(out[name], ending)
    return out
