"""Prompts on their way from a gateway to the engine: every token arrives, whatever it is."""

from __future__ import annotations

import random

import pytest
from weft.common.worker.frames import HEADER, EngineMessages, frame, parse_from_engine, parse_inbox
from weft.contract.codec.pairs import HANDLE
from weft.contract.errors import InvalidRequest
from weft.contract.fills import FillStart
from weft.contract.keys import PageKeys, page_key, token_bytes
from weft.contract.messages import Inbox, Outbox
from weft.contract.token_ids import are_below, token_ids
from weft.decode.assembly import Assembly
from weft.testing.services.fill_commands import fill_command
from weft.v1 import decode_pb2

LARGEST = 2**32 - 1


def random_ids(count: int) -> list[int]:
    """Of all lengths on the wire, the largest number among them."""
    ids = [random.getrandbits(random.randint(1, 32)) for _ in range(count)]
    ids[random.randrange(count)] = LARGEST
    return ids


def test_a_prompt_in_parts_reaches_the_engine() -> None:
    ids = random_ids(random.randint(100, 5000))
    cut = random.randrange(len(ids))
    generated = random_ids(20)
    message = decode_pb2.Submit(request_id="r", attempt=1, prompt_length=len(ids))
    message.prompt.ids.extend(ids[:cut])
    message.progress.add(sample=0, num_tokens=len(generated)).tokens.ids.extend(generated)
    assembly = Assembly(decode_pb2.Submit.FromString(message.SerializeToString()))
    assert not assembly.is_complete
    assembly.add_prompt(
        decode_pb2.PromptPart.FromString(
            decode_pb2.PromptPart(tokens={"ids": ids[cut:]}).SerializeToString()
        ).tokens.ids
    )
    assert assembly.is_complete
    sent = frame(Inbox(submits=[assembly.submit(3)]))
    (submit,) = parse_inbox(sent[HEADER.size :]).submits
    assert submit.prompt.tolist() == ids
    assert submit.progress[0].tokens == generated


def test_a_handle_crosses_both_sockets() -> None:
    """From the owner's engine to the filler's."""
    ids = random_ids(4)
    command = fill_command("start", bytes(range(16)), "127.0.0.1:1")
    assert command.handle is not None
    command.handle.tokens[:] = token_ids(ids)
    sent = frame(EngineMessages(outbox=Outbox(fill_commands=[command])))
    outbox = parse_from_engine(sent[HEADER.size :]).outbox
    assert outbox is not None
    (arrived,) = outbox.fill_commands
    assert arrived == command
    assert arrived.handle is not None
    handle = HANDLE.decode(HANDLE.encode(arrived.handle))
    sent = frame(Inbox(fill_starts=[FillStart(stream=1, handle=handle)]))
    (start,) = parse_inbox(sent[HEADER.size :]).fill_starts
    assert start.handle == command.handle
    assert start.handle.tokens.tolist() == ids


def test_a_part_too_many_is_refused() -> None:
    assembly = Assembly(decode_pb2.Submit(request_id="r", attempt=1, prompt_length=3))
    assembly.add_prompt([1, 2])
    with pytest.raises(InvalidRequest):
        assembly.add_prompt([3, 4])


@pytest.mark.parametrize("kind", [list, tuple, token_ids])
def test_ids_are_compared_with_the_vocabulary(kind: type) -> None:
    ids = random_ids(50)
    assert are_below(kind([]), 1)
    assert are_below(kind(ids), LARGEST + 1)
    assert not are_below(kind(ids), LARGEST)


def test_numbers_that_no_token_has() -> None:
    for number in (-1, LARGEST + 1, 2**70):
        assert not are_below([5, number], LARGEST)
        with pytest.raises(InvalidRequest):
            token_ids([5, number])


def test_keys_of_packed_tokens_are_those_of_tokens() -> None:
    ids, size = random_ids(100), random.randint(1, 20)
    num_pages, namespace = len(ids) // size, random.randbytes(32)
    keys = PageKeys(namespace, size, token_bytes(token_ids(ids)))
    grown = [*ids, *random_ids(size)]
    expected, parent = [], bytes(32)
    for start in range(0, (num_pages + 1) * size, size):
        parent = page_key(parent, grown[start : start + size], namespace)
        expected.append(parent)
    assert keys.upto(ids, num_pages) == expected[:num_pages]
    assert keys.upto(grown, num_pages + 1) == expected
