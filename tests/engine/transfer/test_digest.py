"""Page digests: both forms against plain integers, committed vectors, sensitivity."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.pages.transfer.digest import (
    digest_pages,
    digest_pages_numpy,
    native_digest,
)

VECTORS = Path(__file__).parents[3] / "protos" / "vectors" / "digest.json"
FORMS = [
    pytest.param(digest_pages_numpy, id="numpy"),
    pytest.param(
        digest_pages,
        id="native",
        marks=pytest.mark.skipif(
            native_digest().library is None, reason=f"cc: {native_digest().reason}"
        ),
    ),
]
MASK = (1 << 64) - 1


def mix(word: int, index: int) -> int:
    """The definition in plain integers."""
    z = (word + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def reference(page: bytes) -> int:
    words = [int.from_bytes(page[i : i + 8], "little") for i in range(0, len(page), 8)]
    return sum(mix(word, i) for i, word in enumerate(words)) & MASK


def random_pool(num_pages: int, page_bytes: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)


@pytest.mark.parametrize("form", FORMS)
def test_committed_vectors(form) -> None:
    vectors = json.loads(VECTORS.read_text())["vectors"]
    assert len(vectors) >= 8
    for vector in vectors:
        page = bytes.fromhex(vector["page_hex"])
        assert reference(page) == int(vector["digest_hex"], 16)
        pool = np.frombuffer(page, np.uint8).reshape(1, -1)
        assert form(pool, [0])[0] == int(vector["digest_hex"], 16)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(
    num_pages=st.integers(1, 4),
    num_words=st.integers(0, 70),
    data=st.data(),
)
def test_equals_plain_integers(form, num_pages, num_words, data) -> None:
    pool = random_pool(num_pages, 8 * num_words)
    pages = data.draw(st.lists(st.integers(0, num_pages - 1), max_size=6))
    expected = [reference(pool[page].tobytes()) for page in pages]
    assert form(pool, pages).tolist() == expected


@pytest.mark.skipif(native_digest().library is None, reason=f"cc: {native_digest().reason}")
def test_forms_agree_on_large_unaligned_and_strided_pages() -> None:
    rng = np.random.default_rng()
    page_bytes = 8 * int(rng.integers(66_000, 90_000))
    flat = rng.integers(0, 256, 5 * (page_bytes + 12) + 8, dtype=np.uint8)
    unaligned = flat[1 : 1 + 5 * page_bytes].reshape(5, page_bytes)
    strided = flat[3 : 3 + 5 * (page_bytes + 12)].reshape(5, page_bytes + 12)[:, 8:-4]
    for pool in (unaligned, strided):
        pages = rng.permutation(5)
        expected = digest_pages_numpy(pool, pages)
        assert digest_pages(pool, pages).tolist() == expected.tolist()


def test_what_goes_wrong_in_practice_is_told_apart() -> None:
    page = random_pool(1, 4096)
    (digest,) = digest_pages(page, [0])
    flipped = page.copy()
    flipped[0, np.random.randint(4096)] ^= 1 << np.random.randint(8)
    swapped_words = page.reshape(-1, 8)[::-1].reshape(1, -1)
    swapped_halves = np.roll(page, 2048, axis=1)
    shifted = np.roll(page, 8, axis=1)
    stale_half = page.copy()
    stale_half[:, 2048:] = 0
    nan_filled = np.full_like(page, 0xFF)
    zeros = np.zeros_like(page)
    variants = [flipped, swapped_words, swapped_halves, shifted, stale_half, nan_filled, zeros]
    digests = [int(digest_pages(np.ascontiguousarray(v), [0])[0]) for v in variants]
    shorter_zeros = int(digest_pages(zeros[:, :2048], [0])[0])
    assert len({int(digest), *digests, shorter_zeros}) == len(variants) + 2
    assert 0 not in digests


@pytest.mark.parametrize("form", FORMS)
def test_bad_arguments_are_refused(form) -> None:
    pool = random_pool(4, 16)
    with pytest.raises(ValueError, match="multiple of 8"):
        form(random_pool(2, 12), [0])
    for pages in ([4], [-1], [0, 1 << 40]):
        with pytest.raises(ValueError, match="pool of 4"):
            form(pool, pages)
    with pytest.raises(ValueError, match="integers"):
        form(pool, [0.5])
    with pytest.raises(ValueError, match="uint8"):
        form(pool.view(np.int8), [0])
    with pytest.raises(ValueError, match="contiguous"):
        form(random_pool(4, 32)[:, ::2], [0])


def test_several_threads_at_once() -> None:
    pool = random_pool(16, 65536)
    expected = digest_pages_numpy(pool, range(16)).tolist()
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.append(digest_pages(pool, range(16)).tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
