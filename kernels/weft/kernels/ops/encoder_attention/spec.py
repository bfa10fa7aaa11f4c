"""Types of encoder attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Bounds(NamedTuple):
    """Where the sequences of a ragged batch begin: sequence r has rows bounds[r] to bounds[r +
    1].
    """

    on_device: torch.Tensor
    """[R + 1] int32, on the batch's device."""
    on_host: Sequence[int] = ()
    """The bounds on the host; empty on a GPU, where the host does not wait for them."""

    @classmethod
    def of(cls, cu_lens: torch.Tensor) -> Bounds:
        """Makes the bounds of a batch from [R + 1] int32 on its device."""
        return cls(cu_lens, () if cu_lens.is_cuda else cu_lens.tolist())

    @classmethod
    def even(cls, count: int, length: int, device: torch.device) -> Bounds:
        """Makes the bounds of `count` sequences of one length."""
        return cls.of(torch.arange(count + 1, dtype=torch.int32, device=device) * length)
