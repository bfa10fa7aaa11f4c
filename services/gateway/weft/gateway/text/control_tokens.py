"""Keeps a model's control tokens out of what clients, users and tools write in a conversation.

A chat template joins its own text, which has control tokens such as `<|im_start|>`, with texts of
the conversation. In those the same spelling is text. To tell them apart after rendering,
`ControlTokens.guard` puts a mark, a character that nothing else in the request has, after each
place in those texts at which a control token could begin. The template renders the marked texts,
whatever it cuts, splits or joins. `ControlTokens.encode` then knows that a spelling with a mark in
it is text, and removes all marks.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from weft.contract.errors import InvalidRequest
from weft.gateway.request import ChatPrompt
from weft.gateway.text.answer.describe import RESULT_TAGS
from weft.gateway.text.answer.formats import FORMATS, REASONING_FORMATS
from weft.gateway.text.parts import text_part
from weft.gateway.text.tokens import encode

_MARKS = tuple(map(chr, range(0x12000, 0x1239A)))
"""Candidates for the mark: cuneiform signs. They are letters without upper or lower case, so that
no filter of a template changes them, and hardly any request has one.
"""
_TAG = re.compile(r"[<\[][^\s<>\[\]]+[>\]]")
"""What a template may look for in messages, such as `</think>`."""
_MIN_MARK_CHARS = 3
_MAX_TEMPLATE_CHARS = 3
"""Most characters of a control token that a template is expected to write next to a text of the
conversation, as in `'<|' + name + '|>'`.
"""
_ASSISTANT_TEXTS = ("content", "reasoning", "reasoning_content")
_OWN_NAMES_OF_MESSAGES, _OWN_NAMES_OF_TOOLS = 3, 2
"""Levels of objects whose names no client chooses: a message, a call in it, and its function; a
tool and its function. Templates and the gateway look these names up.
"""
_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles from which templates make tokens, as in `'<|' + role + '|>'`."""
_ANSWER_MARKS = frozenset(
    mark
    for marks in (
        *(form.tokens for form in FORMATS.values() if not form.is_harmony),
        *(form.tokens for form in REASONING_FORMATS.values() if not form.is_harmony),
    )
    for mark in marks
    if len(mark) >= _MIN_MARK_CHARS
)
"""Marks of reasoning and calls, which an assistant's text may contain."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    mark: str = ""
    """The character that `ControlTokens.guard` added; empty: none."""

    @classmethod
    def of(cls, text: str, mark: str) -> Rendered:
        """Makes it of a template's output from marked texts, some of which may be JSON in ASCII."""
        return cls(text.replace(_escape(mark), mark) if mark else text, mark)

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.text.replace(self.mark, "") if self.mark else self.text


class ControlTokens:
    """The control tokens of one model. Safe to use from several threads. `sources` are its chat
    templates, and tokens that the gateway writes.
    """

    def __init__(self, tokenizer: Tokenizer, sources: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        source = "\n".join(sources)
        controls = {one.content: id_ for id_, one in added.items() if _is_control(one, source)}
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._ids = frozenset(id_ for one, id_ in controls.items() if one != unknown)
        self.spellings = frozenset(controls)
        """Texts that are control tokens where the template writes them."""
        # Parentheses make `split` return the tokens, too.
        self._find = re.compile(f"({_any_of(self.spellings)})")
        self._words = frozenset(re.findall(r"\w+", self._find.sub(" ", source)))
        """What the template may look up or compare by name."""
        tags = frozenset(tag for tag in _TAG.findall(source) if not self._find.search(tag))
        self._given = _Guard(self.spellings, tags, self._words)
        self._assistant = _Guard(self.spellings, tags | _ANSWER_MARKS, self._words)
        self._lock = threading.Lock()
        self._renamed: tuple[Tokenizer, dict[str, str]] | None = None

    def guard(self, prompt: ChatPrompt) -> tuple[ChatPrompt, str]:
        """The conversation with marks, and the mark; empty: it needs none.

        An assistant's own text keeps the marks of reasoning and calls, which the model has written
        and templates look for. All other texts keep no control token: messages, names, tools, the
        arguments of calls, and variables of the template.

        Raises:
            InvalidRequest: The conversation has all characters that could be the mark.
        """
        if not self.spellings:
            return prompt, ""
        given = (prompt.messages, prompt.tools, prompt.template_variables)
        strings = list(_strings(given))
        mark = next((one for one in _MARKS if not _has(strings, one)), "")
        if not mark:
            raise InvalidRequest(
                "messages: have each of the cuneiform signs; leave out one of them",
                stage="prepare",
                param="messages",
            )
        messages = tuple(self._message(message, mark) for message in prompt.messages)
        tools = tuple(self._given.value(tool, mark, _OWN_NAMES_OF_TOOLS) for tool in prompt.tools)
        variables = self._given.value(prompt.template_variables, mark)
        return replace(prompt, messages=messages, tools=tools, template_variables=variables), mark

    def _message(self, message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
        guarded = self._given.value(message, mark, _OWN_NAMES_OF_MESSAGES)
        if message["role"] in _ROLES:
            guarded["role"] = message["role"]
        guard = self._given
        if message["role"] == "assistant":
            guard = self._assistant
            for name in _ASSISTANT_TEXTS:
                if name in message:
                    guarded[name] = guard.value(message[name], mark)
        content = message.get("content")
        if isinstance(content, list):
            # The names in parts are the gateway's own.
            guarded["content"] = [
                text_part(guard.value(part["text"], mark)) if part["type"] == "text" else part
                for part in content
            ]
        return dict(guarded)

    def encode(self, rendered: Rendered) -> list[int]:
        """Tokenises a rendered conversation; only the template's own control tokens become such
        ids.
        """
        text, mark = rendered
        if not mark:
            return encode(self._tokenizer, text, add_special_tokens=False)
        # Text and control tokens take turns.
        parts = self._find.split(text)
        is_spelled = False
        for at in range(0, len(parts), 2):
            if mark in parts[at]:
                parts[at] = parts[at].replace(mark, "")
                is_spelled = is_spelled or self._find.search(parts[at]) is not None
        if not is_spelled:
            ids = encode(self._tokenizer, "".join(parts), add_special_tokens=False)
            # A tokenizer that normalises texts may find tokens in other spellings.
            if sum(map(self._ids.__contains__, ids)) <= len(parts) // 2:
                return ids
        tokenizer, names = self._with_other_names()
        parts[1::2] = [names[token] for token in parts[1::2]]
        return encode(tokenizer, "".join(parts), add_special_tokens=False)

    def tokenizer_of_text(self, *texts: str) -> Tokenizer:
        """A tokenizer for which the control tokens in some texts are text."""
        if self.spellings and any(map(self._find.search, texts)):
            return self._with_other_names()[0]
        return self._tokenizer

    def _with_other_names(self) -> tuple[Tokenizer, dict[str, str]]:
        """A copy of the tokenizer in which control tokens have names that nobody can guess, and
        these names.
        """
        with self._lock:
            if self._renamed is None:
                names = {one: _secret_name(number) for number, one in enumerate(self.spellings)}
                self._renamed = _renamed(self._tokenizer, names), names
            return self._renamed


class _Guard:
    """Puts marks into texts of a conversation, but into none of `kept`. `spellings` are those of
    the control tokens; the template may look up or compare `words` by name.
    """

    def __init__(
        self, spellings: Collection[str], kept: Collection[str], words: Collection[str]
    ) -> None:
        self._words = words
        firsts = {one[0] for one in spellings if not one[0].isalnum()}
        self._kept = frozenset(one for one in kept if one[0] in firsts)
        self._short = frozenset(one for one in spellings if one[0] in firsts and len(one) == 2)
        """Tokens in which the mark comes after the first character. In others it comes after the
        second one, so that a template's own search for `/think` does not find `</think>`.
        """
        self._lettered = frozenset(one for one in spellings if one[0] not in firsts)
        """Tokens that begin with a letter or digit. Each such character gets a mark, since the
        template may join a token of parts that are far from one another.
        """
        whole = self._kept | self._short
        second = f"(?:(?!{_any_of(self._kept)})\\S)?"
        places = [
            f"{re.escape(first)}(?:{_any_of([one[1:] for one in whole if one[0] == first])}"
            f"|{second})"
            for first in sorted(firsts)
        ]
        letters = sorted({one[0] for one in self._lettered})
        self._places = re.compile("|".join(places + letters))
        begins = range(1, 1 + _MAX_TEMPLATE_CHARS)
        self._rests = {one[at:] for one in spellings for at in begins if len(one) > at + 1}
        """Ends of control tokens whose beginning a template may write."""
        self._inner = {
            one[at : len(one) - cut]
            for one in spellings
            for at in begins
            for cut in range(1 + _MAX_TEMPLATE_CHARS)
            if len(one) > at + cut
        }
        self._lengths: dict[str, set[int]] = {}
        """Lengths of `_rests` by their first two characters."""
        for rest in self._rests:
            self._lengths.setdefault(rest[:2], set()).add(len(rest))

    def value(self, value: Any, mark: str, own_names: int = 0) -> Any:
        """`own_names`: levels of objects whose names are the gateway's own, and get no mark."""
        if isinstance(value, str):
            return self._text(value, mark)
        if isinstance(value, Mapping):
            inner = {name: self.value(one, mark, own_names - 1) for name, one in value.items()}
            if own_names > 0:
                return inner
            return {self.value(name, mark): one for name, one in inner.items()}
        if isinstance(value, list | tuple):
            return [self.value(one, mark, own_names) for one in value]
        return value

    def _text(self, text: str, mark: str) -> str:
        is_name = text in self._words and not any(one in text for one in self._lettered)

        def marked(found: re.Match[str]) -> str:
            whole = found[0]
            if whole in self._kept or (is_name and whole[0].isalnum()):
                return whole
            return whole[0] + mark + whole[1:] if whole in self._short else whole + mark

        text = self._places.sub(marked, text)
        bare = text.lstrip()
        lengths = self._lengths.get(bare[:2], ())
        is_rest = any(bare[:length] in self._rests for length in lengths)
        if is_rest or (bare in self._inner and bare not in self._words):
            at = len(text) - len(bare) + 1
            return text[:at] + mark + text[at:]
        return text


def _is_control(token: AddedToken, source: str) -> bool:
    """Whether a text is a control token where a template writes it: each special token, and others
    that look like a tag and that the template or the gateway knows. Words and blanks that have
    their own ids are text.
    """
    text = token.content
    if not text.strip() or len(text) == 1:
        return False
    if token.special:
        return True
    is_tag = text[0] in "<[" and text[-1] in ">]"
    is_known = text in _ANSWER_MARKS or text in RESULT_TAGS
    return is_known or (is_tag and (text[1] in "|｜" or text in source))


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression of the longest of some texts. It never fits if there are none.

    Texts with a common beginning share it, since a regular expression tries alternatives in turn.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _expression(tree) if tree else "(?!)"


def _expression(tree: Mapping[str, Any]) -> str:
    branches = []
    for character, below in sorted(tree.items(), reverse=True):
        tail = character
        while len(below) == 1 and "" not in below:
            ((one, below),) = below.items()
            tail += one
        has_more = bool(below.keys() - {""})
        branches.append(re.escape(tail) + (_expression(below) if has_more else ""))
    # The empty text sorts last, so that longer ones are tried first.
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else branches[0]


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _strings(key)
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


def _has(texts: Iterable[str], mark: str) -> bool:
    escape = _escape(mark)
    return any(mark in text or escape in text for text in texts)


def _escape(mark: str) -> str:
    """The mark as ASCII-only JSON writes it, for templates that dump messages as JSON."""
    return json.dumps(mark)[1:-1]


def _secret_name(number: int) -> str:
    return f"\ue000{secrets.token_hex(8)}-{number}\ue000"


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The tokens' old names are text."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        if token["content"] in names:
            name = names[token["content"]]
            token |= {"content": name, "single_word": False, "normalized": False}
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(one, one): id_ for one, id_ in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(one, one), score] for one, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (
            (one, one.split(" ", 1) if isinstance(one, str) else one) for one in model["merges"]
        )
        model["merges"] = [one for one, (a, b) in pairs if not {a, b, a + b} & names.keys()]
    return Tokenizer.from_str(json.dumps(content))
