"""Pieces of several page groups in pages of the first one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from weft.engine.executor.pieces import WindowPieces

NUM_PAGES, PAGE_BYTES = 40, 96


@pytest.mark.parametrize("is_each", [True, False])
def test_pieces_of_each_group_come_out_of_pages_as_they_went_in(is_each: bool) -> None:
    pages = torch.randint(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8)
    for width in (random.randrange(1, 80), random.randrange(80, 200)):
        pool = torch.randn(12, width)
        memory, wanted = WindowPieces(pool, pages), pool.clone()
        pieces = random.sample(range(12), 3)
        num_pages = -(-width * 4 // PAGE_BYTES)
        count = 3 * num_pages if is_each else -(-3 * width * 4 // PAGE_BYTES)
        into = random.sample(range(NUM_PAGES), count)
        memory.pack(pieces, into, pages, is_each=is_each)
        memory.poison(pieces)
        assert pool[pieces].isnan().all()
        memory.unpack(pieces, into, pages, is_each=is_each)
        assert torch.equal(pool, wanted)
        memory.zero(pieces[:1])
        assert not pool[pieces[0]].any()


def test_tiers_read_the_pieces_of_one_group() -> None:
    pages = torch.zeros((NUM_PAGES, PAGE_BYTES), dtype=torch.uint8)
    for _ in range(2):
        pool = torch.randn(12, 48)
        reader = WindowPieces(pool, pages).pool(2, PAGE_BYTES)
        piece = random.randrange(12)
        read = np.concatenate([reader.read(2 * piece + part).copy() for part in range(2)])
        assert read.view(np.float32).tolist() == pool[piece].tolist()
