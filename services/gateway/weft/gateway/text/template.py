"""Renders the chat templates of Hugging Face models in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from weft.contract.errors import InvalidRequest, ModelError
from weft.gateway.text.parts import Content, parts_of, wrapped

_MARK = "\U0010fffd continued here \U0010fffd"
"""Text at the end of the message to be continued. Without it, blanks that the template cuts off, or
text that it adds, could not be recognised.
"""

_PROBE = "probe"
"""Content by which a template shows whether it reads texts."""

_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a template's own code can raise."""


class _GenerationTag(Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which marks the assistant's own text for
    training; here it only renders its content.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders a conversation to the text that the model was trained on."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compiles the template, a Jinja2 source. It sees `special_tokens`, `bos_token` and the
        like, and `strftime_now` reads the clock `now`.

        Raises:
            ModelError: The template does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda fmt: now().strftime(fmt)
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.takes_tools = "tools" in names
        """Whether the template describes tools to the model."""
        self.knows_developers = "developer" in source
        """Whether the template knows the role `developer`."""
        self.knows_thinking = ".thinking" in source
        """Whether the template reads messages' reasoning from `thinking`, like gpt-oss's."""
        self._reads_parts_alone = False
        self._reads_parts_alone = self._drops(_PROBE) and not self._drops(parts_of(_PROBE))

    def _drops(self, content: Content) -> bool:
        """Whether a user's content does not reach the text."""
        try:
            return _PROBE not in self.render([{"role": "user", "content": content}])
        except InvalidRequest:
            return True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: Each with `role` and `content`.
            add_generation_prompt: End with the opening of the assistant's turn.
            continue_final_message: End inside the last message, so that the model continues it.
            variables: More names for the template, such as `enable_thinking`.

        Raises:
            InvalidRequest: The template refuses the conversation.
        """
        given = _with_mark(messages) if continue_final_message else list(messages)
        if self._reads_parts_alone:
            given = [{**one, "content": parts_of(one.get("content") or "")} for one in given]
        names: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": given,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(names)
        except _REFUSALS as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}",
                stage="prepare",
                param="messages",
            ) from error
        return _open_last(text) if continue_final_message else text


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    *before, last = messages
    return [*before, {**last, "content": wrapped(last.get("content") or "", after=_MARK)}]


def _open_last(text: str) -> str:
    begin, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "continue_final_message: the chat template leaves out the last message",
            stage="prepare",
            param="continue_final_message",
        )
    return begin


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
