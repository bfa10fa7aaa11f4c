"""Weights of 4 bits in groups for tests."""

from __future__ import annotations

from typing import Literal

import torch
from weft.kernels.int_groups import IntGroups, mxfp4_groups, pack_int_groups

Kind = Literal["plain", "offsets", "wide", "e2m1"]
"""Integers without offsets, with them, with scales of float32; MXFP4."""


def draw_groups(rows: int, columns: int, group: int, kind: Kind, device: str = "cpu") -> IntGroups:
    """A random matrix; of MXFP4 columns are a multiple of 32."""
    if kind == "e2m1":
        shape = (rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=device)
        return mxfp4_groups(blocks, torch.randint(117, 123, shape, device=device).to(torch.uint8))
    has_offsets = kind == "offsets"
    low = 0 if has_offsets else -8
    numbers = torch.randint(low, low + 16, (rows, columns), dtype=torch.int8, device=device)
    size = (rows, -(-columns // group))
    scales = (0.5 + torch.rand(size, device=device)) / (4 * columns**0.5)
    scales = scales if kind == "wide" else scales.half()
    offsets = -scales * torch.randint(0, 16, size, device=device) if has_offsets else None
    return pack_int_groups(numbers, scales, offsets, group)
