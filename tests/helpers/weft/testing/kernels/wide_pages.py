"""Pools that are one of several planes: their pages lie apart."""

from __future__ import annotations

import random

import torch

_UNIT = 8
"""Elements: pages begin and end at 16 bytes, not at whole rows."""


class WidePages:
    """A copy of a pool in pages with room before and behind, which is NaN and must stay so."""

    def __init__(self, pool: torch.Tensor) -> None:
        before, behind = (_UNIT * random.randint(1, 9) for _ in range(2))
        num_pages, size = pool.shape[0], pool[0].numel()
        shape = (num_pages, before + size + behind)
        self._wide = torch.full(shape, float("nan"), dtype=pool.dtype, device=pool.device)
        self._inside = slice(before, before + size)
        self.pool = self._wide[:, self._inside].view(pool.shape)
        """Of the same shape and values; its first stride is larger."""
        self.pool.copy_(pool)
        assert num_pages < 2 or not self.pool.is_contiguous()

    def check(self, expected: torch.Tensor) -> None:
        """The pool has just the bits of another one, and what lies between was not written."""
        wide = torch.full_like(self._wide, float("nan"))
        wide[:, self._inside] = expected.flatten(1)
        assert torch.equal(self._wide.view(torch.uint8), wide.view(torch.uint8))
