"""Tokenising: long texts stop nobody, and who only tokenises waits in a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer
from weft.common.rpc.errors import from_rpc_error
from weft.common.settings import load_settings
from weft.contract.errors import ContextTooLong, DeadlineExceeded, WeftError
from weft.gateway.request import ChatPrompt
from weft.gateway.settings import GatewaySettings
from weft.gateway.text import prepare
from weft.gateway.text.tokens import decode, encode
from weft.testing.models.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2

ANSWER = "A good answer, every time."
USER = [{"role": "user", "content": "hi"}]
MAX_QUEUED = 3


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    tokens = byte_level_bpe().encode(ANSWER).ids

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[tokens])

    async with gateway(tmp_path, script, max_queued_tokenizations=MAX_QUEUED) as harness:
        yield harness


class Gate:
    """Threads that come to it wait until it is opened."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._opened = threading.Event()

    def pass_(self) -> None:
        self.num_waiting += 1
        assert self._opened.wait(60)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


async def refusal(call: Awaitable[object]) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback_bpe])
def test_ids_and_texts_are_those_of_the_plain_calls(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    rng = random.Random(make.__name__)
    texts = ["", "the fox", "<|im_start|>user\n", "你好 🎉👩‍👩‍👧 naïve"]
    texts += ["".join(rng.choice("the fox<|im_end|>é你🎉 →\n") for _ in range(300))]
    lists = []
    for text in texts:
        for special in (False, True):
            ids = encode(tokenizer, text, add_special_tokens=special)
            assert ids == tokenizer.encode(text, add_special_tokens=special).ids
        lists.append(ids)
    expected = [tokenizer.decode(ids, skip_special_tokens=False) for ids in lists]
    assert decode(tokenizer, lists) == expected


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread has Python's lock until it lets go of it."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("what", ["encode", "decode"])
def test_others_run_while_a_long_text_is_tokenised(what: str) -> None:
    tokenizer = byte_level_bpe()
    text = "the quick fox " * 50_000
    ids = encode(tokenizer, text, add_special_tokens=False)
    turns, seen = 0, []

    def work() -> None:
        before = turns
        if what == "encode":
            encode(tokenizer, text, add_special_tokens=False)
        else:
            decode(tokenizer, [ids])
        seen.append(turns - before)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    assert seen[0]


async def test_bare_tokenising_waits_in_a_queue_of_its_own(
    mesh: Harness, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(tokenizer: Tokenizer, many: Sequence[Sequence[int]]) -> list[str]:
        gate.pass_()
        return decode(tokenizer, many)

    monkeypatch.setattr(prepare, "decode", blocked)
    body = {"tokens": mesh.ids("the fox")}
    waiting = [asyncio.create_task(mesh.json("DetokenizeTokens", body))]
    await mesh.wait(lambda: gate.num_waiting)
    waiting += [asyncio.create_task(mesh.json("DetokenizeTokens", body)) for _ in range(MAX_QUEUED)]
    await mesh.wait(lambda: mesh.app.catalogue.first.preparer._bare.num_queued == MAX_QUEUED)
    typed = gateway_pb2.DetokenizeRequest(tokens=common_pb2.TokenIds(ids=[5]))
    for call in (
        mesh.typed.Detokenize(typed),
        mesh.typed.Tokenize(gateway_pb2.TokenizeRequest(text="x")),
    ):
        error = await refusal(call)
        assert (error.grpc_code, error.http_status) == ("RESOURCE_EXHAUSTED", 429)
        assert error.reason == "OVERLOADED"
        assert error.retry_after_s
    # A prompt finds a thread all the same.
    chat = await mesh.json("ChatCompletions", {"model": MODEL, "messages": USER})
    assert chat["choices"][0]["message"]["content"] == ANSWER
    # Who leaves gives back a place in the queue.
    waiting.pop().cancel()
    await mesh.wait(lambda: mesh.app.catalogue.first.preparer._bare.num_queued < MAX_QUEUED)
    waiting.append(asyncio.create_task(mesh.json("DetokenizeTokens", body)))
    gate.open()
    assert await asyncio.gather(*waiting) == [{"prompt": "the fox"}] * len(waiting)


async def test_the_deadline_holds_while_a_prompt_is_tokenised(
    mesh: Harness, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        gate.pass_()
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(prepare, "encode", blocked)
    request = gateway_pb2.CompleteRequest(text="the fox")
    request.timeout.FromMilliseconds(200)
    async with asyncio.timeout(30):
        error = await refusal(mesh.typed.Complete(request).read())
    assert (error.reason, error.stage) == ("DEADLINE_EXCEEDED", "prepare")
    await mesh.wait(lambda: not mesh.app._admission.num_running)


@pytest.fixture
def preparer() -> Iterator[prepare.Preparer]:
    flags = "--model-dir m --decode 127.0.0.1:1 --tokenizer-threads 1 --request-timeout-s 0.2"
    made = prepare.Preparer(load_settings(GatewaySettings, flags.split(), {}), lambda: 60)
    yield made
    made.close()


async def test_the_deadline_holds_while_a_thread_is_awaited(
    preparer: prepare.Preparer, gate: Gate
) -> None:
    card: Any = SimpleNamespace(tokenizer=byte_level_bpe())
    preparer._pool.submit(gate.pass_)
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded, match="while the text was tokenised"):
            await preparer.detokenize(card, [[5]])
        while preparer._bare.num_running:
            await asyncio.sleep(0.01)


def test_tools_are_not_too_long_for_their_json(preparer: prepare.Preparer) -> None:
    card: Any = SimpleNamespace(max_token_bytes=1)
    parameters = {"type": "object", "properties": {"städte": {"type": "string"}}}
    for num_chars, is_refused in ((50, False), (61, True)):
        told = {"name": "wetter", "description": "ü" * num_chars, "parameters": parameters}
        tool = {"type": "function", "function": told}
        prompt = ChatPrompt(messages=({"role": "user", "content": "hi"},), tools=(tool,))
        with pytest.raises(ContextTooLong) if is_refused else contextlib.nullcontext():
            preparer._refuse_hopeless(card, prompt)


async def test_tokenize_takes_no_more_text_than_a_prompt(mesh: Harness) -> None:
    hopeless = "x" * 500_000
    for body in (
        {"prompt": hopeless},
        {"messages": [{"role": "user", "content": hopeless}]},
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.json("TokenizeText", body)
        error = from_rpc_error(caught.value)
        assert (error.http_status, error.reason) == (400, "CONTEXT_LENGTH_EXCEEDED")
        assert "512" in error.message
    error = await refusal(mesh.typed.Tokenize(gateway_pb2.TokenizeRequest(text=hopeless)))
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    # One that is too long, but not by much, is told its length.
    some = await mesh.json("TokenizeText", {"prompt": "the fox " * 400})
    assert some["count"] == len(some["tokens"]) > some["max_model_len"]


async def test_the_tokens_of_a_chat_are_counted(mesh: Harness) -> None:
    counted = await mesh.json("CountChatTokens", {"messages": USER, "max_tokens": 3})
    answer = await mesh.json("ChatCompletions", {"messages": USER, "max_tokens": 3})
    assert counted == {"input_tokens": answer["usage"]["prompt_tokens"]}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.post("CountChatTokens", {"messages": USER, "temperature": "hot"})
    assert from_rpc_error(caught.value).param == "temperature"


async def test_echo_of_token_ids(mesh: Harness) -> None:
    lists = [mesh.ids("the fox"), mesh.ids("Hello 你好")]
    body = {"prompt": lists, "echo": True, "max_tokens": 90}
    answer = await mesh.json("Completions", body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["the fox" + ANSWER, "Hello 你好" + ANSWER]
