"""How a transcript is split into words, against transformers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words
from weft.gateway.api.audio.words import split_words
from weft.testing.models.tiny_speech import speech_tokenizer

TOKENIZER = speech_tokenizer()
PARTS = (
    *(" a", " weft", " don't", "-", "well", ".", ",", " (", ")", ' "', '"', " \u00bf", "?", "!"),
    *("\u3002", "\u7ec7", "\u5e03\u673a", " \u00e9t\u00e9", "\U0001f9f5", " 3.5", "%", " ", "  "),
)


@pytest.mark.parametrize(("code", "name"), [("en", "english"), ("zh", "chinese")])
def test_words_are_those_of_transformers(code: str, name: str) -> None:
    rng = random.Random()

    def decode(ids: Any, **_: Any) -> str:
        text: str = TOKENIZER.decode(list(ids))
        return text

    of_transformers: Any = SimpleNamespace(decode=decode, eos_token_id=TOKENIZER.get_vocab_size())
    for _ in range(200):
        text = "".join(rng.choices(PARTS, k=rng.randint(1, 12)))
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        times = [(float(number), number + 0.5) for number in range(len(ids))]
        words, _, indices = _combine_tokens_into_words(of_transformers, ids, name)
        found = split_words(ids, times, decode, code)
        assert [one.text for one in found] == words, text
        wanted = [(float(one[0]), one[-1] + 0.5) for one in indices]
        assert [(one.start_s, one.end_s) for one in found] == wanted
