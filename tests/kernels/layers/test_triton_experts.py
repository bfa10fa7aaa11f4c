"""Rows and what experts add to them, exchanged by Triton's interpreter in a process a rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.moe import moe
from weft.testing.kernels.expert_ranks import EXPERTS_OF_RANK, experts_of, run_ranks, steps_of

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.full_after(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_get_what_the_experts_of_all_ranks_add(size: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)

    found = run_ranks(size, seed, tmp_path)

    whole, num_sent = experts_of(size, None, seed), [0] * size
    for number, step in enumerate(steps_of(size, seed)):
        for rank, part in enumerate(step):
            results = found[rank].results[number]
            owners = part.routing.ids // EXPERTS_OF_RANK
            of_others = [int((owners == one).any(1).sum()) for one in range(size) if one != rank]
            num_sent[rank] += part.num_layers * sum(of_others)
            assert len(results) == part.num_layers
            for w, result in zip(whole, results, strict=False):
                expected = moe(part.x, part.routing, w, part.residual)
                torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert [one.num_sent for one in found] == num_sent, "each row goes once where it is needed"
