"""K and V in 8 bits on CPUs and in Triton's interpreter: the numbers that are written to pages, and
attention over them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton.language as tl
from weft.kernels.ops import tree_rows
from weft.kernels.ops.attention import paged_attention as native_attention
from weft.kernels.ops.attention import triton_parts as context_parts
from weft.kernels.ops.attention.gpu import paged_attention
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.pages.scaled_kv import SCALE_BYTES, dequantised, parts_of, quantised
from weft.kernels.ops.rope import rope_and_cache as rope_on_cpu
from weft.kernels.ops.rope.reference import rope_and_cache_reference
from weft.kernels.ops.rope.triton_rope import rope_and_cache
from weft.kernels.ops.tree_rows import triton_rows as gpu_tree_rows
from weft.kernels.shared.formats.fp8 import FP8
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

PAGE, HEADS, KV_HEADS, DIM, LAYERS = 16, 6, 2, 32, 3
POOL_PAGES = 49


def make_pool(pages: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Vectors with numbers and scales that kernels would not write."""
    pool = torch.zeros((pages, KV_HEADS, LAYERS, 2, PAGE, DIM + SCALE_BYTES), dtype=dtype)
    numbers, scales = parts_of(pool)
    drawn = torch.randn(numbers.shape).mul_(40).clamp_(-127, 127).to(numbers.dtype)
    numbers.view(torch.uint8).copy_(drawn.view(torch.uint8))
    scales.copy_(torch.rand(scales.shape) / 60)
    return pool


def make_step(
    lengths: list[tuple[int, int]], dtype: torch.dtype = torch.uint8
) -> tuple[AttentionMetadata, torch.Tensor]:
    """Requests with so many rows and positions, and their pool; no request has page 0."""
    q_lens = torch.tensor([length for length, _ in lengths])
    kv_lens = torch.tensor([length for _, length in lengths]).int()
    cu = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int()
    pool = make_pool(POOL_PAGES, dtype)
    parts_of(pool)[1][0] = float("nan")
    table = (1 + torch.randperm(POOL_PAGES - 1))[: len(lengths) * 12].view(-1, 12).int()
    bounds = (int(q_lens.max()), int(kv_lens.max()))
    return AttentionMetadata(table, torch.arange(int(q_lens.sum())), cu, kv_lens, *bounds), pool


POOLS = [torch.uint8, torch.int8]
DECODES, PROMPTS = [(1, 37), (1, 5)], [(40, 75), (1, 90), (3, 180), (3, 3)]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "fixed": {"is_fixed": True},
    "capped": {"softcap": 5.0},
}


@pytest.mark.parametrize("lengths", [DECODES, PROMPTS])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("kept", POOLS)
def test_attention(
    lengths: list[tuple[int, int]],
    way: str,
    is_native: bool,
    kept: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of GPUs, where several programs walk the longest context, and of CPUs."""
    fresh_seed()
    monkeypatch.setattr(context_parts, "MIN_POSITIONS", tl.constexpr(64))
    step, pool = make_step(lengths, kept)
    dtype = torch.bfloat16 if is_native else torch.float16
    q = torch.randn(len(step.places), HEADS, DIM).to(dtype)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, **WAYS[way])
    attend = native_attention if is_native else paged_attention
    out = attend(q, pool, 1, spec, step)
    kept = dequantised(pool, torch.float64)
    exact = paged_attention_reference(q.double(), kept, 1, spec, step)
    peer = paged_attention_reference(q, kept.to(dtype), 1, spec, step)
    assert_as_exact(out, peer, exact, factor=3.0)
    assert_as_exact(paged_attention_reference(q, pool, 1, spec, step), peer, exact, factor=3.0)


@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("dtype", POOLS)
def test_native_attention_in_float32(dim: int, dtype: torch.dtype) -> None:
    fresh_seed()
    step, _ = make_step(PROMPTS)
    pool = torch.zeros((POOL_PAGES, KV_HEADS, LAYERS, 2, PAGE, dim + SCALE_BYTES), dtype=dtype)
    rows = (POOL_PAGES - 1) * PAGE
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * dim)
    turns, places = torch.rand(rows, dim), PAGE + torch.randperm(rows)
    rope_on_cpu(qkv, torch.arange(rows), turns, pool, 1, places, HEADS, KV_HEADS)
    wanted = torch.zeros_like(pool)
    given = (qkv, torch.arange(rows), turns, wanted, 1, places)
    rope_and_cache_reference(*given, HEADS, KV_HEADS)
    kept, expected = (dequantised(one, torch.float32) for one in (pool, wanted))
    # A sum that is rounded otherwise may round a number to its other neighbour.
    assert ((kept - expected).abs() > 1e-5 * expected.abs()).double().mean() < 1e-3
    assert ((kept - expected).abs() <= expected.abs() / 7 + 5e-2).all()
    q = torch.randn(len(step.places), HEADS, dim)
    spec = AttentionSpec(HEADS, KV_HEADS, dim, dim**-0.5)
    out = native_attention(q, pool, 1, spec, step)
    kept = dequantised(pool, torch.float64)
    exact = paged_attention_reference(q.double(), kept, 1, spec, step)
    peer = paged_attention_reference(q, kept.float(), 1, spec, step)
    assert_as_exact(out, peer, exact, factor=3.0)


def test_paths_of_trees_move_numbers_and_scales() -> None:
    fresh_seed()
    pool = make_pool(8)
    places, wanted, before = torch.randperm(8 * PAGE)[:12], pool.clone(), pool.clone()
    rows = torch.tensor([[0, 1, 2, 3, -1], [4, 5, 6, 7, 8]])
    paths = torch.tensor([[0, 2, 3, -1, -1], [4, 6, 8, -1, -1]])
    tree_rows.move_paths(pool, places, rows, paths)
    gpu_tree_rows.move_paths(wanted, places, rows, paths)
    assert torch.equal(pool, wanted)
    found = dequantised(pool, torch.float32)[places // PAGE, :, :, :, places % PAGE]
    moved = dequantised(before, torch.float32)[places // PAGE, :, :, :, places % PAGE]
    assert torch.equal(found[[1, 2, 5, 6]], moved[[2, 3, 6, 8]])


@pytest.mark.parametrize("dtype", POOLS)
def test_what_is_written_depends_on_the_vector_alone(dtype: torch.dtype) -> None:
    fresh_seed()
    rows, pool = 9, make_pool(4, dtype)
    before, wanted = pool.clone(), pool.clone()
    # Numbers that the format has: the interpreter rounds others to FP8 wrongly.
    kind, most = (FP8, 448) if dtype == torch.uint8 else (torch.int8, 127)
    wide = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM).mul_(20).clamp_(-127, 127).to(kind).float()
    wide[..., 0] = most
    wide[3] = 0
    qkv = (wide / 64).half().flatten(1).contiguous()
    turns = torch.cat((torch.ones(16, DIM // 2), torch.zeros(16, DIM // 2)), 1)
    positions, slots = torch.arange(rows), 16 + torch.randperm(40)[:rows]
    given = (qkv, positions, turns)
    q = rope_and_cache(*given, pool, 1, slots, HEADS, None, None, 1e-6)
    expected = rope_and_cache_reference(*given, wanted, 1, slots, HEADS, KV_HEADS)
    torch.testing.assert_close(q, expected)
    assert torch.equal(pool, wanted)
    numbers, scales = quantised(wide / 64, kind)
    assert torch.equal(numbers.float() * scales[..., None], wide / 64)
    pages, places = slots // PAGE, slots % PAGE
    for part, first in enumerate((HEADS, HEADS + KV_HEADS)):
        found = dequantised(pool, torch.float32)[pages, :, 1, part, places]
        assert torch.equal(found, wide[:, first : first + KV_HEADS] / 64)
    pool[:, :, 1] = before[:, :, 1]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("is_native", [False, True])
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype, is_native: bool) -> None:
    """Of GPUs, and of CPUs: vectors with NaN in one element are NaN, others are not."""
    fresh_seed()
    rows = PAGE
    pool = torch.zeros((1, KV_HEADS, LAYERS, 2, PAGE, DIM + SCALE_BYTES), dtype=dtype)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM)
    qkv[4, HEADS:, random.randrange(DIM)] = float("nan")
    turns = torch.cat((torch.ones(rows, DIM // 2), torch.zeros(rows, DIM // 2)), 1)
    places = torch.arange(rows)
    given = (qkv.bfloat16().flatten(1), places, turns, pool, 1, places, HEADS)
    if is_native:
        rope_on_cpu(*given, KV_HEADS)
    else:
        rope_and_cache(*given, None, None, 1e-6)
    kept = dequantised(pool, torch.float32)[0, :, 1]
    assert kept[:, :, 4].isnan().all()
    assert kept[:, :, torch.arange(rows) != 4].isfinite().all()
