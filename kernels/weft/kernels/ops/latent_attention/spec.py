"""Types of latent attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

NOTHING = -1e38
"""Logarithm of a softmax's sum that has no weight in it."""


class EarlierLatents(NamedTuple):
    """The cached positions of a step's requests with several rows, request by request."""

    places: torch.Tensor
    """[N] int64: page * page_size + offset, as for `write_latents`."""
    parts: tuple[tuple[slice, torch.Tensor], ...]
    """Parts of these positions, none with more positions than the step has rows. A part is a slice
    of `places` and [R + 1] int32: where each request's positions begin within the part, and where
    the last request's end.
    """


class LatentSpec(NamedTuple):
    """The constants of one layer's attention."""

    heads: int
    """H."""
    value_dim: int
    """V: elements of a value, which are the first of a position's vector."""
    scale: float
    """Factor on the scores."""
    first_position: int = 0
    """First position to attend to; a row that sees none gets zeros."""


class RowsLaunch(NamedTuple):
    first: int
    tiles: torch.Tensor
    splits: torch.Tensor


class RowsPlan(NamedTuple):
    """Rows, and the positions that each attends to, which are the first ones of its pages. On the
    device.
    """

    page_table: torch.Tensor
    """[rows, max_pages] int32."""
    lens: torch.Tensor
    """[rows] int32; 0: the row attends to nothing."""
    read_lens: torch.Tensor
    """[rows] int32, at least 1: rows that attend to nothing read the first position of their page
    table.
    """
    launches: tuple[RowsLaunch, ...]


class LatentPlan(NamedTuple):
    """How FlashMLA computes a step's attention."""

    seen: RowsPlan
    """Each row's attention to all positions that it may see."""
    before: RowsPlan | None = None
    """Attention to the positions before the step alone. It has all rows; or each request's last
    row, where no request of several rows has such positions, or their keys and values by head are
    computed. None: each request has one row.
    """
