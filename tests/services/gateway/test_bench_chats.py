"""Benchmarks of chats: the oracle against a naive one, what the client says, what is counted."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from weft.gateway.admission.slo import Targets
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, gateway
from weft.v1 import decode_pb2, gateway_pb2

BENCH = Path(__file__).resolve().parents[3] / "bench"
PAGE = 16


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("chats.workload", "chats.client", "conversations", "overload")
    return SimpleNamespace(
        **{name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    )


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_the_oracle_is_a_cache_that_forgets_nothing(chats: Any) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    oracle, held = chats.workload.EndlessCache(), [[]]
    computed = 0
    for _ in range(200):
        begin = rng.choice(held)[: rng.randint(0, 200)]
        prompt = begin + [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        known = max(common(prompt, one) // PAGE * PAGE for one in held)
        computed += len(prompt) - min(known, (len(prompt) - 1) // PAGE * PAGE)
        oracle.sent(prompt)
        whole = prompt + [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        oracle.ended(whole)
        held += [prompt[:-1], whole[:-1]]
        assert oracle.computed_tokens == computed


def test_chats_share_their_beginnings_and_come_at_their_rate(chats: Any) -> None:
    made = chats.workload.make_chats(400, 5.0, 2048, seed=random.randrange(2**31))
    assert len({tuple(chat.system) for chat in made}) <= 12
    assert [chat.start_s for chat in made] == sorted(chat.start_s for chat in made)
    assert 50 < made[-1].start_s < 120
    assert {len(chat.messages) for chat in made} == {2, 3, 4, 5, 6}
    assert all(len(chat.pauses_s) == len(chat.messages) - 1 for chat in made)


def scripted(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    """The answer depends on the prompt, as a greedy model's does."""
    first = 65 + sum(prompt) % 100
    return Script(tokens=[[first + at for at in range(submit.stop.max_tokens)]])


async def test_turns_say_all_that_was_said(chats: Any, tmp_path: Path) -> None:
    made = chats.workload.make_chats(
        6, 200.0, 250, seed=3, system_tokens=(20, 60), pause_s=0.001, turns=(2, 3)
    )
    oracle = chats.workload.EndlessCache()
    asking = chats.client.Asking(max_tokens=5)
    async with gateway(tmp_path, scripted, num_decode=2, decode_policy="manual") as mesh:
        address = mesh.app.server.address
        async with chats.client.ChatClient(address, MODEL) as client:
            turns = await client.run(made, asking, oracle)
        prompts = {tuple(p) for worker in mesh.workers for p in worker.prompts}
        homes = [{tuple(p) for p in worker.prompts} for worker in mesh.workers]
    assert len(turns) == sum(len(chat.messages) for chat in made) == len(prompts)
    for chat in made:
        of_chat = [turn for turn in turns if turn.chat == chat.name]
        said: list[int] = list(chat.system)
        asked = []
        for turn, message in zip(of_chat, chat.messages, strict=True):
            said += message
            asked.append(tuple(said))
            assert turn.num_prompt == len(said)
            assert turn.tokens == [65 + sum(said) % 100 + at for at in range(5)]
            assert 0 < turn.first_s <= turn.end_s
            assert turn.timeline is not None
            said += turn.tokens
        assert set(asked) <= prompts
        assert any(set(asked) <= home for home in homes), "a chat's name is its routing key"
    assert oracle.prompt_tokens == sum(map(len, prompts))


async def test_a_refused_turn_is_told_from_a_late_one(chats: Any, tmp_path: Path) -> None:
    targets = gateway_pb2.LatencyTargets(first_token=Duration(seconds=1))
    asking = chats.client.Asking(max_tokens=4, targets=targets)
    made = chats.workload.make_chats(3, 100.0, 250, seed=4, system_tokens=(20, 30), turns=(1, 1))
    async with gateway(tmp_path, scripted) as mesh:
        worker = mesh.workers[0]
        worker.prefill_tokens_per_second, worker.queued_tokens = 100.0, 100_000
        async with chats.client.ChatClient(mesh.app.server.address, MODEL) as client:
            for _ in range(100):  # Until the gateway has heard of the queue.
                (turn,) = await client.run(made[:1], asking)
                if turn.reason:
                    break
            refused = await client.run(made, asking)
    assert {turn.reason for turn in refused} == {"TARGET_UNATTAINABLE"}
    row = chats.overload.row_of(
        *("overload", 2.0, "chat", refused),
        has_gate=True,
        targets=Targets(1.0, 0.1),
        seconds=2.0,
    )
    assert (row.num_offered, row.num_refused, row.num_met, row.goodput_per_s) == (3, 3, 0, 0.0)


def test_outcomes_add_up(chats: Any) -> None:
    turn_of = chats.client.Turn
    turns = [
        turn_of("in time", 0, 10, 0.0, [1] * 11, 0.5, 1.0),
        turn_of("late", 0, 10, 0.0, [1] * 11, 1.5, 2.0),
        turn_of("slow", 0, 10, 0.0, [1] * 11, 0.5, 5.5),
        turn_of("refused", 0, 10, 0.0, [], 0.0, 0.1, "no", "TARGET_UNATTAINABLE"),
        turn_of("failed", 0, 10, 0.0, [], 0.0, 0.1, "no", "OVERLOADED"),
    ]
    row = chats.overload.row_of(
        *("overload", 2.0, "chat", turns), has_gate=True, targets=Targets(1.0, 0.1), seconds=2.0
    )
    counts = (row.num_met, row.num_late, row.num_slow, row.num_refused, row.num_failed)
    assert counts == (1, 1, 1, 1, 1)
    assert row.goodput_per_s == 0.5
    assert row.between_p99_s == pytest.approx(0.5, rel=0.1)
