"""Types of experts without gates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from weft.kernels.ops.activation.spec import Activation
from weft.kernels.ops.linear.spec import LinearWeight


class PlainExperts(NamedTuple):
    """The MLPs of all experts of a layer."""

    up: tuple[LinearWeight, ...]
    """[I, H] each; none on a GPU."""
    down: tuple[LinearWeight, ...]
    """[H, I] each; none on a GPU."""
    activation: Activation
    placement: torch.Tensor | None = None
    """[experts of all ranks] int32: each expert's place on this rank, or the number of places if
    another rank has it. None: this rank has all experts.
    """
    stacked: tuple[torch.Tensor, torch.Tensor] | None = None
    """The stacked weights on a GPU, [E, I, H] and [E, H, I]."""
