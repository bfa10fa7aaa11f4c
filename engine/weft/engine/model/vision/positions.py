"""What a vision transformer adds to patches for their places in pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from weft.checkpoint.vision_config import VisionConfig
from weft.engine.model.vision.layouts import Grid, Layout, in_squares
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights

_BELOW_ONE = 1.0 - 1e-6
"""Largest coordinate of a patch, where an image is 1 long."""


class Positions(Protocol):
    """A table of positions in one of its forms."""

    def __call__(self, grids: Sequence[Grid], layout: Layout) -> torch.Tensor:
        """[T, hidden]: the additions to the patches of pictures, in the layout's order."""


@dataclass(frozen=True, slots=True)
class OwnPositions:
    """Pictures of one size, whose patches have rows of their own."""

    rows: torch.Tensor
    """[patches, hidden], in the order of squares."""

    def __call__(self, grids: Sequence[Grid], layout: Layout) -> torch.Tensor:
        added = self.rows.repeat(len(grids), 1)
        return added if layout.order is None else added.index_select(0, layout.order)


@dataclass(frozen=True, slots=True)
class InterpolatedPositions:
    """A square table, which is linear between its entries."""

    table: torch.Tensor
    """[side * side, hidden]."""
    side: int

    def __call__(self, grids: Sequence[Grid], layout: Layout) -> torch.Tensor:
        assert layout.spots is not None, "the layout is of the same tower"
        before = layout.spots.floor()
        share = layout.spots - before
        low = before.long()
        high = (low + 1).clamp_(max=self.side - 1)
        along = [((low[:, n], 1 - share[:, n]), (high[:, n], share[:, n])) for n in (0, 1)]
        mixed: torch.Tensor | None = None
        for (row, row_share), (column, column_share) in product(*along):
            entries = self.table.index_select(0, row * self.side + column)
            part = entries * (row_share * column_share)[:, None]
            mixed = part if mixed is None else mixed.add_(part)
        assert mixed is not None
        return mixed.to(self.table.dtype)


def read_positions(weights: Weights, config: VisionConfig) -> Positions | None:
    """Reads the table below the vision transformer's prefix; None: it has none."""
    vit = config.vit
    if vit.positions == "none":
        return None
    if vit.has_class_token:
        table = _with_class(weights, config)[1:]
    else:
        table = weights.vocabulary(config.names.positions, vit.num_patches, vit.hidden_size)
    if vit.positions in ("interpolated", "centred"):
        return InterpolatedPositions(table, vit.grid)
    numbers = torch.arange(vit.num_patches).view(vit.grid, vit.grid)
    if vit.positions == "bucketed":
        numbers = _buckets(vit.grid)
    rows = in_squares(numbers, config.connector.factor).to(weights.device)
    return OwnPositions(table.index_select(0, rows))


def read_class_row(weights: Weights, config: VisionConfig) -> torch.Tensor | None:
    """[hidden]: what attention reads of each picture beside its patches, its position included;
    None: nothing.
    """
    vit, names = config.vit, config.names
    if not vit.has_class_token:
        return None
    shape = (vit.hidden_size,) if vit.is_unfolded else (1, 1, vit.hidden_size)
    row = weights.read([TensorSlice(names.class_token, shape)]).view(-1)
    return row if vit.positions == "none" else row + _with_class(weights, config)[0]


def _with_class(weights: Weights, config: VisionConfig) -> torch.Tensor:
    """[1 + patches, hidden]: the class token's position comes first."""
    vit = config.vit
    shape = (1 + vit.num_patches, vit.hidden_size)
    if vit.is_unfolded:
        return weights.read([TensorSlice(config.names.positions, shape)]).roll(1, 0)
    return weights.read([TensorSlice(config.names.positions, (1, *shape))])[0]


def _buckets(grid: int) -> torch.Tensor:
    """[grid, grid] int64: each patch's row of the table of positions. Computed in float32 as models
    are trained, where some patches of some grids share a row.
    """
    bounds = torch.arange(1 / grid, 1.0, 1 / grid)
    at = (torch.arange(grid, dtype=torch.float32) * (1.0 / torch.tensor(grid))).clamp(
        max=_BELOW_ONE
    )
    along = torch.bucketize(at, bounds, right=True)
    return along[:, None] * grid + along[None, :]
