"""JSON schemas: what is generated is valid by `jsonschema`, and what is valid can be generated."""

from __future__ import annotations

import datetime
import itertools
import json
import random
import re
import uuid
from typing import Any

import pytest
from jsonschema import Draft202012Validator, validators
from llguidance import LLMatcher
from weft.contract import schema_formats
from weft.contract.request import Constraint, check_whitespace
from weft.engine.features.constraints import schema as schema_reader
from weft.testing.engine.constraint_texts import SOURCE, accepts, compiled, random_text
from weft.testing.engine.random_schemas import varied_schemas
from weft.testing.kernels.kernel_checks import fresh_seed

DRAFT7 = "http://json-schema.org/draft-07/schema#"
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "k": {"enum": ["x", "y"]}},
}
BARE = {
    "type": "object",
    "properties": {"c": {"type": "integer"}},
    "additionalProperties": False,
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3.5, "", "a", "b", "bc", "abc", [], [1], [1, 1], [1, 2]),
    *(
        [None],
        ["a"],
        ["a", "b"],
        ["b", "a"],
        ["a", "a"],
        [True],
        {},
        {"a": 1},
        {"b": "x"},
        {"k": "x"},
    ),
    *({"a": 1, "b": "x"}, {"a": 1, "k": "y"}, {"b": "x", "k": "x"}, {"a": 1, "b": "", "k": "y"}),
    *({"a": "x"}, {"k": "z"}, {"a": 1, "b": 2}, {"c": 1}, {"a": 1, "c": 1}),
]


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


COMBINED: list[Any] = [
    {"not": {"type": "null"}},
    {"not": {"enum": ["a", "bc", 1]}},
    {"type": "string", "not": {"const": "a"}},
    {"type": ["string", "array"], "not": {"minLength": 2}},
    {"type": ["string", "null"], "not": {"pattern": "^[ab]{1,2}$"}},
    {"type": "string", "not": {"pattern": "^[^ab]*$"}},
    {"oneOf": [{"type": "string", "pattern": "^[a-c]{3}$"}, {"type": "string"}]},
    {"oneOf": [{"type": "string", "pattern": r"^[\wz-]{2,}$"}, {"type": ["string", "null"]}]},
    {**OBJECT, "not": {"required": ["a", "b"]}},
    {**OBJECT, "not": {"properties": {"k": {"const": "x"}}, "required": ["k"]}},
    {**OBJECT, "not": {"anyOf": [{"required": ["a"]}, {"required": ["k"]}]}},
    {**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {**OBJECT, "oneOf": [{"required": ["a", "b"]}, {"required": ["k"]}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "maxItems": 1}]},
    {"oneOf": [{**OBJECT, "additionalProperties": False}, {**BARE, "required": ["c"]}]},
    {"oneOf": [BARE, {**BARE, "properties": {"a": {"type": "integer"}}}]},
    {"oneOf": [{"const": 1}, {"enum": [2, "a"]}, {"type": "null"}]},
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {**OBJECT["properties"], "k": {"type": "string", "pattern": pattern}},
                "required": ["k"],
            }
            for pattern in ("^x$", "^(?:y|z)$")
        ]
    },
    {"oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 1}]},
    {**OBJECT, "dependentRequired": {"a": ["b"], "k": ["a"]}},
    {**OBJECT, "dependencies": {"b": ["k"]}, "$schema": DRAFT7},
    {**OBJECT, "dependentSchemas": {"a": {"properties": {"k": {"const": "y"}}}}},
    {
        **OBJECT,
        "if": {"required": ["a"]},
        "then": {"required": ["k"]},
        "else": {"required": ["b"]},
    },
    {**OBJECT, "allOf": [{"required": ["a"]}, {"properties": {"k": {"const": "y"}}}]},
    {"allOf": [OBJECT, {"type": "object", "required": ["b"]}]},
    {**OBJECT, "anyOf": [{"required": ["a"]}, {"properties": {"k": {"const": "x"}}}]},
    {**OBJECT, "minProperties": 2},
    {**OBJECT, "minProperties": 1, "maxProperties": 2},
    {**OBJECT, "maxProperties": 1, "additionalProperties": {"type": "integer"}},
    {**OBJECT, "minProperties": 1, "additionalProperties": {"type": "integer"}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {
        "type": "object",
        "propertyNames": {"maxLength": 1},
        "additionalProperties": {"type": "integer"},
    },
    {"type": "object", "patternProperties": {"^[ab]$": {"type": "integer"}}},
    *(
        {
            "type": "object",
            "properties": {
                **{"a": {"type": "number", "multipleOf": step}, "b": {"type": "string"}},
                "k": {"enum": ["x", 2]},
            },
            "additionalProperties": False,
            "patternProperties": {pattern: {"type": ["number", "string"], "maximum": 8.5}},
        }
        for step, pattern in ((5, "^a$"), (2, "^(a|b)$"), (3, "^[abk]"), (5, "^"))
    ),
    *(
        {"type": "object", "additionalProperties": {"type": ["integer", "string"]}, **names}
        for names in (
            {"propertyNames": {"type": "string"}},
            {"propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^[bk]"}]}},
            {"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"enum": ["a", "k"]}}},
            {"propertyNames": {"oneOf": [{"pattern": "^a"}, {"pattern": "^k", "type": "string"}]}},
            {"propertyNames": {"allOf": [{"type": "string"}, {"maxLength": 1}]}},
            {"propertyNames": {"not": {"enum": ["b", "c"]}}},
            {"propertyNames": {"pattern": "^[ab]$"}, "properties": {"a": {"const": 1}, "k": {}}},
        )
    ),
    {"propertyNames": {"enum": ["a"]}, "patternProperties": {".*": {"const": 1}}, "type": "object"},
    {"type": "array", "contains": {"const": "a"}, "items": {"type": ["string", "null"]}},
    {"type": "array", "contains": {"enum": [1, 2]}, "minContains": 2},
    {"type": "array", "contains": {"const": "a"}, "maxContains": 1, "items": {"type": "string"}},
    {"type": "array", "contains": {"type": "integer"}, "minContains": 0, "maxContains": 1},
    {"type": "string", "not": {"pattern": "[^ab]"}},
    {"allOf": [{"enum": [1.5, "a", [1]]}, {"not": {"type": "string", "pattern": "bb"}}]},
    {"allOf": [{"$ref": "#/$defs/x"}, {"maxLength": 1}], "$defs": {"x": {"enum": ["a", "bc"]}}},
    {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "^b+"}]},
    {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {"type": "array", "maxItems": 1, "uniqueItems": True},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "integer"}}},
    {"$ref": "#/components/schemas/X", "components": {"schemas": {"X": {"type": "string"}}}},
    {"anyOf": [{"type": "string"}, {"$ref": "#/anyOf/0"}]},
    {"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": ["null", "array"]}}},
    {"type": "string", "enum": ["a", 1, "b"]},
    {"enum": ["a", "abc", 3], "minLength": 2},
    {"$ref": "#/$defs/o", "required": ["a"], "$defs": {"o": OBJECT}},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1},
    {"minLength": 1, "maxItems": 1, "type": ["string", "array"]},
]


@pytest.mark.parametrize("schema", COMBINED, ids=json.dumps)
def test_values_are_allowed_as_by_jsonschema(schema: Any) -> None:
    """But for properties that are not listed, and values of types that are only implied."""
    grammar, validator = compiled(schema), validators.validator_for(schema)(schema)
    num_allowed = 0
    for value in VALUES:
        is_allowed, is_valid = accepts(grammar, written(value)), validator.is_valid(value)
        assert is_valid or not is_allowed, value
        num_allowed += is_allowed
        is_listed = not isinstance(value, dict) or value.keys() <= OBJECT["properties"].keys()
        if is_listed and not isinstance(value, float):
            assert is_allowed == is_valid, value
    assert num_allowed


@pytest.mark.parametrize("overlap", [False, True])
def test_two_hundred_random_walks_are_valid(overlap: bool) -> None:
    fresh_seed()
    rng = random.Random(random.random())
    for schema in varied_schemas(100, seed=rng.randrange(1 << 30)):
        whole = {"allOf": [schema, {}], "$defs": schema.get("$defs", {})} if overlap else schema
        text = random_text(compiled(whole), rng, b'"}],x')
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("schema", COMBINED, ids=json.dumps)
def test_random_walks_through_combinations_are_valid(schema: Any) -> None:
    fresh_seed()
    rng, grammar = random.Random(random.random()), compiled(schema)
    # JSON Schema's \w is ASCII, Python's is not; its $ is no place before a last line end.
    text = json.dumps(schema).replace("\\\\w", "0-9A-Za-z_").replace('$"', '\\\\Z"')
    judged = json.loads(text)
    for _ in range(5):
        Draft202012Validator(judged).validate(json.loads(random_text(grammar, rng)))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "contains": False}, "#/contains"),
        ({"not": {"multipleOf": 0}}, "#/not"),
        ({"propertyNames": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}}, "propertyNames/allOf"),
        ({"properties": {"a/b~": {"$dynamicRef": "#a"}}}, "a~1b~0/$dynamicRef"),
        ({"type": "array", "uniqueItems": True, "minItems": 65}, "#/uniqueItems"),
        ({"items": [{"not": {"pattern": "ab"}}]}, "#/items/0/not"),
        ({"if": {"pattern": "ab"}, "then": False}, "#/if"),
        ({"oneOf": [{"pattern": "ab"}, {"pattern": "cd"}]}, "#/oneOf"),
        ({"$ref": "#/x/y", "x": {"y": {"$dynamicRef": "#"}}}, "#/x/y/$dynamicRef"),
        ({"$ref": "#/$defs/no"}, "#/$ref"),
        ({"$ref": "https://example.com/a"}, "#/$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b", "type": "null"}}}, "#/$ref"),
        ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
        ({"type": "string", "pattern": "a(?!b)"}, "#/pattern"),
        ({"type": "string", "pattern": "\\ud83d"}, "#/pattern"),
        ({"type": "strin"}, "#/type"),
        ({"minLength": -1}, "#/minLength"),
        ({"minLength": 3, "maxLength": 2}, "#/maxLength"),
        ({"minItems": 3, "maxItems": 2, "type": "array"}, "#/maxItems"),
        ({"required": "a"}, "#/required"),
        ({"properties": []}, "#/properties"),
        ({"anyOf": {}}, "#/anyOf"),
        ({"properties": {"a": 5}}, "#/properties/a"),
        ({"$schema": 5}, "#/$schema"),
        ({"const": "\x01"}, "#/const"),
        ({"minProperties": 3, "type": "object"}, "#/minProperties"),
        ({"unevaluatedProperties": False, "allOf": [{"required": ["a"]}]}, "unevaluatedProperties"),
        ({"propertyNames": {"format": "ipv6"}}, "#/propertyNames/format"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(ValueError, match=r"^at #") as refused:
        compiled(schema)
    assert f"{place}: " in str(refused.value)


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, False]
)
def test_a_schema_of_no_value_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="no text satisfies it"):
        compiled(schema)


def endless_schema(rng: random.Random) -> dict[str, Any]:
    """Definitions that refer to one another, many of them without an end."""
    names = [f"d{number}" for number in range(rng.randint(1, 4))]

    def part(depth: int) -> Any:
        kind = rng.choice(("plain", "ref", "ref", "object", "object", "array", "anyOf"))
        if kind == "plain" or not depth:
            return rng.choice(({"type": "null"}, {"type": "boolean"}, {"const": 7}))
        if kind == "ref":
            return {"$ref": f"#/$defs/{rng.choice(names)}"}
        if kind == "anyOf":
            return {"anyOf": [part(depth - 1) for _ in range(rng.randint(1, 3))]}
        if kind == "array":
            first = [part(depth - 1) for _ in range(rng.randint(0, 2))]
            least = rng.randint(0, 2)
            return {
                "type": "array",
                **({"prefixItems": first} if first else {}),
                "items": part(depth - 1),
                "minItems": least,
                "maxItems": least + 1,
            }
        listed = {name: part(depth - 1) for name in "ab"[: rng.randint(1, 2)]}
        required = [name for name in listed if rng.random() < 0.6]
        return {
            "type": "object",
            "properties": listed,
            "required": required,
            "additionalProperties": False,
        }

    return {"$ref": f"#/$defs/{names[0]}", "$defs": {name: part(3) for name in names}}


def smallest(schema: Any, definitions: dict[str, Any], depth: int) -> list[Any]:
    """A value of the schema with at most so many references within one another; [] for none."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return smallest(definitions[name], definitions, depth - 1) if depth else []
    if "anyOf" in schema:
        found = [smallest(part, definitions, depth) for part in schema["anyOf"]]
        return next((one for one in found if one), [])
    if "const" in schema:
        return [schema["const"]]
    if schema["type"] == "object":
        values = {
            name: smallest(schema["properties"][name], definitions, depth)
            for name in sorted(schema["required"])
        }
        return [{name: one[0] for name, one in values.items()}] if all(values.values()) else []
    if schema["type"] == "array":
        parts = [*schema.get("prefixItems", []), schema["items"], schema["items"]]
        items = [smallest(part, definitions, depth) for part in parts[: schema["minItems"]]]
        return [[one[0] for one in items]] if all(items) else []
    return [None if schema["type"] == "null" else True]


def test_schemas_without_a_finite_value_are_refused() -> None:
    fresh_seed()
    kinds = set[bool]()
    for _ in range(150):
        schema = endless_schema(random)  # type: ignore[arg-type]
        found = smallest(schema, schema["$defs"], len(schema["$defs"]))
        kinds.add(bool(found))
        if not found:
            with pytest.raises(ValueError, match="no text satisfies it"):
                compiled(schema)
            continue
        assert accepts(compiled(schema), written(found[0])), (schema, found)
    assert len(kinds) == 2


ENDLESS = {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "required": ["e"]}


@pytest.mark.parametrize(
    ("schema", "right", "begun"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/e"}}}, "{}", '{"a'),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/e"}]}, "null", "{"),
        ({"type": "array", "items": {"$ref": "#/$defs/e"}}, "[]", "[{"),
        (
            {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#/$defs/e"}]},
            "[null]",
            "[null,",
        ),
        ({"type": "object", "additionalProperties": {"$ref": "#/$defs/e"}}, "{}", '{"'),
        ({"type": "object", "patternProperties": {"^a$": {"$ref": "#/$defs/e"}}}, "{}", '{"a":{'),
        (
            {"type": "array", "items": {"anyOf": [{"const": 1}, {"$ref": "#/$defs/e"}]}},
            "[1,1]",
            "[1,{",
        ),
    ],
)
def test_nothing_begins_that_cannot_end(schema: Any, right: str, begun: str) -> None:
    grammar = compiled(schema | {"$defs": {"e": ENDLESS}})
    assert accepts(grammar, right)
    tokens = [*begun.encode()]
    assert grammar.deep_copy().try_consume_tokens(tokens) < len(tokens)


def test_objects_have_what_they_list() -> None:
    closed = [{"type": "object", "properties": {}}, {"properties": {"a": {"type": "null"}}}]
    for schema in closed:
        grammar = compiled(schema)
        assert accepts(grammar, "{}")
        assert not accepts(grammar, '{"z":1}')
    for schema in ({"type": "object"}, {"additionalProperties": True, "properties": {}}):
        assert accepts(compiled(schema), '{"z":1}')
    assert not accepts(compiled({"type": "array", "prefixItems": [True]}), "[1,2]")


def test_properties_come_in_the_order_of_the_schema() -> None:
    properties = {name: {"type": "null"} for name in ("b", "a", "c")}
    grammar = compiled({"properties": properties})
    for names in itertools.chain(*(itertools.permutations("bac", n) for n in range(4))):
        text = written(dict.fromkeys(names))
        assert accepts(grammar, text) == (list(names) == sorted(names, key="bac".index)), names


def test_no_name_comes_twice_under_another_spelling() -> None:
    described = {"a": {"type": "string"}, "ab": {"type": "string"}}
    grammar = compiled(
        {"properties": described, "required": ["a"], "additionalProperties": {"type": "integer"}}
    )
    for name in ("b", "abc", "", r"\"", "é", r"b\n"):
        assert accepts(grammar, f'{{"a": "x", "{name}": 5}}'), name
    for name in ("a", r"\u0061", r"a\u0062", r"\u0061b"):
        assert not accepts(grammar, f'{{"a": "x", "{name}": 5}}'), name


STRING = re.compile(r'"(?:[^"\\]|\\.)*+"')


def of_form(schema: Any, whitespace: str | None) -> LLMatcher:
    text = json.dumps(schema)
    return SOURCE.compile(Constraint(kind="json_schema", text=text, whitespace=whitespace))


@pytest.mark.parametrize(
    ("whitespace", "blanks"),
    [
        (None, r"(?:[^\s]|(?<=[,:]) )*"),
        ("", r"\S*"),
        ("[ ]?", r"(?:\S| (?! ))*"),
        (r"\s{0,2}", r"(?:\S|\s{1,2}(?!\s))*"),
    ],
)
def test_blanks_stand_where_the_form_has_them(whitespace: str | None, blanks: str) -> None:
    """What texts have outside their strings, on random ways through the masks."""
    rng = random.Random(fresh_seed())
    for schema in varied_schemas(12):
        text = random_text(of_form(schema, whitespace), rng, favoured=b' "}]')
        assert re.fullmatch(blanks, STRING.sub("s", text)), text
        Draft202012Validator(schema).validate(json.loads(text))


def test_json_is_compact_or_has_one_blank() -> None:
    """Unless the request says otherwise."""
    schema = {"type": "array", "items": {"type": "object", "additionalProperties": True}}
    values = [{"a": 1, "b": [1, {"c": ", : "}]}, {}]
    grammar = of_form(schema, None)
    assert accepts(grammar, json.dumps(values))
    assert accepts(grammar, json.dumps(values, separators=(",", ":")))
    assert accepts(of_form(schema, r"[ \n]{0,32}"), json.dumps(values, indent=4))
    for text in (' [{"a": 1}]', '[ {"a": 1}]', '[{"a" : 1}]', '[{"a":  1}]', '[{"a":\n1}]'):
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("pattern", ["x", "[^a]", ".", r"\S", "[ x]", "[ -~]", "(?= )", " " * 257])
def test_patterns_of_more_than_blanks_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="nothing but blanks"):
        check_whitespace(pattern)


@pytest.mark.parametrize("pattern", ["", " ", r"[\n\t ]*", r"(?: |\n){1,3}", r"\s?", r"^\x20$"])
def test_patterns_of_blanks_are_taken(pattern: str) -> None:
    check_whitespace(pattern)
    assert accepts(of_form({"const": [1, 2]}, pattern), "[1,2]")


@pytest.mark.parametrize(("least", "most"), [(0, 3), (1, None), (2, 2), (0, 0), (127, 300)])
def test_lengths_are_counted_in_characters(least: int, most: int | None) -> None:
    schema: dict[str, Any] = {"type": "string", "minLength": least}
    if most is not None:
        schema["maxLength"] = most
    grammar = compiled(schema)
    end = most if most is not None else least
    for count in {0, 1, *(max(0, size) for size in (least - 1, least, end - 1, end, end + 1))}:
        for unit in ("x", "é", "😀", r"\n", r"\""):
            is_valid = least <= count and (most is None or count <= most)
            assert accepts(grammar, f'"{unit * count}"') == is_valid, (count, unit)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 9},
        {"type": ["string", "null"]},
        {"type": "string", "pattern": "^[^a]*$"},
        {"type": "string", "pattern": "."},
        {},
    ],
)
def test_strings_are_json_and_utf8(schema: dict[str, Any]) -> None:
    grammar = compiled(schema)
    for good in ('"b\ud7ff\ue000\U0010ffff"', r'"b\b\f\n\r\t\"\\"'):
        assert accepts(grammar, good), good
    for bad in (
        *('"\n"', '"\x01"', '"\t"', r'"\x41"', r'"\u12"', '"a', 'a"', '"\x7f"'),
        *(r'"\ud800"', r'"\uDFFF"', b'"\xed\xa0\x80"', b'"\xed\xbf\xbf"', b'"\xff"', b'"\xc3"'),
    ):
        assert not accepts(grammar, bad), bad


ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"format": "email", "pattern": ZOD_EMAIL}, ["a.b@c.de"], ["a..b@c.de", ".a@c.de", "a@c"]),
        ({"format": "email", "maxLength": 8}, ["a@b.de"], ["aaaa@bb.de", "a"]),
        (
            {"format": "uri", "minLength": 1, "maxLength": 2083},
            ["https://a.b/c?d#e"],
            ["a b", "http://[x", "", f"http://a/{'b' * 2083}"],
        ),
        ({"format": "uuid", "pattern": "^[0-9a-f-]*$"}, [str(uuid.UUID(int=7))], ["x"]),
        (
            {"format": "date-time", "pattern": "Z$"},
            ["2024-02-29T00:00:00Z"],
            ["2024-02-29T00:00:00+01:00"],
        ),
        ({"format": "date", "minLength": 10}, ["2024-02-29"], ["2023-02-29", "2024-04-31"]),
        ({"format": "ipv4", "pattern": r"^10\."}, ["10.0.0.1"], ["11.0.0.1", "10.0.0.256"]),
        ({"format": "time"}, ["12:30:00-05:00"], ["24:00:00Z", "12:30:60Z"]),
        ({"format": "hostname"}, ["a-b.example.com"], ["-a", "xn--x", "a..b"]),
        ({"format": "uri-reference"}, ["/a/b?c#d", "a:b", "//h/p", ""], ["a b", "%zz", "1a:b"]),
        ({"format": "json-pointer"}, ["", "/a~1b/0"], ["a", "/~2"]),
        ({"contentEncoding": "base64"}, ["", "YWI=", "YWJj"], ["YWI", "%"]),
        ({"minLength": 2, "maxLength": 3, "pattern": "^a"}, ["ab", "abc"], ["a", "abcd", "bc"]),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_formats_beside_patterns_and_lengths(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammar = compiled({"type": "string", **schema})
    assert [text for text in right if not accepts(grammar, f'"{text}"')] == []
    assert [text for text in wrong if accepts(grammar, f'"{text}"')] == []


def test_dates_are_of_the_calendar() -> None:
    grammar = compiled({"type": "string", "format": "date"})
    fresh_seed()
    years = [1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999, *random.sample(range(1, 10_000), 8)]
    for year in (0, *years):
        for month in range(14):
            for day in (0, 1, 9, 10, 19, 20, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert accepts(grammar, f'"{text}"') == is_date(text), text


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_an_older_draft_reads_references_alone() -> None:
    schema = {"$schema": DRAFT7, "$ref": "#/definitions/a", "type": "null"}
    schema["definitions"] = {"a": {"items": [{"type": "integer"}], "additionalItems": False}}
    grammar = compiled(schema)
    validator = validators.validator_for(schema)(schema)
    for text in ("[]", "[1]", '["a"]', "[1,2]"):
        assert accepts(grammar, text) == validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("keywords", [{"properties": {}}, {"required": [], "items": {}}])
def test_keywords_that_exclude_nothing_imply_no_type(keywords: Any) -> None:
    grammar = compiled({"type": "object", "properties": {"a": keywords}})
    for value in ("text", 3, {"b": 1}, [1]):
        assert accepts(grammar, written({"a": value})), value
    assert not accepts(compiled({"type": "object", "properties": {}}), written({"b": 1}))


def test_a_class_that_may_match_anywhere_is_cheap() -> None:
    grammar = compiled({"type": "string", "pattern": "[A-Za-z0-9-_.:]{1,255}"})
    assert accepts(grammar, '"  a  "')
    assert accepts(grammar, json.dumps("a" * 300))
    assert not accepts(grammar, '"  "')


def test_schemas_that_take_endless_comparisons_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As many as the product makes take a test ten seconds and more.
    monkeypatch.setattr(schema_reader, "MAX_LOOKS", schema_reader.MAX_LOOKS // 20)
    defs: dict[str, Any] = {"a20": {"type": "string"}}
    for n in range(20):
        further = {"$ref": f"#/$defs/a{n + 1}"}
        defs[f"a{n}"] = {"oneOf": [further, {"type": "null", "allOf": [further]}]}
    with pytest.raises(ValueError, match="is too complex"):
        compiled({"$ref": "#/$defs/a0", "$defs": defs})


@pytest.mark.parametrize(
    "words",
    [
        {"_format": "date", "_uniqueItems": True, "requires": ["b"], "minLenth": 3, "OneOf": []},
        {"additonalProperties": False, "multiple": True, "format": "never-heard", "ref": "#/no"},
        {"nullable": True, "propertyName": {"type": "null"}, "contians": 5, "": {}, "$x": []},
    ],
)
def test_words_that_are_no_keywords_constrain_nothing(words: dict[str, Any]) -> None:
    for schema in (OBJECT, {"type": "string"}, {"enum": [1, "a"]}, {"anyOf": [OBJECT, BARE]}, {}):
        grammar, beside = compiled(schema), compiled({**schema, **words})
        inside = compiled({"type": "array", "items": {**schema, **words}})
        for value in VALUES:
            text = written(value)
            assert accepts(beside, text) == accepts(grammar, text), text
            assert accepts(inside, f"[{text}]") == accepts(grammar, text), text
    negative = compiled({"type": ["string", "null"], "not": {"type": "null", **words}})
    assert accepts(negative, '"a"')
    assert not accepts(negative, "null")


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        r"^(?!^[-+.]*$)[+-]?0*\d{0,3}\.?\d{0,2}0*$",
        r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{2,4}$",
        r"^(?=.{2,3}$)a*b*$",
    ],
)
def test_look_ahead_at_the_start_is_enforced(pattern: str) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    letters = [*"-.0 1aAb"]
    texts = [
        "",
        *(
            map(
                "".join, itertools.chain(*(itertools.product(letters, repeat=n) for n in (1, 2, 3)))
            )
        ),
    ]
    found = [text for text in texts if accepts(grammar, f'"{text}"')]
    assert found == [text for text in texts if re.search(pattern, text, re.ASCII)]
    assert found


@pytest.mark.parametrize("name", sorted({*schema_formats.PATTERNS, *schema_formats.BUILT_IN}))
def test_every_format_has_an_end(name: str) -> None:
    grammar = compiled({"type": "string", "format": name})
    fresh_seed()
    text = json.loads(random_text(grammar, random.Random(random.random()), b"", most=20_000))
    assert len(text) <= schema_formats.MAX_BASE64_LENGTH
    if name == "duration":
        assert DURATION.fullmatch(text)


DURATION = re.compile(r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)")
"""ISO 8601."""
