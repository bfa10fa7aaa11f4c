"""Rows of layers whose heads have a matrix as state: the gated delta rule and Mamba 2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from weft.kernels.ops.recurrence.sequences import Sequences


class HeadRows(NamedTuple):
    """Queries, keys, values and gates of ragged sequences of rows."""

    q: torch.Tensor
    """[T, Hk, Dk]."""
    k: torch.Tensor
    """[T, Hk, Dk]."""
    v: torch.Tensor
    """[T, H, Dv]; H / Hk consecutive heads share a head of q and k."""
    decay: torch.Tensor
    """[T, H] or [T, H, Dk]: logarithm of the share of the state that each row keeps."""
    sequences: Sequences
    """Where the rows lie."""
    beta: torch.Tensor | None = None
    """[T, H], for the delta rule (`weft.kernels.ops.gated_delta`); None: values are added as
    they are.
    """
    steps: torch.Tensor | None = None
    """[T, H]: factors on values; None: 1."""
    skips: torch.Tensor | None = None
    """[H]: share of the values that is added to the result; None: 0."""
    scale: float = 1.0
    """Factor on queries."""
    is_unit: bool = False
    """Whether keys and queries are normalised to length 1."""

    @property
    def shared(self) -> int:
        """Heads that share one head of keys."""
        return self.v.shape[1] // self.k.shape[1]

    def packed(self) -> HeadRows:
        """The same rows with the elements of a head adjacent, and gates in float32, contiguous."""
        q, k, v = (each if each.stride(2) == 1 else each.contiguous() for each in self[:3])
        beta, steps, skips = (
            None if each is None else each.to(torch.float32).contiguous()
            for each in (self.beta, self.steps, self.skips)
        )
        return self._replace(
            q=q,
            k=k,
            v=v,
            decay=self.decay.to(torch.float32).contiguous(),
            beta=beta,
            steps=steps,
            skips=skips,
        )
