"""Chooses the parser of a request's answers, and the constraint that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.contract.request import Constraint, Reasoning
from weft.gateway.request import ChatPrompt, GenerateRequest, PreparedPrompt
from weft.gateway.text.answer.demand import calls_or_answer
from weft.gateway.text.answer.formats import (
    CALLS_ONLY,
    LLAMA3_JSON,
    ReasoningFormat,
    ToolFormat,
)
from weft.gateway.text.answer.harmony import HarmonyParser
from weft.gateway.text.answer.parser import AnswerParser, NamedCallParser, TextParser
from weft.gateway.text.model_card import ModelCard

MakeParser = Callable[[], AnswerParser]


def parser_maker(
    request: GenerateRequest, model: ModelCard, prompt: PreparedPrompt
) -> MakeParser | None:
    """A function that makes a parser for each sample of a chat; None: the whole text is content."""
    return _Reading(request, model, prompt).parser()


def reasoning_of(
    request: GenerateRequest, model: ModelCard, prompt: PreparedPrompt
) -> ReasoningFormat | None:
    """Format of the reasoning with which an answer may begin; None: it has none."""
    if not isinstance(request.prompts[0], ChatPrompt):
        return None
    return _Reading(request, model, prompt).reasoning


def final_constraint(
    request: GenerateRequest, model: ModelCard, prompt: PreparedPrompt
) -> Constraint | None:
    """The constraint of a prompt's samples. That of a chat begins after the model's reasoning, and
    allows calls as an alternative to an answer if the request allows both.

    Raises:
        InvalidRequest: The request's constraint cannot be combined with calls.
    """
    constraint = request.sampling.constraint
    if constraint is None:
        return None
    if constraint.whitespace is None:
        constraint = replace(constraint, whitespace=model.json_whitespace)
    if isinstance(request.prompts[0], ChatPrompt):
        constraint = _Reading(request, model, prompt).constraint(constraint)
    return constraint


class _Reading:
    """How the answer to one chat is parsed, which also decides how it is constrained."""

    def __init__(self, request: GenerateRequest, model: ModelCard, prompt: PreparedPrompt) -> None:
        (given,) = request.prompts
        assert isinstance(given, ChatPrompt), "only chats are parsed"
        self._model = model
        self._prompt = prompt
        self._tools = given.tools
        self._is_continued = given.continue_final_message
        self._calls = calls = request.raw.calls
        self._param = request.raw.name_of("constraint")
        self._is_constrained = request.sampling.constraint is not None
        self._has_choice = self._is_constrained and calls is not None and not calls.is_demanded
        """Whether the answer is either calls or a text under a constraint."""

    @property
    def reasoning(self) -> ReasoningFormat | None:
        form = self._model.reasoning
        if self._is_constrained and self._before_constraint() is None:
            return None  # Workers could not see where the reasoning ends.
        if form is None or form.is_harmony or self._prompt.begins_reasoning:
            return form
        return None if self._is_continued else form

    def _before_constraint(self) -> Reasoning | None:
        told = self._model.answer_reasoning
        if told is None or self._prompt.begins_reasoning or self._model.is_harmony:
            return told if told is None else replace(told, begin=None)
        is_over = self._prompt.has_reasoned or self._is_continued
        return None if is_over or told.begin is None else told

    def constraint(self, constraint: Constraint) -> Constraint:
        """Adds the reasoning that may come before the constrained text and the tokens that may come
        in its place.
        """
        reasoning = self._before_constraint()
        alternatives: tuple[int, ...] = ()
        # Harmony's calls come in a separate channel, which is not constrained.
        if self._has_choice and (reasoning is None or not self._model.is_harmony):
            alternatives = self._model.call_opener_ids
            form = self._model.tool_format
            if not (alternatives and form.openers):
                most = None if self._calls is None else self._calls.most
                form = LLAMA3_JSON if form.is_harmony else form
                constraint = calls_or_answer(form, self._tools, constraint, most, self._param)
        return replace(constraint, reasoning=reasoning, alternatives=alternatives)

    def parser(self) -> MakeParser | None:
        if self._model.is_harmony and (
            not self._is_constrained or self._before_constraint() is not None
        ):
            return self._harmony
        calls, own, reasoning = self._calls, self._model.tool_format, self.reasoning
        if calls is None:
            return None if reasoning is None else lambda: self._text(None)
        if calls.name:
            name = calls.name
            if reasoning is None:
                return lambda: NamedCallParser(name, own.id_length)
            return lambda: NamedCallParser(name, own.id_length, self._text(None))
        if calls.is_demanded:
            return lambda: self._text(CALLS_ONLY, is_demanded=True)
        if not self._has_choice:
            return lambda: self._text(own)
        either = LLAMA3_JSON if own.is_harmony else own
        return lambda: self._text(either, is_answer_else=True)

    def _text(self, tools: ToolFormat | None, **options: bool) -> TextParser:
        if tools is not None:
            tools = replace(tools, id_length=self._model.tool_format.id_length)
        return TextParser(
            tools,
            reasoning=self.reasoning,
            begins_reasoning=self._prompt.begins_reasoning,
            is_continued=self._is_continued,
            max_calls=None if self._calls is None else self._calls.most,
            schemas=self._tools,
            **options,
        )

    def _harmony(self) -> AnswerParser:
        calls, id_length = self._calls, self._model.tool_format.id_length
        most = None if calls is None else calls.most
        answer: AnswerParser | None = None
        if calls is not None and calls.name:
            answer = NamedCallParser(calls.name, id_length)
        elif calls is not None and calls.is_demanded:
            answer = TextParser(CALLS_ONLY, is_demanded=True, max_calls=most)
        return HarmonyParser(
            shows_calls=calls is not None,
            shows_reasoning=self._model.reasoning is not None,
            id_length=id_length,
            max_calls=most,
            answer=answer,
        )
