"""K and V in FP8: what is written and what attention makes of it, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.attention import AttentionSpec, GroupStep, paged_attention_reference
from weft.kernels.fp8_kv import SCALE_BYTES, dequantised, parts_of, quantised
from weft.kernels.gpu.attention import paged_attention
from weft.kernels.gpu.rope import rope_and_cache
from weft.kernels.quantised import FP8
from weft.kernels.rope import rope_and_cache_reference
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

PAGE, HEADS, KV_HEADS, DIM, LAYERS = 16, 6, 2, 32, 3


def make_pool(pages: int) -> torch.Tensor:
    """Vectors with numbers and scales that kernels would not write."""
    pool = torch.zeros((pages, KV_HEADS, LAYERS, 2, PAGE, DIM + SCALE_BYTES), dtype=torch.uint8)
    numbers, scales = parts_of(pool)
    numbers.view(torch.uint8).copy_(torch.randn(numbers.shape).mul_(60).to(FP8).view(torch.uint8))
    scales.copy_(torch.rand(scales.shape) / 60)
    return pool


@pytest.mark.parametrize("lengths", [[(1, 37), (1, 5)], [(40, 75), (1, 90), (3, 3)]])
@pytest.mark.parametrize("window", [None, 20])
def test_attention(lengths: list[tuple[int, int]], window: int | None) -> None:
    fresh_seed()
    q_lens = torch.tensor([length for length, _ in lengths])
    kv_lens = torch.tensor([length for _, length in lengths]).int()
    cu = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int()
    pool = make_pool(24)
    scales = parts_of(pool)[1]
    scales[0] = float("nan")  # No request has page 0.
    table = (1 + torch.randperm(23))[: len(lengths) * 6].view(-1, 6).int()
    q = torch.randn(int(q_lens.sum()), HEADS, DIM).half()
    bounds = (int(q_lens.max()), int(kv_lens.max()))
    step = GroupStep(table, torch.arange(len(q)), cu, kv_lens, *bounds)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, window=window)
    out = paged_attention(q, pool, 1, spec, step)
    kept = dequantised(pool, torch.float64)
    exact = paged_attention_reference(q.double(), kept, 1, spec, step)
    peer = paged_attention_reference(q, kept.half(), 1, spec, step)
    assert_as_exact(out, peer, exact, factor=3.0)
    assert_as_exact(paged_attention_reference(q, pool, 1, spec, step), peer, exact, factor=3.0)


def test_what_is_written_depends_on_the_vector_alone() -> None:
    fresh_seed()
    rows, pool = 9, make_pool(4)
    before, wanted = pool.clone(), pool.clone()
    # Numbers that FP8 has: the interpreter rounds others wrongly.
    wide = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM).mul_(20).to(FP8).float()
    wide[..., 0] = 448
    wide[3] = 0
    qkv = (wide / 64).half().flatten(1).contiguous()
    turns = torch.cat((torch.ones(16, DIM // 2), torch.zeros(16, DIM // 2)), 1)
    positions, slots = torch.arange(rows), 16 + torch.randperm(40)[:rows]
    given = (qkv, positions, turns)
    q = rope_and_cache(*given, pool, 1, slots, HEADS, None, None, 1e-6)
    expected = rope_and_cache_reference(*given, wanted, 1, slots, HEADS, KV_HEADS)
    torch.testing.assert_close(q, expected)
    assert torch.equal(pool, wanted)
    numbers, scales = quantised(wide / 64)
    assert torch.equal(numbers.float() * scales[..., None], wide / 64)
    pages, places = slots // PAGE, slots % PAGE
    for part, first in enumerate((HEADS, HEADS + KV_HEADS)):
        found = dequantised(pool, torch.float32)[pages, :, 1, part, places]
        assert torch.equal(found, wide[:, first : first + KV_HEADS] / 64)
    pool[:, :, 1] = before[:, :, 1]
    assert torch.equal(pool, before)
