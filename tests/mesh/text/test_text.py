"""Greedy text of the whole mesh equals transformers', whichever way a prompt's pages take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_calls import Answer, Ask, Caller, check_way, new_salt
from weft.testing.meshes.mesh_kinds import DRAFTED_TOKENS, NUM_TOKENS, PREEMPTED_TOKENS, on
from weft.testing.meshes.mesh_prompts import BY_NAME, COVER, DRAFTED, PROMPTS, SOME, MeshPrompt
from weft.testing.meshes.text_reference import Reference, TextReference, is_near_tie
from weft.v1 import common_pb2

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600)]

FACES = ("rest", "grpc")
LONG_TOKENS = 4000
"""Of an answer that is stopped long before."""
MOST_ROUNDS = 10
"""How often a test may repeat its prompts until drafts were accepted. The gate decides by measured
times whether to draft, so that a busy machine may see no drafts, or only a few wrong ones.
"""
WAYS = ("nixl", "data", "local", "hit", "preempted")
KIND_OF_WAY = {
    **{"nixl": "nixl", "hit": "nixl", "data": "data"},
    **{"local": "local", "preempted": "local"},
}
ALONE = tuple(
    BY_NAME[name]
    for name in ("one-token", "arabic", "system", "chat-japanese", "raw-300", "long-summary")
)


def check_text(reference: TextReference, ask: Ask, answer: Answer) -> None:
    """Asserts that the answer is transformers'."""
    assert isinstance(ask.prompt, MeshPrompt)
    expected = reference.of(ask.prompt, ask.max_tokens, ignore_eos=ask.ignore_eos)
    ids = expected.token_ids
    assert answer.prompt_tokens == len(expected.prompt_ids)
    if answer.token_ids is not None:
        assert answer.token_ids == ids, ask.prompt.name
    assert answer.text == reference.text(ids), ask.prompt.name
    assert answer.completion_tokens == len(ids)
    ended = ids[-1] == reference.eos_token_id and not ask.ignore_eos
    stop, length = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
    assert answer.finish_reason == (stop if ended else length)


@on("nixl")
@pytest.mark.full_after(1)
@pytest.mark.parametrize("prompts", [SOME, PROMPTS], ids=["some", "all"])
async def test_prompts_sixteen_at_once(
    mesh: LocalMesh, reference: TextReference, prompts: Sequence[MeshPrompt]
) -> None:
    places = asyncio.Semaphore(16)

    async def one(number: int, prompt: MeshPrompt) -> tuple[Ask, Answer]:
        ask = Ask(prompt, NUM_TOKENS, new_salt(), is_streamed=number % 2 == 0)
        async with places:
            return ask, await caller.rest(ask)

    async with Caller(mesh) as caller:
        done = await asyncio.gather(*(one(*pair) for pair in enumerate(prompts)))
    for ask, answer in done:
        check_text(reference, ask, answer)
        check_way("nixl", answer)


@on("nixl")
async def test_six_prompts_alone(mesh: LocalMesh, reference: TextReference) -> None:
    async with Caller(mesh) as caller:
        for prompt in ALONE:
            ask = Ask(prompt, NUM_TOKENS, new_salt(), is_streamed=True)
            answer = await caller.rest(ask)
            check_text(reference, ask, answer)
            check_way("nixl", answer)


@on("nixl")
async def test_pages_are_shipped_while_later_ones_are_computed(mesh: LocalMesh) -> None:
    """Its times come with the filler's last word, which a request of few tokens may end before."""
    async with Caller(mesh) as caller:
        answer = await caller.rest(Ask(BY_NAME["raw-1000"], 64, new_salt(), ignore_eos=True))
    check_way("nixl", answer)
    (fill,) = answer.timeline.fills
    assert fill.end_token - fill.start_token == fill.computed_tokens >= 992
    posted, computed = fill.first_write_posted_time, fill.last_chunk_computed_time
    assert 0 < posted.ToNanoseconds() < computed.ToNanoseconds()
    assert computed.ToNanoseconds() < fill.last_write_complete_time.ToNanoseconds()


# ---- every way over every face -----------------------------------------------------------------


def ways() -> pytest.MarkDecorator:
    """Runs a test for each way, on the mesh where prompts take it."""
    each = [
        pytest.param(
            way,
            # The default run has `data` in `test_bfloat16_differs_at_near_ties_only`.
            marks=[on(KIND_OF_WAY[way]), *([pytest.mark.full] if way == "data" else [])],
        )
        for way in WAYS
    ]
    return pytest.mark.parametrize("way", each)


@ways()
async def test_pairs_of_face_way_and_prompt(
    mesh: LocalMesh, reference: TextReference, way: str
) -> None:
    """Every two of (face, way, prompt) meet."""
    turn = WAYS.index(way)
    cases = [(FACES[(turn + i) % 2], prompt) for i, prompt in enumerate(COVER)]
    await check_cases(mesh, reference, way, cases)


@pytest.mark.full
@pytest.mark.timeout(3600)
@ways()
async def test_all_of_face_way_and_prompt(
    mesh: LocalMesh, reference: TextReference, way: str
) -> None:
    cases = [(face, prompt) for prompt in PROMPTS for face in FACES]
    await check_cases(mesh, reference, way, cases)


async def check_cases(
    mesh: LocalMesh,
    reference: TextReference,
    way: str,
    cases: Sequence[tuple[str, MeshPrompt]],
) -> None:
    if way == "preempted":
        reference.prepare((prompt, PREEMPTED_TOKENS, True) for _, prompt in cases)
    async with Caller(mesh) as caller:
        for number, (face, prompt) in enumerate(cases):
            ask = Ask(prompt, NUM_TOKENS, new_salt(), is_streamed=number % 4 < 2)
            if way == "preempted":
                ask, answer = await ask_preempted(mesh, caller, face, prompt, reference)
            else:
                answer = await caller.ask(face, ask)
            if way == "hit":
                check_text(reference, ask, answer)
                check_way("nixl", answer)
                answer = await caller.ask(face, ask)
            check_text(reference, ask, answer)
            check_way(way, answer)


URGENT = [random.Random(7).randrange(1000, 40_000) for _ in range(620)]
"""Takes so many pages that those of who gives way do not all stay cached."""


async def ask_preempted(
    mesh: LocalMesh, caller: Caller, face: str, prompt: MeshPrompt, reference: TextReference
) -> tuple[Ask, Answer]:
    """Sends a request, and while it runs one that is more urgent: there is place for one."""
    for _ in range(8):
        ask = Ask(prompt, PREEMPTED_TOKENS, new_salt(), ignore_eos=True, priority=100)
        asking = asyncio.create_task(caller.ask(face, ask))
        while not asking.done():
            if (await asyncio.to_thread(mesh.load, "decode-0")).running_requests:
                break
        urgent = Ask(URGENT, 2, new_salt(), ignore_eos=True)
        await caller.ask("grpc", urgent)
        answer = await asking
        if answer.timeline.preemptions:
            break
        check_text(reference, ask, answer)
    return ask, answer


# ---- bfloat16 ----------------------------------------------------------------------------------


@on("bfloat16")
@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("prompts", "count"), [(SOME, 7), (PROMPTS, len(PROMPTS))], ids=["some", "all"]
)
async def test_bfloat16_differs_at_near_ties_only(
    mesh: LocalMesh,
    reference: TextReference,
    capsys: pytest.CaptureFixture[str],
    prompts: Sequence[MeshPrompt],
    count: int,
) -> None:
    prompts = random.sample(prompts, count)
    async with Caller(mesh) as caller:
        asks = [Ask(prompt, NUM_TOKENS, new_salt()) for prompt in prompts]
        answers = await asyncio.gather(*(caller.grpc(ask) for ask in asks))
    kinds = {fill.transport for answer in answers for fill in answer.timeline.fills}
    assert kinds == {common_pb2.TRANSPORT_KIND_DATA}
    differences = [
        difference
        for prompt, answer in zip(prompts, answers, strict=True)
        if (difference := first_difference(prompt, answer, reference.of(prompt, NUM_TOKENS)))
    ]
    with capsys.disabled():
        print(f"\nbfloat16: {len(differences)} of {len(prompts)} texts differ from float32")
        for difference in differences:
            print(f"  {difference}")
    assert not [d for d in differences if not d.is_near_tie]


class Difference:
    """Where two texts part, and the float32 logits of the two tokens there."""

    def __init__(self, name: str, position: int, expected: float, actual: float | None) -> None:
        self._words = f"{name}, token {position}: logits {expected:.4f} and {actual}"
        self.is_near_tie = actual is not None and is_near_tie(expected, actual)

    def __str__(self) -> str:
        return f"{self._words}{'' if self.is_near_tie else ' (NOT a near-tie)'}"


def first_difference(prompt: MeshPrompt, answer: Answer, expected: Reference) -> Difference | None:
    """None where the tokens are the same."""
    actual: Iterable[int] = answer.token_ids or ()
    for position, (theirs, ours) in enumerate(zip(expected.token_ids, actual, strict=False)):
        if theirs != ours:
            logits = expected.logit(position, theirs), expected.logit(position, ours)
            assert logits[0] is not None
            return Difference(prompt.name, position, logits[0], logits[1])
    assert len(expected.token_ids) == answer.completion_tokens
    return None


@on("nixl")
async def test_drafts_are_verified_and_change_nothing(
    mesh: LocalMesh, reference: TextReference
) -> None:
    """Text of many tokens, from pages that a prefill worker filled, draft's entries and all."""
    drafted = accepted = num_rounds = 0

    def are_right() -> bool:
        return accepted > 0.1 * drafted > 0  # wrong ones: none

    async with Caller(mesh) as caller:
        while not are_right() and num_rounds < MOST_ROUNDS:
            num_rounds += 1
            for prompt in DRAFTED:
                ask = Ask(prompt, DRAFTED_TOKENS, new_salt(), ignore_eos=True)
                answer = await caller.rest(ask)
                check_text(reference, ask, answer)
                drafted += answer.timeline.drafted_tokens
                accepted += answer.timeline.accepted_tokens
                assert answer.timeline.steps <= DRAFTED_TOKENS + 1 - answer.timeline.accepted_tokens
    print(f"{accepted} of {drafted} drafts were right")
    assert are_right()


@on("nixl")
async def test_who_wants_no_drafts_gets_none_beside_others(
    mesh: LocalMesh, reference: TextReference
) -> None:
    drafted = Ask(BY_NAME["raw-300"], DRAFTED_TOKENS, new_salt(), ignore_eos=True)
    plain = replace(drafted, salt=new_salt(), speculates=False)
    async with Caller(mesh) as caller:
        for face in FACES:
            answers = await asyncio.gather(*(caller.ask(face, ask) for ask in (drafted, plain)))
            for ask, answer in zip((drafted, plain), answers, strict=True):
                check_text(reference, ask, answer)
            assert answers[1].timeline.drafted_tokens == answers[1].timeline.accepted_tokens == 0
            assert answers[1].timeline.steps >= DRAFTED_TOKENS


@on("nixl")
async def test_a_stop_string_ends_drafted_text(mesh: LocalMesh, reference: TextReference) -> None:
    """The gateway cuts it where the stop string is complete, and the worker goes on for no more
    than it takes to be told."""
    names = ("english", "system")
    drafted = 0
    async with Caller(mesh) as caller:
        for turn in range(MOST_ROUNDS * len(names)):
            name = names[turn % len(names)]
            ids = reference.of(BY_NAME[name], DRAFTED_TOKENS, ignore_eos=True).token_ids
            stop, num_tokens = stop_string(reference, ids)
            ask = Ask(BY_NAME[name], LONG_TOKENS, new_salt(), ignore_eos=True, stop=stop)
            before = generated_tokens(mesh)
            answer = await caller.rest(ask)
            text = reference.text(ids)
            assert answer.text == text[: text.index(stop)], name
            assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
            assert answer.completion_tokens == num_tokens
            await asyncio.to_thread(mesh.wait_idle)
            num_generated = generated_tokens(mesh) - before
            print(f"{name}: {stop!r} ends token {num_tokens}, {num_generated} were generated")
            assert num_tokens <= num_generated < LONG_TOKENS / 4
            drafted += answer.timeline.drafted_tokens
            assert answer.timeline.accepted_tokens < num_generated
            if turn >= len(names) - 1 and drafted:
                break
    assert drafted > 0


def stop_string(reference: TextReference, ids: Sequence[int]) -> tuple[str, int]:
    """Some letters that come late in a text, and by which of its tokens they have come."""
    text = reference.text(ids)
    places = [at for at in range(len(text) // 2, len(text) - 3) if text[at : at + 3].isascii()]
    stop = next(
        text[at : at + 3]
        for at in random.sample(places, len(places))
        if text.index(text[at : at + 3]) == at
    )
    return stop, next(n for n in range(1, len(ids) + 1) if stop in reference.text(ids[:n]))


def generated_tokens(mesh: LocalMesh) -> int:
    return int(mesh.dump("decode-0")["engine"]["counters"]["generated_tokens"])
