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
