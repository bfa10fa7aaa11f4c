"""Grammars in GBNF and Lark, choices and structural tags."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from weft.contract.request import Constraint
from weft.testing.engine.constraint_texts import SOURCE, accepts


def of(grammar: str) -> LLMatcher:
    return SOURCE.compile(Constraint(kind="ebnf", text=grammar))


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+   # one equation a line
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= "(" (root | [ab]) ")"', ["(a)", "((b))"], ["", "a", "((a)", "(ab)"]),
        ('root ::= [a-c]{3} ">"', ["abc>"], ["ab>", "abcd>"]),
        ('root ::= word "ing"\nword ::= [a-z]+', ["walking"], ["ing", "walk"]),
        ('root ::= "a" |\n  "b" # c\n\n  | x\nx ::= "c"?', ["a", "b", "c", ""], ["d", "ab"]),
        ("root ::= . .", ["\né", "ab"], ["a", "abc"]),
        ("root ::= [^a]", ["é", "\n", "😀"], ["a", "", "bb"]),
        ('root ::= "\\x41\\u00e9\\U0001F600"', ["Aé😀"], ["A"]),
        ('root ::= "a"{2,3} [b-]* [\\]]', ["aa]", "aaab-]"], ["a]", "aa"]),
        ('root ::= a-b | aB\na-b ::= "1"\naB ::= "2"', ["1", "2"], ["12"]),
        ('root ::= "" | [] "x"', [""], ["x"]),
        ('root ::= "a" "b"{0} "c"{0,0}', ["a"], ["ab", "ac"]),
        # What a rule could also go on with follows it: lines between, and at the end.
        (ARITHMETIC, ["(a+3)*b = 7\n", "a=1\nb=2 \n\n"], ["a=", "a=1", "a+=1\n"]),
        ('root ::= "(" root ")" | w "b"\nw ::= [a-c]+', ["(ab)", "bbb", "acbb"], ["b", "(a)"]),
        (
            JSON,
            ['{"a":[1,2.5,{"b":"x\\n"}], "c":null}', "{}"],
            ['{"a":}', "[", '{"a":"\n"}', "1"],
        ),
    ],
)
def test_grammars_in_gbnf(grammar: str, right: list[str], wrong: list[str]) -> None:
    matcher = of(grammar)
    assert [text for text in right if not accepts(matcher, text)] == []
    assert [text for text in wrong if accepts(matcher, text)] == []
    assert not accepts(matcher, b"\xc3")


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('root ::= "a" b', "at line 1, column 14: there is no rule `b`"),
        ('a ::= "a"', "no rule `root`"),
        ('root ::= "a\n"', "at line 1, column 12: "),
        ("root ::= (", "at line 1, column 11: "),
        ("root ::= [z-a]", "at line 1, column 14: "),
        ('root ::= "\\q"', "at line 1, column 11: this escape"),
        ('root ::= "\\ud800"', "half a character"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root = x", "`::=` is expected"),
        ("", "no rule `root`"),
        (f"root ::= {'(' * 2000}", "nested too deeply"),
        ("root ::= root", "no text satisfies it"),
        ('root ::= "a" root', "no text satisfies it that ever ends"),
        ('root ::= "a" x+\nx ::= "b" (root | x)', "no text satisfies it that ever ends"),
        ('start: "a" b', "at line 1, column 8: unknown name"),
        ("start: /a/\nstart: (", "at line"),
        ("start: T\nT: ~/a/", "`~`"),
        ("start[max_tokens=3]: /a*/", "max_tokens"),
        ("start: x\nx[stop=/b/]: /a*/", "stop"),
        ("start: <|im_end|>", "special token"),
    ],
)
def test_what_is_wrong_is_told(grammar: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        of(grammar)
    assert told in str(refused.value)
    assert "no_forcing" not in str(refused.value)


def test_what_would_never_end_does_not_begin() -> None:
    matcher = of('root ::= "(" root ")" | "c" x* y? "e" | x "f"\nx ::= "d" y\ny ::= x')
    assert all(accepts(matcher, text) for text in ("ce", "((ce))"))
    for begin in (b"d", b"cd", b"(d"):
        assert matcher.deep_copy().try_consume_tokens([*begin]) == len(begin) - 1
    for grammar in (
        'root ::= "(" root ")" | "c" x | "e"\nx ::= "d" x',
        'root ::= "c" [] | "(" root ")" | "e"',
        'root ::= "(" (root | "c" x+) ")" | "e"\nx ::= "d" x',
    ):
        matcher = of(grammar)
        assert accepts(matcher, "((e))")
        assert matcher.deep_copy().try_consume_tokens([*b"(c"]) == 1


def test_grammars_in_lark() -> None:
    grammar = of('start: pair ("," pair)*\npair: /[a-c]+/ "~=" %json {"type": "boolean"}')
    assert accepts(grammar, "a~=true,bc~=false")
    assert not accepts(grammar, "a~=1")
    assert accepts(of('%llguidance {}\nstart: "a" // stop=1'), "a")


def test_choices_are_literal() -> None:
    choices = (
        "yes",
        'say "hi"',
        "back\\slash",
        "line\none",
        "\x01f\x7f",
        "été 🎉",
        "[a-z]",
        "a",
        "ab",
    )
    grammar = SOURCE.compile(Constraint(kind="choice", choices=choices))
    assert all(accepts(grammar, choice) for choice in choices)
    for wrong in ("", "ye", "b", "yes ", "x"):
        assert not accepts(grammar, wrong)


def tags(*structures: dict[str, Any], triggers: list[Any]) -> Constraint:
    text = json.dumps({"structures": structures, "triggers": triggers})
    return Constraint(kind="structural_tag", text=text)


FOO = {
    "begin": "<function=foo>",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "end": "</function>",
}
BAR = {"begin": "<function=bar>", "schema": {"type": "null"}, "end": "</function>"}


def test_tags_begin_at_their_triggers() -> None:
    grammar = SOURCE.compile(tags(FOO, BAR, triggers=["<function="]))
    for text in (
        *("", "hello", "a < b <fun", "line\nline"),
        'hi <function=foo>{"a": 1}</function> bye',
        '<function=bar>null</function><function=foo>{"a":2}</function>',
    ):
        assert accepts(grammar, text), text
    for text in (
        "<function=",
        "<function=foo>{}</function>",
        "<function=baz>",
        "<function=bar>null",
    ):
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint(kind="structural_tag", text="{"), "is not JSON"),
        (Constraint(kind="structural_tag", text="[]"), "#/structures: a list"),
        (tags(triggers=["<"]), "1 to 128"),
        (tags(FOO, triggers=[5]), "#/triggers/0"),
        (tags(FOO, triggers=["<tool"]), "#/structures/0/begin"),
        (
            tags(BAR, {**FOO, "schema": {"$dynamicRef": "#a"}}, triggers=["<"]),
            "structures/1/schema/$dynamicRef",
        ),
        (tags({"begin": "<"}, triggers=["<"]), "#/structures/0/end"),
    ],
)
def test_tags_are_refused_with_the_place(constraint: Constraint, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        SOURCE.compile(constraint)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        # Each has a size that takes minutes as soon as the time grows with its square.
        ("\n" * 2_000_000, "has no rule `root`"),
        ('root ::= "a"{1,' + " " * 400_000, "a name is expected"),
        ('start: "' + r"\"" * 400_000, None),
        ("start: /" + r"\/" * 400_000, None),
        ("start: x" + "\n" * 1_000_000, None),
    ],
)
def test_time_grows_with_the_text(grammar: str, told: str | None) -> None:
    with pytest.raises(ValueError, match=told):
        of(grammar)


def test_many_first_characters_take_little_time() -> None:
    choices = " | ".join(f'"{chr(0x4E00 + n)}"' for n in range(12_000))
    assert accepts(of(f"root ::= {choices}"), chr(0x4E00 + 11_999))


def test_rules_that_name_one_another_too_much_are_refused() -> None:
    rules = [f'r{n} ::= "{chr(0x4E00 + n)}"? r{n + 1}' for n in range(1500)]
    with pytest.raises(ValueError, match="is too complex"):
        of("\n".join(["root ::= r0", *rules, 'r1500 ::= "z" root?']))


def test_what_an_open_text_hides_is_refused() -> None:
    for opener in '"/':
        with pytest.raises(ValueError, match="special token"):
            of(f'start: "a"\nb: {opener}\\" <x>\n')


def test_expressions_of_several_lines() -> None:
    grammar = of('start: /(?x) a  # "<" or ~\n b/ x\nx: "<"')
    assert accepts(grammar, "ab<")
    for line in ('"/ <[1]> | "q"', "#/ <[1]>", '"/ ~ "b"'):
        with pytest.raises(ValueError, match="is not supported in grammars"):
            of(f"start: /a\n{line}")
