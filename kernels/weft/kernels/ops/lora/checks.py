"""Checks of what adapters add to a product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from weft.kernels.ops.lora.spec import LoraAddition, LoraWeights


def check_addition(
    out_shape: Sequence[int], x_shape: Sequence[int], dtype: torch.dtype, addition: LoraAddition
) -> None:
    """Raises ValueError unless an addition fits a product.

    Args:
        out_shape: [T, N] of the product.
        x_shape: [T, K] of its input.
    """
    rows, tokens = x_shape[0], addition.segments.token_slots.shape[0]
    if tokens != rows:
        raise ValueError(f"LoRA segments of {tokens} tokens, {rows} rows")
    check_parts(addition.parts, addition.layer, out_shape, x_shape, dtype)


def check_parts(
    parts: Sequence[LoraWeights],
    layer: int,
    out_shape: Sequence[int],
    x_shape: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Like `check_addition`, for some parts of an addition in a layer."""
    for part in parts:
        end = part.column + part.out_features
        if part.in_features != x_shape[1] or end > out_shape[1] or part.a.dtype != dtype:
            raise ValueError(
                f"LoRA rows of {part.in_features} to {part.out_features} {part.a.dtype} at column "
                f"{part.column} do not fit {tuple(x_shape)} to {tuple(out_shape)} {dtype}"
            )
        if not 0 <= layer < part.table.shape[0]:
            raise ValueError(f"layer {layer} of LoRA rows for {part.table.shape[0]}")
