"""What chaos finds wrong with an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from weft.chaos.load import AFFLICTED_LATE_S, LATE_S, text_problem, whole_problem
from weft.chaos.requests import GRACE_S, ChaosRequest, Reply
from weft.contract.errors import PeerUnavailable
from weft.v1 import common_pb2

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
ASK = ChaosRequest(number=0, prompt=(1, 2), max_tokens=4, temperature=0.0, seed=1, n=2)
RIGHT = Reply(
    tokens=[[5, 6, 7, 8], [5, 9]],
    texts=["abcd", "ae"],
    reasons=[[LENGTH], [STOP]],
    completion_tokens=6,
)
WRONG = {
    "another token": replace(RIGHT, tokens=[[5, 6, 7, 9], [5, 9]]),
    "a token twice": replace(RIGHT, tokens=[[5, 6, 6, 7, 8], [5, 9]], completion_tokens=7),
    "a token less": replace(RIGHT, tokens=[[5, 6, 7], [5, 9]], completion_tokens=5),
    "no text": replace(RIGHT, texts=["abcd", ""]),
    "text twice": replace(RIGHT, texts=["abcdd", "ae"]),
    "a stop string": replace(RIGHT, texts=["abcd", "aef"]),
    "another reason": replace(RIGHT, reasons=[[LENGTH], [LENGTH]]),
    "two ends": replace(RIGHT, reasons=[[LENGTH], [STOP, STOP]]),
    "no end": replace(RIGHT, reasons=[[LENGTH], []]),
    "no usage": replace(RIGHT, completion_tokens=None),
    "other usage": replace(RIGHT, completion_tokens=5),
}


def test_a_right_answer_and_parts_of_it_are_right() -> None:
    assert whole_problem(ASK, RIGHT) is None
    assert text_problem(RIGHT, RIGHT) is None
    lost = PeerUnavailable("lost")
    part = Reply(tokens=[[5, 6], [5]], texts=["a", ""], reasons=[[], []], error=lost)
    assert text_problem(RIGHT, part) is None


@pytest.mark.parametrize("name", WRONG)
def test_whatever_is_wrong_is_found(name: str) -> None:
    assert whole_problem(ASK, WRONG[name]) or text_problem(RIGHT, WRONG[name])


def test_wrong_parts_are_found() -> None:
    lost = PeerUnavailable("lost")
    part = Reply(tokens=[[5, 6], [5]], texts=["a", "b"], reasons=[[], []], error=lost)
    assert text_problem(RIGHT, part)


def test_clients_wait_longer_than_requests_may_take() -> None:
    assert LATE_S < AFFLICTED_LATE_S < GRACE_S
