"""Copies entries of pages from a GPU's pool to the pools of other GPUs, which it maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_ROWS = 16
"""Positions of one program."""


class PeerPools(NamedTuple):
    """Pools of several GPUs with the same pages, `[pages, heads, layers, parts, positions, dim]`
    each, contiguous.
    """

    own: torch.Tensor
    """This GPU's, as int32 words."""
    bases: torch.Tensor
    """[size] int64 on this GPU: the address of each pool, as this process maps it."""
    rank: int
    """Index of this GPU's."""

    @classmethod
    def of(cls, pools: Sequence[torch.Tensor], rank: int) -> PeerPools:
        """Raises ValueError if an entry is not a whole number of words."""
        own = pools[rank]
        if own.dim() != 6 or own.shape[5] * own.element_size() % 4:
            raise ValueError(f"entries of pools of shape {tuple(own.shape)} are not copied")
        addresses = [pool.data_ptr() for pool in pools]
        bases = torch.tensor(addresses, dtype=torch.int64, device=own.device)
        return cls(own.view(torch.uint8).view(torch.int32), bases, rank)

    @property
    def num_layers(self) -> int:
        return self.own.shape[2]

    def push(self, places: torch.Tensor, layers: range) -> None:
        """Copies entries to all other pools. Enqueued on the current stream.

        Args:
            places: int64 [T] on this GPU: page * positions + position.
            layers: Consecutive layers whose entries are copied.
        """
        _, heads, num_layers, parts, page_size, words = self.own.shape
        if not len(places):
            return
        block = next_power_of_2(words)
        grid = (cdiv(len(places), _ROWS), heads * parts * len(layers))
        _push_kernel[grid](
            *(self.own, self.bases, places, len(places), layers.start, len(layers)),
            *(num_layers, parts, heads, page_size, words),
            RANK=self.rank,
            SIZE=len(self.bases),
            ROWS=_ROWS,
            BLOCK=block,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_places", "first_layer"])
def _push_kernel(
    own: tl.tensor,
    bases: tl.tensor,
    places: tl.tensor,
    num_places: int,
    first_layer: int,
    layers: int,
    num_layers: int,
    parts: int,
    heads: int,
    page_size: int,
    words: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = tl.program_id(1)
    part = number % parts
    layer = first_layer + number // parts % layers
    head = number // parts // layers
    place = tl.load(places + row, mask=row < num_places, other=0)
    page = place // page_size
    at = ((page * heads + head) * num_layers + layer) * parts + part
    at = (at * page_size + place % page_size) * words
    column = tl.arange(0, BLOCK)
    mask = (row < num_places)[:, None] & (column < words)[None, :]
    offsets = at[:, None] + column[None, :]
    entries = tl.load(own + offsets, mask=mask)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(bases + peer).to(tl.pointer_type(tl.int32))
            tl.store(theirs + offsets, entries, mask=mask)
