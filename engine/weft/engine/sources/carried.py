"""Pieces of a model's companions in pages of the first group's size, as tiers and the KV store have
them: each in separate pages, beside the page that it belongs to.
"""

from __future__ import annotations

from typing import Protocol

from weft.contract.keys import block_keys
from weft.engine.requests.companions import Companion
from weft.pages.transfer.page_pool import PagePool


class Carried(Protocol):
    """One companion's pieces in pages."""

    @property
    def companion(self) -> Companion: ...

    @property
    def num_pages(self) -> int:
        """Pages that a piece takes."""
        ...

    @property
    def first_key(self) -> int:
        """Number of the keys beside a page that companions before this one take."""
        ...

    def make_pool(self) -> PagePool:
        """Creates access to pieces for one thread. Page i of piece p is number
        p * num_pages + i.
        """
        ...


def keys_of(carried: Carried, key: bytes) -> list[bytes]:
    """Keys of the pages that hold the piece beside page `key`, in order."""
    return block_keys(key, carried.num_pages, carried.first_key)


def first_key_of(carried: Carried, key: bytes) -> bytes:
    return block_keys(key, 1, carried.first_key)[0]
