"""Sums, tokens and logits of ranks with a GPU each, by Triton's interpreter in a process a rank."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from weft.testing.kernels.peer_ranks import EPS, Ranks, cases_of, digest_of

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_all_ranks_get_the_same_bits_of_the_right_sums(
    size: int,
) -> None:
    seed = random.randrange(1 << 30)
    ranks = Ranks.create(size)

    others = [ranks.start(rank, seed) for rank in range(1, size)]
    found = ranks.run(0, seed)
    for other in others:
        told, _ = other.communicate(timeout=120)
        assert np.array_equal(np.load(io.BytesIO(told)), digest_of(found))
    for case, one in zip(cases_of(size, seed), found, strict=True):
        added = torch.zeros_like(case.stream)
        for part in case.parts:
            added += part
        total = case.stream + added
        assert torch.equal(one.total, total)
        assert torch.equal(one.tap, total)
        wide = total.double()
        scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
        torch.testing.assert_close(one.normed.double(), wide * scale * case.gain, atol=1e-5, rtol=0)
        assert torch.equal(one.tokens, case.tokens)
        assert torch.equal(one.logits, case.logits)
