"""JSON schemas of all the kinds that are enforced: some as people write them, and random ones.

All are bounded, so that a model that writes at random comes to an end.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "été", "a b", 'quo"te', "back\\slash", "x_1", "items", "$ref", "名前")


def person() -> Schema:
    """A typical client's schema: nested objects, optional fields, an enum."""
    return {
        "type": "object",
        "title": "Person",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12, "description": "full"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
            "role": {"enum": ["admin", "user", "guest"]},
            "scores": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
        },
        "required": ["name", "age", "role"],
        "additionalProperties": False,
    }


def shapes() -> Schema:
    """A tagged union by references, as pydantic writes it."""
    sizes = {"type": "integer", "minimum": 1, "maximum": 99}
    return {
        "$defs": {
            "Circle": {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": sizes},
                "required": ["kind", "radius"],
            },
            "Box": {
                "type": "object",
                "properties": {"kind": {"const": "box"}, "width": sizes, "height": sizes},
                "required": ["kind", "width", "height"],
            },
        },
        "type": "object",
        "properties": {
            "shape": {"oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Box"}]},
        },
        "required": ["shape"],
    }


def tuples() -> Schema:
    """Arrays with a schema for each item."""
    return {
        "type": "array",
        "prefixItems": [{"type": "integer", "multipleOf": 5, "maximum": 50, "minimum": 0}, True],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 3,
    }


def patterns() -> Schema:
    """Strings and names by regular expression, and by format."""
    return {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "day": {"type": "string", "format": "date"},
            "extra": {
                "type": "object",
                "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
                "maxProperties": 2,
            },
            "names": {
                "propertyNames": {"maxLength": 3},
                "additionalProperties": {"const": 1},
                "maxProperties": 2,
            },
        },
        "required": ["code", "extra", "names"],
    }


FIXED = (person, shapes, tuples, patterns)


def varied_schemas(count: int, seed: int = 5) -> list[Schema]:
    """`count` schemas, the fixed ones first; the same for the same seed."""
    rng = random.Random(seed)
    drawn = [random_schema(rng, rng.randint(1, 3)) for _ in range(max(0, count - len(FIXED)))]
    return [*(make() for make in FIXED[:count]), *drawn]


def random_schema(rng: random.Random, depth: int) -> Schema:
    """A random schema that nests at most `depth` levels."""
    leaves = (_string, _integer, _number, _listed, _simple)
    branches = (_object, _object, _array, _any_of)
    return rng.choice(leaves if depth == 0 else (*branches, *leaves[: rng.randint(0, 2)]))(
        rng, depth
    )


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)},
            {"type": "string", "pattern": rng.choice(["^[a-c]+x{2}$", "^(up|down)$", "^é?[^q]$"])},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "date-time"])},
            {"type": ["string", "null"], "maxLength": 3},
        ]
    )


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-500, 500)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 20},
            {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
            {"type": "integer", "multipleOf": 10, "minimum": low + 0.5, "maximum": low + 5000},
        ]
    )


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-5, 5), rng.randint(0, 4))
    least, most = (
        rng.choice([f"{one}imum", f"exclusive{one.title()}imum"]) for one in ("min", "max")
    )
    return {"type": "number", least: low, most: low + rng.choice([0.01, 0.5, 3])}


def _listed(rng: random.Random, depth: int) -> Schema:
    values = ["x", 'say "hi"\n', 3, -1.5, True, None, [1, {"k": []}], {"deep": {"er": "ü"}}]
    chosen = rng.sample(values, rng.randint(1, 4))
    return rng.choice([{"enum": chosen}, {"const": chosen[0]}])


def _simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    elif rng.random() < 0.3:
        schema["additionalProperties"] = {"type": "boolean"}
        schema["maxProperties"] = len(names)
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = random_schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)], "description": "either"}
