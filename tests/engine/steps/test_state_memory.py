"""Blocks of recurrent layers in pages of KV."""

from __future__ import annotations

import random

import torch
from weft.contract.layout import StatePart, StatePlane
from weft.engine.executor.states import StateMemory


def test_a_block_comes_out_of_pages_as_it_went_in() -> None:
    parts = (StatePart("state", (3, 5, 7), "float32"), StatePart("tail", (11, 2), "bfloat16"))
    rows = (StatePart("hidden", (13,), "bfloat16"),)
    plane = StatePlane(name="delta", layers=2, parts=parts, ring=parts, rows=rows)
    cpu = torch.device("cpu")
    mine, theirs = (StateMemory(plane, 6, 1, 4, cpu) for _ in range(2))
    page_bytes = random.randrange(100, 300)
    pages = random.sample(range(20), -(-plane.block_bytes // page_bytes))
    pool = torch.randint(0, 256, (20, page_bytes), dtype=torch.uint8)
    theirs.poison([1, 2, 3, 4, 5])
    for part in (*mine.pools.blocks, *mine.pools.row_blocks):
        part.copy_(torch.randn(part.shape))
    mine.to_pages(4, pages, pool)
    theirs.from_pages(2, pages, pool)
    for own, other in zip(
        (*mine.pools.blocks, *mine.pools.row_blocks),
        (*theirs.pools.blocks, *theirs.pools.row_blocks),
        strict=True,
    ):
        assert torch.equal(own[4], other[2])
        assert other[3].isnan().all()
