"""Seeded sampling over two prefill and two decode workers: the same text wherever it is made."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from weft.engine.sampling.sampler import derive_seed
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_calls import Answer, Ask, Caller, check_way, new_salt
from weft.testing.meshes.mesh_kinds import NUM_TOKENS, on
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy, TinyMesh
from weft.v1 import common_pb2, gateway_pb2

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600), on("pairs")]

LENGTHS = (2, 17, 40, 64, 130, 300)
NUM_TRIES = 50
"""For draws that float32 can tell; one of a hundred is none."""


def prompt_of(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


async def clear_ask(caller: Caller, greedy: Greedy, length: int, seed: int) -> Ask:
    """An ask whose draws float32 can tell."""
    for _ in range(NUM_TRIES):
        prompt = prompt_of(length)
        ask = Ask(prompt, NUM_TOKENS, new_salt(), temperature=1.0, seed=seed, ignore_eos=True)
        ids = (await caller.grpc(ask)).token_ids or []
        if greedy.is_clear_draw(prompt, ids, temperature=1.0, seed=seed):
            return ask
    raise AssertionError("the mesh draws other tokens than its definition has")


async def test_a_seed_gives_the_same_text_alone_in_a_batch_and_on_both_workers(
    mesh: TinyMesh, greedy: Greedy
) -> None:
    seed = random.randrange(2**63)

    async def answer(face: str, ask: Ask) -> Answer:
        answer = await caller.ask(face, replace(ask, salt=new_salt()))
        check_way("nixl", answer)
        return answer

    async def on_each_worker(ask: Ask) -> dict[str, Answer]:
        """One answer alone from each decode worker; the gateway takes them in turn."""
        found: dict[str, Answer] = {}
        for turn in range(8):
            made = await answer(("grpc", "rest")[turn % 2], ask)
            found[made.timeline.worker_id] = made
            if len(found) == 2 and turn % 2:
                break
        return found

    async with Caller(mesh) as caller:
        asks = [await clear_ask(caller, greedy, length, seed) for length in LENGTHS]
        alone = [await on_each_worker(ask) for ask in asks]
        together = await asyncio.gather(*(answer("grpc", ask) for ask in asks * 2))

    for number, answers in enumerate(alone):
        assert answers.keys() == {"decode-0", "decode-1"}
        batched = (together[number], together[number + len(asks)])
        assert batched[0].token_ids == batched[1].token_ids
        assert {one.text for one in (*answers.values(), *batched)} == {batched[0].text}
    fillers = {fill.worker_id for answer in together for fill in answer.timeline.fills}
    assert fillers == {"prefill-0", "prefill-1"}


async def test_samples_differ_and_repeat(mesh: TinyMesh, greedy: Greedy) -> None:
    messages = [gateway_pb2.ChatMessage(role="user", content="Tell me about your day.")]
    request = gateway_pb2.ChatRequest(
        model=mesh.model,
        messages=messages,
        sampling=common_pb2.SamplingParams(temperature=1.0, n=4),
        stop=common_pb2.StopCriteria(max_tokens=NUM_TOKENS, ignore_eos=True),
    )

    async def samples() -> list[list[int]]:
        (message,) = [message async for message in caller.stub.Chat(request)]
        assert [choice.index for choice in message.choices] == list(range(request.sampling.n))
        return [list(choice.token_ids) for choice in message.choices]

    async with Caller(mesh) as caller:
        tokenized = await caller.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=messages))
        prompt = tokenized.tokens.ids
        for _ in range(NUM_TRIES):
            request.sampling.seed = random.randrange(2**64)
            found = await samples()
            seeds = [derive_seed(request.sampling.seed, index) for index in range(4)]
            if all(
                greedy.is_clear_draw(prompt, ids, temperature=1.0, seed=seed)
                for ids, seed in zip(found, seeds, strict=True)
            ):
                break
        else:
            raise AssertionError("the mesh draws other tokens than its definition has")
        assert len(set(map(tuple, found))) == 4
        assert await samples() == found  # on the other worker
        request.sampling.n = 1
        assert await samples() == found[:1]


async def test_without_a_seed_texts_differ(mesh: LocalMesh) -> None:
    ask = Ask(prompt_of(2), NUM_TOKENS, temperature=1.0, ignore_eos=True)
    async with Caller(mesh) as caller:
        answers = await asyncio.gather(*(caller.rest(ask) for _ in range(4)))
    assert len({answer.text for answer in answers}) == 4
