"""Admission policies: the order in which waiting requests are admitted; one class and file each."""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.base.config import PolicyName
from weft.engine.scheduler.policies.base import AdmissionQueue
from weft.engine.scheduler.policies.fair import FairQueue
from weft.engine.scheduler.policies.fcfs import FcfsQueue
from weft.engine.scheduler.policies.longest_prefix import LongestPrefixQueue
from weft.engine.scheduler.policies.priority import PriorityQueue
from weft.engine.scheduler.state import Request


def make_queue(
    name: PolicyName, ageing_s: float, num_cached_tokens: Callable[[Request], int]
) -> AdmissionQueue:
    """Creates the queue of a policy.

    Args:
        name: of the policy.
        ageing_s: what waiting is worth, in seconds; see the policies.
        num_cached_tokens: how much of a request's prompt is cached.
    """
    if name == "priority":
        return PriorityQueue(ageing_s)
    if name == "longest_prefix":
        return LongestPrefixQueue(ageing_s, num_cached_tokens)
    return FairQueue() if name == "fair" else FcfsQueue()
