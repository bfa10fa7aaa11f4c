"""Where the patches of several pictures lie in a packed batch, and what follows from it: bounds of
attention, the order of rows, positions and rotations.

The patches of one square that a connector joins follow one another, row by row, and the squares
do too, in the order of a picture's rows or of its windows. Attention does not depend on the order,
and the connector then only reads consecutive rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import numpy as np
import torch
from weft.checkpoint.vision_config import AxialRopeConfig, VisionConfig
from weft.contract.arrays import Float32Array, Int64Array
from weft.engine.base.device_copies import sent
from weft.engine.model.layers.encoder import Turns
from weft.kernels.ops.encoder_attention.spec import Bounds

Grid = tuple[int, int]
"""Rows and columns of a picture's patches."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A packed batch of T patches. All tensors are on the tower's device."""

    pictures: Bounds
    """The patches of each picture."""
    windows: Bounds | None
    """The patches of each window; None: the tower has no windows."""
    order: torch.Tensor | None
    """[T] int64: the number, in the order of pictures, of each row's patch; None: that order."""
    back: torch.Tensor | None
    """[squares] int64: the place in the batch of each square in the order of pictures; None: that
    order.
    """
    spots: torch.Tensor | None
    """[T, 2] float32: row and column of each patch in an interpolated table of positions; None:
    there is none.
    """
    turns: Turns | None
    """None: the tower rotates nothing."""
    patches: torch.Tensor | None = None
    """[T] int64: the place of each patch in a batch that also has a row for each picture, before
    its patches, as `pictures` says; None: there are patches alone.
    """

    def with_class(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T + pictures, hidden]: `row`, [hidden], before each picture's patches."""
        assert self.patches is not None, "the layout is of the same tower"
        count = len(x) + self.pictures.on_device.shape[0] - 1
        whole = row.to(x.dtype).repeat(count, 1)
        return whole.index_copy_(0, self.patches, x)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchBatch:
    """Rows before a tower's first layer, on its device."""

    x: torch.Tensor
    """[T, hidden]; rows behind the last picture are padding."""
    pictures: Bounds
    windows: Bounds | None
    turns: Turns | None
    patches: torch.Tensor | None
    """[patches] int64: as `Layout.patches`."""


def layout_of(config: VisionConfig, grids: Sequence[Grid], device: torch.device) -> Layout:
    """The layout of a batch of pictures."""
    vit, square = config.vit, config.connector.factor
    ends = list(accumulate((rows * columns for rows, columns in grids), initial=0))
    places = np.concatenate([_places(grid, square) for grid in grids])
    windows, order, back = None, None, None
    if vit.windows is not None:
        squares, lengths = _windows(grids, square, vit.windows.side // square)
        each = square * square
        windows = _bounds([0, *accumulate(length * each for length in lengths)], device)
        order = (squares[:, None] * each + np.arange(each)).reshape(-1)
        places = places[order]
        back = np.argsort(squares)
    spots, turns = None, None
    if vit.positions in ("interpolated", "centred"):
        is_centred = vit.positions == "centred"
        found = _spots(places, grids, vit.grid, order, is_centred=is_centred)
        spots = sent(found, device)
    if vit.rope is not None:
        cos_sin = axial_turns(vit.rope, vit.head_dim, sent(places + vit.first_place, device))
        turns = Turns(cos_sin, torch.arange(len(places), device=device))
    patches = None
    if vit.has_class_token:
        numbers = np.arange(1, len(grids) + 1)
        counts = [rows * columns for rows, columns in grids]
        patches = sent(np.arange(ends[-1]) + np.repeat(numbers, counts), device)
        ends = [end + number for number, end in enumerate(ends)]
        turns = None if turns is None else _with_class_turns(turns, patches, ends[-1])
    return Layout(
        pictures=_bounds(ends, device),
        windows=windows,
        order=None if order is None else sent(order, device),
        back=None if back is None else sent(back, device),
        spots=spots,
        turns=turns,
        patches=patches,
    )


def _with_class_turns(turns: Turns, patches: torch.Tensor, num_rows: int) -> Turns:
    """Class tokens do not rotate."""
    dim = turns.cos_sin.shape[1]
    whole = turns.cos_sin.new_zeros(num_rows, dim)
    whole[:, : dim // 2] = 1.0
    whole.index_copy_(0, patches, turns.cos_sin)
    return Turns(whole, torch.arange(num_rows, device=whole.device))


def axial_turns(rope: AxialRopeConfig, head_dim: int, places: torch.Tensor) -> torch.Tensor:
    """[T, 2] -> [T, head_dim] float32: the rotation of each patch by its row and its column."""
    steps = torch.arange(0, head_dim // 2, 2, dtype=torch.float32)
    exponents = torch.stack((steps, steps + 1 if rope.takes_turns else steps)) / (head_dim // 2)
    frequencies = sent((1.0 / rope.theta**exponents).numpy(), places.device)
    angles = (places[:, :, None].float() * frequencies).flatten(1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def in_squares(of_patches: torch.Tensor, square: int) -> torch.Tensor:
    """[rows, columns] -> [rows * columns] in the order of squares."""
    height, width = (size // square for size in of_patches.shape)
    parts = of_patches.view(height, square, width, square)
    return parts.permute(0, 2, 1, 3).reshape(-1)


def _places(grid: Grid, square: int) -> Int64Array:
    """[patches, 2]: row and column of each patch of a picture, in the order of squares."""
    rows, columns = grid
    at = np.indices(grid).reshape(2, rows // square, square, columns // square, square)
    return np.ascontiguousarray(at.transpose(1, 3, 2, 4, 0).reshape(-1, 2))


def _spots(
    places: Int64Array,
    grids: Sequence[Grid],
    side: int,
    order: Int64Array | None,
    *,
    is_centred: bool,
) -> Float32Array:
    """Coordinates in a table of `side` rows and columns, whose corners are those of each picture,
    or whose entries are for the middles of equal parts. Computed in float32 as models are trained.
    """
    counts = [rows * columns for rows, columns in grids]
    sizes = np.repeat(np.array(grids), counts, axis=0)
    sizes = sizes if order is None else sizes[order]
    if is_centred:
        middles = (places.astype(np.float32) + np.float32(0.5)) * np.float32(side)
        return np.maximum(middles / sizes.astype(np.float32) - np.float32(0.5), np.float32(0))
    steps = np.maximum(sizes - 1, 1).astype(np.float32)
    spots: Float32Array = places.astype(np.float32) * np.float32(side - 1) / steps
    return spots


def _windows(grids: Sequence[Grid], square: int, side: int) -> tuple[Int64Array, list[int]]:
    """The squares of all pictures by windows of `side` squares, and the squares of each window."""
    parts, lengths, first = list[Int64Array](), list[int](), 0
    for grid in grids:
        rows, columns = (size // square for size in grid)
        numbers = first + np.arange(rows * columns).reshape(rows, columns)
        for top, left in product(range(0, rows, side), range(0, columns, side)):
            parts.append(numbers[top : top + side, left : left + side].reshape(-1))
            lengths.append(len(parts[-1]))
        first += rows * columns
    return np.concatenate(parts), lengths


def _bounds(ends: Sequence[int], device: torch.device) -> Bounds:
    return Bounds.of(sent(np.array(ends, np.int32), device))
