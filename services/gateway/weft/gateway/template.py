"""Renders the chat templates of Hugging Face models in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from weft.engine.errors import InvalidRequest, ModelError


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
        """Compiles the template.

        Args:
            source: Jinja2 source of the model.
            special_tokens: `bos_token` and its like, visible to the template.
            now: The clock behind `strftime_now`.

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
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

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
            variables: More names for the template (`enable_thinking` and its like).

        Raises:
            InvalidRequest: The template refuses the conversation.
        """
        names: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}",
                stage="prepare",
                param="messages",
            ) from error
        return _open_last(text, messages) if continue_final_message else text


def _open_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cuts off the text after the last message's content."""
    last = str(messages[-1].get("content") or "").strip()
    position = text.rfind(last)
    if position < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template changes the last message",
            stage="prepare",
            param="continue_final_message",
        )
    return text[: position + len(last)]


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
