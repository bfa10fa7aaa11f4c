"""Rows that see later rows of their image, on a GPU against float64, at real sizes."""

from __future__ import annotations

import random

import pytest
import torch
from weft.kernels.ops.attention import paged_attention
from weft.testing.kernels.attention_cases import (
    LAYER,
    Geometry,
    eager_attention,
    exact_attention,
    in_parts,
    make_case,
    random_key_ends,
)
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("cuda")

LENGTHS = [(1, 700), (256, 256), (300, 1500), (5, 90), (1, 1), (1030, 1030)]


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [
        (Geometry(8, 4, 256, 16), torch.bfloat16),
        (Geometry(32, 8, 128, 16), torch.bfloat16),
        (Geometry(4, 2, 64, 16), torch.float32),
    ],
)
def test_rows_see_up_to_their_ends(
    geometry: Geometry, dtype: torch.dtype, window: int | None, is_fixed: bool
) -> None:
    fresh_seed()
    case = make_case(geometry, random.sample(LENGTHS, len(LENGTHS)), dtype, "cuda")
    ends = random_key_ends(case)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    most = (case.max_q_len, case.max_kv_len)
    options = {"window": window, "is_fixed": is_fixed, "key_ends": ends}
    made = in_parts(paged_attention)(case.q, case.pool, LAYER, *lengths, *most, **options)
    eager = eager_attention(case, window=window, key_ends=ends)
    assert_as_exact(made, eager, exact_attention(case, window=window, key_ends=ends))
