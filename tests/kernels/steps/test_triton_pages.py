"""The GPU's page kernels by Triton's interpreter: every bit against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from weft.contract.layout import PagePart
from weft.kernels.ops.pages import copy_parts
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.page_cases import (
    POISON,
    bytes_of,
    expected_digests,
    page_numbers,
    poisoned,
    random_pool,
    unsigned,
)
from weft.testing.kernels.wide_pages import WidePages

pytestmark = pytest.mark.needs("triton-interpreter")

PARTS = [
    (4, PagePart(1, 280, 0, 280), 3),
    (6, PagePart(3, 96, 24, 40), 5),
    (5, PagePart(2, 70_000, 8192, 40_000), 2),
    (3, PagePart(4, 12, 8, 4), 1),
    (5, PagePart(4, 80_000, 4096, 72_004), 4),  # Each program copies twice.
]
"""Pages of the pool, the part of a page that moves, pages."""
SIZES = [
    (1, 2, 1),
    (5, 70, 5),
    (7, 4096, 3),
    (4, 4098, 2),
    (3, 9002, 3),
    (3, 16_384, 2),
    (2, 32_780, 2),
    (6, 12, 0),
]
"""Pages of the pool, words of a page, pages that move."""
DROPPED_TILE = ("[(len(pages) * parts,)]", "[(len(pages) * parts - 1,)]")
"""Launches one program less, so that the last tile of the last page is not copied."""


def words(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(pool.shape[0], -1).view(torch.int32)


@pytest.mark.parametrize(("num_pages", "num_words", "count"), SIZES)
def test_gather(num_pages: int, num_words: int, count: int, tmp_path: Path) -> None:
    pool = random_pool(num_pages, num_words, torch.bfloat16)
    pages, out = page_numbers(num_pages, count), poisoned(count + 1, pool)
    before = bytes_of(pool)
    with kernel_module("pages.triton_pages", tmp_path) as module:
        if count:
            module.gather_rows(words(pool), pages, out.view(torch.int32))
    assert (out[:count].numpy() == before[pages.numpy()]).all()
    assert (out[count:] == POISON).all()
    assert (bytes_of(pool) == before).all()


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize(("num_pages", "part", "count"), PARTS)
def test_parts_come_from_pages_anywhere(
    num_pages: int, part: PagePart, count: int, *, is_reference: bool, tmp_path: Path
) -> None:
    num_words = part.num_ranges * part.stride // 4
    pool, pages = random_pool(num_pages, num_words, torch.bfloat16), page_numbers(num_pages, count)
    sources = [np.random.default_rng().integers(0, 256, 4 * num_words, np.uint8) for _ in pages]
    addresses = torch.tensor([source.ctypes.data for source in sources])
    expected = bytes_of(pool)
    end = part.begin + part.size
    for page, source in zip(pages.tolist(), sources, strict=True):
        into = expected[page].reshape(part.num_ranges, part.stride)
        into[:, part.begin : end] = source.reshape(into.shape)[:, part.begin : end]
    if is_reference:
        copy_parts(addresses, pages, pool, part)
    else:
        with kernel_module("pages.triton_pages", tmp_path) as module:
            module.copy_part_rows(addresses, pages, words(pool), part)
    assert (bytes_of(pool) == expected).all()


@pytest.mark.parametrize(("num_pages", "num_words", "count"), SIZES)
def test_scatter(num_pages: int, num_words: int, count: int, tmp_path: Path) -> None:
    pool = random_pool(num_pages, num_words, torch.bfloat16)
    pages, source = page_numbers(num_pages, count), poisoned(count + 1, pool)
    source[:count] = torch.randint(0, 256, source[:count].shape, dtype=torch.uint8)
    expected = bytes_of(pool)
    expected[pages.numpy()] = source[:count].numpy()
    with kernel_module("pages.triton_pages", tmp_path) as module:
        if count:
            module.scatter_rows(source.view(torch.int32), pages, words(pool))
    assert (bytes_of(pool) == expected).all()


@pytest.mark.parametrize(("num_pages", "num_words", "count"), [s for s in SIZES if s[2]])
def test_digest(num_pages: int, num_words: int, count: int, tmp_path: Path) -> None:
    pool = random_pool(num_pages, num_words, torch.float32)
    pages = page_numbers(num_pages, count)
    with kernel_module("page_digest.triton_digest", tmp_path) as module:
        digests = module.row_digests(words(pool).view(torch.int64), pages)
    assert unsigned(digests) == expected_digests(pool, pages)


def test_pages_may_lie_apart(tmp_path: Path) -> None:
    """Nothing between them is written."""
    pool, other = (random_pool(5, 4110, torch.bfloat16) for _ in range(2))
    pages = page_numbers(5, 3)
    wide, target, out = WidePages(pool), WidePages(other), poisoned(3, pool)
    with kernel_module("pages.triton_pages", tmp_path) as module:
        module.gather_rows(words(wide.pool), pages, out.view(torch.int32))
        module.scatter_rows(out.view(torch.int32), pages, words(target.pool))
    assert (out.numpy() == bytes_of(pool)[pages.numpy()]).all()
    other[pages] = pool[pages]
    target.check(other)
    with kernel_module("page_digest.triton_digest", tmp_path) as module:
        digests = module.row_digests(words(wide.pool).view(torch.int64), pages)
    assert unsigned(digests) == expected_digests(pool, pages)
    wide.check(pool)


@pytest.mark.parametrize(
    ("name", "num_words", "change"),
    [
        (
            "pages.triton_pages",
            4110,
            ("rows + page * stride + column", "rows + row * stride + column"),
        ),
        (
            "page_digest.triton_digest",
            4110,
            ("is_word = column < num_words", "is_word = column < num_words - 4"),
        ),
        ("page_digest.triton_digest", 4110, ("static_range(TILES)", "static_range(1)")),
        ("page_digest.triton_digest", 16_384, ("total += z if IS_WHOLE", "total = z if IS_WHOLE")),
        ("page_digest.triton_digest", 16_384, ("(z >> 27)", "(z >> 28)")),
    ],
)
@pytest.mark.full
def test_the_checks_see_a_changed_kernel(
    name: str, num_words: int, change: tuple[str, str], tmp_path: Path
) -> None:
    pool = random_pool(5, num_words, torch.float32)
    pages = torch.tensor([3, 0], dtype=torch.int64)
    with kernel_module(name, tmp_path, change) as module:
        if name == "pages.triton_pages":
            out = poisoned(2, pool)
            module.gather_rows(words(pool), pages, out.view(torch.int32))
            assert (out.numpy() != bytes_of(pool)[pages.numpy()]).any()
        else:
            digests = module.row_digests(words(pool).view(torch.int64), pages)
            assert unsigned(digests) != expected_digests(pool, pages)


def test_a_dropped_last_tile_is_seen(tmp_path: Path) -> None:
    pool = random_pool(4, 4110, torch.float32)
    pages, out = page_numbers(4, 4), poisoned(4, pool)
    with kernel_module("pages.triton_pages", tmp_path, DROPPED_TILE) as module:
        module.gather_rows(words(pool), pages, out.view(torch.int32))
    assert (out.numpy() != bytes_of(pool)[pages.numpy()]).any()


@pytest.mark.parametrize("change", [("rows + page * stride", "rows + row * stride"), DROPPED_TILE])
def test_a_changed_scatter_is_seen(change: tuple[str, str], tmp_path: Path) -> None:
    pool = random_pool(4, 4110, torch.float32)
    pages, source = torch.tensor([3, 0, 2]), poisoned(3, pool)
    source[:] = torch.randint(0, 256, source.shape, dtype=torch.uint8)
    expected = bytes_of(pool)
    expected[pages.numpy()] = source.numpy()
    with kernel_module("pages.triton_pages", tmp_path, change) as module:
        module.scatter_rows(source.view(torch.int32), pages, words(pool))
    assert (bytes_of(pool) != expected).any()
