"""Weights in groups for tests, and the rows that they are multiplied by."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.int_groups import (
    IntGroups,
    mxfp4_groups,
    nvfp4_groups,
    pack_int_groups,
)

Kind = Literal["plain", "offsets", "wide", "e2m1", "nvfp4"]
"""Integers without offsets, with them, with scales of float32; MXFP4; NVFP4."""


def draw_groups(rows: int, columns: int, group: int, kind: Kind, device: str = "cpu") -> IntGroups:
    """A random matrix; of MXFP4 columns are a multiple of 32, of NVFP4 of 16."""
    if kind == "nvfp4":
        return draw_nvfp4(rows, columns, device)
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


def draw_nvfp4(rows: int, columns: int, device: str = "cpu") -> IntGroups:
    """Scales are of all sizes that e4m3 has, those below its normal numbers and 0 included."""
    shape, at = (rows, columns // 16), {"device": device}
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, **at)
    exponents = torch.randint(-3, 3, shape, **at)
    scales = torch.ldexp(1 + torch.rand(shape, **at), exponents).to(torch.float8_e4m3fn)
    odd = torch.randint(0, 256, shape, dtype=torch.uint8, **at).view(torch.float8_e4m3fn).float()
    is_odd = (torch.rand(shape, **at) < 0.05) & odd.isfinite() & (odd.abs() < 8)
    scales = torch.where(is_odd, odd, scales.float()).to(torch.float8_e4m3fn)
    return nvfp4_groups(data, scales, (0.5 + torch.rand(rows, **at)) / (4 * columns**0.5))


def rows_as_multiplied(x: torch.Tensor, matrix: IntGroups) -> torch.Tensor:
    """The rows that a matrix is multiplied by: without AMX those of bfloat16 are rounded group by
    group, with NVFP4 in blocks of 64. With AVX512-VNNI they are rounded to 255 numbers where the
    matrix has 4 bits, with NVFP4 to 32,513, and to 65,535 where it has 8.
    """
    native = cpu.native_cpu()
    if x.dtype != torch.bfloat16 or native is None or native.has_amx:
        return x
    if matrix.bits == 4 and not native.takes_int8_rows:
        return x
    k, most = x.shape[1], 127 if matrix.bits == 4 else 32767
    most *= 128 if matrix.is_nvfp4 else 1
    group = 64 if matrix.is_nvfp4 else matrix.group
    groups = F.pad(x.float(), (0, -k % group)).unflatten(1, (-1, group))
    largest = groups.abs().amax(2, keepdim=True)
    steps = largest / most
    factor = 1 / steps if matrix.bits == 4 else most / largest
    numbers = (groups.double() * factor.double()).round().float()
    return (numbers * steps).flatten(1)[:, :k]
