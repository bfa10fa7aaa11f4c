"""Tensors in huge pages."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch
from weft.kernels.shared.memory import HUGE_PAGE_BYTES, WeightArena, huge_zeros


@pytest.mark.parametrize("shape", [(3,), (5, 7), (1 << 20, 3), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_zeros(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    if tensor.numel():
        assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
        tensor.fill_(3)
        assert (tensor == 3).all()


def test_arena_hands_out_separate_aligned_parts() -> None:
    arena = WeightArena(block_bytes=1 << 16)
    counts = [random.randrange(1, 20_000) for _ in range(40)]
    parts = [arena.take(count, torch.float32) for count in counts]
    for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
        assert part.shape == (count,)
        assert part.data_ptr() % 64 == 0
        part.fill_(i)
    for i, part in enumerate(parts):
        assert (part == i).all()


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_goes_back_with_the_last_tensor() -> None:
    before = mapped_bytes()
    arena = WeightArena(block_bytes=1 << 30)
    part = arena.take(10, torch.float32)
    del arena
    assert mapped_bytes() - before > 1 << 29
    del part
    gc.collect()
    assert mapped_bytes() - before < 1 << 29
