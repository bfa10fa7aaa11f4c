"""Patches of pictures, and the rows that a vision transformer makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from weft.checkpoint.vision_config import NUM_CHANNELS, VisionConfig
from weft.engine.model.vision.layouts import Grid, Layout
from weft.engine.model.vision.positions import Positions, read_positions
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchEmbedding:
    """Makes rows of pixels: the product of each patch plus the row of its position."""

    patch_size: int
    frames: int
    """Frames of a patch."""
    square: int
    """Patches along a side of a square."""
    weight: LinearWeight
    """[hidden, frames * patch_size * patch_size * 3]."""
    positions: Positions | None
    middle: torch.Tensor
    """[3] float32: the pixels' numbers that become 0."""
    factor: torch.Tensor
    """[3] float32: what the differences from `middle` are multiplied by."""
    dtype: torch.dtype

    @classmethod
    def read(cls, weights: Weights, config: VisionConfig) -> PatchEmbedding:
        """Reads the parameters below the vision transformer's prefix."""
        vit, names, pixels = config.vit, config.names, config.pixels
        size, side = vit.hidden_size, vit.patch_size
        time = (vit.frames,) if vit.frames > 1 else ()
        shape = (size, NUM_CHANNELS, *time, side, side)
        kernel = TensorSlice(
            f"{names.patches}.weight", (size, math.prod(shape[1:])) if vit.is_unfolded else shape
        )
        by_pixel = weights.read([kernel]).view(shape).movedim(1, -1).reshape(size, -1)
        bias = None
        if vit.has_bias and vit.has_patch_bias:
            bias = weights.read([TensorSlice(f"{names.patches}.bias", (size,))])
        mean, std = (torch.tensor(of, dtype=torch.float64) for of in (pixels.mean, pixels.std))
        return cls(
            patch_size=side,
            frames=vit.frames,
            square=config.connector.factor,
            weight=pack_linear(by_pixel, bias, weights.arena),
            positions=read_positions(weights, config),
            middle=(mean / pixels.scale).float().to(weights.device),
            factor=(pixels.scale / std).float().to(weights.device),
            dtype=weights.dtype,
        )

    def __call__(
        self, pictures: Sequence[torch.Tensor], grids: Sequence[Grid], layout: Layout
    ) -> torch.Tensor:
        """[height, width, 3] uint8 each, or [height, width, 3 * frames] of a video -> [T, hidden],
        in the layout's order.
        """
        parts = [self._numbers(*each) for each in zip(pictures, grids, strict=True)]
        numbers = torch.cat(parts) if len(parts) > 1 else parts[0]
        if layout.order is not None:
            numbers = numbers.index_select(0, layout.order)
        added = None if self.positions is None else self.positions(grids, layout)
        return linear(numbers, self.weight, added)

    def _numbers(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[patches, frames * patch_size * patch_size * 3]: what the product takes, in the order of
        squares.
        """
        frames = torch.split(pixels, NUM_CHANNELS, dim=-1)
        parts = [self._numbers_of_frame(frame, grid) for frame in frames]
        if len(parts) < self.frames:
            return parts[0].repeat(1, self.frames)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _numbers_of_frame(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        side, square = self.patch_size, self.square
        rows, columns = grid
        whole = pixels[: rows * side, : columns * side]
        along = [(size // square, square, side) for size in grid]
        parts = whole.reshape(*along[0], *along[1], NUM_CHANNELS)
        patches = parts.permute(0, 3, 1, 4, 2, 5, 6).contiguous()
        numbers = torch.sub(patches, self.middle).mul_(self.factor)
        return numbers.view(rows * columns, -1).to(self.dtype)
