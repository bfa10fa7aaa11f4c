"""FP8 weights and rows for tests."""

from __future__ import annotations

import torch
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Blocks, Fp8Channels, Fp8Matrix


def draw_matrix(rows: int, k: int, block_rows: int = 0) -> Fp8Matrix:
    """A random weight, of channels or of blocks of `block_rows`, with the scales that its numbers
    could have; followed by numbers that no kernel may read, which are NaN.
    """
    data = _before_nan((torch.randn(rows, k) * 100).clamp(-448, 448).to(FP8))
    shape = (-(-rows // block_rows), -(-k // FP8_GROUP)) if block_rows else (rows,)
    scales = _before_nan((0.5 + torch.rand(shape)) / (100 * k**0.5))
    return Fp8Blocks(data, scales, block_rows) if block_rows else Fp8Channels(data, scales)


def _before_nan(given: torch.Tensor) -> torch.Tensor:
    """The same numbers, behind which NaN lie in memory."""
    flat = torch.full((given.numel() + 512,), float("nan")).to(given.dtype)
    flat[: given.numel()] = given.flatten()
    return flat[: given.numel()].view(given.shape)
