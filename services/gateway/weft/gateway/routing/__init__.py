"""Routing policies: one class each, over a view of one pool."""

from __future__ import annotations

from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.bucket import Bucket
from weft.gateway.routing.cache_aware import CacheAware
from weft.gateway.routing.cache_aware_approximate import CacheAwareApproximate
from weft.gateway.routing.consistent_hashing import ConsistentHashing
from weft.gateway.routing.follow import Follow
from weft.gateway.routing.manual import Manual
from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.power_of_two import PowerOfTwo
from weft.gateway.routing.prefix_hash import PrefixHash
from weft.gateway.routing.random_choice import RandomChoice
from weft.gateway.routing.round_robin import RoundRobin
from weft.gateway.routing.total_requests import TotalRequests
from weft.gateway.routing.total_tokens import TotalTokens
from weft.gateway.routing.view import LoadEstimate, PoolView, RoutingRequest, Throughput, WorkerView

POLICIES: dict[str, type[Policy]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "total_requests": TotalRequests,
    "total_tokens": TotalTokens,
    "power_of_two": PowerOfTwo,
    "bucket": Bucket,
    "manual": Manual,
    "consistent_hashing": ConsistentHashing,
    "prefix_hash": PrefixHash,
    "follow": Follow,
    "cache_aware": CacheAware,
}
"""Policies by their name in the settings."""


def make_policy(name: str, options: PolicyOptions) -> Policy:
    """Creates a policy for one pool; `name` is a key of `POLICIES`."""
    if name == "cache_aware" and not options.kv_events:
        return CacheAwareApproximate(options)
    return POLICIES[name](options)


__all__ = [
    "POLICIES",
    "Choice",
    "FleetPageIndex",
    "LoadEstimate",
    "Policy",
    "PolicyOptions",
    "PoolView",
    "RoutingRequest",
    "Throughput",
    "WorkerView",
    "make_policy",
]
