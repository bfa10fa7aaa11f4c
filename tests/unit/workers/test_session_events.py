"""Events of a Session stay below their bound, and lose and reorder nothing."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from weft.contract.request import MAX_TOP_LOGPROBS, PromptLogprobs, TokenLogprob
from weft.contract.submits import (
    Accepted,
    Failed,
    Failure,
    Finished,
    GatewayBatch,
    Pong,
    Preempted,
    Routes,
    TokenColumns,
    Tokens,
)
from weft.contract.timeline import MAX_FILLS, FillRecord, Timeline
from weft.decode.events import MAX_EVENT_BYTES, batch_to_proto, merge_batches
from weft.gateway.generation.sample_routes import SampleRoutes
from weft.v1 import decode_pb2

LARGE = 2**32 - 1
"""Of numbers that take most room."""


def request_id(number: int) -> str:
    return f"{number:016x}" + "é" * 24


def events_of(batch: GatewayBatch) -> list[decode_pb2.SessionEvent]:
    events = list(batch_to_proto(batch, "w" * 64, 1.5))
    sizes = [event.ByteSize() for event in events]
    assert max(sizes) <= MAX_EVENT_BYTES
    # Not one for each entry either.
    assert sum(sizes) > (len(sizes) - 1) * MAX_EVENT_BYTES // 4
    return events


def logprob(token: int, num_top: int) -> TokenLogprob:
    top = tuple((LARGE - rank, -float(rank)) for rank in range(num_top))
    return TokenLogprob(token_id=token, logprob=-1.5, top=top)


def tokens_of(number: int, count: int, first_index: int = 0, num_top: int | None = None) -> Tokens:
    ids = [random.randrange(2**31, 2**32) for _ in range(count)]
    logprobs = [] if num_top is None else [logprob(token, num_top) for token in ids]
    return Tokens(request_id(number), LARGE, LARGE, first_index, ids, logprobs)


def fill_record(index: int) -> FillRecord:
    return FillRecord(
        source="prefill",
        worker_id="w" * 64,
        transport="nixl",
        start_token=index,
        end_token=LARGE,
        start_s=1e5 / 3,
        end_s=1e6 / 3,
        bytes=2**63,
        failure="é" * 5000,
    )


@pytest.mark.parametrize("num_top", [None, 0, MAX_TOP_LOGPROBS])
def test_tokens_of_one_entry_are_split(num_top: int | None) -> None:
    many = 400_000 if num_top is None else 100_000 // (1 + num_top)
    sent = [tokens_of(1, many, 7, num_top), tokens_of(2, 1, 0, num_top), tokens_of(3, 300)]
    got: dict[str, list[int]] = defaultdict(list)
    firsts = {request_id(1): 7, request_id(2): 0, request_id(3): 0}
    events = events_of(GatewayBatch(gateway=1, tokens=list(sent)))
    assert len(events) > 1
    alternatives = 0
    for event in events:
        for tokens in event.tokens:
            assert tokens.first_index == firsts[tokens.request_id] + len(got[tokens.request_id])
            assert (tokens.attempt, tokens.sample) == (LARGE, LARGE)
            got[tokens.request_id] += tokens.ids
            if tokens.logprobs:
                assert [entry.token_id for entry in tokens.logprobs] == tokens.ids
            alternatives += sum(len(entry.top) for entry in tokens.logprobs)
    assert got == {tokens.request_id: tokens.ids for tokens in sent}
    assert alternatives == (many + 1) * (num_top or 0)


@pytest.mark.parametrize("num_top", [0, 3, MAX_TOP_LOGPROBS])
def test_log_probabilities_of_a_prompt_are_split_and_come_first(num_top: int) -> None:
    counts = (100_000 // (1 + num_top), 1, 300)
    sent = [
        PromptLogprobs(
            request_id(number), LARGE, 1 + number, [logprob(LARGE - i, num_top) for i in range(n)]
        )
        for number, n in enumerate(counts)
    ]
    # Merged, as where a gateway reads late.
    batches = [GatewayBatch(gateway=1, prompt_logprobs=[one]) for one in sent]
    batches[0].tokens.append(tokens_of(9, 1))
    events = events_of(merge_batches(batches))
    assert len(events) > 1
    got: dict[str, list[int]] = defaultdict(list)
    alternatives = 0
    for event in events:
        for scores in event.prompt_logprobs:
            known = got[scores.request_id]
            number = [request_id(number) for number in range(3)].index(scores.request_id)
            assert scores.first_position == 1 + number + len(known)
            known += [entry.token_id for entry in scores.logprobs]
            alternatives += sum(len(entry.top) for entry in scores.logprobs)
    assert got == {one.request_id: [entry.token_id for entry in one.logprobs] for one in sent}
    assert alternatives == sum(counts) * num_top
    assert [len(event.tokens) for event in events] == [0] * (len(events) - 1) + [1]


def test_routes_of_experts_are_split_between_positions() -> None:
    numbers = np.random.default_rng().integers(0, 2**16, (40_000, 3, 5), np.uint16)
    sent = Routes(request_id(1), LARGE, 2, 7, 3, 5, 2, numbers.tobytes())
    end = tokens_of(1, 1)
    events = events_of(merge_batches([GatewayBatch(gateway=1, tokens=[end], routes=[sent])]))
    assert len(events) > 4
    found, parts = SampleRoutes(7), [part for event in events for part in event.routes]
    assert not any(map(found.add, parts))
    whole = found.array(7 + 40_000 + 1)
    assert whole is not None
    assert (whole == numbers).all()
    assert not found.add(parts[0]), "another owner starts anew"
    assert found.array(7 + 40_000 + 1) is None
    assert not found.add(parts[1])
    assert "after" in found.add(parts[1]), "a part came twice"


def test_every_kind_of_entry_counts() -> None:
    keys = [(request_id(number), LARGE) for number in range(5_000)]
    timeline = Timeline(
        submitted_at=0.0, fills=[fill_record(index) for index in range(MAX_FILLS + 50)]
    )
    failure = Failure(
        reason="INTERNAL", message="é" * 5000, stage="decode", param="p" * 900, retry_after_s=1.0
    )
    batch = GatewayBatch(
        gateway=1,
        accepted=[Accepted(request_id=key, attempt=attempt) for key, attempt in keys],
        computed_here=list(keys),
        tokens=[tokens_of(number, 1) for number in range(5_000)],
        preempted=[Preempted(request_id=k, attempt=a, sample=LARGE) for k, a in keys],
        finished=[
            Finished(
                request_id=key,
                attempt=attempt,
                sample=1,
                reason="stop",
                stop_token_id=0,
                completion_tokens=LARGE,
                cached_prompt_tokens=LARGE,
                timeline=timeline if index < 3 else Timeline(submitted_at=0.0),
            )
            for index, (key, attempt) in enumerate(keys)
        ],
        failed=[Failed(request_id=k, attempt=a, failure=failure) for k, a in keys[:500]],
        pongs=[Pong(nonce=1, unknown=keys[:2000]), Pong(nonce=2**64 - 1, unknown=keys[2000:])],
    )
    events = events_of(batch)
    whole = decode_pb2.SessionEvent()
    for event in events:
        if event.HasField("pong"):
            assert event.pong.nonce == 2**64 - 1
        whole.MergeFrom(event)
    here = whole.computed_here
    for entries in (whole.accepted, here, whole.preempted, whole.finished, whole.pong.unknown):
        assert [(entry.request_id, entry.attempt) for entry in entries] == keys
    assert [tokens.ids for tokens in whole.tokens] == [tokens.ids for tokens in batch.tokens]
    assert [entry.request_id for entry in whole.failed] == [key for key, _ in keys[:500]]
    assert whole.failed[0].retry_after.ToSeconds() == 1
    assert all(entry.HasField("stop_token_id") for entry in whole.finished)
    told = [fill.start_token for fill in whole.finished[0].timeline.fills]
    assert told == list(range(50, MAX_FILLS + 50)), "the newest"
    # A pong follows what was said of the attempts asked for, and ends what they had.
    kinds = [[field.name for field, _ in event.ListFields()] for event in events]
    first_pong = next(index for index, names in enumerate(kinds) if "pong" in names)
    assert all(names == ["pong"] for names in kinds[first_pong + 1 :])


def test_merged_tokens_keep_their_log_probabilities() -> None:
    """What a duplicate submit is answered with has none; the next step's tokens have."""
    repeated, stepped, next_step = (
        tokens_of(1, 3),
        tokens_of(1, 1, 3, num_top=2),
        tokens_of(1, 2, 4, num_top=2),
    )
    expected = repeated.ids + stepped.ids + next_step.ids
    batches = [GatewayBatch(gateway=1, tokens=[t]) for t in (repeated, stepped, next_step)]
    (event,) = events_of(merge_batches(batches))
    assert [len(tokens.ids) for tokens in event.tokens] == [3, 3]
    assert [token for tokens in event.tokens for token in tokens.ids] == expected
    assert [entry.token_id for entry in event.tokens[1].logprobs] == expected[3:]


def test_columns_say_what_entries_say() -> None:
    """Together with log-probabilities of some, and merged where a gateway reads late."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    numbers = rng.sample(range(10_000), 3_000)
    batches, expected = [], defaultdict(list)
    for index in range(4):
        wanted = rng.sample(range(len(numbers)), rng.choice((0, 5)))
        ids = [rng.randrange(2**32) for _ in numbers]
        columns = TokenColumns(
            [request_id(number) for number in numbers],
            [LARGE - number for number in numbers],
            [number % 7 for number in numbers],
            [index + number for number in numbers],
            ids,
            {row: logprob(ids[row], 2) for row in wanted},
        )
        batches.append(GatewayBatch(gateway=1, columns=[columns]))
        for row, number in enumerate(numbers):
            expected[number].append((index + number, ids[row], row in wanted))
        told = [tokens for event in events_of(batches[-1]) for tokens in event.tokens]
        assert [(t.request_id, t.attempt, t.sample, t.first_index, *t.ids) for t in told] == [
            (request_id(number), LARGE - number, number % 7, index + number, token)
            for number, token in zip(numbers, ids, strict=True)
        ]
        assert [row for row, tokens in enumerate(told) if tokens.logprobs] == sorted(wanted)
    merged: dict[str, list[tuple[int, int, bool]]] = defaultdict(list)
    for event in events_of(merge_batches(batches)):
        for tokens in event.tokens:
            assert [entry.token_id for entry in tokens.logprobs] in ([], tokens.ids)
            merged[tokens.request_id] += [
                (tokens.first_index + at, token, bool(tokens.logprobs))
                for at, token in enumerate(tokens.ids)
            ]
    assert merged == {request_id(number): found for number, found in expected.items()}


def test_columns_hold_what_needs_no_entry() -> None:
    """Entries are of requests without a number, and of tokens with log-probabilities."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = [(number, sample) for number in range(4_000) for sample in range(number % 4 + 1)]
    rng.shuffle(rows)
    ids = [rng.randrange(2**32) for _ in rows]
    streams = {
        (request_id(number), LARGE - number): 2**40 + 10 * number
        for number in range(4_000)
        if rng.random() < 0.9
    }
    wanted = set(rng.sample(range(len(rows)), rng.choice((0, 50))))
    columns = TokenColumns(
        [request_id(number) for number, _ in rows],
        [LARGE - number for number, _ in rows],
        [sample for _, sample in rows],
        [LARGE - number - sample for number, sample in rows],
        ids,
        {row: logprob(ids[row], 2) for row in wanted},
    )
    events = list(batch_to_proto(GatewayBatch(gateway=1, columns=[columns]), "w", 0.0, streams))
    assert max(event.ByteSize() for event in events) <= MAX_EVENT_BYTES
    named = {
        first + sample: (key, sample)
        for key, first in streams.items()
        for sample in range((LARGE - key[1]) % 4 + 1)
    }
    found = {}
    for event in events:
        told = event.columns
        for stream, index, token in zip(told.streams, told.indices, told.ids, strict=True):
            (name, attempt), sample = named[stream]
            found[name, attempt, sample] = (index, token, False)
        for entry in event.tokens:
            key = (entry.request_id, entry.attempt)
            assert key not in streams or entry.logprobs
            found[*key, entry.sample] = (entry.first_index, entry.ids[0], bool(entry.logprobs))
    assert found == {
        (request_id(number), LARGE - number, sample): (
            LARGE - number - sample,
            ids[row],
            row in wanted,
        )
        for row, (number, sample) in enumerate(rows)
    }
    assert sum(len(event.tokens) for event in events) < len(rows) // 4
