"""Placement of a prompt's pages on the KV store's replicas.

A prompt is cut into stretches. The first ones are short: many prompts begin alike, and the replica
of a common beginning should not have to hold all their continuations. The key of a stretch's first
page determines the replica of all its pages, so every worker finds them, and a prompt takes few
fills. Rendezvous hashing (Thaler and Ravishankar, 1998) maps keys to replicas: if a replica is
lost, only its stretches move to others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

FIRST_PAGES = 8
MAX_PAGES = 64


def stretches(num_pages: int) -> Iterator[tuple[int, int]]:
    """Splits the first pages of a prompt into stretches [first, end) of 8, 16, 32, 64, 64, ...
    pages.
    """
    first, length = 0, FIRST_PAGES
    while first < num_pages:
        yield first, min(first + length, num_pages)
        first, length = first + length, min(2 * length, MAX_PAGES)


def shard_start(index: int) -> int:
    """First page of the stretch that contains page number `index`."""
    first, length = 0, FIRST_PAGES
    while first + length <= index:
        if length == MAX_PAGES:
            return index - (index - first) % MAX_PAGES
        first, length = first + length, 2 * length
    return first


def ranked(names: Sequence[str], shard: bytes) -> list[str]:
    """Replicas in their order of preference for a stretch.

    Args:
        names: Names of the replicas; all workers must use the same.
        shard: Key of the stretch's first page.
    """
    if len(names) == 1:
        return list(names)

    def weight(name: str) -> bytes:
        return hashlib.blake2b(shard + name.encode(), digest_size=8, person=b"weft-shard").digest()

    return sorted(names, key=weight, reverse=True)
