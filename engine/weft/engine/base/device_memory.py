"""How PyTorch takes memory of a GPU from the driver."""

from __future__ import annotations

import torch

SMALL_BYTES = 1 << 20
"""Size up to which tensors lie in memory that PyTorch takes for small ones alone."""
UNIT_BYTES = 512
"""The memory of a tensor is a multiple of this."""


def take_at_once(num_bytes: int, device: torch.device) -> None:
    """Takes memory of a GPU from which PyTorch then serves tensors, since a call of the driver for
    each large one takes longer. What no tensor needs stays with PyTorch.

    Raises:
        RuntimeError: There is not that much.
    """
    if device.type == "cuda":
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
