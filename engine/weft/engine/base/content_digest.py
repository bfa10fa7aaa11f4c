"""Digests of tensors that are computed where the tensors lie."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from weft.kernels.ops.content_digest import ALIGNMENT_BYTES, weighted_sums

_WORD_BYTES = 4
_ROW_WORDS = 1 << 16
"""Words of a row, whose products with the two rows of `_multipliers` are added up."""


class ContentDigests:
    """32 bytes over each tensor's dtype, shape and numbers: sums of its words, each times a number
    that only its place decides, which a GPU makes about as fast as it reads its memory. It does so
    for all tensors in one launch, for whose end only `take` waits.

    Args:
        tensors: On one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        whole = [_aligned(one) for one in tensors]
        self._heads = [f"{one.dtype} {tuple(one.shape)}".encode() for one in tensors]
        self._rests = [_rest(one) if one.nbytes % _WORD_BYTES else b"" for one in whole]
        self._counts = [-(-(one.nbytes // _WORD_BYTES) // _ROW_WORDS) for one in whole]
        self._sums = weighted_sums(whole, _multipliers(tensors[0].device))

    def take(self) -> list[bytes]:
        numbers: Any = self._sums.cpu().numpy()
        found, at = list[bytes](), 0
        for head, rest, count in zip(self._heads, self._rests, self._counts, strict=True):
            data = numbers[at : at + count].tobytes()
            found.append(hashlib.blake2b(head + rest + data, digest_size=32).digest())
            at += count
        return found


def content_digest(tensor: torch.Tensor) -> bytes:
    """The digest of one tensor, as `ContentDigests` makes it."""
    return ContentDigests([tensor]).take()[0]


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous()
    return whole.clone() if whole.data_ptr() % ALIGNMENT_BYTES else whole


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
