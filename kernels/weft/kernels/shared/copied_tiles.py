"""Tiles of matrices that a GPU's copy engine fetches (TMA, compute capability 9.0). Loading them
costs a program neither registers nor arithmetic on addresses.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor
from weft.kernels.shared.sm90 import is_sm90

_ALIGNMENT_BYTES = 16


def can_copy(matrix: torch.Tensor) -> bool:
    """Whether the GPU has such an engine that can fetch tiles of `matrix`, [rows, columns]."""
    itemsize = matrix.dtype.itemsize
    return (
        is_sm90(matrix.device)
        and itemsize <= 2
        and matrix.numel() > 0
        and matrix.stride(1) == 1
        and matrix.data_ptr() % _ALIGNMENT_BYTES == 0
        and matrix.stride(0) * itemsize % _ALIGNMENT_BYTES == 0
    )


def copied_tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describes a matrix that `can_copy` accepts to a kernel, which loads tiles of `rows` rows and
    `columns` columns. Elements of a tile outside the matrix are 0.
    """
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
