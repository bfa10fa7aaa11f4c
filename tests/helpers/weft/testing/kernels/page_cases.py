"""Pools of random bits, page numbers, and what moving and digesting pages must give."""

from __future__ import annotations

import random

import numpy as np
import torch
from weft.pages.transfer.digest import digest_pages_numpy
from weft.testing.kernels.kernel_checks import fresh_seed

POISON = 0xA5


def random_pool(
    num_pages: int, num_words: int, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """`[num_pages, 2, ...]` of random bits, NaNs among them; `num_words` is even."""
    fresh_seed()
    bits = torch.randint(0, 256, (num_pages, 4 * num_words), dtype=torch.uint8)
    return bits.view(dtype).view(num_pages, 2, -1).to(device)


def page_numbers(num_pages: int, count: int, device: str = "cpu") -> torch.Tensor:
    """Different pages in random order."""
    return torch.tensor(
        random.sample(range(num_pages), count), dtype=torch.int64, device=torch.device(device)
    )


def bytes_of(pool: torch.Tensor) -> np.ndarray:
    """uint8 `[num_pages, page_bytes]`; a copy."""
    return pool.cpu().flatten(1).view(torch.uint8).numpy().copy()


def poisoned(rows: int, pool: torch.Tensor) -> torch.Tensor:
    """A buffer for so many pages, full of a pattern."""
    num_bytes = pool[0].numel() * pool.itemsize
    return torch.full((rows, num_bytes), POISON, dtype=torch.uint8, device=pool.device)


def expected_digests(pool: torch.Tensor, pages: torch.Tensor) -> list[int]:
    """Digests computed by numpy from the bytes."""
    return digest_pages_numpy(bytes_of(pool), pages.cpu().numpy()).tolist()


def unsigned(digests: torch.Tensor) -> list[int]:
    """The 64 bits of int64 numbers."""
    return digests.cpu().numpy().view(np.uint64).tolist()
