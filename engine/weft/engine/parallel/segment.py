"""Memory that several processes map."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.errors import ConfigError


class Segment:
    """An anonymous memory file, mapped into this process. It lives as long as some process has it.

    Args:
        number: File descriptor, which is closed when this object is destroyed.
    """

    def __init__(self, number: int, size: int) -> None:
        self.size = size
        self._begin = 0
        self._file = os.fdopen(number, "r+b", buffering=0)
        self._map = mmap.mmap(number, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """Address at which this process maps the memory."""

    @classmethod
    def create(cls, size: int, name: str) -> Segment:
        """Creates a segment of zeros. The system provides memory only when it is first written.
        Raises ConfigError if the system refuses the memory.
        """
        try:
            number = os.memfd_create(name, os.MFD_CLOEXEC)
            os.ftruncate(number, size)
            segment = cls(number, size)
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"{size:,} bytes of shared memory for ranks: {error}; take tp = 1", param="tp"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            segment._map.madvise(mmap.MADV_HUGEPAGE)
        return segment

    def part(self, begin: int, size: int) -> Segment:
        """`size` bytes of it, in the same memory."""
        part = Segment.__new__(Segment)
        part.size, part._file, part._map = size, self._file, self._map
        part._begin, part.address = self._begin + begin, self.address + begin
        return part

    @property
    def number(self) -> int:
        """The file descriptor, to be handed to another process."""
        return self._file.fileno()

    def bytes_at(self, begin: int, size: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._map, np.uint8, size, self._begin + begin)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first bytes of the segment as a tensor."""
        count = torch.Size(shape).numel()
        return torch.frombuffer(self._map, dtype=dtype, count=count).view(shape)
