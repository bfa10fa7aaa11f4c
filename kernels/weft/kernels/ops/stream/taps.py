"""Copies of the residual stream at some layers, for draft heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from weft.kernels.ops.draft_head import DraftEntries
from weft.kernels.shared import cpu


class Taps:
    """Collects the residual stream, side by side, as it enters some layers.

    Args:
        layers: Indices in the pool; a layer may be listed twice.
        out: [T, len(layers) * H], contiguous, for a step of T rows; written.
        follower: Work that begins once all states are tapped, or None. If these layers cannot begin
            it, the caller must.

    Raises:
        ValueError: There are too many layers, or `out` cannot be divided among them.
    """

    def __init__(
        self, layers: Sequence[int], out: torch.Tensor, follower: DraftEntries | None = None
    ) -> None:
        count, width = len(layers), out.shape[1]
        if not 0 < count <= cpu.MAX_TAPS or width % count or not out.is_contiguous():
            raise ValueError(f"{count} inputs of layers do not fit {tuple(out.shape)}")
        self._layers = tuple(layers)
        self._out = out
        self._follower = follower

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Copies `hidden`, [T, H], if the stream that enters `layer` is wanted."""
        for place in self.places_of(layer):
            place.copy_(hidden)

    def have_taken(self, layer: int) -> None:
        """Begins the follower if `layer`, whose stream has been taken, is the last that is
        wanted.
        """
        if self._follower is not None and layer == max(self._layers):
            self._follower.begin()

    def places_of(self, layer: int) -> list[torch.Tensor]:
        """Where the stream that enters `layer` goes, [T, H] each: columns of a wider matrix."""
        places = self._out.chunk(len(self._layers), dim=1)
        return [
            place for place, wanted in zip(places, self._layers, strict=True) if wanted == layer
        ]

    def before(self, layer: int) -> list[torch.Tensor]:
        """Where the streams go that enter layers before `layer`, as `places_of`."""
        places = self._out.chunk(len(self._layers), dim=1)
        return [place for place, one in zip(places, self._layers, strict=True) if one < layer]

    def follower_of(self, first: int, count: int) -> DraftEntries | None:
        """The work that can run directly after these layers, if any."""
        ends = (min(self._layers), max(self._layers))
        return self._follower if first <= ends[0] and ends[1] < first + count else None

    def native(self, hidden: torch.Tensor) -> cpu.TapsStruct:
        """The taps as the native operation on `hidden` reads them; valid as long as this object
        lives.
        """
        rows, width = hidden.shape
        count = len(self._layers)
        if self._out.shape != (rows, count * width) or self._out.dtype != hidden.dtype:
            raise ValueError(
                f"{count} inputs of layers {tuple(hidden.shape)} {hidden.dtype} do not fit "
                f"{tuple(self._out.shape)} {self._out.dtype}"
            )
        described = cpu.TapsStruct(self._out.data_ptr(), count * width, count)
        for index, layer in enumerate(self._layers):
            described.layers[index], described.columns[index] = layer, index * width
        return described
