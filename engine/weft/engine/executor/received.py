"""Bytes that a trainer has sent or lent, as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from weft.contract.weights import SentTensor
from weft.engine.model.weights.sent import dtype_of, num_bytes

TOGETHER_BYTES = 128 << 20
"""Bytes of small tensors that are copied together, since a GPU takes longer to be told of a small
copy than to make it.
"""
_ALIGNMENT_BYTES = 256
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def divided(tensors: Sequence[SentTensor], most_bytes: int) -> Iterator[list[SentTensor]]:
    """Groups that each end with the tensor that makes them larger than `most_bytes`; 0: each tensor
    by itself. Trainers that pack divide tensors in the same way.
    """
    part, size = list[SentTensor](), 0
    for one in tensors:
        part.append(one)
        size += num_bytes(one)
        if size > most_bytes or not most_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def shaped(parts: Sequence[torch.Tensor], tensors: Sequence[SentTensor]) -> list[torch.Tensor]:
    """The same memory, [bytes] uint8 each, in the tensors' dtypes and shapes."""
    return [
        part.view(dtype_of(one.dtype)).view(one.shape)
        for part, one in zip(parts, tensors, strict=True)
    ]


def copies(parts: Sequence[torch.Tensor], tensors: Sequence[SentTensor]) -> list[torch.Tensor]:
    """As `shaped`, but copies, which share new memory. The parts, at least one, lie anywhere in
    allocations of one device.
    """
    begins, end = list[int](), 0
    for part in parts:
        begins.append(end)
        end += -(-part.numel() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    memory = torch.empty(end, dtype=torch.uint8, device=parts[0].device)
    places = [
        memory[begin : begin + part.numel()] for begin, part in zip(begins, parts, strict=True)
    ]
    sizes = (size for one in parts for size in (one.storage_offset(), one.numel()))
    word = _WORDS[math.gcd(max(_WORDS), *sizes)]
    torch._foreach_copy_([one.view(word) for one in places], [one.view(word) for one in parts])
    return shaped(places, tensors)
