"""Arrays of the host on a device, in one copy, and tensors of a device on the host.

Nothing here waits for the device but `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT_BYTES = 16
_NUM_BUFFERS = 2
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class PinnedBuffers:
    """Memory of the host that copies start from, used in turn: one may still be under way.

    Args:
        device: copies go to; the memory is pinned for a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(_NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._next = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of at least so many bytes, no longer read by any copy."""
        event = self._copied[self._next]
        if event is not None:
            event.synchronize()
        if self._buffers[self._next].numel() < num_bytes:
            size = 1 << max(16, num_bytes - 1).bit_length()
            self._buffers[self._next] = torch.empty(
                size, dtype=torch.uint8, pin_memory=self._is_cuda
            )
        return self._buffers[self._next]

    def sent(self) -> None:
        """The copy out of the buffer taken last has been enqueued."""
        if self._is_cuda:
            event = self._copied[self._next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._next] = event
        self._next = (self._next + 1) % _NUM_BUFFERS


class DeviceCopies:
    """Sends arrays to a device.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pinned = PinnedBuffers(device)
        """What copies start from; others may send from it as well."""

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
        """Copies int64, int32 and float32 arrays as one piece of memory, without waiting.

        Returns:
            A flat tensor for each array.
        """
        if self._device.type == "cpu":
            return [torch.from_numpy(array.flatten()) for array in arrays]
        begins, end = [], 0
        for array in arrays:
            begins.append(end)
            end += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buffer = self.pinned.take(end)
        host = buffer.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            flat = np.ascontiguousarray(array).reshape(-1)
            host[begin : begin + array.nbytes] = flat.view(np.uint8)
        sent = torch.empty(end, dtype=torch.uint8, device=self._device)
        sent.copy_(buffer[:end], non_blocking=True)
        self.pinned.sent()
        return [
            sent[begin : begin + array.nbytes].view(_TORCH_DTYPES[array.dtype])
            for begin, array in zip(begins, arrays, strict=True)
        ]


class Mark:
    """What a device has been told to do so far.

    Args:
        device: it; of a CPU, everything is done already.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Waits until it is done."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Lets what a stream is told from now on wait until it is done; None: waits itself."""
        if stream is None:
            self.wait()
        elif self._event is not None:
            stream.wait_event(self._event)


class Fetched:
    """A tensor on its way to the host, through pinned memory if it was on a GPU.

    Args:
        values: of any device; may be freed or written to by later work.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._host = values.to("cpu", non_blocking=True)
        self._copied = Mark(values.device)

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once it is there."""
        self._copied.wait()
        return self._host
