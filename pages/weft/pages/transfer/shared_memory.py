"""Memory that several processes of one host map: an anonymous file, passed on as a descriptor.

Such memory has no name that could outlive a crash. It is given back when no process has it any
more.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray
from weft.pages.transfer.nixl_wire import TransferError, TransportMismatch

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""A file that shrinks would end each process that touches the lost part."""
_MADV_POPULATE_WRITE = 23
_POPULATED_AT_ONCE = 2 << 20


class MemoryFile:
    """Zeros, which the system gives as they are first written.

    Raises:
        TransferError: The system refuses the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            self.number = os.memfd_create("weft-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            """File descriptor, for other processes; open as long as this object lives."""
        except (OSError, AttributeError) as error:
            raise TransferError(f"no shared memory: {error}") from error
        try:
            os.ftruncate(self.number, num_bytes)
            fcntl.fcntl(self.number, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            self.array = _mapped(self.number, num_bytes)
            """uint8 `[num_bytes]`. It stays mapped as long as anything refers to it."""
        except (OSError, ValueError) as error:
            os.close(self.number)
            raise TransferError(f"{num_bytes:,} bytes of shared memory: {error}") from error

    def populate(self, num_bytes: int) -> None:
        """Takes the first bytes from the system, in a thread, where the system can do that. A first
        write costs several times what later ones do.
        """
        end = min(num_bytes, len(self.array))
        threading.Thread(target=_populate, args=(self.array[:end],), daemon=True).start()

    def __del__(self) -> None:
        if hasattr(self, "array"):
            os.close(self.number)


def _populate(memory: NDArray[np.uint8]) -> None:
    madvise = ctypes.CDLL(None).madvise  # It lets other threads run, and mmap's method does not.
    for at in range(0, len(memory), _POPULATED_AT_ONCE):
        piece = memory[at : at + _POPULATED_AT_ONCE]
        address, size = ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(len(piece))
        if madvise(address, size, _MADV_POPULATE_WRITE):
            return


def map_file(number: int, num_bytes: int) -> NDArray[np.uint8]:
    """Maps another process's memory file, uint8 `[num_bytes]`. Its descriptor may then be closed.

    Raises:
        TransportMismatch: The file has another size, or could lose bytes that are mapped.
    """
    try:
        seals = fcntl.fcntl(number, fcntl.F_GET_SEALS)
        size = os.fstat(number).st_size
        if seals & _SIZE_SEALS != _SIZE_SEALS or size < num_bytes:
            raise TransportMismatch(f"a memory file of {size:,} bytes, seals {seals:#x}")
        return _mapped(number, num_bytes)
    except (OSError, ValueError) as error:
        raise TransportMismatch(f"mapping {num_bytes:,} bytes: {error}") from error


def _mapped(number: int, num_bytes: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(number, num_bytes, mmap.MAP_SHARED)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
