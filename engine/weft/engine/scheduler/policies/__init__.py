"""Admission policies: the order in which waiting requests are admitted; one class and file each."""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.base.config import PolicyName
from weft.engine.requests.request import Request
from weft.engine.scheduler.policies.base import AdmissionQueue
from weft.engine.scheduler.policies.fair import FairQueue
from weft.engine.scheduler.policies.fcfs import FcfsQueue
from weft.engine.scheduler.policies.longest_prefix import LongestPrefixQueue
from weft.engine.scheduler.policies.priority import PriorityQueue
from weft.engine.scheduler.policies.shortest_remaining import ShortestRemainingQueue


def make_queue(
    name: PolicyName,
    ageing_s: float,
    num_cached_tokens: Callable[[Request], int],
    step_tokens: int,
) -> AdmissionQueue:
    """Creates the queue of a policy.

    Args:
        ageing_s: Seconds of waiting that count as one unit of precedence, which each policy
            defines.
        num_cached_tokens: Returns the number of a request's prompt tokens that are cached.
        step_tokens: Prompt tokens of a full step.
    """
    if name == "priority":
        return PriorityQueue(ageing_s)
    if name == "longest_prefix":
        return LongestPrefixQueue(ageing_s, num_cached_tokens)
    if name == "shortest_remaining":
        return ShortestRemainingQueue(ageing_s, step_tokens)
    return FairQueue() if name == "fair" else FcfsQueue()
