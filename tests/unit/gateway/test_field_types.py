"""A value of each JSON type for each field of each body: it is taken, or refused by the field's
name.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from weft.contract.errors import InvalidRequest
from weft.gateway.api.anthropic.bodies import CountTokensBody, MessagesBody
from weft.gateway.api.ollama.bodies import ChatBody as OllamaChatBody
from weft.gateway.api.ollama.bodies import GenerateBody, ShowBody
from weft.gateway.api.openai.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EndSessionBody,
    TokenizeBody,
)
from weft.gateway.api.openai.parse import parse_body
from weft.gateway.api.pooling.bodies import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from weft.gateway.api.responses.bodies import ResponsesBody

NO_JSON = ("NaN", r'"\ud800"', "9" * 5000)
"""Nobody should write these, and not every parser takes them."""
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
GOOD: dict[type[Body], dict[str, Any]] = {
    ChatBody: MESSAGES,
    CompletionBody: {"prompt": "hi"},
    TokenizeBody: {"prompt": "hi"},
    DetokenizeBody: {"tokens": [5]},
    EndSessionBody: {"session_id": "s"},
    ResponsesBody: {"input": "hi"},
    MessagesBody: {**MESSAGES, "max_tokens": 5},
    CountTokensBody: MESSAGES,
    OllamaChatBody: MESSAGES,
    GenerateBody: {"prompt": "hi"},
    ShowBody: {"model": "m"},
    EmbeddingsBody: {"input": "hi"},
    CohereEmbedBody: {"texts": ["hi"]},
    RerankBody: {"query": "hi", "documents": ["there"]},
    ScoreBody: {"text_1": "hi", "text_2": "there"},
    ClassifyBody: {"input": "hi"},
    PoolingBody: {"input": "hi"},
}


def json_texts() -> list[str]:
    """Texts of JSON values of every type."""
    number = random.uniform(-1e9, 1e9)
    values: list[Any] = [None, True, False, 0, -1, 1.0, number, round(number), 10**30, -(2**63)]
    values += ["", "x", "5", "\0", "\u2028\U0001f600", [], [None], [[]], [{}], ["x", 1], [True]]
    values += [{}, {"x": None}, {"type": 5}, {"type": "text"}, {"content": []}]
    return [*map(json.dumps, values), "1e400", "-1e400", "9" * 400, *NO_JSON]


def refusal_of(cls: type[Body], data: str) -> InvalidRequest | None:
    """How a body is refused; None where it is taken."""
    try:
        parse_body(cls, data.encode(), 1 << 20)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_bodies_are_refused_as_deep(opening: str, closing: str) -> None:
    for depth in (203, 100_000):
        told = refusal_of(ChatBody, f"{opening * depth}1{closing * depth}")
        assert told is not None
        assert told.http_status == 400
        assert "nested too deeply: at most 200" in told.message
        told = refusal_of(ChatBody, f"{opening * depth}")
        assert told is not None
        assert "nested too deeply" in told.message
    told = refusal_of(ChatBody, f"{opening * 199}1{closing * 199}")
    assert told is not None
    assert "deep" not in told.message


@pytest.mark.parametrize("cls", GOOD)
def test_each_type_is_taken_or_refused_by_name(cls: type[Body]) -> None:
    good = GOOD[cls]
    parse_body(cls, json.dumps(good).encode(), 1 << 20)
    num_taken = 0
    for name, field in cls.model_fields.items():
        shown = field.alias or name
        rest = json.dumps({key: value for key, value in good.items() if key != shown})[1:]
        for text in json_texts():
            data = f'{{"{shown}": {text}{", " if len(rest) > 1 else ""}{rest}'
            refusal = refusal_of(cls, data)
            if refusal is None:
                num_taken += 1
                continue
            told = refusal.param if refusal.param is not None else refusal.message
            is_named = told.startswith(shown)
            assert is_named or ("is not valid JSON" in told and text in NO_JSON), (data, refusal)
            assert len(refusal.message) < 500, data
    assert num_taken >= len(cls.model_fields)  # at least null, or a value of its own
