"""Tensors that a trainer on the same machine lends: memory of its GPU by a CUDA IPC handle, or a
named piece of the host's shared memory.

A handle is plain bytes. Nothing is unpickled, and the driver, or the size of the file, tells how
much memory lies behind it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from weft.contract.errors import ConfigError, ModelError
from weft.contract.weights import SentTensor, TensorHandle
from weft.engine.model.weights.sent import dtype_of, num_bytes
from weft.pages.transfer.device_memory import ForeignMemory
from weft.pages.transfer.nixl_wire import TransferError

_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_PARAM = "handles"


class SharedTensors:
    """Opens what tensors of one call lie in. Used by one thread, within `opened`."""

    def __init__(self, device: torch.device, stack: ExitStack) -> None:
        self._device = device
        self._stack = stack
        self._uuid = ""
        if device.type == "cuda":
            self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._opened: dict[bytes, torch.Tensor] = {}

    def read(self, tensor: SentTensor) -> torch.Tensor:
        """A copy of a tensor, on the worker's device. Raises ModelError for a handle that names no
        memory of this device, or too little of it.
        """
        count, dtype = num_bytes(tensor), dtype_of(tensor.dtype)
        handle = next((one for one in tensor.handles if one.gpu == self._uuid), None)
        if handle is None:
            where = f"GPU {self._uuid}" if self._uuid else "the host's memory (`shm`)"
            raise ModelError(f"{tensor.name} has no handle for {where}", param=_PARAM)
        read = self._of_gpu if self._uuid else self._of_host
        return read(tensor.name, handle, count).view(dtype).view(tensor.shape)

    def _of_gpu(self, name: str, handle: TensorHandle, count: int) -> torch.Tensor:
        if (memory := self._opened.get(handle.handle)) is None:
            try:
                found = ForeignMemory(handle.handle, self._device.index or 0)
            except TransferError as error:
                raise ModelError(f"{name}: {error}", param=_PARAM) from error
            self._stack.callback(found.close)
            memory = self._opened[handle.handle] = torch.as_tensor(found, device=self._device)
        if handle.offset + count > memory.numel():
            raise _too_small(name, handle, count, memory.numel())
        return memory[handle.offset : handle.offset + count].clone()

    def _of_host(self, name: str, handle: TensorHandle, count: int) -> torch.Tensor:
        if not _NAME.fullmatch(handle.shm):
            raise ModelError(f"{name}: {handle.shm[:64]!r} is no name of memory", param=_PARAM)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        out = torch.empty(count, dtype=torch.uint8)
        try:
            file = os.open(os.path.join(_FOLDER, handle.shm), flags)
            try:
                _read(file, out, handle.offset)
            finally:
                os.close(file)
        except (OSError, EOFError) as error:
            message = f"{name}: {count:,} bytes of {handle.shm} cannot be read: {error}"
            raise ModelError(message, param=_PARAM) from error
        return out


@contextmanager
def opened(device: torch.device) -> Iterator[SharedTensors]:
    """Memory that is opened meanwhile is closed when all copies of it have ended."""
    with ExitStack() as stack:
        try:
            yield SharedTensors(device, stack)
        finally:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def check_lent(tensors: Sequence[SentTensor]) -> bool:
    """Whether the tensors of a call are lent, by handles. Raises ConfigError if only some are."""
    are_lent = [bool(one.handles) for one in tensors]
    if any(are_lent) and not all(are_lent):
        raise ConfigError("give handles of all tensors, or of none", param=_PARAM)
    return any(are_lent)


def _read(file: int, out: torch.Tensor, offset: int) -> None:
    data, at = memoryview(out.numpy().data), 0
    while at < len(data):
        count = os.preadv(file, [data[at:]], offset + at)
        if not count:
            raise EOFError(f"it ends {len(data) - at:,} bytes before")
        at += count


def _too_small(name: str, handle: TensorHandle, count: int, size: int) -> ModelError:
    return ModelError(
        f"{name}: {count:,} bytes from {handle.offset:,} on, of memory of {size:,}", param=_PARAM
    )
