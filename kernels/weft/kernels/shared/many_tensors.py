"""Work on many tensors of one device, for which a GPU gets few launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def copy_each(tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Copies each tensor, at least one, to its place."""
    torch._foreach_copy_(list(outs), list(tensors))


def finite_if_all(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A number [] for each of some tensors of one dtype, float32, float16 or bfloat16, each with at
    least one number: it is finite if all of the tensor's are.
    """
    if tensors[0].is_cuda:
        return torch._foreach_norm(list(tensors), math.inf)
    extremes = (one.aminmax() for one in tensors)
    return [lowest * 0 + highest * 0 for lowest, highest in extremes]
