"""Sums that digests of weights are made of: the GPU's kernel, by Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from weft.kernels.ops.content_digest import weighted_sums, weighted_sums_reference
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("width", [300, 8192, 9000])
def test_sums_wrap_as_those_of_python(width: int) -> None:
    from weft.kernels.ops.content_digest import triton_sums

    fresh_seed()
    counts = [20_001, 0, 1, 299, 8192, random.randrange(1, 30_000)]
    random.shuffle(counts)
    words = [torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32) for count in counts]
    tables = torch.randint(-(2**63), 2**63 - 1, (2, width), dtype=torch.int64)
    right = [
        [sum(a * b for a, b in zip(row, table, strict=False)) % 2**64 for table in tables.tolist()]
        for one in words
        for row in rows_of(one.tolist(), width)
    ]
    for sums in (triton_sums.weighted_sums, weighted_sums_reference, weighted_sums):
        found = sums(words, tables)
        assert [[one % 2**64 for one in row] for row in found.tolist()] == right


def rows_of(numbers: list[int], width: int) -> list[list[int]]:
    return [numbers[first : first + width] for first in range(0, len(numbers), width)]


def test_bytes_after_the_last_word_count_for_nothing() -> None:
    from weft.kernels.ops.content_digest import triton_sums

    fresh_seed()
    words = torch.randint(-(2**31), 2**31, (700,), dtype=torch.int32)
    tables = torch.randint(-(2**63), 2**63 - 1, (2, 400), dtype=torch.int64)
    longer = torch.cat([words.view(torch.int16), torch.ones(1, dtype=torch.int16)])
    for sums in (triton_sums.weighted_sums, weighted_sums):
        assert torch.equal(sums([longer], tables), sums([words], tables))
        assert sums([longer[:1], torch.empty(0)], tables).shape == (0, 2)


def test_what_a_gpu_cannot_read_is_refused() -> None:
    tables = torch.zeros((2, 4), dtype=torch.int64)
    words = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(ValueError, match="tables"):
        weighted_sums([words], tables.int())
    with pytest.raises(ValueError, match="contiguous"):
        weighted_sums([words[::2]], tables)
    with pytest.raises(ValueError, match="multiples of 16"):
        weighted_sums([words, words[1:]], tables)
