"""Pieces of companions in tiers: which of them a request finds there, and where it continues.

A piece lies in a tier next to the page that it belongs to: in as many pages as it needs, each under
a separate key (`weft.contract.keys.block_keys`) and with a separate digest. Pages count for a
request only up to a border at which tiers hold all pieces that the request lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.engine.sources.carried import Carried, first_key_of, keys_of
from weft.engine.sources.tiers.loads import TierRun
from weft.pages.tiers.keyed import PageName
from weft.pages.tiers.tier import Tier


def pages_of(carried: Carried, piece: int) -> range:
    return range(piece * carried.num_pages, (piece + 1) * carried.num_pages)


def names_of(carried: Carried, key: bytes) -> list[PageName]:
    """Names of the pages that hold the piece beside page `key`, in order. The parent of the first
    one is that page; the parent of each further one is the page before it.
    """
    keys = keys_of(carried, key)
    return [PageName(*pair) for pair in zip(keys, [key, *keys[:-1]], strict=True)]


class FoundPage(NamedTuple):
    """A page of a piece that a tier holds."""

    name: PageName
    tier: Tier


class FoundPieces(NamedTuple):
    """The pieces that tiers hold and with which a request can continue at a border."""

    border: int
    """Number of pages of the prompt before the border."""
    pages: Sequence[Sequence[FoundPage]]
    """For each companion, the pages of its pieces, in order."""


def find_pieces(
    companions: Sequence[Carried], keys: Sequence[bytes], first: int, tiers: Sequence[Tier]
) -> FoundPieces | None:
    """The pieces before the last border of a prompt at which a request can continue; None: there
    is no such border.

    Args:
        keys: Page keys of the prompt, as far as pool and tiers hold it.
        first: The border that the request has reached, in pages; nothing before it helps.
        tiers: The nearest one first.
    """
    border, last = len(keys), -1
    while border != last:
        last, found = border, list[list[FoundPage]]()
        for carried in companions:
            border, pages = _find_last(carried, keys[:border], first, tiers)
            found.append(pages)
        if border <= first:
            return None
    return FoundPieces(border, found)


def _find_last(
    carried: Carried, keys: Sequence[bytes], first: int, tiers: Sequence[Tier]
) -> tuple[int, list[FoundPage]]:
    """The last border at which tiers hold what one companion lacks, and the pages there."""
    found: list[list[FoundPage]] = []
    border = index = len(keys)
    while index > max(first, carried.companion.first_needed(border)):
        index -= 1
        own = _held_at(carried, keys[index], tiers)
        if own is None:
            border, found = index, []
        else:
            found.append(own)
    return border, [page for own in reversed(found) for page in own]


def _held_at(carried: Carried, key: bytes, tiers: Sequence[Tier]) -> list[FoundPage] | None:
    """The pages of the piece beside page `key`; None: one is missing."""
    start = first_key_of(carried, key)
    if not any(tier.pages.has(start) for tier in tiers):
        return None
    found: list[FoundPage] = []
    for name in names_of(carried, key):
        tier = next((tier for tier in tiers if tier.pages.has(name.key)), None)
        if tier is None:
            return None
        found.append(FoundPage(name, tier))
    return found


def cut(runs: Sequence[TierRun], border: int) -> list[TierRun]:
    """The part of runs before a border."""
    return [
        run._replace(end_page=min(run.end_page, border)) for run in runs if run.first_page < border
    ]


def runs_of(pages: Sequence[FoundPage]) -> list[TierRun]:
    """These pages, counted from 0, by tier."""
    runs: list[TierRun] = []
    for index, (_, tier) in enumerate(pages):
        if runs and runs[-1].tier is tier:
            runs[-1] = runs[-1]._replace(end_page=index + 1)
        else:
            runs.append(TierRun(tier, index, index + 1))
    return runs
