"""Random JSON schemas in the style of clients: records, sets, tagged unions, references, formats.

They are made of shapes that generators of schemas write, one within another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = ("id", "name", "tags", "kind", "size", "owner", "notes", "price", "created_at", "items")
NOTES = ("title", "description", "$comment", "x-order", "markdownDescription")


def client_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema of a whole answer."""
    writer = _Writer(rng)
    schema = writer.model(depth)
    if writer.definitions:
        schema["$defs"] = writer.definitions
    if rng.random() < 0.3:
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Schema] = {}

    def model(self, depth: int) -> Schema:
        """An object with listed properties."""
        rng = self._rng
        names = rng.sample(WORDS, rng.randint(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.value(depth - 1) for name in names},
        }
        if rng.random() < 0.8:
            schema["required"] = rng.sample(names, rng.randint(0, len(names)))
        if rng.random() < 0.4:
            schema["additionalProperties"] = False
        if len(names) > 1 and rng.random() < 0.15:
            schema["dependentRequired"] = {names[0]: [names[1]]}
        if rng.random() < 0.1:
            schema["minProperties"] = 1
        return self._noted(schema)

    def value(self, depth: int) -> Schema:
        leaves = (self._string, self._number, self._enum, self._plain)
        inner = (self.model, self._list, self._set, self._record, self._tuple, self._union)
        more = (self._nullable, self._reference, self._extended, self._list)
        choices: tuple[Callable[[int], Schema], ...] = leaves
        if depth > 0:
            choices = (*leaves, *inner, *more)
        return self._noted(self._rng.choice(choices)(depth))

    def _noted(self, schema: Schema) -> Schema:
        if self._rng.random() < 0.3:
            return {self._rng.choice(NOTES): "a note", **schema}
        return schema

    def _string(self, depth: int) -> Schema:
        formats = ("date", "date-time", "time", "duration", "email", "uuid", "uri", "ipv4", "cuid2")
        patterns = ("^[a-z]{2,5}$", "^[A-Z]{3}-\\d+$", "^(?=.*[a-z])[a-z0-9]{1,9}$", "^#", "x")
        return self._rng.choice(
            [
                {"type": "string"},
                {"type": "string", "maxLength": 12},
                {"type": "string", "minLength": 1},
                {"type": "string", "format": self._rng.choice(formats)},
                {"type": "string", "pattern": self._rng.choice(patterns)},
            ]
        )

    def _number(self, depth: int) -> Schema:
        kind = self._rng.choice(["integer", "number"])
        bounds: list[Schema] = [{}, {"minimum": 0}, {"minimum": 1, "maximum": 10}]
        bounds += [{"exclusiveMinimum": 0}, {"multipleOf": 5}, {"maximum": 99.5}]
        return {"type": kind, **self._rng.choice(bounds)}

    def _enum(self, depth: int) -> Schema:
        listed = self._rng.sample(["a", "bc", "new", "in use"], 2)
        return self._rng.choice(
            [
                {"enum": listed},
                {"type": "string", "enum": listed},
                {"const": listed[0]},
                {"enum": [*listed, None, 3]},
            ]
        )

    def _plain(self, depth: int) -> Schema:
        return self._rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": "boolean"}, {}])

    def _list(self, depth: int) -> Schema:
        bounds: list[Schema] = [
            {},
            {"minItems": 1},
            {"maxItems": 3},
            {"minItems": 1, "maxItems": 4},
        ]
        schema = {"type": "array", "items": self.value(depth - 1), **self._rng.choice(bounds)}
        if self._rng.random() < 0.1:
            schema = {"type": "array", "items": {"type": "string"}, "contains": {"const": "a"}}
        return schema

    def _set(self, depth: int) -> Schema:
        least: Schema = self._rng.choice([{}, {"minItems": 1}, {"minItems": 2}])
        items = self.value(min(depth - 1, 1))
        if least.get("minItems") == 2:
            items = self._rng.choice([{"type": "string"}, {"type": "integer"}, {"enum": [1, 2, 3]}])
        return {"type": "array", "items": items, "uniqueItems": True, **least}

    def _record(self, depth: int) -> Schema:
        value = self.value(depth - 1)
        names: list[Schema] = [{"type": "string"}, {"pattern": "^[a-z]+$"}, {"maxLength": 6}]
        names += [{"enum": ["a", "b"]}, {"anyOf": [{"const": "a"}, {"pattern": "^b"}]}]
        return self._rng.choice(
            [
                {"type": "object", "additionalProperties": value},
                {
                    "type": "object",
                    "propertyNames": self._rng.choice(names),
                    "additionalProperties": value,
                },
                {"type": "object", "patternProperties": {"^x-": value}},
            ]
        )

    def _tuple(self, depth: int) -> Schema:
        parts = [self.value(depth - 1) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _union(self, depth: int) -> Schema:
        """Alternatives by a tag, or of different types."""
        if self._rng.random() < 0.5:
            kinds = self._rng.sample([{"type": "string"}, {"type": "integer"}, {"type": "null"}], 2)
            return {self._rng.choice(["anyOf", "oneOf"]): kinds}
        cases = []
        for tag in ("cat", "dog", "ant")[: self._rng.randint(2, 3)]:
            case = self.model(depth - 1)
            case["properties"] = {"type": {"const": tag}, **case["properties"]}
            case["required"] = ["type", *case.get("required", ())]
            cases.append(case)
        return {self._rng.choice(["anyOf", "oneOf"]): cases}

    def _nullable(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth - 1), {"type": "null"}], "default": None}

    def _reference(self, depth: int) -> Schema:
        """A definition, which may refer to itself."""
        name = f"Part{self._rng.randint(1, 3)}"
        if name not in self.definitions:
            self.definitions[name] = {}
            made = self.model(depth - 1)
            if self._rng.random() < 0.4:
                parts = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2}
                made["properties"]["parts"] = parts
            self.definitions[name] = made
        return {"$ref": f"#/$defs/{name}"}

    def _extended(self, depth: int) -> Schema:
        more = {"type": "object", "properties": {"extra": self.value(0)}, "required": ["extra"]}
        base = self.model(depth - 1)
        base.pop("additionalProperties", None)
        return {"allOf": [base, more]}
