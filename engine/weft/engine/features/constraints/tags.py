"""Structural tags: texts that consist of free text, fixed texts, JSON and other parts.

The form is xgrammar's, `{"format": FORMAT}`, or the older one of vLLM, `{"structures": [{"begin",
"schema", "end"}], "triggers": [...]}`; each alone or as the object of `response_format`. In
addition to xgrammar's fields, JSON may have `lenient_defs`: names in the schema's `$defs` that
allow any object where their schemas cannot be enforced.

A free text ends where the first of the texts begins that may follow it. So each format is written
together with the text after it: a list of alternatives, whose first texts a free text looks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.engine.features.constraints.gbnf import convert_gbnf
from weft.engine.features.constraints.patterns import convert_regex

MAX_TAGS = 128
"""Most items of each list."""
MAX_DEPTH = 32
"""Most formats within one another."""
MAX_REPEATS = 1024
MAX_CHARS = 100_000
"""Largest `max_chars` of a free text."""
_TEXT = r"/(?s:.*)/"
_DEFINITION = re.compile(r"at #/\$defs/([^/:]+)")
_UNSUPPORTED = {
    **dict.fromkeys(
        ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"),
        "give texts, not tokens",
    ),
    "qwen_xml_parameter": "give json_schema",
}
"""Formats that xgrammar also has, and what to use instead."""


class _Part(NamedTuple):
    """One alternative of a text: a fixed text, then the text that a rule generates."""

    head: str | None
    """The fixed text, which may be empty; None: no fixed text begins it."""
    rule: str
    """Notation of the rule after the fixed text; empty: nothing follows."""
    is_end: bool = False
    """Whether the whole text ends here."""


_END = [_Part("", "", is_end=True)]
_UNKNOWN = [_Part(None, "")]
"""The alternatives that follow an item of a list, which may continue or end."""

Alternatives = Sequence[_Part]


def convert_tags(text: str, json_rule: Callable[[str], str]) -> str:
    """A grammar of text with tags. `json_rule` writes the grammar's rule for a value of a JSON
    schema. Raises ValueError if the tags, as JSON, are malformed, or if a part cannot be enforced.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if isinstance(given, dict) and "format" in given:
        return _Writer(json_rule).grammar(given["format"], "#/format")
    structures = _field(given, "structures", list, "#")
    triggers = _field(given, "triggers", list, "#")
    tags = []
    for i, structure in enumerate(structures):
        at = f"#/structures/{i}"
        begin, end = (_field(structure, name, str, at) for name in ("begin", "end"))
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    places = {"tags": "structures", "content/json_schema": "schema"}
    return _Writer(json_rule, places).grammar(
        {"type": "triggered_tags", "triggers": triggers, "tags": tags}, "#"
    )


class _Writer:
    """Writes the rules of one grammar. `places` has the parts of JSON pointers that clients know by
    other names.
    """

    def __init__(
        self, json_rule: Callable[[str], str], places: Mapping[str, str] | None = None
    ) -> None:
        self._json_rule = json_rule
        self._places = places or {}
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        """Names of rules and terminals by their notation."""
        self._ends: list[Sequence[str]] = [()]
        """Ends of the enclosing tags; no free text contains the innermost ones."""
        self._depth = 0

    def grammar(self, form: Any, at: str) -> str:
        start = self._any(self._write(form, _END, at)) or '""'
        return "\n".join([f"start: {start}", *self._rules])

    # -- formats, each with what follows it --------------------------------------------------------

    def _write(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        kind = _field(form, "type", str, at)
        if (told := _UNSUPPORTED.get(kind)) is not None:
            raise self._error(f"{at}/type", f"{kind} is not supported: {told}")
        write = _FORMATS.get(kind)
        if write is None:
            known = ", ".join(_FORMATS)
            raise self._error(f"{at}/type", f"{kind[:40]!r} is not known; give one of {known}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(at, "is nested too deeply")
        found = write(self, form, then, at)
        self._depth -= 1
        return found

    def _const_string(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        value = _field(form, "value", str, at)
        return self._behind(value, then)

    def _json_schema(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        self._plain(form, at, style="json", any_order=False, max_whitespace_cnt=None)
        schema = form.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise self._error(f"{at}/json_schema", "a JSON schema is expected")
        lenient = {*self._texts(form, "lenient_defs", at)}
        rule = self._json(schema, lenient, f"{at}/json_schema")
        return [_Part(None, self._joined(self._named("json", rule), self._any(then)))]

    def _json(self, schema: Any, lenient: set[str], at: str) -> str:
        """The rule of a schema, in which definitions that cannot be enforced allow any object if
        they are in `lenient`.
        """
        try:
            return self._json_rule(json.dumps(schema))
        except RecursionError:
            raise self._error(at, "is nested too deeply") from None
        except ValueError as error:
            name = _DEFINITION.match(str(error))
            if name is None or name[1] not in lenient:
                place = self._place(at)
                raise ValueError(str(error).replace("at #", f"at {place}", 1)) from None
        free = {name[1]: {"type": "object", "additionalProperties": True}}
        return self._json({**schema, "$defs": schema["$defs"] | free}, lenient - {name[1]}, at)

    def _regex(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        pattern = _field(form, "pattern", str, at)
        try:
            written = f"/{convert_regex(pattern)}/" if pattern else ""
        except ValueError as error:
            raise self._error(f"{at}/pattern", str(error)) from None
        rule = self._named("REGEX", written)
        # A text that may follow could also continue the expression: its first occurrence ends it.
        ended = [
            _Part(None, self._joined(self._named("until", f"{rule} {head}", "[lazy]"), part.rule))
            for part in then
            if rule and (head := _quoted(part.head or ""))
        ]
        others = [part for part in then if not (rule and part.head)]
        if not others:
            return ended
        return [*ended, _Part(None, self._joined(rule, self._any(others)))]

    def _grammar(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        text = _field(form, "grammar", str, at)
        prefix = f"g{len(self._rules)}_"
        try:
            lines = convert_gbnf(text, prefix).splitlines()
        except ValueError as error:
            raise self._error(f"{at}/grammar", str(error)) from None
        self._rules += lines
        return [_Part(None, self._joined(f"{prefix}start", self._any(then)))]

    def _any_text(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        if form.get("max_tokens") is not None:
            raise self._error(f"{at}/max_tokens", "a number of tokens is not supported")
        most = form.get("max_chars")
        if most is not None and not _is_count(most, MAX_CHARS):
            raise self._error(f"{at}/max_chars", f"0 to {MAX_CHARS} is expected")
        return self._free(self._texts(form, "excludes", at), [], then, at, most)

    def _sequence(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        parts = self._list(form, "elements", at)
        found = list(then)
        for i, part in reversed([*enumerate(parts)]):
            found = self._write(part, self._shared(found), f"{at}/elements/{i}")
        return found

    def _or(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        parts, shared = self._list(form, "elements", at), self._shared(then)
        return [
            one
            for i, part in enumerate(parts)
            for one in self._write(part, shared, f"{at}/elements/{i}")
        ]

    def _repeated(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        kind, content = form["type"], _field(form, "content", dict, at)
        least, most = {"optional": (0, 1), "star": (0, -1), "plus": (1, -1)}.get(kind, (0, 0))
        if kind == "repeat":
            least, most = form.get("min"), form.get("max")
            is_right = _is_count(least, MAX_REPEATS) and (
                most == -1 or _is_count(most, MAX_REPEATS)
            )
            if not is_right or -1 < most < least:
                message = f"min and max are counts up to {MAX_REPEATS}, or max is -1"
                raise self._error(at, message)
        place, shared = f"{at}/content", self._shared(then)
        if most == 0:
            return shared
        if most == 1:
            once = self._write(content, shared, place)
            return once if least else [*once, *shared]
        written = self._write(content, _UNKNOWN, place)
        items = [part for part in written if part.head or part.rule]
        if not items:
            return shared
        least = least if len(items) == len(written) else 0  # An item may be empty.
        item = self._named("item", self._any(items))
        # The first item is separate, so that a free text before it can look for its beginning.
        bounds = f"{{{max(0, least - 1)},{'' if most < 0 else most - 1}}}"
        first = self._before(items, self._joined(f"{item}{bounds}", self._any(shared)))
        return first if least else [*first, *shared]

    def _tag(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        return self._behind(self._begin(form, at), self._behind_begin(form, then, at))

    def _tags_with_separator(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        separator = _field(form, "separator", str, at)
        shared, tags = self._shared(then), self._list(form, "tags", at)
        items = [
            one
            for i, tag in enumerate(tags)
            for one in self._tag(self._checked(tag, f"{at}/tags/{i}"), _UNKNOWN, f"{at}/tags/{i}")
        ]
        rest = self._any(shared)
        if not _flag(form, "stop_after_first", at):
            item = self._named("item", self._any(items))
            more = self._named("more", self._joined(_quoted(separator), item))
            rest = self._joined(f"{more}*", rest)
        first = self._before(items, rest)
        return first if _flag(form, "at_least_one", at) else [*first, *shared]

    def _triggered_tags(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        triggers, tags = self._texts(form, "triggers", at), self._list(form, "tags", at)
        if not triggers:
            raise self._error(f"{at}/triggers", f"1 to {MAX_TAGS} texts are expected")
        shared = self._shared(then)
        is_once = _flag(form, "stop_after_first", at)
        of_trigger: dict[str, list[_Part]] = {trigger: [] for trigger in triggers}
        items: list[_Part] = []
        for i, tag in enumerate(tags):
            place = f"{at}/tags/{i}"
            begin = self._begin(self._checked(tag, place), place)
            # Free text ends at the first trigger, so of two that match the shorter one counts.
            trigger = min((one for one in triggers if begin.startswith(one)), key=len, default="")
            if not trigger:
                raise self._error(f"{place}/begin", "it begins with none of the triggers")
            behind = self._shared(self._behind_begin(tag, _UNKNOWN, place))
            of_trigger[trigger] += self._behind(begin.removeprefix(trigger), behind)
            items += self._behind(begin, behind)
        if is_once:
            rest = self._any(shared)
            of_trigger = {text: self._before(tag, rest) for text, tag in of_trigger.items()}
        found = self._dispatched(form, of_trigger, shared, at, is_once=is_once)
        if not _flag(form, "at_least_one", at):
            return found
        return self._before(items, self._any(shared if is_once else found))

    def _dispatch(self, form: Any, then: Alternatives, at: str) -> list[_Part]:
        shared, is_once = self._shared(then), not _flag(form, "loop", at, default=True)
        of_trigger: dict[str, list[_Part]] = {}
        for i, rule in enumerate(self._list(form, "rules", at)):
            place = f"{at}/rules/{i}"
            is_pair = isinstance(rule, list) and len(rule) == 2 and isinstance(rule[0], str)
            if not is_pair or not rule[0] or rule[0] in of_trigger:
                raise self._error(place, "a text of its own and a format are expected")
            behind = self._write(rule[1], shared if is_once else _UNKNOWN, f"{place}/1")
            of_trigger[rule[0]] = behind
        return self._dispatched(form, of_trigger, shared, at, is_once=is_once)

    def _dispatched(
        self,
        form: Any,
        of_trigger: Mapping[str, list[_Part]],
        then: Alternatives,
        at: str,
        *,
        is_once: bool,
    ) -> list[_Part]:
        """Free text in which each trigger is followed by the structure that belongs to it."""
        excludes = self._texts(form, "excludes", at)
        triggers = [trigger for trigger, behind in of_trigger.items() if behind]
        parts = [
            self._joined(
                self._until(trigger, excludes, None), self._named("tag", self._any(behind))
            )
            for trigger, behind in of_trigger.items()
            if behind
        ]
        free = self._free(excludes, triggers, then, at, None)
        if is_once:
            return [*(_Part(None, part) for part in parts), *free]
        part = self._named("part", " | ".join(parts))
        return [_Part(None, self._joined(f"{part}*", self._any(free)))]

    # -- free text ---------------------------------------------------------------------------------

    def _free(
        self,
        excludes: Sequence[str],
        triggers: Sequence[str],
        then: Alternatives,
        at: str,
        most: int | None,
    ) -> list[_Part]:
        """Free text up to one of the fixed texts that may follow, or to the end.

        Args:
            excludes: Texts that do not occur in it.
            triggers: Texts that do not occur in it either, since other rules look for them.
            then: The alternatives that follow.
            most: Most characters; None: any number.
        """
        found = []
        for part in then:
            if part.head:
                until = self._until(part.head, excludes, most)
                found.append(_Part(None, self._joined(until, part.rule)))
            elif part.is_end:
                heads = [one.head for one in then if one.head]
                without = [*excludes, *triggers, *heads, *self._ends[-1]]
                found.append(_Part(None, self._named("REST", _without(without, most)), True))
            else:
                message = "must be the last part, or be followed by a fixed text"
                raise self._error(at, f"free text {message}")
        return found

    def _until(self, text: str, excludes: Sequence[str], most: int | None) -> str:
        """A rule of free text up to the end of the first occurrence of a text."""
        others = [one for one in (*excludes, *self._ends[-1]) if one != text]
        before = self._named("FREE", _without(others, most))
        return self._named("until", f"{before} {_quoted(text)}", "[lazy]")

    # -- tags --------------------------------------------------------------------------------------

    def _checked(self, tag: Any, at: str) -> Any:
        if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
            raise self._error(at, "a tag is expected")
        return tag

    def _begin(self, tag: Any, at: str) -> str:
        if isinstance(tag.get("begin"), dict):
            raise self._error(f"{at}/begin", "token is not supported: give a text")
        return str(_field(tag, "begin", str, at))

    def _behind_begin(self, tag: Any, then: Alternatives, at: str) -> list[_Part]:
        end = tag.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(one, str) for one in ends) or not ends:
            raise self._error(f"{at}/end", "a text is expected, or a list of texts")
        shared = self._shared(then)
        behind = [one for text in dict.fromkeys(ends) for one in self._behind(text, shared)]
        content = _field(tag, "content", dict, at)
        self._ends.append([text for text in ends if text])
        found = self._write(content, behind, f"{at}/content")
        self._ends.pop()
        return found

    # -- parts -------------------------------------------------------------------------------------

    def _behind(self, head: str, then: Alternatives) -> list[_Part]:
        """Alternatives that begin with a fixed text."""
        return [_Part(head, self._any(then))] if head else list(then)

    def _before(self, parts: Alternatives, rule: str) -> list[_Part]:
        """Alternatives that nothing follows yet, followed by the text that a rule generates."""
        rule = self._named("then", rule)
        return [part._replace(rule=self._joined(part.rule, rule)) for part in parts]

    def _shared(self, then: Alternatives) -> list[_Part]:
        """The alternatives, each with a rule's name as its rule, so that it can be used often."""
        return [
            part._replace(rule=self._named("then", part.rule) if " " in part.rule else part.rule)
            for part in then
        ]

    def _any(self, parts: Alternatives) -> str:
        written = [self._joined(_quoted(part.head or ""), part.rule) for part in parts]
        if not any(written):
            return ""
        written = list(dict.fromkeys(one or '""' for one in written))
        return written[0] if len(written) == 1 else self._named("any", " | ".join(written))

    def _named(self, kind: str, notation: str, options: str = "") -> str:
        """Name of a rule of a notation; the notation itself if it is a name, or empty."""
        if not notation or (notation.isidentifier() and not options):
            return notation
        key = f"{options}{notation}"
        if key not in self._names:
            self._names[key] = name = f"{kind}_{len(self._names)}"
            self._rules.append(f"{name}{options}: {notation}")
        return self._names[key]

    @staticmethod
    def _joined(*parts: str) -> str:
        return " ".join(part for part in parts if part)

    # -- checks ------------------------------------------------------------------------------------

    def _plain(self, form: Any, at: str, **defaults: object) -> None:
        for name, default in defaults.items():
            if form.get(name, default) != default:
                message = f"{name} {json.dumps(form[name])[:40]} is not supported"
                raise self._error(f"{at}/{name}", message)

    def _list(self, form: Any, name: str, at: str) -> list[Any]:
        found = _field(form, name, list, at)
        if not 0 < len(found) <= MAX_TAGS:
            raise self._error(f"{at}/{name}", f"1 to {MAX_TAGS} are expected")
        return list(found)

    def _texts(self, form: Any, name: str, at: str) -> list[str]:
        found = form.get(name, [])
        if not isinstance(found, list) or len(found) > MAX_TAGS:
            raise self._error(f"{at}/{name}", f"at most {MAX_TAGS} texts are expected")
        for i, text in enumerate(found):
            if not isinstance(text, str) or not text:
                raise self._error(f"{at}/{name}/{i}", "a text is expected")
        return list(dict.fromkeys(found))

    def _place(self, at: str) -> str:
        for own, known in self._places.items():
            at = at.replace(f"/{own}", f"/{known}")
        return at

    def _error(self, at: str, message: str) -> ValueError:
        return ValueError(f"at {self._place(at)}: {message}")


_FORMATS: dict[str, Callable[[_Writer, Any, Alternatives, str], list[_Part]]] = {
    "const_string": _Writer._const_string,
    "json_schema": _Writer._json_schema,
    "regex": _Writer._regex,
    "grammar": _Writer._grammar,
    "any_text": _Writer._any_text,
    "sequence": _Writer._sequence,
    "or": _Writer._or,
    **dict.fromkeys(("optional", "star", "plus", "repeat"), _Writer._repeated),
    "tag": _Writer._tag,
    "tags_with_separator": _Writer._tags_with_separator,
    "triggered_tags": _Writer._triggered_tags,
    "dispatch": _Writer._dispatch,
}


def _without(texts: Sequence[str], most: int | None) -> str:
    """A terminal of the texts in which some texts do not occur."""
    free = _TEXT if most is None else rf"/(?s:.{{0,{most}}})/"
    if not texts:
        return free
    listed = " | ".join(f"({_TEXT} {_quoted(text)} {_TEXT})" for text in dict.fromkeys(texts))
    return f"{free} & ~({listed})"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _flag(form: Any, name: str, at: str, *, default: bool = False) -> bool:
    value = form.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"at {at}/{name}: a boolean is expected")
    return value


def _field(given: Any, name: str, kind: type, at: str) -> Any:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "a format" if kind is dict else "a text"
        raise ValueError(f"at {at}/{name}: {expected} is expected")
    return value
