"""Digests of tensors that are computed where the tensors lie."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import torch
from weft.kernels.ops.content_digest import weighted_sums

_WORD_BYTES = 4
_ROW_WORDS = 1 << 16
"""Words of a row, whose products with the two rows of `_multipliers` are added up."""


def content_digest(tensor: torch.Tensor) -> bytes:
    """32 bytes over a tensor's dtype, shape and numbers: sums of its words, each times a number
    that only its place decides, which a GPU makes about as fast as it reads its memory.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    count = data.numel() // _WORD_BYTES
    words = data[: count * _WORD_BYTES].view(torch.int32)
    rest: Any = data[count * _WORD_BYTES :].cpu().numpy()
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=32)
    digest.update(rest.tobytes())
    numbers: Any = weighted_sums(words, _multipliers(data.device)).cpu().numpy()
    digest.update(numbers.tobytes())
    return digest.digest()


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """[2, `_ROW_WORDS`] odd int64, the same on every device."""
    drawn = np.random.PCG64(75).random_raw(2 * _ROW_WORDS)
    numbers = (drawn | np.uint64(1)).view(np.int64).reshape(2, _ROW_WORDS)
    return torch.from_numpy(numbers).to(device)
