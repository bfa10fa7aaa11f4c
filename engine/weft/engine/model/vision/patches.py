"""Patches of pictures, in the order in which a tower has them.

The patches of one square that a connector joins follow one another, row by row, and the squares
do too. Attention does not depend on the order, and the connector then only reads consecutive rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from weft.checkpoint.vision_config import NUM_CHANNELS, VisionConfig
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight

_BELOW_ONE = 1.0 - 1e-6
"""Largest coordinate of a patch, where an image is 1 long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchEmbedding:
    """Makes rows of pixels: the product of each patch plus the row of its position."""

    patch_size: int
    grid: int
    """Patches along a side of a picture."""
    square: int
    """Patches along a side of a square."""
    weight: LinearWeight
    """[hidden, patch_size * patch_size * 3]."""
    positions: torch.Tensor
    """[patches, hidden]: rows of a picture's patches."""
    middle: torch.Tensor
    """[3] float32: the pixels' numbers that become 0."""
    factor: torch.Tensor
    """[3] float32: what the differences from `middle` are multiplied by."""

    @classmethod
    def read(cls, weights: Weights, config: VisionConfig) -> PatchEmbedding:
        """Reads the parameters below the vision transformer's prefix."""
        vit, names, pixels = config.vit, config.names, config.pixels
        size, side = vit.hidden_size, vit.patch_size
        kernel = TensorSlice(f"{names.patches}.weight", (size, NUM_CHANNELS, side, side))
        by_pixel = weights.read([kernel]).permute(0, 2, 3, 1).reshape(size, -1)
        bias = None
        if vit.has_bias:
            bias = weights.read([TensorSlice(f"{names.patches}.bias", (size,))])
        table = weights.vocabulary(names.positions, vit.num_patches, size)
        rows = in_squares(_buckets(vit.grid), config.connector.factor).to(weights.device)
        mean, std = (torch.tensor(of, dtype=torch.float64) for of in (pixels.mean, pixels.std))
        return cls(
            patch_size=side,
            grid=vit.grid,
            square=config.connector.factor,
            weight=pack_linear(by_pixel, bias, weights.arena),
            positions=table.index_select(0, rows),
            middle=(mean / pixels.scale).float().to(weights.device),
            factor=(pixels.scale / std).float().to(weights.device),
        )

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, height, width, 3] uint8 -> [N * patches, hidden]."""
        side, num_squares = self.patch_size, self.grid // self.square
        whole = pixels[:, : self.grid * side, : self.grid * side]
        along = num_squares, self.square, side
        parts = whole.view(len(pixels), *along, *along, NUM_CHANNELS)
        patches = parts.permute(0, 1, 4, 2, 5, 3, 6, 7).contiguous()
        numbers = torch.sub(patches, self.middle).mul_(self.factor)
        added = self.positions.repeat(len(pixels), 1)
        return linear(numbers.view(len(added), -1).to(added.dtype), self.weight, added)


def in_squares(of_patches: torch.Tensor, square: int) -> torch.Tensor:
    """[grid, grid] -> [grid * grid] in a tower's order."""
    height, width = (size // square for size in of_patches.shape)
    parts = of_patches.view(height, square, width, square)
    return parts.permute(0, 2, 1, 3).reshape(-1)


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
