"""Structural tags in xgrammar's form."""

from __future__ import annotations

import contextlib
import json
import random
import string
from typing import Any

import pytest
from weft.contract.request import Constraint
from weft.testing.engine.constraint_texts import SOURCE, accepts, random_text
from weft.testing.kernels.kernel_checks import fresh_seed

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": A}
ANY = {"type": "any_text"}


def fixed(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, *ends: str) -> dict[str, Any]:
    end = ends[0] if len(ends) == 1 else list(ends)
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def listed(kind: str, *elements: Any) -> dict[str, Any]:
    return {"type": kind, "elements": list(elements)}


def repeated(kind: str, content: Any, **bounds: int) -> dict[str, Any]:
    return {"type": kind, "content": content, **bounds}


def triggered(*triggers: str, **options: Any) -> dict[str, Any]:
    tags = [tag("<f=a>", JSON, "</f>"), tag("<f=b>", fixed("!"), "</f>")]
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags, **options}


def separated(**options: Any) -> dict[str, Any]:
    tags = [tag("<i>", JSON, "</i>")]
    return {"type": "tags_with_separator", "tags": tags, "separator": ",", **options}


def dispatch(**options: Any) -> dict[str, Any]:
    return {"type": "dispatch", "rules": [["<f>", JSON], ["<g>", fixed("!")]], **options}


SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
SETS = {"type": "json_schema", "json_schema": {"properties": {"a": SET}, "required": ["a"]}}
TWICE, ONCE = '{"a":[1,1]}', '{"a":[1,2]}'
OTHER = {"type": "json_schema", "json_schema": {"type": ["string", "array"]}}
CALL, ITEM = '<f=a>{"a": 1}</f>', '<i>{"a":1}</i>'
GRAMMAR = {"type": "grammar", "grammar": 'root ::= "a" rest\nrest ::= [bc]* | "(" root ")"'}
CASES: list[tuple[Any, list[str], list[str]]] = [
    (SETS, [ONCE], [TWICE]),
    (listed("sequence", fixed(TWICE), SETS), [TWICE + ONCE], [TWICE + TWICE]),
    (listed("or", SETS, OTHER), [ONCE, '"[1,1]"', "[1,1]"], [TWICE]),
    (
        {**triggered("<f=", "<s>"), "tags": [tag("<f=a>", JSON, "</f>"), tag("<s>", SETS, "</s>")]},
        [f'[1,1] "{{ {CALL}<s>{ONCE}</s>[<s>{ONCE}</s>', f"{TWICE}<s{TWICE}"],
        [f'{CALL}<s>{TWICE}</s>"', f"<s>{ONCE}</s>[<s>{TWICE}</s>"],
    ),
    (fixed("yes"), ["yes"], ["no", "", "yesx"]),
    (fixed('é"\\\n</'), ['é"\\\n</'], ["é"]),
    (listed("sequence", fixed("A: "), JSON), ['A: {"a": 1}'], ['{"a": 1}', "A: "]),
    (listed("or", fixed("yes"), JSON), ["yes", '{"a":1}'], ["", 'yes{"a":1}']),
    (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a </ b\n</t>"], ["<t>", "<t></t>x"]),
    (tag("<t>", ANY, "</t>", "</u>"), ["<t>x</t>", "<t>x</u>"], ["<t>x</t>y</u>", "<t>x"]),
    (
        listed("sequence", tag("<t>", ANY, "</t>"), triggered("<f=")),
        ["<t>x</t>", f"<t><f=</t> hi {CALL} <f=b>!</f>bye <"],
        ["<t>x</t><f=c>", '<t>x</t><f=a>{"a":1}', f"{CALL}"],
    ),
    (
        triggered("<f=", at_least_one=True),
        [CALL, f"{CALL} x {CALL}y"],
        ["", "x", f"x{CALL}", f"{CALL}<f="],
    ),
    (triggered("<f=a", "<f=b", at_least_one=True, stop_after_first=True), [CALL], ["", CALL + "x"]),
    (triggered("<f=", stop_after_first=True), ["", "abc", f"x{CALL}"], [f"{CALL}x", "<f="]),
    (
        triggered("<f=", excludes=["bad"]),
        ["", "ba d", f"x{CALL}ba"],
        ["bad", f"xbadx{CALL}", f"{CALL}bad"],
    ),
    (
        tag("<r>", triggered("<f="), "</r>"),
        ["<r></r>", f"<r>x{CALL}y</r>"],
        ["<r>x", "<r></r>x", f"<r>{CALL}"],
    ),
    (separated(), ["", ITEM, f"{ITEM},{ITEM}"], [",", f"{ITEM},", f"{ITEM}{ITEM}"]),
    (separated(at_least_one=True, stop_after_first=True), [ITEM], ["", f"{ITEM},{ITEM}"]),
    ({**ANY, "excludes": ["no", "x"]}, ["", "n o", "on"], ["no", "ano", "x"]),
    ({**ANY, "max_chars": 3}, ["", "é😀a"], ["abcd"]),
    (
        listed("sequence", ANY, fixed("END"), fixed("!")),
        ["END!", "a EN END!"],
        ["END", "", "ENDx!"],
    ),
    (
        listed("sequence", {**ANY, "excludes": ["q"]}, repeated("star", separated()), fixed("z")),
        ["z", f"ab{ITEM},{ITEM}z"],
        ["q z", "<i>z", ""],
    ),
    (
        listed("sequence", ANY, repeated("optional", fixed("END"))),
        ["END", "a EN END", "", "a"],
        ["ENDx"],
    ),
    (repeated("repeat", fixed("ab"), min=1, max=3), ["ab", "ababab"], ["", "abababab"]),
    (repeated("repeat", fixed("ab"), min=0, max=2), ["", "ab", "abab"], ["ababab"]),
    (repeated("repeat", fixed("ab"), min=2, max=-1), ["abab", "abababab"], ["ab"]),
    (repeated("repeat", fixed("ab"), min=0, max=0), [""], ["ab"]),
    (repeated("plus", fixed("ab")), ["ab", "abab"], [""]),
    (
        tag("<r>", {"type": "regex", "pattern": "[a-z<]+"}, "</r>"),
        ["<r>a</r>", "<r>a<b</r>"],
        ["<r></r>", "<r>a", "<r>A</r>"],
    ),
    (tag("<r>", {"type": "regex", "pattern": ".*"}, "</r>"), ["<r>a<</r>", "<r></r>"], ["<r>a"]),
    (tag("<g>", GRAMMAR, "</g>"), ["<g>abcb</g>", "<g>a(ab)</g>"], ["<g></g>", "<g>a(b)</g>"]),
    (dispatch(), ["", 'x<f>{"a":1} y <g>!'], ["<g>", "<f>{}"]),
    (dispatch(loop=False), ["", 'x<f>{"a":1}', "x<g>!"], ["<g>!x"]),
]


def of(form: Any) -> Constraint:
    text = json.dumps({"type": "structural_tag", "format": form})
    return Constraint(kind="structural_tag", text=text)


@pytest.mark.parametrize(("form", "right", "wrong"), CASES)
def test_formats(form: Any, right: list[str], wrong: list[str]) -> None:
    grammar = SOURCE.compile(of(form))
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def nested(depth: int) -> Any:
    return fixed("a") if not depth else repeated("star", nested(depth - 1))


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"type": "token", "token": 5}, "#/format/type: token is not supported"),
        ({**ANY, "max_tokens": 5}, "#/format/max_tokens: "),
        ({**JSON, "style": "qwen_xml"}, '#/format/style: style "qwen_xml" is not supported'),
        ({**JSON, "any_order": True}, "#/format/any_order: "),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "qwen_xml_parameter is not supported"),
        ({"type": "xml"}, "'xml' is not known; give one of const_string"),
        ({}, "#/format/type: a text is expected"),
        (7, "#/format/type: a text is expected"),
        (listed("sequence", ANY, JSON), "#/format/elements/0: free text must be the last part"),
        (repeated("star", ANY), "#/format/content: free text must be"),
        (listed("or"), "#/format/elements: 1 to 128"),
        (listed("or", {"type": "json_schema"}), "#/format/elements/0/json_schema: "),
        (
            tag(
                "a", {"type": "json_schema", "json_schema": {"properties": {"x": {"type": 1}}}}, ""
            ),
            "#/format/content/json_schema/properties/x/type",
        ),
        (tag("a", {"type": "regex", "pattern": "("}, "b"), "#/format/content/pattern: "),
        (tag("a", {"type": "grammar", "grammar": "x"}, "b"), "#/format/content/grammar: "),
        (tag("a", ANY), "#/format/end: a text is expected"),
        ({**tag("a", ANY, "b"), "begin": {"type": "token", "token": 1}}, "#/format/begin: token"),
        (triggered("<g="), "#/format/tags/0/begin: it begins with none"),
        (triggered(), "#/format/triggers: 1 to 128"),
        (triggered("<f=", at_least_one=1), "#/format/at_least_one: a boolean"),
        ({"type": "dispatch", "rules": [["", JSON]]}, "#/format/rules/0: "),
        (repeated("repeat", fixed("a"), min=3, max=2), "#/format: min and max"),
        (repeated("repeat", fixed("a"), min=0, max=10**9), "#/format: min and max"),
        (nested(40), "is nested too deeply"),
    ],
)
def test_what_is_not_supported_is_named(form: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        SOURCE.compile(of(form))
    assert told in str(refused.value)


def test_sets_that_cannot_be_told_from_other_parts_end_the_answer() -> None:
    matcher = SOURCE.compile(of(listed("or", SETS, JSON))).deep_copy()
    assert not matcher.consume_token(ord("{"))
    assert matcher.is_error()
    assert "two parts begin alike" in matcher.get_error()


def test_deep_formats_take_little_room() -> None:
    """No format is written twice, so rules do not double with each level."""
    form = fixed("a")
    for _ in range(10):
        form = listed("sequence", repeated("plus", listed("or", form, fixed("b"))), separated())
    assert accepts(SOURCE.compile(of(form)), "ab" + ITEM * 3)


SCHEMAS = (
    {"type": "boolean"},
    {"type": "object", "properties": {"a": {"enum": ["]", 12]}}, "required": ["a"]},
)


def random_format(rng: random.Random, letters: list[str], depth: int = 3) -> Any:
    """A random format whose fixed texts are letters of their own, which random walks come upon.

    Args:
        rng: Draws it.
        letters: Those that are left; each is used once, so that no text is ambiguous.
        depth: Most levels.
    """

    def inner() -> Any:
        return random_format(rng, letters, depth - 1)

    def some_tag(begin: str = "") -> Any:
        ends = [letters.pop() for _ in range(rng.choice((1, 1, 2)))]
        return tag(begin + letters.pop(), inner(), *ends)

    flags = {name: rng.random() < 0.4 for name in ("at_least_one", "stop_after_first")}
    excludes = [letters.pop() for _ in range(rng.choice((0, 0, 1)))]
    kind = rng.choice("crja" if depth <= 0 else "crjaassottmmdpx")
    if kind == "c":
        return fixed(letters.pop())
    if kind == "r":
        return {"type": "regex", "pattern": rng.choice(("[ab]{1,3}", "a?b*", "[0-9]"))}
    if kind == "j":
        return {"type": "json_schema", "json_schema": rng.choice(SCHEMAS)}
    if kind == "a":
        return {**ANY, "excludes": excludes}
    if kind in "so":
        name = "sequence" if kind == "s" else "or"
        return listed(name, *(inner() for _ in range(rng.randrange(1, 4))))
    if kind == "t":
        return some_tag()
    if kind == "m":
        trigger = letters.pop()
        tags = [some_tag(trigger) for _ in range(rng.randrange(1, 3))]
        texts = {"triggers": [trigger], "excludes": excludes}
        return {"type": "triggered_tags", "tags": tags, **texts, **flags}
    if kind == "d":
        tags = [some_tag() for _ in range(rng.randrange(1, 3))]
        return {"type": "tags_with_separator", "tags": tags, "separator": ";", **flags}
    if kind == "p":
        least = rng.randrange(3)
        return repeated("repeat", inner(), min=least, max=rng.choice((-1, least, least + 2)))
    return repeated(rng.choice(("optional", "plus", "star")), inner())


def spoilt(value: Any, rng: random.Random) -> Any:
    """The value with one part replaced by something else, or left out."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        copied: Any = value.copy()
        at = rng.choice([*(value if isinstance(value, dict) else range(len(value)))])
        if rng.random() < 0.1:
            del copied[at]
        else:
            copied[at] = spoilt(value[at], rng)
        return copied
    return rng.choice((None, 5, -1, 1.5, True, "", "x", "tag", [], ["a"], {}, [[]], ANY))


def test_any_malformed_tag_is_refused_as_such() -> None:
    rng = random.Random(fresh_seed())
    right = [form for form, _, _ in CASES]
    for _ in range(400):
        with contextlib.suppress(ValueError):
            SOURCE.compile(of(spoilt(rng.choice(right), rng)))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_xgrammar_takes_each_text() -> None:
    """Texts of random ways through the masks of random formats."""
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string

    rng, favoured = random.Random(fresh_seed()), f'"}}];a{string.ascii_uppercase}'.encode()
    num_formats = num_texts = 0
    while num_formats < 300:
        letters = [*string.ascii_uppercase]
        rng.shuffle(letters)
        try:
            form = random_format(rng, letters)
            grammar = SOURCE.compile(of(form))
        except (IndexError, ValueError):  # No letters are left, or free text has no known end.
            continue
        num_formats += 1
        theirs = Grammar.from_structural_tag({"type": "structural_tag", "format": form})
        for _ in range(4):
            try:
                text = random_text(grammar, rng, favoured=favoured, most=400)
            except AssertionError as error:
                if "no end within" not in str(error):
                    raise
                continue
            num_texts += 1
            assert _is_grammar_accept_string(theirs, text), (form, text)
    assert num_texts > 600
