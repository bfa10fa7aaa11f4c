"""Copies of host arrays to a device in one transfer, and of device tensors to the host.

Only the methods named `wait` block until the device has done its work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from weft.pages.marks import MAX_WAITING

_ALIGNMENT_BYTES = 16
_GROUP = 4
"""Number of buffers that share one event, recorded after the last of their copies. Recording an
event takes the host longer than enqueueing a copy.
"""
_NUM_BUFFERS = MAX_WAITING + _GROUP
"""Number of pinned buffers: enough for the copies of two steps, of up to five each, since a copy
waits for the step before its own. With fewer buffers the host would wait in the middle of a step.
"""
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def host_zeros(
    shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """Zeros on the host, pinned if `device` is a GPU, to which copies then do not block."""
    is_pinned = device is not None and device.type == "cuda"
    return torch.zeros(shape, dtype=dtype, pin_memory=is_pinned)


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream for copies to a GPU; None: the device is a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """A block whose work goes to this stream; None: it runs as it would without the block."""
    # `torch.cuda.stream(None)` would initialise CUDA for a worker on a CPU of a machine with GPUs.
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def sent(numbers: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The numbers on a device: themselves on a CPU, else a copy from pinned memory, for which the
    host does not wait.
    """
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def on_host(values: torch.Tensor) -> torch.Tensor:
    """The tensor on the host: itself on a CPU, else a copy, for which the caller waits.

    Unlike with `Tensor.cpu`, whose copy to ordinary memory holds a lock of the driver until it has
    come, other threads can launch work meanwhile.
    """
    return values if values.device.type == "cpu" else Fetched(values).wait()


class PinnedBuffer(NamedTuple):
    tensor: torch.Tensor
    """[bytes] uint8."""
    host: npt.NDArray[np.uint8]
    """The memory of `tensor`, as numpy sees it."""


class PinnedBuffers:
    """Pinned host buffers for copies to a device. They are used in turn, since earlier copies may
    still be running.

    Args:
        device: Destination of the copies; the memory is pinned for a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        nothing = torch.empty(0, dtype=torch.uint8)
        self._buffers = [PinnedBuffer(nothing, nothing.numpy())] * _NUM_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * (_NUM_BUFFERS // _GROUP)
        self._next = 0

    def take(self, num_bytes: int) -> PinnedBuffer:
        """A buffer of at least this many bytes that no copy reads any more."""
        group, place = divmod(self._next, _GROUP)
        event = self._copied[group]
        if event is not None and place == 0:
            event.synchronize()
        if len(self._buffers[self._next].host) < num_bytes:
            size = 1 << max(16, num_bytes - 1).bit_length()
            made = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)
            self._buffers[self._next] = PinnedBuffer(made, made.numpy())
        return self._buffers[self._next]

    def sent(self) -> None:
        """Call it when the copy out of the buffer taken last has been enqueued."""
        group, place = divmod(self._next, _GROUP)
        if self._is_cuda and place == _GROUP - 1:
            event = self._copied[group] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[group] = event
        self._next = (self._next + 1) % _NUM_BUFFERS


class DeviceCopies:
    """Copies host arrays to a device, asynchronously where possible."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pinned = PinnedBuffers(device)
        """Pinned buffers of the copies. Other senders may use them too."""

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
        """Sends int64, int32 and float32 arrays in one transfer, without waiting. Returns a flat
        tensor for each array.
        """
        if self._device.type == "cpu":
            return [torch.from_numpy(array.flatten()) for array in arrays]
        begins, end = [], 0
        for array in arrays:
            begins.append(end)
            end += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buffer, host = self.pinned.take(end)
        for begin, array in zip(begins, arrays, strict=True):
            flat = np.ascontiguousarray(array).reshape(-1)
            host[begin : begin + array.nbytes] = flat.view(np.uint8)
        sent = torch.empty(end, dtype=torch.uint8, device=self._device)
        sent.copy_(buffer[:end], non_blocking=True)
        self.pinned.sent()
        views = {dtype: sent.view(_TORCH_DTYPES[dtype]) for dtype in {a.dtype for a in arrays}}
        return [
            views[array.dtype][begin // array.itemsize : begin // array.itemsize + array.size]
            for begin, array in zip(begins, arrays, strict=True)
        ]


class Mark:
    """A point in a device's queue of work.

    Args:
        device: The device; on a CPU every mark is reached at once.
        event: Event of an earlier mark that nothing waits for any more, to be used again.
    """

    def __init__(self, device: torch.device, event: torch.cuda.Event | None = None) -> None:
        self._event = event
        if device.type == "cuda":
            if event is None:
                self._event = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Blocks until the device has reached the mark."""
        if self._event is not None:
            self._event.synchronize()

    def is_reached(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Makes later work of a stream wait for the mark; without a stream, blocks the caller."""
        if stream is None:
            self.wait()
        elif self._event is not None:
            stream.wait_event(self._event)


class Marks:
    """Marks of one stream of work. They share a few events, so a mark is valid only until `number`
    further marks were added.

    Args:
        device: The device; on a CPU every mark is reached at once.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._device = device
        self._events: list[torch.cuda.Event | None] = [None] * number
        if device.type == "cuda":
            self._events = [torch.cuda.Event() for _ in range(number)]  # type: ignore[no-untyped-call]
        self._next = 0

    def add(self) -> Mark:
        event = self._events[self._next]
        self._next = (self._next + 1) % len(self._events)
        return Mark(self._device, event)


class Fetched:
    """A tensor that is copied to the host, through pinned memory if it is on a GPU.

    Args:
        values: Tensor on any device; later work may free it or write to it.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._host = values.to("cpu", non_blocking=True, copy=True)
        self._copied = Mark(values.device)

    def wait(self) -> torch.Tensor:
        """Waits for the copy and returns the tensor on the host."""
        self._copied.wait()
        return self._host


class HostCopies:
    """Copies of int64 tensors to the host. They share memory, so a copy is valid only until
    `number` further copies were begun.
    """

    def __init__(self, device: torch.device, size: int, number: int) -> None:
        self._hosts = [host_zeros(size, torch.int64, device) for _ in range(number)]
        self._marks = Marks(device, number)
        self._next = 0

    def begin(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to copy a contiguous tensor, which later work may overwrite. Returns a function
        that waits for the copy.
        """
        host = self._hosts[self._next][: values.numel()].view(values.shape)
        self._next = (self._next + 1) % len(self._hosts)
        host.copy_(values, non_blocking=True)
        mark = self._marks.add()

        def wait() -> torch.Tensor:
            mark.wait()
            return host

        return wait
