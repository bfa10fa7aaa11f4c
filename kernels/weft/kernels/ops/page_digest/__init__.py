"""Digests of a pool's pages, computed on the pool's device.

The digest of a page is the sum, modulo 2**64, of mix(w, i) over its little-endian 64-bit words w, i
being the word's index in the page; mix is the output function of SplitMix64 (Steele, Lea, Flood:
Fast splittable pseudorandom number generators, OOPSLA 2014) of its i-th state and w. Sums wrap and
may be taken in any order, so every device finds the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from weft.kernels.ops.pages import is_viewable_as, page_words, rows_here
from weft.kernels.ops.pages.pool import ALL_PAGES, PageShare
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.page_digest import triton_digest as _triton_digest
else:
    _triton_digest = deferred(__name__, "weft.kernels.ops.page_digest.triton_digest")

INCREMENT = 0x9E3779B97F4A7C15
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""(shift, factor) of the rounds of mix; a last shift of 31 follows."""
LAST_SHIFT = 31


def page_digests(
    pool: Tensor, pages: Tensor, first_word: int = 0, share: PageShare = ALL_PAGES
) -> Tensor:
    """Digests of some pages, left on the pool's device.

    Args:
        pool: `[num_pages, ...]`, contiguous within a page; a page, and the distance between pages,
            is a multiple of 8 bytes; not changed.
        pages: int64 `[n]` on the pool's device: page numbers, in any order, repetitions allowed.
            Each must be in the pool.
        first_word: For a pool that has a part of each page: index of the part's first word in the
            page. Digests of parts add up to digests of pages.
        share: Which of the pages the pool has; 0 is the digest of the others.

    Returns:
        int64 `[n]`: the 64 bits of each page's digest.
    """
    rows = _words(pool, pages)
    if pool.is_cuda and len(pages):
        return _triton_digest.row_digests(rows, pages, first_word, share)
    return page_digests_reference(pool, pages, first_word, share)


def page_digests_reference(
    pool: Tensor, pages: Tensor, first_word: int = 0, share: PageShare = ALL_PAGES
) -> Tensor:
    """`page_digests` in eager torch, any device; a CPU uses it too."""
    here, rows = rows_here(pages, share)
    found = torch.zeros_like(pages)
    words = _words(pool, pages)[rows]
    numbers = torch.arange(1, words.shape[1] + 1, device=pool.device) + first_word
    z = words + numbers * _signed(INCREMENT)
    for shift, factor in FACTORS:
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    found[here] = (z ^ _shifted(z, LAST_SHIFT)).sum(dim=1)
    return found


def _words(pool: Tensor, pages: Tensor) -> Tensor:
    """int64 `[num_pages, words of a page]`."""
    halves = page_words(pool, pages)
    if halves.shape[1] % 2:
        raise ValueError(f"a page of {4 * halves.shape[1]} bytes is not a number of 8-byte words")
    if not is_viewable_as(halves, torch.int64):
        raise ValueError(f"pages do not begin at 8-byte words: {4 * halves.stride(0)} bytes apart")
    return halves.view(torch.int64)


def _shifted(z: Tensor, shift: int) -> Tensor:
    """A logical shift to the right; torch's own shift of int64 copies the sign."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
