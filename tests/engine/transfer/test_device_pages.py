"""Pages that several ranks have parts of are moved as those of one pool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.layout import CacheLayout, PagedPlane, PageGroup, StatePart, StatePlane
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks.share import blocks_of, pool_of, sized_layout
from weft.engine.executor.states import StateMemory
from weft.engine.parallel.stages import stage_of_rank
from weft.engine.transfer.device_pages import DevicePages, PagePart, rows_of_pool
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


PARTS = (StatePart("state", (2, 3), "float32"), StatePart("inputs", (4,), "bfloat16"))


def layout_with(layers: tuple[int, ...], of_states: int) -> CacheLayout:
    """Pages with one plane for each number of layers, and recurrent layers."""
    shapes = [(2, 24), (4, 16)][: len(layers)]
    planes = tuple(
        PagedPlane(name=f"plane-{dim}", layers=count, heads=heads, dim=dim, dtype="float32")
        for count, (heads, dim) in zip(layers, shapes, strict=True)
    )
    states = StatePlane(name="made-up", layers=of_states, parts=PARTS, ring=())
    return CacheLayout(4, (PageGroup(planes),), states)


class MappedRanks:
    """Stands in for a rank's `SharedMemory` on GPUs, where each map has memory for every rank.

    Args:
        made: The maps of rank 0, which comes first.
    """

    size = 1

    def __init__(self, rank: int, count: int, made: list[list[torch.Tensor]]) -> None:
        self.rank, self.others = rank, None
        self._count, self._made, self._num_taken = count, made, 0

    def memory(self, num_bytes: int) -> list[torch.Tensor]:
        """The memory of the same call on rank 0."""
        if self.rank == 0:
            sizes = [num_bytes] * self._count
            self._made.append([torch.zeros(size, dtype=torch.uint8) for size in sizes])
        found = self._made[self._num_taken]
        assert all(len(one) == num_bytes for one in found), "ranks ask for the same memory"
        self._num_taken += 1
        return found


@pytest.mark.parametrize(
    "layers", [((2,), (1,)), ((2, 1), (1, 2)), ((1,), (2,), (1,))], ids=["one", "two", "three"]
)
def test_pools_and_blocks_of_stages_are_parts_of_the_whole(layers: Any) -> None:
    """Of stages with other numbers of layers each, also where pages have several planes."""
    num_pages, num_blocks, count = 7, 5, len(layers)
    of_states = [random.randrange(1, 4) for _ in layers]
    of_stages = [layout_with(own, n) for own, n in zip(layers, of_states, strict=True)]
    whole = layout_with(tuple(map(sum, zip(*layers, strict=True))), sum(of_states))
    config = EngineConfig(model_dir=Path(), pp=2, device="cuda", host_cache_bytes=1 << 20)
    pools, blocks = {}, {}
    made: list[list[torch.Tensor]] = []
    for rank in range(count):
        stage = stage_of_rank(rank, count)
        shared: Any = MappedRanks(rank, count, made)
        _, pool = pool_of(config, shared, of_stages[stage], num_pages, None, of_stages)
        of_rank = blocks_of(config, shared, of_stages[stage], [num_blocks], of_stages)
        assert pool is not None
        assert of_rank is not None
        pools[stage], blocks[stage] = pool, of_rank
    first = stage_of_rank(0, count)
    pages = pools[first].pages
    assert pages is not None
    assert pages.page_bytes == whole.page_bytes
    sized = sized_layout(of_stages[0], of_stages)
    assert sized.page_bytes == max(one.page_bytes for one in of_stages)
    assert sized.states is not None
    assert sized.states.layers == max(of_states)
    came = torch.randint(0, 256, (num_pages, whole.page_bytes), dtype=torch.uint8)
    numbers = torch.randperm(num_pages)
    pages.scatter(came, numbers)
    in_order = came[numbers.argsort()]
    out = torch.zeros_like(came)
    pages.gather(torch.arange(num_pages), out)
    assert torch.equal(out, in_order)
    right = page_digests(in_order, torch.arange(num_pages))
    assert torch.equal(pages.digests(torch.arange(num_pages)), right)
    begin = 0
    for number, plane in enumerate(whole.groups[0].planes):
        shape = (num_pages, plane.heads, plane.layers, len(plane.parts), 4, plane.dim)
        size = plane.width * 4 * 4
        of_plane = in_order[:, begin : begin + size].contiguous().view(torch.int32).view(shape)
        begin, at = begin + size, 0
        for stage in range(count):
            end = at + layers[stage][number]
            rows, before = rows_of_pool(pools[stage].own), of_stages[stage].groups[0].planes
            skipped = sum(one.width for one in before[:number]) * 4 * 4
            taken = rows[:, skipped : skipped + before[number].width * 4 * 4].contiguous()
            own_shape = (num_pages, plane.heads, end - at, *shape[3:])
            own = taken.view(torch.int32).view(own_shape)
            assert torch.equal(own, of_plane[:, :, at:end])
            at = end
    check_blocks(blocks, whole, of_stages, num_blocks)


def check_blocks(
    blocks: dict[int, Any], whole: CacheLayout, of_stages: list[CacheLayout], num_blocks: int
) -> None:
    """A block that rank 0 copies to pages has the bytes that one process's has."""
    assert whole.states is not None
    device = torch.device("cpu")
    alone = StateMemory(whole.states, num_blocks, 1, 1, device)
    first = stage_of_rank(0, len(of_stages))
    own_plane = of_stages[first].states
    assert own_plane is not None
    divided = StateMemory(own_plane, num_blocks, 1, 1, device, blocks[first])
    for number, part in enumerate(alone.of_blocks):
        part.copy_(torch.randn(part.shape))
        at = 0
        for stage in range(len(of_stages)):
            own = blocks[stage].own[number]
            own.copy_(part[:, at : at + own.shape[1]])
            at += own.shape[1]
    pools = [torch.zeros((2, whole.states.block_bytes), dtype=torch.uint8) for _ in range(2)]
    block = random.randrange(num_blocks)
    alone.to_pages(block, [1], pools[0])
    divided.to_pages(block, [1], pools[1])
    assert torch.equal(*pools)
    divided.from_pages((block + 1) % num_blocks, [1], pools[1])
    for number, part in enumerate(alone.of_blocks):
        of_block = [one.own[number][(block + 1) % num_blocks] for _, one in sorted(blocks.items())]
        assert torch.equal(torch.cat(of_block), part[block])
