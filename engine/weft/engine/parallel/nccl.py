"""A bare NCCL communicator, as trainers that do not use PyTorch's process groups have it."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress

import torch
from weft.contract.errors import GroupFailed

_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SUM = 0


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Communicator:
    """A member of a group whose rank 0 broadcasts. Work is enqueued on the current stream of the
    member's device.
    """

    def __init__(
        self, number: bytes, rank: int, size: int, device: torch.device, wait_s: float
    ) -> None:
        """Waits until all members have come, at most `wait_s`. Raises GroupFailed."""
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._device = device
        self._handle = ctypes.c_void_p()
        name = _Id.from_buffer_copy(number)
        status = list[int]()

        def begin() -> None:
            with torch.cuda.device(device):
                made = self._library.ncclCommInitRank(
                    ctypes.byref(self._handle), ctypes.c_int(size), name, ctypes.c_int(rank)
                )
                status.append(int(made))

        # NCCL cannot be interrupted here: a thread that waits in vain ends with the process.
        thread = threading.Thread(target=begin, name="nccl", daemon=True)
        thread.start()
        thread.join(wait_s)
        if not status:
            raise GroupFailed(f"the members of the group have not come within {wait_s:g} s")
        self._check(status[0])

    def broadcast(self, out: torch.Tensor) -> None:
        """From rank 0 into a contiguous tensor."""
        data = out if out.dtype in _TYPES else out.view(torch.uint8)
        place = ctypes.c_void_p(data.data_ptr())
        self._check(
            self._library.ncclBroadcast(
                *(place, place, ctypes.c_size_t(data.numel()), ctypes.c_int(_TYPES[data.dtype])),
                *(ctypes.c_int(0), self._handle, self._stream()),
            )
        )

    def all_reduce(self, data: torch.Tensor) -> None:
        place = ctypes.c_void_p(data.data_ptr())
        self._check(
            self._library.ncclAllReduce(
                *(place, place, ctypes.c_size_t(data.numel()), ctypes.c_int(_TYPES[data.dtype])),
                *(ctypes.c_int(_SUM), self._handle, self._stream()),
            )
        )

    def abort(self) -> None:
        """Ends the communicator, and what it still does."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle.value:
            with suppress(GroupFailed):
                self._check(self._library.ncclCommAbort(handle))

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _check(self, status: int) -> None:
        if status:
            raise GroupFailed(f"NCCL: {self._library.ncclGetErrorString(status).decode()}")
