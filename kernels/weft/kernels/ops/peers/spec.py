"""The interfaces of layers to the ranks that hold shares of one model."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from weft.kernels.ops.attention.spec import PageRanks
from weft.kernels.ops.norm import Norm
from weft.kernels.shared import cpu

LATE = 2
"""A device that has waited for rank r for too long sets its group's stop word to LATE + r."""


class _Peers(Protocol):
    """All ranks of a tensor-parallel group, as one of them sees it.

    Its calls are collective: every rank makes the same calls in the same order, with the same
    shapes.
    """

    rank: int
    size: int
    width: int | None
    """H that sums have; None: any."""
    pages: PageRanks | None
    """Ranks with which this one divides the pages of its KV heads; None: it has all of them."""

    def add_sum(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + the sum of `partial` over all ranks, the same bits on each of them.

        Args:
            partial: [T, H] float32 or the dtype of `residual`, contiguous.
            residual: [T, H], contiguous, equal on all ranks; not changed.

        Returns:
            [T, H], dtype of `residual`.
        """
        ...


class CpuPeers(_Peers, Protocol):
    """Ranks that native operations meet in shared memory."""

    device_type: Literal["cpu"]

    def native(self) -> cpu.PeersStruct:
        """The group as native operations read it; valid while this object lives."""
        ...

    def check(self, lost: int) -> None:
        """Raises the error of a status other than 0 of `meet` (csrc/peers.h)."""
        ...


class GpuPeers(_Peers, Protocol):
    """Ranks that compute a sum and the norm that follows in one launch."""

    device_type: Literal["cuda"]

    def add_norm(
        self,
        partial: torch.Tensor,
        stream: torch.Tensor,
        norm: Norm | None,
        tap: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Adds the sum of `partial` over all ranks to the stream.

        Args:
            partial: [T, H], dtype of `stream`, contiguous.
            stream: [T, H], contiguous, equal on all ranks; changed.
            tap: [T, H] with rows of any stride: receives the stream as well; or None.

        Returns:
            [T, H]: the normalised stream; None without a norm.
        """
        ...


Peers = CpuPeers | GpuPeers
"""Told apart by `device_type`, since `isinstance` with a runtime protocol takes too long for a
step.
"""
