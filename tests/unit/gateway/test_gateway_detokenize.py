"""Incremental detokenisation against decoding the whole."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from weft.gateway.text.detokenize import (
    ByteDetokenizer,
    Vocabulary,
    WindowDetokenizer,
    make_detokenizer,
)
from weft.testing.models.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe

TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(exclude_categories=("Cs",)),
        st.sampled_from("the fox hello é你好🎉👩\u200d\ufe0f \n"),
    ),
    max_size=60,
)


@cache
def byte_level() -> Vocabulary:
    return Vocabulary(byte_level_bpe())


@cache
def byte_fallback() -> Vocabulary:
    return Vocabulary(byte_fallback_bpe())


def run(detokenizer: ByteDetokenizer | WindowDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def random_split(tokenizer: Tokenizer, text: str, cuts: list[int]) -> list[int]:
    """Tokens of `text` cut at arbitrary bytes: encodings that no tokenizer would choose."""
    ids: list[int] = []
    data = text.encode()
    alphabet = {byte_level().token_bytes(i): i for i in range(3, 300)}
    position = 0
    for cut in sorted({c % (len(data) + 1) for c in cuts} | {len(data)}):
        piece = data[position:cut]
        try:
            ids += tokenizer.encode(piece.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            ids += [alphabet[bytes([byte])] for byte in piece]
        position = cut
    return ids


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 300), max_size=8))
def test_byte_level_valid_text(text: str, cuts: list[int]) -> None:
    vocabulary = byte_level()
    ids = random_split(vocabulary.tokenizer, text, cuts)
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=False) == text
    for kind in (ByteDetokenizer(vocabulary, False), WindowDetokenizer(vocabulary, [], False)):
        deltas = run(kind, ids)
        assert "".join(deltas) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 420), max_size=40), st.booleans())
def test_byte_level_any_tokens(ids: list[int], skip: bool) -> None:
    vocabulary = byte_level()
    deltas = run(make_detokenizer(vocabulary, [5], skip), ids)
    assert "".join(deltas) == vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS)
def test_byte_fallback_continues_its_prompt(prompt: str, text: str) -> None:
    tokenizer = byte_fallback().tokenizer
    prompt_ids = tokenizer.encode(prompt).ids
    ids = tokenizer.encode(text).ids
    whole = tokenizer.decode([*prompt_ids, *ids])
    deltas = run(make_detokenizer(byte_fallback(), prompt_ids, True), ids)
    assert "".join([tokenizer.decode(prompt_ids), *deltas]) == whole
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
    alone = run(make_detokenizer(byte_fallback(), [], True), ids)
    assert "".join(alone) == tokenizer.decode(ids)


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="the fox🎉你好é世\n", min_size=2, max_size=24), st.data())
def test_byte_fallback_goes_on_in_a_run_of_bytes(text: str, data: st.DataObject) -> None:
    """As behind a prompt whose last characters are bytes: the context begins within one of them."""
    tokenizer = byte_fallback().tokenizer
    ids = tokenizer.encode(text).ids
    cut = data.draw(st.integers(0, len(ids) - 1))
    known, whole = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
    assume("\ufffd" not in known and whole.startswith(known))
    deltas = run(make_detokenizer(byte_fallback(), ids[:cut], True), ids[cut:])
    assert "".join(deltas) == whole[len(known) :]


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level().tokenizer
    ids = tokenizer.encode("<|im_start|>hello<tool call> x→é→<|im_end|>").ids
    assert tokenizer.token_to_id("<|im_start|>") in ids
    assert "".join(run(ByteDetokenizer(byte_level(), True), ids)) == "hello<tool call> x→é→"
    shown = "".join(run(ByteDetokenizer(byte_level(), False), ids))
    assert shown == "<|im_start|>hello<tool call> x→é→<|im_end|>"


def test_incomplete_end_is_replaced_once() -> None:
    vocabulary = byte_level()
    ids = random_split(vocabulary.tokenizer, "a🎉", [2, 3, 4])[:-1]
    assert "".join(run(ByteDetokenizer(vocabulary, True), ids)) == "a\ufffd"


@pytest.mark.parametrize("vocabulary", [byte_level, byte_fallback])
def test_window_stays_short(vocabulary) -> None:  # type: ignore[no-untyped-def]
    detokenizer = WindowDetokenizer(vocabulary(), [], False)
    longest = 0
    for index in range(2000):
        detokenizer.push((index * 7919) % 256 + 3)
        longest = max(longest, len(detokenizer._ids))
    assert longest <= 64


def test_token_bytes_of_fallback() -> None:
    vocabulary = byte_fallback()
    assert vocabulary.token_bytes(vocabulary.tokenizer.token_to_id("<0xE4>")) == b"\xe4"
    assert vocabulary.token_bytes(vocabulary.tokenizer.token_to_id("▁the")) == b" the"
    assert vocabulary.token_bytes(vocabulary.tokenizer.token_to_id("he")) == b"he"
    assert vocabulary.token_bytes(10**6) == b""
