"""Pools on a GPU whose pages lie apart: kernels find in them what they find in a contiguous one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.pages import copy_pages, gather_pages, scatter_pages
from weft.kernels.ops.rope import rope_and_cache
from weft.kernels.ops.tree_rows import move_paths
from weft.testing.kernels.attention_cases import LAYER, Case, Geometry, in_parts, make_case
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.page_cases import page_numbers, poisoned
from weft.testing.kernels.tree_cases import Work, make_tree_case
from weft.testing.kernels.wide_pages import WidePages

pytestmark = pytest.mark.needs("cuda")

CUDA = "cuda"
LLAMA = Geometry(32, 8, 128, 16)
DTYPES = [torch.float32, torch.bfloat16]
FAR = 2**28
"""Elements from page to page, so that the ninth is beyond 2**31."""


def attend(case: Case, pool: torch.Tensor, **options: Any) -> torch.Tensor:
    return in_parts(paged_attention)(
        *(case.q, pool, LAYER, case.page_table, case.cu_q_lens, case.kv_lens),
        *(case.scale, case.max_q_len, case.max_kv_len),
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"first_position": 1}, {"window": 100}, {"is_fixed": True}],
)
@pytest.mark.parametrize(
    "lengths", [[(1, 1000), (1, 33)], [(4, 300), (3, 9)], [(1, 70), (300, 500), (40, 40)]]
)
def test_attention(
    lengths: list[tuple[int, int]], options: dict[str, Any], dtype: torch.dtype
) -> None:
    fresh_seed()
    case = make_case(LLAMA, lengths, dtype, CUDA)
    wide = WidePages(case.pool)
    expected = attend(case, case.pool, **options)
    assert not expected.isnan().any()
    assert torch.equal(attend(case, wide.pool, **options), expected)
    wide.check(case.pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_trees(dtype: torch.dtype) -> None:
    fresh_seed()
    work = [Work(32, 200, True), Work(5, 40, True), Work(1, 30)]
    tree = make_tree_case(LLAMA, work, dtype, CUDA)
    case = tree.case
    wide = WidePages(case.pool)
    found = attend(case, wide.pool, ancestors=tree.ancestors)
    assert torch.equal(found, attend(case, case.pool, ancestors=tree.ancestors))
    wide.check(case.pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes(dtype: torch.dtype) -> None:
    """Of K and V; and the moves of accepted paths."""
    fresh_seed()
    heads, kv_heads, dim, page_size = LLAMA
    rows, num_pages = 60, 12
    pool = torch.randn(num_pages, kv_heads, 3, 2, page_size, dim, device=CUDA).to(dtype)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=CUDA).to(dtype)
    positions = torch.randint(0, 50, (rows,), device=CUDA)
    cos_sin = torch.randn(50, dim, device=CUDA)
    places = torch.randperm(num_pages * page_size, device=CUDA)[:rows]
    steps = torch.arange(rows, device=CUDA).view(4, 15)
    paths = torch.where(torch.arange(15, device=CUDA) < 5, steps[:, :1] + 2 * (steps % 15), -1)
    wide = WidePages(pool)
    results = []
    for target in (pool, wide.pool):
        common = (qkv, positions, cos_sin, target, LAYER, places)
        results.append(rope_and_cache(*common, heads, kv_heads))
        move_paths(target, places, steps, paths)
    assert torch.equal(*results)
    wide.check(pool)


@pytest.mark.parametrize("count", [3, 20])
def test_whole_pages(count: int) -> None:
    fresh_seed()
    pool, other = torch.randn(2, 40, 2, 5000, device=CUDA).bfloat16()
    pages, out = page_numbers(40, count, CUDA), poisoned(count, pool)
    wide, target = WidePages(pool), WidePages(other)
    assert torch.equal(page_digests(wide.pool, pages), page_digests(pool, pages))
    gather_pages(wide.pool, pages, out)
    wide.check(pool)
    scatter_pages(out, pages, target.pool)
    other[pages] = pool[pages]
    target.check(other)
    sources, destinations = page_numbers(40, 2 * count).view(2, count).tolist()
    for copied in (target.pool, other):
        copy_pages(copied, sources, destinations)
    target.check(other)


def test_pages_far_apart() -> None:
    """Offsets beyond 32 bits."""
    fresh_seed()
    case = make_case(LLAMA, [(1, 100), (40, 90)], torch.bfloat16, CUDA)
    num_pages = len(case.pool)
    memory = torch.empty(num_pages * FAR, dtype=torch.bfloat16, device=CUDA)
    pool = memory.view(num_pages, FAR)[:, : case.pool[0].numel()].view(case.pool.shape)
    assert num_pages > 9
    pool.copy_(case.pool)
    for options in ({}, {"is_fixed": True}):
        assert torch.equal(attend(case, pool, **options), attend(case, case.pool, **options))
    pages = torch.arange(num_pages, device=CUDA)
    assert torch.equal(page_digests(pool, pages), page_digests(case.pool, pages))
