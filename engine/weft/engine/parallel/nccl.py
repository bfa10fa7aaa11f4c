"""A bare NCCL communicator, as trainers that do not use PyTorch's process groups have it, and as
stages of several hosts have it between two of them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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
_MAGIC, _UNSET = 0xCAFEBEEF, -(1 << 31)
_CONFIG_VERSION = 21805
"""NCCL's version of `_Config`; later ones have further fields at its end, and take this one."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cluster_size", ctypes.c_int),
        ("min_blocks", ctypes.c_int),
        ("max_blocks", ctypes.c_int),
        ("network", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class Communicator:
    """A member of a group. Work is enqueued on the current stream of the member's device.

    Args:
        number: The group's name, from `new_id`.
        max_blocks: Most thread blocks, and so processors of the GPU, that an operation takes; None:
            NCCL chooses.
    """

    def __init__(
        self,
        number: bytes,
        rank: int,
        size: int,
        device: torch.device,
        wait_s: float,
        max_blocks: int | None = None,
    ) -> None:
        """Waits until all members have come, at most `wait_s`. Raises GroupFailed."""
        self._library = _library()
        self._device = device
        self._handle = ctypes.c_void_p()
        blocks = _UNSET if max_blocks is None else max_blocks
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, *[_UNSET] * 3, blocks)
        config.split_share = _UNSET
        name, numbers = _Id.from_buffer_copy(number), (ctypes.c_int(size), ctypes.c_int(rank))

        def begin() -> None:
            with torch.cuda.device(device):
                place, (of_all, own) = ctypes.byref(self._handle), numbers
                if max_blocks is None:
                    made = self._library.ncclCommInitRank(place, of_all, name, own)
                else:
                    made = self._library.ncclCommInitRankConfig(
                        *(place, of_all, name, own, ctypes.byref(config))
                    )
            self._check(made)

        within(begin, wait_s, "the members of the group have not come")

    def send(self, rows: torch.Tensor, to: int) -> None:
        """Sends a contiguous tensor, which that member receives."""
        self._check(self._library.ncclSend(*_bytes(rows), ctypes.c_int(to), *self._where()))

    def receive(self, out: torch.Tensor, of: int) -> None:
        """Receives what that member sends into a contiguous tensor of the same size."""
        self._check(self._library.ncclRecv(*_bytes(out), ctypes.c_int(of), *self._where()))

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

    def _where(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._handle, self._stream()

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _check(self, status: int) -> None:
        _check(self._library, status)


def new_id() -> bytes:
    """The name of a new group, of 128 bytes, at which its other members find this process. Raises
    GroupFailed.
    """
    library, number = _library(), _Id()
    _check(library, library.ncclGetUniqueId(ctypes.byref(number)))
    return bytes(number)


def nccl_version() -> int:
    """The version of NCCL that this process uses: 22809 is 2.28.9. Raises GroupFailed."""
    library, version = _library(), ctypes.c_int()
    _check(library, library.ncclGetVersion(ctypes.byref(version)))
    return version.value


def within(job: Callable[[], None], wait_s: float, told: str) -> None:
    """Runs what NCCL does not let anyone interrupt: a thread that waits in vain ends with the
    process. Raises GroupFailed with what was `told` after `wait_s`, or the job's error.
    """
    ended = list[Exception | None]()

    def run() -> None:
        try:
            job()
            ended.append(None)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="nccl", daemon=True)
    thread.start()
    thread.join(wait_s)
    if not ended:
        raise GroupFailed(f"{told} within {wait_s:g} s")
    if ended[0] is not None:
        raise ended[0]


def _library() -> Any:
    """Raises GroupFailed if the system has no NCCL."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise GroupFailed(f"NCCL is not installed: {error}") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(library: Any, status: int) -> None:
    if status:
        raise GroupFailed(f"NCCL: {library.ncclGetErrorString(status).decode()}")


def _bytes(data: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]:
    kind = ctypes.c_int(_TYPES[torch.uint8])
    return ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.nbytes), kind
