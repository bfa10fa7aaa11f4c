"""Pages and blocks of stages of two ranks each, which have a GPU each: rank 0, or the first rank of
a host, reads and writes them whole in memory that it maps.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.contract.layout import CacheLayout, PagedPlane, StatePart, StatePlane
from weft.engine.executor.ranks.host_memory import (
    SharedRows,
    _put,
    parts_of_stage,
    pieces_of_pages,
)
from weft.engine.executor.ranks.share import blocks_of, pool_of
from weft.engine.parallel.shards import kv_heads_of, layout_of_rank
from weft.engine.parallel.stages import stage_of_rank
from weft.engine.transfer.device_pages import DevicePages
from weft.pages.transfer.digest import digest_pages

PAGE, DIM, NUM_PAGES, TP = 16, 8, 9, 2
OTHERS: Any = SimpleNamespace(agree=lambda phase: 0)
CONFIG: Any = SimpleNamespace(
    has_pages_by_stage=True, is_on_gpu=True, moves_pages=True, tp=TP, dcp=1
)


def layout_with(layers: int, heads: int) -> CacheLayout:
    plane = PagedPlane(heads=heads, layers=layers, parts=("k", "v"), dim=DIM, dtype="bfloat16")
    return CacheLayout.of_plane(plane, PAGE)


class Memories:
    """In place of memory of `count` ranks that this one, of number `rank`, maps."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.rank, self.size, self.others = rank, TP, OTHERS
        self._count = count
        self.made: list[list[torch.Tensor]] = []

    def memory(self, num_bytes: int) -> list[torch.Tensor]:
        self.made.append([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self._count)])
        return self.made[-1]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("counts", [(3, 2), (2, 2, 1)])
def test_whole_pages_lie_on_the_ranks_of_all_stages(counts: tuple[int, ...], heads: int) -> None:
    """With one head both ranks of a stage have copies of it."""
    count, num_ranks = len(counts), TP * len(counts)
    of_stages = [layout_with(layers, heads) for layers in counts]
    pages = random_bytes(NUM_PAGES, layout_with(sum(counts), heads).page_bytes)
    shape = (NUM_PAGES, heads, sum(counts), -1)
    rank = random.randrange(num_ranks)
    memories: Any = Memories(num_ranks, rank)
    own_stage = stage_of_rank(rank, count, TP)
    layout, pool = pool_of(CONFIG, memories, of_stages[own_stage], NUM_PAGES, of_stages=of_stages)
    assert layout == layout_of_rank(of_stages[own_stage], TP)
    assert pool is not None
    assert pool.pages is not None
    numbers = torch.randperm(NUM_PAGES)
    pool.pages.scatter(pages, numbers)
    found = torch.zeros_like(pages)
    pool.pages.gather(numbers, found)
    assert torch.equal(found, pages)
    expected = digest_pages(pages.numpy(), range(NUM_PAGES))
    assert pool.pages.digests(numbers).numpy().view("uint64").tolist() == expected.tolist()
    lies = torch.zeros_like(pages)
    lies[numbers] = pages
    for other, memory in enumerate(memories.made[0]):
        stage = stage_of_rank(other, count, TP)
        first = sum(counts[:stage])
        of_rank = kv_heads_of(heads, other % TP, TP)
        part = lies.view(shape)[:, of_rank, first : first + counts[stage]].reshape(-1)
        assert torch.equal(memory[: len(part)], part)
        if other == rank:
            assert torch.equal(pool.own.view(torch.uint8).reshape(-1), part)


@pytest.mark.parametrize("heads", [1, 4])
def test_the_first_rank_of_a_host_has_the_pages_of_its_gpus(heads: int) -> None:
    of_hosts = [layout_with(layers, heads) for layers in (3, 2)]
    pages = random_bytes(NUM_PAGES, layout_with(5, heads).page_bytes)
    digests = torch.zeros(NUM_PAGES, dtype=torch.int64)
    back, numbers = torch.zeros_like(pages), torch.arange(NUM_PAGES)
    for stage, layout in enumerate(of_hosts):
        memories: Any = Memories(TP)
        _, pool = pool_of(CONFIG, memories, layout, NUM_PAGES)
        assert pool is not None
        assert pool.pages is not None
        pools = [part.pool for part in pool.pages.parts]
        rows = SharedRows(pool.pages, DevicePages(parts_of_stage(of_hosts, stage, pools)))
        assert (rows.num_rows, rows.row_bytes) == (NUM_PAGES, layout.page_bytes)
        own = torch.empty((NUM_PAGES, layout.page_bytes), dtype=torch.uint8)
        pieces = pieces_of_pages(of_hosts, stage)
        _put([piece._replace(whole=piece.own, own=piece.whole) for piece in pieces], pages, own)
        rows.write(numbers, own)
        digests += rows.digests(numbers)
        _put(pieces, rows.read(numbers), back)
    assert torch.equal(back, pages)
    expected = digest_pages(pages.numpy(), range(NUM_PAGES))
    assert digests.numpy().view("uint64").tolist() == expected.tolist()


def test_whole_blocks_lie_on_the_ranks_of_all_stages() -> None:
    counts, num_blocks = (1, 2), 5
    parts = (StatePart("state", (4, 3), "float32"), StatePart("inputs", (6,), "bfloat16"))
    of_stages = [
        CacheLayout(PAGE, (), StatePlane(name="net", layers=count, parts=parts, ring=()))
        for count in counts
    ]
    memories: Any = Memories(2 * TP)
    layout = layout_of_rank(of_stages[1], TP)
    blocks = blocks_of(CONFIG, memories, layout, [num_blocks], of_stages)
    assert blocks is not None
    assert blocks.is_mapped
    whole = []
    for part, memory in zip(parts, memories.made, strict=True):
        dtype: torch.dtype = getattr(torch, part.dtype)
        values = torch.randn(num_blocks, sum(counts), *part.shape).to(dtype)
        for rank, flat in enumerate(memory):
            stage = stage_of_rank(rank, 2, TP)
            layers = values[:, sum(counts[:stage]) :][:, : counts[stage]]
            own = layers.chunk(TP, dim=2)[rank % TP].reshape(-1)
            flat[: own.nbytes].view(dtype)[:] = own
        whole.append(values)
    for block in range(num_blocks):
        found = [part[block].reshape(-1).view(torch.uint8) for part in blocks.whole]
        expected = [part[block].reshape(-1).view(torch.uint8) for part in whole]
        assert torch.equal(torch.cat(found), torch.cat(expected))
    for own, values in zip(blocks.own, whole, strict=True):
        assert torch.equal(own, values[:, counts[0] :].chunk(TP, dim=2)[0])
