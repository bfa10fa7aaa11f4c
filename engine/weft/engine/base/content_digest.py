"""Digests of tensors that are computed where the tensors lie."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from weft.kernels.ops.content_digest import ALIGNMENT_BYTES, weighted_sums

_WORD_BYTES = 4
_ROW_WORDS = 1 << 16
"""Words of a row, whose products with the two rows of `_multipliers` are added up."""


class ContentDigests:
    """Sums of each tensor's words, each times a number that only its place decides, which a GPU
    makes about as fast as it reads its memory. It does so for all tensors in one launch, for whose
    end only `sums` waits.

    Args:
        tensors: On one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        whole = [
            one if _is_aligned(one) else one.clone(memory_format=torch.contiguous_format)
            for one in tensors
        ]
        sizes = [one.nbytes for one in whole]
        pairs = zip(whole, sizes, strict=True)
        self._rests = [_rest(one) if size % _WORD_BYTES else b"" for one, size in pairs]
        self._counts = [-(-(size // _WORD_BYTES) // _ROW_WORDS) for size in sizes]
        self._sums = weighted_sums(whole, _multipliers(tensors[0].device))

    def sums(self) -> list[bytes]:
        """Of each tensor; its dtype and shape decide how many."""
        data: bytes = self._sums.cpu().numpy().tobytes()
        ends = [*accumulate(self._counts, initial=0)]
        rows = zip(self._rests, pairwise(ends), strict=True)
        size = self._sums.shape[1] * self._sums.itemsize
        return [rest + data[begin * size : end * size] for rest, (begin, end) in rows]


def content_digest(tensor: torch.Tensor) -> bytes:
    """32 bytes over a tensor's dtype, shape and numbers."""
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.blake2b(head + ContentDigests([tensor]).sums()[0], digest_size=32).digest()


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT_BYTES


def _rest(tensor: torch.Tensor) -> bytes:
    """The bytes after the last whole word."""
    data = tensor.reshape(-1).view(torch.uint8)
    rest: Any = data[data.numel() // _WORD_BYTES * _WORD_BYTES :].cpu().numpy()
    return bytes(rest.tobytes())


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """[2, `_ROW_WORDS`] odd int64, the same on every device."""
    drawn = np.random.PCG64(75).random_raw(2 * _ROW_WORDS)
    numbers = (drawn | np.uint64(1)).view(np.int64).reshape(2, _ROW_WORDS)
    return torch.from_numpy(numbers).to(device)
