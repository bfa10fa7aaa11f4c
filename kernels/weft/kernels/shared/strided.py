"""Tensors as arguments of a GPU's kernels, with their strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Strided(NamedTuple):
    """A tensor and the distances of its first two dimensions, in elements."""

    data: Any
    """The tensor; in a kernel its pointer."""
    first: int
    second: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        return cls(tensor, tensor.stride(0), tensor.stride(1))
