"""Chat sessions in an engine with a model: the next turn finds its pages, and nobody is held up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from weft.contract.submits import SessionEnd
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.lora_reference import load
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_models import make_tiny, tiny_config

PAGE = 8
VOCAB = 517


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    return make_tiny("llama", path, seed=random.randrange(2**31), vocab_size=VOCAB)


def prompt_of(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def one_engine(model_dir: Path, **settings: object) -> EnginePair:
    clock = ManualClock()
    return EnginePair(make_engine(model_dir, "decode", clock, **settings), [], clock)


def cached(pair: EnginePair, request_id: str) -> int:
    """Tokens of a request's prompt that were found."""
    return pair.answers[request_id].finished[-1].timeline.matched_tokens


def ask(pair: EnginePair, prompt: list[int], count: int = 3, **values: object) -> str:
    asked = pair.submit(prompt, count, **values)
    pair.finish(asked)
    return asked


def test_the_next_turn_of_a_chat_finds_all_of_the_last_one(model_dir: Path) -> None:
    """Beside a flood that would push it out, and does where there is no session."""
    for session_id in ("chat", ""):
        pair = one_engine(model_dir, num_pages=41)
        try:
            prompt = prompt_of(9 * PAGE)
            first = pair.submit(prompt, PAGE, session_id=session_id)
            (answer,) = pair.finish(first)
            for _ in range(4):
                ask(pair, prompt_of(25 * PAGE))
            second = ask(pair, [*prompt, *answer, *prompt_of(5)], session_id=session_id)
            # The KV of the last token was never made.
            wanted = 9 * PAGE + (PAGE - 1) // PAGE * PAGE
            # Without, the first tokens of another prompt may be the same by chance.
            found = cached(pair, second)
            assert found >= wanted if session_id else found < PAGE
            pair.settle()
            load = pair.owner.sessions
            assert load is not None
            assert (load.pins.num_pages > 0) == bool(session_id)
        finally:
            pair.close()


def test_sessions_hold_up_nobody(model_dir: Path) -> None:
    """All of the pool is pinned, and a request takes all of it."""
    pair = one_engine(model_dir, num_pages=33, session_pool_share=1.0)
    try:
        for number in range(4):
            ask(pair, prompt_of(7 * PAGE + 2), session_id=str(number))
        assert pair.owner.sessions is not None
        assert pair.owner.sessions.pins.num_pages >= 28
        ask(pair, prompt_of(31 * PAGE))
        assert pair.owner.sessions.pins.num_pages <= 1
        pair.settle()
        pair.owner.memory.check_integrity()
    finally:
        pair.close()


def test_a_chat_ends_by_word_by_its_last_request_and_by_time(model_dir: Path) -> None:
    pair = one_engine(model_dir, session_ttl_s=30.0)
    try:
        sessions = pair.owner.sessions
        assert sessions is not None
        for name in ("word", "last", "time"):
            ask(pair, prompt_of(3 * PAGE), session_id=name)
        assert len(sessions.pins) == 3
        pair.send(session_ends=[SessionEnd(cache_salt="", session_id="word")])
        pair.send(session_ends=[SessionEnd(cache_salt="other", session_id="time")])
        pair.turn()
        assert len(sessions.pins) == 2
        ask(pair, prompt_of(3 * PAGE), session_id="last", ends_session=True)
        assert len(sessions.pins) == 1
        pair.clock.offset_s += 31.0
        pair.turn()
        assert (len(sessions.pins), sessions.pins.num_pages) == (0, 0)
        counters = pair.owner.counters()
        assert (counters["released_sessions"], counters["expired_sessions"]) == (2, 1)
    finally:
        pair.close()


def test_a_chat_with_an_adapter_ends_by_word_too(model_dir: Path, tmp_path: Path) -> None:
    config = tiny_config("llama") | {"vocab_size": VOCAB}
    make_adapter(tmp_path / "adapter", config, random.randrange(2**31))
    pair = one_engine(model_dir, enable_lora=True)
    try:
        digest = load(pair.owner, tmp_path / "adapter")
        sessions = pair.owner.sessions
        assert sessions is not None
        for adapter in (b"", digest):
            for name in ("one", "two"):
                ask(pair, prompt_of(3 * PAGE), session_id=name, adapter=adapter)
        assert len(sessions.pins) == 4
        pair.send(session_ends=[SessionEnd(cache_salt="", session_id="one")])
        pair.turn()
        assert len(sessions.pins) == 2
    finally:
        pair.close()


def test_a_flush_forgets_chats_too(model_dir: Path) -> None:
    pair = one_engine(model_dir)
    try:
        ask(pair, prompt_of(5 * PAGE), session_id="chat")
        pair.send(flush_cache=[1])
        pair.turn()
        assert pair.owner.sessions is not None
        assert len(pair.owner.sessions.pins) == pair.owner.sessions.pins.num_pages == 0
        assert pair.owner.memory.counts().cached == 0
    finally:
        pair.close()
