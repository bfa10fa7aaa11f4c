"""Sums that digests of weights are made of: the GPU's kernel, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.ops.content_digest import weighted_sums, weighted_sums_reference
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("width", [300, 8192, 9000])
@pytest.mark.parametrize("count", [0, 1, 299, 8192, 20_001])
def test_sums_wrap_as_those_of_python(width: int, count: int) -> None:
    from weft.kernels.ops.content_digest import triton_sums

    fresh_seed()
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32)
    tables = torch.randint(-(2**63), 2**63 - 1, (2, width), dtype=torch.int64)
    found = triton_sums.weighted_sums(words, tables)
    assert torch.equal(found, weighted_sums_reference(words, tables))
    assert torch.equal(found, weighted_sums(words, tables))
    if count:
        row = [
            sum(a * b for a, b in zip(words[:width].tolist(), table, strict=False)) % 2**64
            for table in tables.tolist()
        ]
        assert [one % 2**64 for one in found[0].tolist()] == row


def test_what_is_no_word_is_refused() -> None:
    tables = torch.zeros((2, 4), dtype=torch.int64)
    with pytest.raises(ValueError, match="words"):
        weighted_sums(torch.zeros(3), tables)
    with pytest.raises(ValueError, match="contiguous"):
        weighted_sums(torch.zeros(8, dtype=torch.int32)[::2], tables)
