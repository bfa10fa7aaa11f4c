"""Bytes that a trainer has sent or lent, as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from weft.engine.model.weights.announced import Handles, Layout

TOGETHER_BYTES = 256 << 20
"""Bytes of small tensors that are copied together, since a GPU takes longer to be told of a small
copy than to make it.
"""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


class Range(NamedTuple):
    """Bytes that lie together, in a layout and where they come from."""

    first: int
    """The first tensor, of those of the layout."""
    piece: int
    """Of `Handles.memory`."""
    offset: int
    begin: int
    """In the layout."""
    num_bytes: int


def ranges(layout: Layout, handles: Handles) -> list[Range]:
    """The layout's tensors, with the gaps where they lie as far apart as in the layout."""
    which, offsets = handles.which[layout.tensors], handles.offsets[layout.tensors]
    shifts = offsets - layout.begins
    is_first = np.ones(len(which), np.bool_)
    is_first[1:] = (which[1:] != which[:-1]) | (shifts[1:] != shifts[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(which)) - 1
    begins = layout.begins[firsts]
    counts = (layout.begins + layout.sizes)[lasts] - begins
    columns = (firsts, which[firsts], offsets[firsts], begins, counts)
    return [*map(Range._make, zip(*(column.tolist() for column in columns), strict=True))]


def copies(
    layout: Layout, wanted: Sequence[Range], pieces: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """The layout's tensors, flat, copied to new memory that they share. The pieces of memory,
    [bytes] uint8, are on one device.
    """
    numbers = [size for one in wanted for size in (one.offset, one.num_bytes)]
    word = int(np.gcd.reduce(numbers, initial=max(_WORDS)))
    first = pieces[wanted[0].piece]
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=first.device)
    words = {at: _words(pieces[at], word) for at in {one.piece for one in wanted}}
    places = _words(memory, word)
    torch._foreach_copy_(
        [_part(places, one.begin, one.num_bytes) for one in wanted],
        [_part(words[one.piece], one.offset, one.num_bytes) for one in wanted],
    )
    return layout.split(memory)


def _words(memory: torch.Tensor, size: int) -> torch.Tensor:
    """As many whole words of `size` bytes as there are."""
    return memory[: memory.numel() // size * size].view(_WORDS[size])


def _part(words: torch.Tensor, begin: int, num_bytes: int) -> torch.Tensor:
    size = words.itemsize
    return words[begin // size : (begin + num_bytes) // size]
