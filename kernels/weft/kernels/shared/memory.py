"""Tensors in huge pages.

Steps read weights and KV pages at scattered addresses. With the system's 4 KiB pages, address
translation then costs a third of the bandwidth on a virtual machine with shared cores; with 2 MiB
pages it costs almost nothing.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os

import torch

HUGE_PAGE_BYTES = 2 << 20

_ALIGNMENT_BYTES = 64
_MADV_REMOVE = 9


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in huge pages where the system has them, else in normal ones: a contiguous CPU tensor
    that begins at a huge page. The system gives the memory only as it is first written. Raises
    OSError if the system refuses the memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    # Shared anonymous memory follows other rules for huge pages, so the mapping is private.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[begin : begin + size].view(dtype).view(shape)


def give_back(address: int, num_bytes: int, *, is_shared: bool = False) -> int:
    """Gives whole pages of anonymous memory back to the system; returns their bytes. The addresses
    stay valid, and have zeros until something is written there.

    Args:
        is_shared: Whether other processes map the memory too, all of which lose it.

    Raises:
        OSError: The system refuses, for example since the memory is locked.
    """
    size = os.sysconf("SC_PAGE_SIZE")
    begin = -(-address // size) * size
    count = (address + num_bytes) // size * size - begin
    if count <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    advice = _MADV_REMOVE if is_shared else mmap.MADV_DONTNEED
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(count), advice):
        raise OSError(ctypes.get_errno(), "memory is not given back")
    return count


class WeightArena:
    """Hands out parts of a few large blocks of huge pages, for weights with the same lifetime.

    A block is freed with the last tensor in it.
    """

    def __init__(self, block_bytes: int = 64 << 20, *, is_fixed: bool = False) -> None:
        """Starts empty; takes blocks of `block_bytes`, or larger ones for larger tensors.

        With `is_fixed`, a GPU too multiplies the weights packed into it in one order, whatever the
        number of rows.
        """
        self.is_fixed = is_fixed
        self._block_bytes = block_bytes
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` zeros, contiguous, that begin at a cache line. Raises OSError if the system
        refuses the memory.
        """
        size = count * dtype.itemsize
        if self._used + size > self._block.numel():
            self._block = huge_zeros((max(size, self._block_bytes),), torch.uint8)
            self._used = 0
        part = self._block[self._used : self._used + size].view(dtype)
        self._used += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return part
