"""Digests of pages: a 64-bit checksum that accompanies the bytes and is checked on arrival.

The digest of a page is the sum, modulo 2**64, of mix(w, i) over the page's little-endian 64-bit
words w, i being the word's index in the page (order head, layer, part, position, dim):

    mix(w, i):  z = w + (i + 1) * 0x9E3779B97F4A7C15
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                z ^ (z >> 31)                               (all modulo 2**64)

mix is the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014) of its i-th state and the word. For a fixed i it is a bijection, so that a
change confined to one word is always seen; other changes go unseen with a chance of about 2**-64.
Zero words count, and a word's place matters. Sums of disjoint ranges add up to the digest of the
whole, in any order, so any device may split the work.

The digest detects faults, not attacks: anyone can construct a page with a given digest.
"""

import ctypes
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from weft.kernels.shared.build import NativeLibrary, load_packaged

WORD_BYTES = 8

_NUMPY_CHUNK_WORDS = 1 << 16
"""Words per block in the numpy form; temporaries of this size stay in the second-level cache."""


@functools.cache
def native_digest() -> NativeLibrary:
    """The C form. First use may compile it; the numpy form is some 5 times slower."""
    if sys.byteorder != "little":
        return NativeLibrary(None, None, "digest.c: this host is not little-endian")
    native = load_packaged(Path(__file__).with_name("digest.c"))
    if native.library is not None:
        function = native.library.weft_digest_pages
        function.restype = None
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [pointer, i64, pointer, i64, i64, pointer]
    return native


def digest_pages(
    pool: NDArray[np.uint8], pages: Sequence[int] | NDArray[Any]
) -> NDArray[np.uint64]:
    """Computes the digests of pages of a pool, uint64 `[len(pages)]` in their order, in one thread.
    The C form releases the GIL.

    Args:
        pool: uint8 `[num_pages, page_bytes]`. The bytes of a page are contiguous; pages may be
            further apart (a head range of a wider pool). Not changed.
        pages: Page numbers, in any order, repetitions allowed.

    Raises:
        ValueError: Shape or page number does not fit; page_bytes is no multiple of 8.
    """
    numbers = _check(pool, pages)
    library = native_digest().library
    if library is None:
        return _numpy_digests(pool, numbers)
    digests = np.zeros(len(numbers), np.uint64)
    library.weft_digest_pages(
        pool.ctypes.data,
        pool.strides[0],
        numbers.ctypes.data,
        len(numbers),
        pool.shape[1] // WORD_BYTES,
        digests.ctypes.data,
    )
    return digests


def digest_pages_numpy(
    pool: NDArray[np.uint8], pages: Sequence[int] | NDArray[Any]
) -> NDArray[np.uint64]:
    """The numpy form of `digest_pages`, for hosts without a C compiler, and for tests."""
    return _numpy_digests(pool, _check(pool, pages))


def _check(pool: NDArray[np.uint8], pages: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    if pool.dtype != np.uint8 or pool.ndim != 2:
        raise ValueError(
            f"pool must be uint8 [num_pages, page_bytes], not {pool.dtype} {pool.shape}"
        )
    num_pages, page_bytes = pool.shape
    if page_bytes % WORD_BYTES:
        raise ValueError(f"page_bytes must be a multiple of {WORD_BYTES}, not {page_bytes}")
    if page_bytes and pool.strides[1] != 1:
        raise ValueError("the bytes of a page must be contiguous")
    numbers = np.asarray(pages)
    if numbers.size == 0:
        return np.zeros(0, np.int64)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError("pages must be a flat sequence of integers")
    if numbers.min() < 0 or numbers.max() >= num_pages:
        raise ValueError(
            f"pages {numbers.min()}..{numbers.max()} are not all in a pool of {num_pages}"
        )
    return np.ascontiguousarray(numbers, dtype=np.int64)


def _numpy_digests(pool: NDArray[np.uint8], numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    digests = np.zeros(len(numbers), np.uint64)
    num_words = pool.shape[1] // WORD_BYTES
    for start in range(0, num_words, _NUMPY_CHUNK_WORDS):
        end = min(start + _NUMPY_CHUNK_WORDS, num_words)
        number_of = np.arange(start + 1, end + 1, dtype=np.uint64)
        states = number_of * np.uint64(0x9E3779B97F4A7C15)
        for k, number in enumerate(numbers):
            words = pool[number, start * WORD_BYTES : end * WORD_BYTES].view("<u8")
            # A slice, since numpy warns when a scalar wraps.
            digests[k : k + 1] += _mix(states + words).sum(dtype=np.uint64)
    return digests


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Works in place. Array arithmetic wraps without a warning."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z
