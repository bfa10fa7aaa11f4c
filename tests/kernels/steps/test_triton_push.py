"""Entries of pages that are copied to other pools arrive where they belong, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from weft.kernels.ops.pages.triton_push import PeerPools

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_arrive_in_all_other_pools(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    shape = (7, random.randint(1, 3), 4, random.randint(1, 2), 8, 2 * random.randint(3, 12))
    pools = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    before, rank = [pool.clone() for pool in pools], random.randrange(3)
    places = torch.randperm(7 * 8, generator=generator)[: random.randint(1, 40)]
    first = random.randrange(4)
    layers = range(first, random.randint(first + 1, 4))
    PeerPools.of(pools, rank).push(places, layers)
    for number, (pool, was) in enumerate(zip(pools, before, strict=True)):
        if number != rank:
            of_places = was.permute(0, 4, 2, 1, 3, 5).flatten(0, 1)
            of_own = before[rank].permute(0, 4, 2, 1, 3, 5).flatten(0, 1)
            of_places[places[:, None], torch.tensor(layers)] = of_own[
                places[:, None], torch.tensor(layers)
            ]
            was = of_places.unflatten(0, (7, 8)).permute(0, 3, 2, 4, 1, 5)
        assert torch.equal(pool, was)
