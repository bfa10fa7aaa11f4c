"""Digests of a pool's pages, computed on the pool's device.

The digest of a page is the sum, modulo 2**64, of mix(w, i) over its little-endian 64-bit words w, i
being the word's index in the global page; mix is the output function of SplitMix64 (Steele, Lea,
Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) of its i-th state and w. Sums
wrap and may be taken in any order, so every device finds the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from weft.kernels.page_ops import page_words

MAX_PAGE_WORDS = 1 << 32
"""Most words in a page: an index has 32 bits."""
INCREMENT = 0x9E3779B97F4A7C15
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""(shift, factor) of the rounds of mix; a last shift of 31 follows."""
LAST_SHIFT = 31


def page_digests(pool: Tensor, pages: Tensor, word_offset: int = 0) -> Tensor:
    """Digests of some pages, left on the pool's device.

    Args:
        pool: `[num_pages, ...]`, contiguous; a page is a multiple of 8 bytes; not changed.
        pages: int64 `[n]` on the pool's device: page numbers, in any order, repetitions allowed.
            Each must be in the pool.
        word_offset: Index of a page's first word in the global page.

    Returns:
        int64 `[n]`: the 64 bits of each page's digest.

    Raises:
        ValueError: A shape, dtype or device does not fit, or an index has more than 32 bits.
    """
    rows = _words(pool, pages)
    if word_offset < 0 or word_offset + rows.shape[1] > MAX_PAGE_WORDS:
        raise ValueError(f"word indices from {word_offset} on do not fit 32 bits")
    if pool.is_cuda and len(pages):
        from weft.kernels.gpu import page_digest as gpu

        return gpu.row_digests(rows, pages, word_offset)
    return page_digests_reference(pool, pages, word_offset)


def page_digests_reference(pool: Tensor, pages: Tensor, word_offset: int = 0) -> Tensor:
    """`page_digests` in eager torch, any device; the CPU's form too."""
    words = _words(pool, pages)[pages]
    index = torch.arange(word_offset, word_offset + words.shape[1], device=pool.device)
    z = words + (index + 1) * _signed(INCREMENT)
    for shift, factor in FACTORS:
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return (z ^ _shifted(z, LAST_SHIFT)).sum(dim=1)


def _words(pool: Tensor, pages: Tensor) -> Tensor:
    """int64 `[num_pages, words of a page]`."""
    halves = page_words(pool, pages)
    if halves.shape[1] % 2:
        raise ValueError(f"a page of {4 * halves.shape[1]} bytes is not a number of 8-byte words")
    return halves.view(torch.int64)


def _shifted(z: Tensor, shift: int) -> Tensor:
    """A logical shift to the right; that of int64 copies the sign."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
