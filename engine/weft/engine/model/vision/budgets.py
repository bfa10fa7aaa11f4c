"""Passes of a tower over memory at fixed addresses, each padded to one of a few numbers of patches,
so that they can be captured as CUDA graphs.

What depends on each picture is computed before a pass and copied there: the rows of its patches,
their rotations, and where sequences begin. Sequences that a batch does not have are empty ones at
its end; rows behind the last sequence are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch
from weft.checkpoint.vision_config import VisionConfig
from weft.engine.model.interface import PlacedMedia
from weft.engine.model.layers.encoder import Turns
from weft.engine.model.vision.layouts import PatchBatch
from weft.kernels.ops.encoder_attention.spec import Bounds

MAX_PICTURES = 16
"""Most pictures of a pass."""
_FEWEST_PATCHES = 256
_STEPS = 4
"""Numbers of patches between a power of 2 and the next. A pass over more than a thousand patches
takes as long as its products, so padding should be few of them.
"""
_COARSE_PATCHES = 1024
"""Below this many patches a pass takes as long as its launches, so the next power of 2 will do."""
_MOST_PATCHES = 8192
"""A longer pass keeps the device busy for longer than its launches take."""
_PATCHES_OF_WINDOW = 16
"""A pass has room for one window for each so many patches. Windows of whole squares have some four
times as many; those of narrow pictures fewer.
"""


class _Memory(NamedTuple):
    """What a batch is copied to, for the largest pass."""

    x: torch.Tensor
    pictures: torch.Tensor
    windows: torch.Tensor | None
    turns: Turns | None
    patches: torch.Tensor | None


class PatchBudgets:
    """`weft.engine.model.interface.EncoderBudgets` of a vision transformer.

    Args:
        batch_of: Makes a batch of pictures, and the place of each of its rows in the order of
            pictures; None: they are in that order.
        compute: The layers and connectors: the rows of a batch.
        max_patches: Most patches that are encoded together.
    """

    def __init__(
        self,
        config: VisionConfig,
        batch_of: Callable[[Sequence[torch.Tensor]], tuple[PatchBatch, torch.Tensor | None]],
        compute: Callable[[PatchBatch], torch.Tensor],
        max_patches: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._batch_of, self._compute = batch_of, compute
        self.sizes = _sizes(config, max_patches)
        self._square = config.connector.factor**2
        self._max_class_rows = MAX_PICTURES if config.vit.has_class_token else 0
        self._memory = _memory(config, self.sizes[-1], self._max_class_rows, dtype, device)

    def put(self, pictures: Sequence[torch.Tensor]) -> PlacedMedia | None:
        batch, back = self._batch_of(pictures)
        num_patches = len(batch.x) - (len(pictures) if self._max_class_rows else 0)
        size = next((size for size in self.sizes if size >= num_patches), None)
        memory = self._memory
        of_windows = None if batch.windows is None else batch.windows.on_device
        if size is None or len(pictures) > MAX_PICTURES:
            return None
        if memory.windows is not None and of_windows is not None:
            if len(of_windows) > _num_windows(size) + 1:
                return None
            _fill(memory.windows, of_windows)
        _fill(memory.pictures, batch.pictures.on_device)
        memory.x[: len(batch.x)].copy_(batch.x)
        if memory.turns is not None and batch.turns is not None:
            memory.turns.cos_sin[: len(batch.turns.cos_sin)].copy_(batch.turns.cos_sin)
        if memory.patches is not None and batch.patches is not None:
            memory.patches[:num_patches].copy_(batch.patches)
        return PlacedMedia(size, num_patches // self._square, back)

    def run(self, size: int) -> torch.Tensor:
        memory, end = self._memory, size + self._max_class_rows
        turns = None
        if memory.turns is not None:
            turns = Turns(memory.turns.cos_sin[:end], memory.turns.rows[:end])
        windows = None
        if memory.windows is not None:
            windows = Bounds.of(memory.windows[: _num_windows(size) + 1])
        return self._compute(
            PatchBatch(
                x=memory.x[:end],
                pictures=Bounds.of(memory.pictures),
                windows=windows,
                turns=turns,
                patches=None if memory.patches is None else memory.patches[:size],
            )
        )


def _sizes(config: VisionConfig, max_patches: int) -> list[int]:
    """Numbers of patches of passes, ascending: where all pictures have one size, those of a few
    pictures and of powers of 2.
    """
    max_patches = min(max_patches, _MOST_PATCHES)
    if config.most_pixels is None:
        one = (config.tile_size // config.vit.patch_size) ** 2
        most = min(max(1, max_patches // one), MAX_PICTURES)
        return [
            one * count for count in sorted({*range(1, min(most, _STEPS)), *_powers(1, most), most})
        ]
    square = config.connector.factor**2
    steps = product(_powers(_COARSE_PATCHES, max_patches), range(_STEPS))
    found = {
        *_powers(_FEWEST_PATCHES, min(max_patches, _COARSE_PATCHES)),
        *(power + power * step // _STEPS for power, step in steps),
    }
    kept = {size for size in found if size < max_patches} | {max_patches}
    return sorted({-(-size // square) * square for size in kept})


def _powers(first: int, most: int) -> list[int]:
    return [first << power for power in range(most.bit_length()) if first << power <= most]


def _num_windows(size: int) -> int:
    return MAX_PICTURES + size // _PATCHES_OF_WINDOW


def _memory(
    config: VisionConfig,
    num_patches: int,
    num_class_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Memory:
    vit, num_rows = config.vit, num_patches + num_class_rows
    turns, windows, patches = None, None, None
    if vit.rope is not None:
        cos_sin = torch.zeros((num_rows, vit.head_dim), dtype=torch.float32, device=device)
        turns = Turns(cos_sin, torch.arange(num_rows, device=device))
    if vit.windows is not None:
        count = _num_windows(num_patches) + 1
        windows = torch.zeros(count, dtype=torch.int32, device=device)
    if num_class_rows:
        patches = torch.zeros(num_patches, dtype=torch.int64, device=device)
    return _Memory(
        x=torch.zeros((num_rows, vit.hidden_size), dtype=dtype, device=device),
        pictures=torch.zeros(MAX_PICTURES + 1, dtype=torch.int32, device=device),
        windows=windows,
        turns=turns,
        patches=patches,
    )


def _fill(bounds: torch.Tensor, found: torch.Tensor) -> None:
    """Further sequences are empty and at the end."""
    bounds[: len(found)].copy_(found)
    bounds[len(found) :].copy_(found[-1:].expand(len(bounds) - len(found)))
