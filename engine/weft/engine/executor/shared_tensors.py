"""Tensors that a trainer on the same machine lends: memory of its GPU by a CUDA IPC handle, or a
named piece of the host's shared memory.

A handle is plain bytes. Nothing is unpickled, and the driver, or the size of the file, tells how
much memory lies behind it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from weft.contract.errors import ConfigError, ModelError
from weft.contract.weights import SentTensor, TensorHandle
from weft.engine.executor.received import copies, shaped
from weft.engine.model.weights.sent import num_bytes
from weft.pages.transfer.device_memory import ForeignMemory
from weft.pages.transfer.nixl_wire import TransferError

_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_PARAM = "handles"
_NUM_OPENERS = 4


class SharedTensors:
    """The memory in which tensors of one call lie. Used by one thread, within `opened`."""

    def __init__(self, device: torch.device, tensors: Sequence[SentTensor]) -> None:
        """Raises ModelError for a tensor without a handle of this device's memory."""
        self._device = device
        self._uuid = ""
        if device.type == "cuda":
            self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._handles = {one.name: self._handle_of(one) for one in tensors}
        self._opening: dict[bytes, Future[ForeignMemory]] = {}
        self._memory: dict[bytes, torch.Tensor] = {}

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Opens each allocation of a GPU once, in the order of the tensors, while others are read:
        the driver takes about as long for one as a GPU takes to copy hundreds of megabytes.
        """
        for one in dict.fromkeys(one.handle for one in self._handles.values()):
            self._opening[one] = threads.submit(ForeignMemory, one, self._device.index or 0)

    def close(self, threads: ThreadPoolExecutor) -> None:
        """Closes the memory, of which all copies must have ended."""
        opened = [
            one.result()
            for one in self._opening.values()
            if not one.cancel() and one.exception() is None
        ]
        for closing in [threads.submit(one.close) for one in opened]:
            closing.result()

    def read(self, tensors: Sequence[SentTensor]) -> list[torch.Tensor]:
        """Copies of tensors, at least one, on the worker's device. Raises ModelError for a handle
        that names no memory of this device, or too little of it.
        """
        read = self._of_gpu if self._uuid else self._of_host
        parts = [read(one.name, self._handles[one.name], num_bytes(one)) for one in tensors]
        return copies(parts, tensors) if self._uuid else shaped(parts, tensors)

    def _handle_of(self, tensor: SentTensor) -> TensorHandle:
        handle = next((one for one in tensor.handles if one.gpu == self._uuid), None)
        if handle is None:
            where = f"GPU {self._uuid}" if self._uuid else "the host's memory (`shm`)"
            raise ModelError(f"{tensor.name} has no handle for {where}", param=_PARAM)
        return handle

    def _of_gpu(self, name: str, handle: TensorHandle, count: int) -> torch.Tensor:
        """[count] uint8 of the trainer's memory."""
        if (memory := self._memory.get(handle.handle)) is None:
            try:
                found = self._opening[handle.handle].result()
            except TransferError as error:
                raise ModelError(f"{name}: {error}", param=_PARAM) from error
            memory = self._memory[handle.handle] = torch.as_tensor(found, device=self._device)
        if handle.offset + count > memory.numel():
            raise _too_small(name, handle, count, memory.numel())
        return memory[handle.offset : handle.offset + count]

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
def opened(device: torch.device, tensors: Sequence[SentTensor]) -> Iterator[SharedTensors]:
    """Memory that is opened meanwhile is closed when all copies of it have ended."""
    shared = SharedTensors(device, tensors)
    if device.type != "cuda":
        yield shared
        return
    with ThreadPoolExecutor(_NUM_OPENERS, "refit-open") as threads:
        try:
            shared.begin(threads)
            yield shared
        finally:
            try:
                torch.cuda.current_stream(device).synchronize()
            finally:
                shared.close(threads)


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
