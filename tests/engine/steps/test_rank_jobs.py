"""Jobs of ranks end with one result, whatever the other ranks answer."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from weft.contract.errors import ConfigError, Internal
from weft.engine.executor.rank_jobs import RankJobs, RankResult, of_one_rank
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.executor.ranks.link import RankLink
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup

LONG_S = 60.0
CPU = torch.device("cpu")
RIGHT = RankResult().to_message()


class Other(NamedTuple):
    rank: int
    link: RankLink


class Leader(RankLeader):
    """Rank 0 beside a rank with which it has nothing but a link."""

    def __init__(self, link: RankLink) -> None:
        super().__init__(2, 2, LONG_S, lambda: None)
        self._others = [Other(1, link)]

    @property
    def group(self) -> SharedGroup:
        raise NotImplementedError

    @property
    def places(self) -> Sequence[str]:
        raise NotImplementedError

    @property
    def others(self) -> Sequence[Other]:
        return self._others

    def share(self, size: int) -> Segment:
        raise NotImplementedError

    def ending(self, rank: int) -> str:
        raise NotImplementedError

    def close(self) -> None:
        self._others[0].link.close()


@contextmanager
def two_ranks() -> Iterator[tuple[Leader, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(LONG_S)
    leader = Leader(RankLink(ours))
    with theirs:
        yield leader, theirs
    leader.close()


def result_of(jobs: RankJobs, own: RankResult) -> RankResult:
    jobs.begin(lambda: own)
    deadline = time.monotonic() + LONG_S
    while (found := jobs.take()) is None:
        assert time.monotonic() < deadline, "the job has no result"
        time.sleep(0.01)
    return found


def test_results_of_all_ranks_are_joined(seed: int) -> None:
    digest, problem = random.randbytes(32), f"disk {random.random()}"
    numbers = [random.sample(range(100), 3) for _ in range(2)]
    offers = [RankResult(offer=json.dumps(of_rank)) for of_rank in numbers]
    failed = RankResult(problem=problem, reason=ConfigError.reason)
    for own, others, wanted in (
        (RankResult(digest=digest), RankResult(digest=digest), RankResult(digest=digest)),
        (offers[0], offers[1], RankResult(offer=json.dumps(numbers[0] + numbers[1]))),
        (RankResult(), failed, failed),
        (failed, RankResult(), failed),
    ):
        with two_ranks() as (leader, other):
            RankLink(other).send(others.to_message())
            assert result_of(RankJobs("test", CPU, leader.combine), own) == wanted


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "no memory", "reason": "CONFIG_ERROR"},
        {},
        {name: value for name, value in RIGHT.items() if name != "digest"},
        RIGHT | {"more": 1},
        RIGHT | {"digest": "xy"},
        RIGHT | {"digest": 5},
        RIGHT | {"is_mixture": 1},
        RIGHT | {"problem": None},
        RIGHT | {"offer": "{}"},
        RIGHT | {"offer": "["},
        [RIGHT],
        None,
        b"{",
        b"\xff",
        b"",
    ],
)
def test_a_rank_that_answers_with_something_else_is_a_problem(answer: Any) -> None:
    """None: the connection closes without an answer."""
    with two_ranks() as (leader, other):
        if answer is None:
            other.close()
        else:
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            other.sendall(struct.pack("<I", len(body)) + body)
        found = result_of(RankJobs("test", CPU, leader.combine), RankResult(digest=b"new"))
    assert found.problem == "rank 1 is gone, or answered with something else"
    assert (found.reason, found.is_mixture) == (ConfigError.reason, True)


def test_a_job_whose_results_cannot_be_joined_has_a_result() -> None:
    """As where one rank offers something and another one nothing."""
    with two_ranks() as (leader, other):
        RankLink(other).send(RIGHT)
        found = result_of(RankJobs("test", CPU, leader.combine), RankResult(offer="[1]"))
    assert (found.reason, found.is_mixture) == (Internal.reason, True)
    assert result_of(RankJobs("test", CPU, of_one_rank), RankResult(offer="[1]")).offer == "[1]"
