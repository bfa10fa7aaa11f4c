"""Chooses the parser of a request's answers, and the constraint that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.engine.request import Constraint, Reasoning
from weft.gateway.request import Calls, ChatPrompt, GenerateRequest, PreparedPrompt
from weft.gateway.text.answer.demand import calls_or_answer
from weft.gateway.text.answer.formats import CALLS_ONLY, CALLS_OR_ANSWER, ToolFormat
from weft.gateway.text.answer.harmony import HarmonyParser
from weft.gateway.text.answer.parser import AnswerParser, NamedCallParser, TextParser
from weft.gateway.text.model_card import ModelCard
from weft.gateway.validate import invalid

MakeParser = Callable[[], AnswerParser]


def parser_maker(
    request: GenerateRequest, model: ModelCard, prompt: PreparedPrompt
) -> MakeParser | None:
    """What makes a parser for each sample of a chat; None: all of its text is content."""
    reading = _Reading.of(request, model, prompt)
    if model.is_harmony:
        return reading.harmony_parser()
    return reading.parser()


def settle_constraint(
    request: GenerateRequest, model: ModelCard, prompts: Sequence[PreparedPrompt]
) -> GenerateRequest:
    """The request with the constraint that its one chat is drawn under: with calls beside an
    answer, if it may have either, and behind the model's reasoning.

    Raises:
        InvalidRequest: There can be no calls beside its constraint.
    """
    constraint = request.sampling.constraint
    if constraint is None or not isinstance(request.prompts[0], ChatPrompt):
        return request
    settled = _Reading.of(request, model, prompts[0]).constraint(constraint)
    return replace(request, sampling=replace(request.sampling, constraint=settled))


class _Reading(NamedTuple):
    """How the answer to one prompt is to be read."""

    request: GenerateRequest
    model: ModelCard
    prompt: PreparedPrompt
    tools: Sequence[Mapping[str, Any]]
    is_continued: bool
    has_free_reasoning: bool
    """Whether the answer may begin with reasoning."""

    @classmethod
    def of(cls, request: GenerateRequest, model: ModelCard, prompt: PreparedPrompt) -> _Reading:
        (given,) = request.prompts
        is_free = model.reasoning is not None
        if request.sampling.constraint is not None and is_free:
            # Without tokens for its end the worker could not tell where the constraint begins.
            is_free = model.answer_reasoning is not None
        return cls(
            request,
            model,
            prompt,
            given.tools if isinstance(given, ChatPrompt) else (),
            isinstance(given, ChatPrompt) and given.continue_final_message,
            is_free,
        )

    @property
    def calls(self) -> Calls | None:
        return self.request.calls

    @property
    def is_constrained(self) -> bool:
        return self.request.sampling.constraint is not None

    @property
    def has_choice(self) -> bool:
        """Whether the answer is calls, or else under a constraint."""
        calls = self.calls
        return calls is not None and not calls.is_demanded and self.is_constrained

    def constraint(self, constraint: Constraint) -> Constraint:
        reasoning = self._reasoning()
        alternatives: tuple[int, ...] = ()
        if self.has_choice and not self.model.is_harmony:
            alternatives = self.model.call_opener_ids
            if not alternatives:
                assert self.calls is not None
                param = self.request.constraint_param
                constraint = calls_or_answer(self.tools, constraint, self.calls.most, param)
        if self.has_choice and self.model.is_harmony and reasoning is None:
            param = self.request.constraint_param
            raise invalid(param, "cannot stand beside tools here: the model's channels are unknown")
        return replace(constraint, reasoning=reasoning, alternatives=alternatives)

    def _reasoning(self) -> Reasoning | None:
        """What may come before the constrained text."""
        model, prompt = self.model, self.prompt
        told = model.answer_reasoning
        if told is None or prompt.begins_reasoning or model.is_harmony:
            return told if told is None else replace(told, begin=None)
        is_over = prompt.has_reasoned or self.is_continued
        return None if is_over or told.begin is None else told

    def parser(self) -> MakeParser | None:
        calls, format_ = self.calls, self.model.tool_format
        has_reasoning = self.has_free_reasoning
        if self.is_constrained:
            has_reasoning = self._reasoning() is not None
        if calls is None and not has_reasoning:
            return None
        own, text = format_, self._text_parser(has_reasoning)
        if calls is None:
            return lambda: text(None)
        if calls.name:
            name = calls.name
            before = text if has_reasoning else None
            return lambda: NamedCallParser(
                name, own.id_length, None if before is None else before(None)
            )
        if calls.is_demanded:
            only = replace(CALLS_ONLY, id_length=own.id_length)
            return lambda: text(only, is_demanded=True)
        if not self.has_choice:
            return lambda: text(own)
        either = own if self.model.call_opener_ids else self._either()
        return lambda: text(either, is_answer_else=True)

    def _either(self) -> ToolFormat:
        return replace(CALLS_OR_ANSWER, id_length=self.model.tool_format.id_length)

    def _text_parser(self, has_reasoning: bool) -> Callable[..., TextParser]:
        def make(tools: ToolFormat | None, **options: Any) -> TextParser:
            return TextParser(
                tools,
                reasoning=self.model.reasoning if has_reasoning else None,
                begins_reasoning=self.prompt.begins_reasoning,
                is_continued=self.is_continued,
                max_calls=None if self.calls is None else self.calls.most,
                schemas=self.tools,
                **options,
            )

        return make

    def harmony_parser(self) -> MakeParser | None:
        calls, id_length = self.calls, self.model.tool_format.id_length
        if self.is_constrained and self._reasoning() is None:
            return self.parser()
        most = None if calls is None else calls.most

        def make() -> AnswerParser:
            answer: AnswerParser | None = None
            if calls is not None and calls.name:
                answer = NamedCallParser(calls.name, id_length)
            elif calls is not None and calls.is_demanded:
                only = replace(CALLS_ONLY, id_length=id_length)
                answer = TextParser(only, is_demanded=True, max_calls=most)
            return HarmonyParser(
                shows_calls=calls is not None,
                shows_reasoning=self.model.reasoning is not None,
                id_length=id_length,
                max_calls=most,
                answer=answer,
            )

        return make
