"""Tensors that a trainer on the same machine lends: memory of its GPU by a CUDA IPC handle, or a
named piece of the host's shared memory.

A handle is plain bytes. Nothing is unpickled, and the driver, or the size of the file, tells how
much memory lies behind it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from weft.contract.errors import ConfigError, ModelError
from weft.engine.executor.received import copies, ranges
from weft.engine.model.weights.announced import Handles, Layout
from weft.pages.transfer.device_memory import ForeignMemory
from weft.pages.transfer.nixl_wire import TransferError

_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_PARAM = "handles"
_NUM_OPENERS = 4
_OPENED_TOGETHER = 16
"""Allocations that a thread opens for each time that it is asked."""


class SharedTensors:
    """The memory in which tensors of one call lie. Used by one thread, within `opened`."""

    def __init__(
        self, device: torch.device, names: Sequence[str], lent: Mapping[str, Handles]
    ) -> None:
        """Raises ModelError for a tensor without a handle of this device's memory."""
        self._device, self._names = device, names
        self._uuid = ""
        if device.type == "cuda":
            self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        nowhere = np.full(len(names), -1)
        self._handles = lent.get(self._uuid, Handles((), nowhere, nowhere))
        if lacking := np.flatnonzero(self._handles.which < 0).tolist():
            where = f"GPU {self._uuid}" if self._uuid else "the host's memory (`shm`)"
            raise ModelError(f"{names[lacking[0]]} has no handle for {where}", param=_PARAM)
        self._opened: list[ForeignMemory | TransferError | None]
        self._opened = [None] * len(self._handles.memory)
        self._opening = list[Future[None]]()
        self._pieces = dict[int, torch.Tensor]()

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Opens each allocation of a GPU once, in the order of the tensors, while others are read:
        the driver takes about as long for one as a GPU takes to copy hundreds of megabytes.
        """
        firsts = range(0, len(self._opened), _OPENED_TOGETHER)
        self._opening = [threads.submit(self._open, first) for first in firsts]

    def close(self, threads: ThreadPoolExecutor) -> None:
        """Closes the memory, of which all copies must have ended."""
        for opening in self._opening:
            opening.cancel()
        wait(self._opening)
        opened = [one for one in self._opened if isinstance(one, ForeignMemory)]
        for closing in [
            threads.submit(_close, opened[at::_NUM_OPENERS]) for at in range(_NUM_OPENERS)
        ]:
            closing.result()

    def read(self, layout: Layout) -> list[torch.Tensor]:
        """Copies of tensors, at least one, on the worker's device: flat, in their dtypes. Raises
        ModelError for a handle that names no memory of this device, or too little of it.
        """
        return self._of_gpu(layout) if self._uuid else self._of_host(layout)

    def _of_gpu(self, layout: Layout) -> list[torch.Tensor]:
        wanted, names = ranges(layout, self._handles), self._names[layout.tensors]
        for one in wanted:
            name = names[one.first]
            size = self._piece(one.piece, name).numel()
            if one.offset + one.num_bytes > size:
                raise ModelError(
                    f"{name}: {one.num_bytes:,} bytes from {one.offset:,} on, of memory of "
                    f"{size:,}",
                    param=_PARAM,
                )
        return copies(layout, wanted, self._pieces)

    def _open(self, first: int) -> None:
        for number, handle in enumerate(self._handles.memory[first : first + _OPENED_TOGETHER]):
            try:
                opened = ForeignMemory(bytes.fromhex(handle), self._device.index or 0)
            except TransferError as error:
                self._opened[first + number] = error
            else:
                self._opened[first + number] = opened

    def _piece(self, number: int, name: str) -> torch.Tensor:
        """[bytes] uint8 of the trainer's memory."""
        if (memory := self._pieces.get(number)) is None:
            self._opening[number // _OPENED_TOGETHER].result()
            found = self._opened[number]
            if isinstance(found, TransferError):
                raise ModelError(f"{name}: {found}", param=_PARAM) from found
            memory = self._pieces[number] = torch.as_tensor(found, device=self._device)
        return memory

    def _of_host(self, layout: Layout) -> list[torch.Tensor]:
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
        data, names = memoryview(memory.numpy().data), self._names[layout.tensors]
        for one in ranges(layout, self._handles):
            name, shm = names[one.first], self._handles.memory[one.piece]
            if not _NAME.fullmatch(shm):
                raise ModelError(f"{name}: {shm[:64]!r} is no name of memory", param=_PARAM)
            try:
                _read(shm, data[one.begin : one.begin + one.num_bytes], one.offset)
            except (OSError, EOFError) as error:
                message = f"{name}: {one.num_bytes:,} bytes of {shm} cannot be read: {error}"
                raise ModelError(message, param=_PARAM) from error
        return layout.split(memory)


@contextmanager
def opened(
    device: torch.device, names: Sequence[str], lent: Mapping[str, Handles]
) -> Iterator[SharedTensors]:
    """Memory that is opened meanwhile is closed when all copies of it have ended."""
    shared = SharedTensors(device, names, lent)
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


def check_lent(lent: Mapping[str, Handles]) -> bool:
    """Whether the tensors of a call are lent, by handles. Raises ConfigError if only some are."""
    if not lent:
        return False
    if (np.max([one.which for one in lent.values()], axis=0) < 0).any():
        raise ConfigError("give handles of all tensors, or of none", param=_PARAM)
    return True


def _close(opened: Sequence[ForeignMemory]) -> None:
    with ExitStack() as stack:
        for one in opened:
            stack.callback(one.close)


def _read(shm: str, out: memoryview, offset: int) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    file, at = os.open(os.path.join(_FOLDER, shm), flags), 0
    try:
        while at < len(out):
            count = os.preadv(file, [out[at:]], offset + at)
            if not count:
                raise EOFError(f"it ends {len(out) - at:,} bytes before")
            at += count
    finally:
        os.close(file)
