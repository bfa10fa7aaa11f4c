"""Sums, tokens and logits of ranks with a GPU each, by Triton's interpreter in a process a rank."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from weft.testing.kernels.peer_ranks import EPS, Ranks, cases_of, digest_of

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_all_ranks_get_the_same_bits_of_the_right_sums(size: int, dtype: torch.dtype) -> None:
    seed = random.randrange(1 << 30)
    ranks = Ranks.create(size, dtype)

    others = [ranks.start(rank, seed) for rank in range(1, size)]
    found = ranks.run(0, seed)
    for other in others:
        told, _ = other.communicate(timeout=120)
        assert np.array_equal(np.load(io.BytesIO(told)), digest_of(found))
    for case, one in zip(cases_of(size, dtype, seed), found, strict=True):
        added = torch.zeros(case.stream.shape)
        for part in case.parts:
            added += part
        total = (case.stream + added).to(dtype)
        assert torch.equal(one.total, total)
        assert torch.equal(one.tap, total)
        wide = total.double()
        scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
        normed, near = wide * scale * case.gain, 1e-5 if dtype == torch.float32 else 2**-10
        torch.testing.assert_close(one.normed.double(), normed, atol=near, rtol=near)
        assert torch.equal(one.tokens, case.tokens)
        assert torch.equal(one.logits, case.logits)
