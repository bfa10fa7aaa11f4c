"""Prompts that fill the context, and where tokens begin in a text."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import ContextTooLong
from weft.testing.models.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2

CONTEXT = 160
TEXT = "naïve 🎉👩‍👩‍👧 你好\u0085 ends𝄞"


@pytest.fixture(params=[byte_level_bpe, byte_fallback_bpe])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """A gateway whose worker repeats the prompt's tokens."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[prompt])

    tokenizer = request.param()
    async with gateway(
        tmp_path, script, tokenizer=tokenizer, max_context_tokens=CONTEXT
    ) as harness:
        yield harness


async def test_a_prompt_that_fills_the_context_is_scored(mesh: Harness) -> None:
    ids = [random.choice(mesh.ids("hello world")) for _ in range(CONTEXT)]
    body: dict[str, Any] = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = (await mesh.json("Completions", body))["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == CONTEXT
    (submit,) = mesh.workers[0].submits
    assert (submit.prompt_length, submit.stop.max_tokens) == (CONTEXT, 1)
    plain = {"prompt": ids, "echo": True, "max_tokens": 0}
    answer = await mesh.json("Completions", plain)
    assert answer["choices"][0]["text"] == choice["text"]
    assert answer["usage"]["completion_tokens"] == 0
    for wrong in (
        {**body, "prompt": [*ids, ids[0]]},
        {**plain, "prompt": [*ids, ids[0]]},
        {**body, "max_tokens": 1},
        {"prompt": ids, "max_tokens": 1},
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.post("Completions", wrong)
        assert isinstance(from_rpc_error(caught.value), ContextTooLong)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_offsets_are_where_characters_begin(mesh: Harness, is_streamed: bool) -> None:
    vocabulary = mesh.app.model.vocabulary
    ids = mesh.ids("x " + TEXT)
    body: dict[str, Any] = {"prompt": ids, "logprobs": 0, "max_tokens": len(ids)}
    if is_streamed:
        choices = [e["choices"][0] for e in await mesh.events("Completions", body)]
    else:
        choices = (await mesh.json("Completions", body))["choices"]
    text = "".join(choice["text"] for choice in choices)
    offsets = [
        at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]
    ]
    assert text.strip().endswith(TEXT)
    assert len(offsets) == len(ids)
    given, tokens = b"", [vocabulary.token_bytes(one) for one in ids]
    whole = b"".join(tokens)
    skipped = len(whole.decode()) - len(text)  # a space that is not shown
    for token, offset in zip(tokens, offsets, strict=True):
        # A character that is not complete yet does not count.
        assert offset == max(0, len(given.decode(errors="ignore")) - skipped)
        given += token


async def test_offsets_of_broken_characters_and_special_tokens(mesh: Harness) -> None:
    vocabulary = mesh.app.model.vocabulary
    for skips in (True, False):
        ids = [random.randrange(3, mesh.tokenizer.get_vocab_size()) for _ in range(40)]
        body = {"prompt": ids, "logprobs": 0, "max_tokens": 40, "ignore_eos": True}
        body |= {"skip_special_tokens": skips}
        (choice,) = (await mesh.json("Completions", body))["choices"]
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(text)
        shown = 0
        for token_id, offset in zip(ids, offsets, strict=True):
            if skips and token_id in vocabulary.special_ids:
                continue
            try:
                token = vocabulary.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                continue
            # What an unfinished character before it becomes, is shown with it. Tokenizers that are
            # not of bytes take a run of broken ones apart in their own way.
            if vocabulary.is_byte_level:
                assert token in text[offset : offset + len(token) + 4]
            shown += 1
        assert shown
