"""Pages that several ranks have parts of are moved as those of one pool."""

from __future__ import annotations

import random

import pytest
import torch
from weft.engine.transfer.device_pages import DevicePages, PagePart
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.pages import gather_pages, scatter_pages
from weft.kernels.ops.pages.pool import PageShare

NUM_PAGES, HEADS, WORDS = 20, 4, 44


def random_pool(heads: int = HEADS) -> torch.Tensor:
    return torch.randn(NUM_PAGES, heads, WORDS)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_are_read_and_written_as_the_whole(size: int) -> None:
    """With eight ranks two have each head."""
    whole = random_pool()
    share = max(1, HEADS // size)
    firsts = [rank * HEADS // size for rank in range(size)]
    pools = [whole[:, first : first + share].clone() for first in firsts]
    head_bytes = 4 * WORDS
    pages = DevicePages(
        [
            PagePart(pool, first * head_bytes, is_copy=first in firsts[:rank])
            for rank, (pool, first) in enumerate(zip(pools, firsts, strict=True))
        ]
    )
    assert pages.page_bytes == HEADS * head_bytes
    numbers = torch.tensor(random.sample(range(NUM_PAGES), 7))
    out = torch.zeros(9, pages.page_bytes, dtype=torch.uint8)
    right = out.clone()
    pages.gather(numbers, out)
    gather_pages(whole, numbers, right)
    assert torch.equal(out, right)
    assert torch.equal(pages.digests(numbers), page_digests(whole, numbers))
    came = torch.randint(0, 256, (7, pages.page_bytes), dtype=torch.uint8)
    others = torch.tensor(random.sample(range(NUM_PAGES), 7))
    pages.scatter(came, others)
    scatter_pages(came, others, whole)
    page, row = random.randrange(NUM_PAGES), torch.zeros(pages.page_bytes, dtype=torch.uint8)
    pages.read(page, row)
    assert torch.equal(row, whole.view(torch.uint8).view(NUM_PAGES, -1)[page])
    pages.write(page, came[0])
    whole.view(torch.uint8).view(NUM_PAGES, -1)[page] = came[0]
    for pool, first in zip(pools, firsts, strict=True):
        ours, right = (t.view(torch.int32) for t in (pool, whole[:, first : first + share]))
        assert torch.equal(ours, right)


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (1, 3), (2, 2)])
def test_pages_that_ranks_divide_are_read_and_written_as_the_whole(heads: int, size: int) -> None:
    """Twice as many ranks have each head, so each page lies on two of them."""
    whole = torch.randn(NUM_PAGES, heads, WORDS)
    head_bytes, parts = 4 * WORDS, list[PagePart]()
    for rank in range(heads * 2 * size):
        head, copy = divmod(rank // size, 2)
        rows = torch.randn(1 + -(-NUM_PAGES // size), 1, WORDS)
        for page in range(rank % size, NUM_PAGES, size):
            rows[1 + page // size] = whole[page, head]
        share = PageShare(rank % size, size)
        parts.append(PagePart(rows, head * head_bytes, is_copy=copy > 0, share=share))
    pages = DevicePages(parts)
    assert pages.page_bytes == heads * head_bytes

    def check() -> None:
        numbers = torch.tensor(random.sample(range(NUM_PAGES), 7))
        out, right = torch.zeros(2, 9, pages.page_bytes, dtype=torch.uint8)
        pages.gather(numbers, out)
        gather_pages(whole, numbers, right)
        assert torch.equal(out, right)
        assert torch.equal(pages.digests(numbers), page_digests(whole, numbers))
        page, row = random.randrange(NUM_PAGES), torch.zeros(pages.page_bytes, dtype=torch.uint8)
        pages.read(page, row)
        assert torch.equal(row, whole.view(torch.uint8).view(NUM_PAGES, -1)[page])

    check()
    came = torch.randint(0, 256, (7, pages.page_bytes), dtype=torch.uint8)
    others = torch.tensor(random.sample(range(NUM_PAGES), 7))
    pages.scatter(came, others)
    scatter_pages(came, others, whole)
    page = random.randrange(NUM_PAGES)
    pages.write(page, came[0])
    whole.view(torch.uint8).view(NUM_PAGES, -1)[page] = came[0]
    check()
    for rank, part in enumerate(parts):
        for page in range(rank % size, NUM_PAGES, size):
            ours, right = part.pool[1 + page // size, 0], whole[page, rank // size // 2]
            assert torch.equal(ours.view(torch.int32), right.view(torch.int32))


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("size", [2, 3])
def test_the_kernels_leave_pages_of_other_pools(size: int) -> None:
    from weft.kernels.ops.page_digest import page_digests_reference, triton_digest
    from weft.kernels.ops.pages import (
        gather_pages_reference,
        scatter_pages_reference,
        triton_pages,
    )

    pool, share = random_pool(2), PageShare(random.randrange(size), size)
    rows = pool.view(NUM_PAGES, -1).view(torch.int32)
    numbers = torch.tensor(random.sample(range(size * (NUM_PAGES - 1)), 9))
    found = torch.randint(0, 1 << 30, (9, rows.shape[1]), dtype=torch.int32)
    right = found.clone()
    triton_pages.gather_rows(rows, numbers, found, share)
    gather_pages_reference(pool, numbers, right.view(torch.uint8), share)
    assert torch.equal(found, right)
    first = random.randrange(1, 1 << 20)
    digests = triton_digest.row_digests(rows.view(torch.int64), numbers, first, share)
    assert torch.equal(digests, page_digests_reference(pool, numbers, first, share))
    came, copied = torch.randint_like(found, 1 << 30), pool.clone()
    triton_pages.scatter_rows(came, numbers, rows, share)
    scatter_pages_reference(came.view(torch.uint8), numbers, copied, share)
    assert torch.equal(rows, copied.view(NUM_PAGES, -1).view(torch.int32))


@pytest.mark.needs("triton-interpreter")
def test_the_kernels_take_parts_of_rows() -> None:
    from weft.kernels.ops.page_digest import triton_digest as page_digest
    from weft.kernels.ops.pages import triton_pages as page_ops

    pool, numbers = random_pool(2), torch.tensor(random.sample(range(NUM_PAGES), 5))
    rows = pool.view(NUM_PAGES, -1).view(torch.int32)
    wide = torch.zeros(5, 300, dtype=torch.int32)
    page_ops.gather_rows(rows, numbers, wide[:, 100:188])
    assert torch.equal(wide[:, 100:188], rows[numbers])
    assert not wide[:, :100].any()
    assert not wide[:, 188:].any()
    page_ops.scatter_rows(wide[:, 100:188], numbers.flip(0), rows)
    assert torch.equal(rows[numbers.flip(0)], wide[:, 100:188])
    first = random.randrange(1, 1 << 20)
    right = page_digests(pool, numbers, first)
    assert torch.equal(page_digest.row_digests(rows.view(torch.int64), numbers, first), right)
