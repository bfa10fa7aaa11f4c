"""Chooses the parser of a request's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.gateway.request import ChatPrompt, GenerateRequest, PreparedPrompt
from weft.gateway.text.answer.formats import CALLS_ONLY
from weft.gateway.text.answer.parser import AnswerParser, NamedCallParser, TextParser
from weft.gateway.text.model_card import ModelCard


def parser_maker(
    request: GenerateRequest, model: ModelCard, prompt: PreparedPrompt
) -> Callable[[], AnswerParser] | None:
    """What makes a parser for each sample of a chat; None: all of its text is content."""
    calls, tools = request.calls, model.tool_format
    if calls is not None and calls.name:
        name = calls.name
        return lambda: NamedCallParser(name, tools.id_length)
    if calls is not None and calls.is_demanded:
        only = replace(CALLS_ONLY, id_length=tools.id_length)
        return lambda: TextParser(only, is_demanded=True)
    # A constrained text begins with what it is constrained to.
    has_reasoning = model.has_reasoning and request.sampling.constraint is None
    if calls is None and not has_reasoning:
        return None
    (given,) = request.prompts
    is_continued = isinstance(given, ChatPrompt) and given.continue_final_message
    return lambda: TextParser(
        None if calls is None else tools,
        has_reasoning=has_reasoning,
        begins_reasoning=prompt.begins_reasoning,
        is_continued=is_continued,
        max_calls=None if calls is None else calls.most,
        schemas=given.tools if isinstance(given, ChatPrompt) else (),
    )
