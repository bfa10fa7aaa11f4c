"""Matrices in int8 that are multiplied by rows in int8, both rotated before they are rounded.

A block of BLOCK neighbours along K is multiplied by a Hadamard matrix, which spreads a number that
is far larger than its neighbours over all of them (Ashkboos et al., QuaRot, 2024, rotates whole
rows). The product of two rotated blocks equals that of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.quantised import Int8Channels, quantise_channels

BLOCK = 64
"""Columns that are rotated together."""
MOST_COLUMNS = 32768
"""Most columns of a row that the native operation rounds."""
_NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class RotatedChannels:
    """Int8 with one scale a row, of a matrix whose blocks of columns are rotated."""

    channels: Int8Channels
    """The rotated matrix, [N, K]."""

    def __post_init__(self) -> None:
        if self.channels.shape[1] % BLOCK:
            raise ValueError(f"{self.channels.shape[1]} columns are no blocks of {BLOCK}")

    @property
    def data(self) -> torch.Tensor:
        return self.channels.data

    @property
    def scales(self) -> torch.Tensor:
        return self.channels.scales

    @property
    def shape(self) -> tuple[int, int]:
        return self.channels.shape

    def columns(self, own: slice) -> RotatedChannels:
        """Some of the columns, in whole blocks, with the scales of the whole matrix."""
        return RotatedChannels(Int8Channels(self.data[:, own].contiguous(), self.scales))

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in floats, [N, K], with the rotation undone."""
        return rotate(self.channels.dequantised(torch.float32)).to(dtype)


def multiplies_rotated(dtype: torch.dtype, device: torch.device, columns: int) -> bool:
    """Whether this machine multiplies a `RotatedChannels` of so many columns in int8.

    That takes AMX or AVX512-VNNI, and rows in bfloat16. On other machines the matrix becomes floats
    at load.
    """
    if dtype != torch.bfloat16 or device.type != "cpu" or columns % BLOCK:
        return False
    native = cpu.native_cpu()
    return native is not None and native.takes_int8_rows and 0 < columns <= MOST_COLUMNS


def rotate(matrix: torch.Tensor) -> torch.Tensor:
    """Multiplies each block of columns by the Hadamard matrix of norm 1, which is its own inverse.
    `matrix` is [N, K], any float dtype, K a multiple of BLOCK. Returns [N, K] float32.
    """
    hadamard = torch.ones(1, 1)
    while len(hadamard) < BLOCK:
        above = torch.cat((hadamard, hadamard), dim=1)
        hadamard = torch.cat((above, torch.cat((hadamard, -hadamard), dim=1)))
    blocks = matrix.float().reshape(-1, BLOCK)
    return (blocks @ hadamard.div(BLOCK**0.5).to(matrix.device)).view(matrix.shape)


def quantise_rotated(weight: torch.Tensor) -> RotatedChannels:
    """Rotates each block of columns of `weight`, [N, K], any float dtype, K a multiple of BLOCK,
    and rounds each row to int8, so that its largest magnitude becomes 127. Raises ValueError if a
    number is not finite.
    """
    n, k = weight.shape
    made = Int8Channels(weight.new_empty((n, k), dtype=torch.int8), weight.new_empty(n).float())
    rows = max(1, _NUMBERS_AT_ONCE // max(k, 1))
    for begin in range(0, n, rows):
        part = quantise_channels(rotate(weight[begin : begin + rows]))
        made.data[begin : begin + rows] = part.data
        made.scales[begin : begin + rows] = part.scales
    return RotatedChannels(made)
