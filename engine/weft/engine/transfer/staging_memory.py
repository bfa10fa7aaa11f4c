"""Memory of staging pages: pinned host memory, or memory of the pool's own device.

PinnedStagingPages   host memory, which shared-memory copies, network cards, TCP, and processes
                     without a GPU (a KV store) can reach
DeviceStagingPages   GPU memory, which other GPUs of this host (NVLink, PCIe) and some network
                     cards can reach; other peers exchange pages as `data`
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.errors import ConfigError
from weft.contract.pages import StagingPages
from weft.engine.base.device_copies import on_stream
from weft.kernels.shared.memory import huge_zeros
from weft.pages.transfer.device_memory import DeviceMemory
from weft.pages.transfer.nixl_wire import PoolRegion, TransferError
from weft.pages.transfer.shared_memory import MemoryFile

logger = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 10.0
"""Seconds allowed for the device to finish its copies."""


class StagingMemory(Protocol):
    """Memory that peers can reach, and that the pool's device copies to and from."""

    pages: StagingPages
    """The pages' bytes, as the host sees them."""
    tensor: torch.Tensor
    """This memory as a tensor, uint8 `[num_pages, page_bytes]`, for the device's copies."""
    is_of_device: bool
    """Whether it is memory of the pool's device, so that the device's kernels reach it."""
    shared: MemoryFile | DeviceMemory | None
    """What processes of this host map to reach the pages; None: they cannot."""

    def region(self) -> PoolRegion: ...

    def describe(self) -> str:
        """Describes the memory, for people."""
        ...

    def close(self) -> None:
        """Releases the memory. No copy may be under way."""
        ...


class PinnedStagingPages:
    """Zeros in pinned host memory, `pages` as uint8 `[num_pages, page_bytes]`, which a CUDA device
    copies to and from directly.

    The memory is ordinary memory of this process, pinned afterwards, so network cards and other
    processes can reach it. A device remembers pinned addresses, so the memory must be unpinned
    before it is released.

    Args:
        device: Device of the pool; on a CPU nothing is pinned.
        is_shared: Whether processes of this host are to map the memory. Then it has huge pages only
            where the system gives them to shared memory.

    Raises:
        ConfigError: There is not enough memory, or the process may not pin it.
    """

    is_of_device = False

    def __init__(
        self, num_pages: int, page_bytes: int, device: torch.device, *, is_shared: bool = False
    ) -> None:
        size = num_pages * page_bytes
        self.shared: MemoryFile | DeviceMemory | None = None
        try:
            if is_shared:
                self.shared = MemoryFile(size)
                memory = torch.from_numpy(self.shared.array).view(num_pages, page_bytes)
            else:
                memory = huge_zeros((num_pages, page_bytes), torch.uint8)
        except (OSError, TransferError) as error:
            raise ConfigError(f"a staging area of {size:,} bytes does not fit: {error}") from error
        self.pages: StagingPages = memory.numpy()
        self.tensor = memory
        if device.type == "cuda":
            pin(memory)
        # The memory stays referenced until it is unpinned, or until this object ends.
        self._release = weakref.finalize(self, unpin, memory, device)
        self._release.atexit = False

    def region(self) -> PoolRegion:
        return PoolRegion.of_array(self.tensor.numpy())

    def describe(self) -> str:
        return "host memory"

    def close(self) -> None:
        self._release()


def pin(memory: torch.Tensor) -> None:
    """Pins host memory for all CUDA devices. Raises ConfigError if CUDA refuses."""
    if (status := register(memory)) != 0:
        raise ConfigError(
            f"a staging area of {memory.nbytes:,} bytes cannot be pinned (CUDA error {status}); "
            "lower staging_bytes",
            param="staging_bytes",
        )


def register(memory: torch.Tensor) -> int:
    """Asks CUDA to pin host memory for all devices. Returns CUDA's status, 0 on success."""
    portable = 1
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostUnregister(memory.data_ptr()))
        if status != 0:
            logger.error("%d bytes cannot be unpinned (CUDA error %d)", memory.nbytes, status)


class DeviceStagingPages:
    """Implements `StagingMemory` over memory of the pool's device.

    Args:
        device: Device of the pool; on a CPU, for tests, it is ordinary memory.
        is_shared: Whether processes of this host are to map the memory.

    Raises:
        ConfigError: There is not that much memory.
    """

    is_of_device = True

    def __init__(
        self, num_pages: int, page_bytes: int, device: torch.device, *, is_shared: bool = False
    ) -> None:
        size = num_pages * page_bytes
        self.shared: MemoryFile | DeviceMemory | None = None
        try:
            if not is_shared:
                whole = torch.zeros(size, dtype=torch.uint8, device=device)
            elif device.type == "cuda":
                # PyTorch's tensor keeps the object that it was made of.
                self.shared = DeviceMemory(size, device.index or 0)
                whole = torch.as_tensor(self.shared, device=device)
            else:
                self.shared = MemoryFile(size)
                whole = torch.from_numpy(self.shared.array)
            self.tensor = whole.view(num_pages, page_bytes)
        except (torch.OutOfMemoryError, TransferError) as error:
            raise ConfigError(
                f"a staging area of {size:,} bytes does not fit {device}: {error}",
                param="staging_bytes",
            ) from error
        self.pages: StagingPages = _DeviceBytes(self.tensor)

    def region(self) -> PoolRegion:
        num_pages, page_bytes = self.tensor.shape
        device = self.tensor.device
        is_cuda = device.type == "cuda"
        return PoolRegion(
            address=self.tensor.data_ptr(),
            page_bytes=page_bytes,
            num_pages=num_pages,
            memory_type="VRAM" if is_cuda else "DRAM",
            device_id=(device.index or 0) if is_cuda else 0,
            keep_alive=self.tensor,
            settle=self._settle if is_cuda else None,
        )

    def describe(self) -> str:
        return f"memory of {self.tensor.device}"

    def close(self) -> None:
        """Does nothing: the memory is released with the last reference. The agents that registered
        it must be gone before.
        """

    def _settle(self) -> None:
        """Waits until the device has finished its enqueued work. Raises TransferError if the device
        did not finish within `SETTLE_TIMEOUT_S`.
        """
        device = self.tensor.device
        waiting = threading.Thread(target=torch.cuda.synchronize, args=(device,), daemon=True)
        waiting.start()
        waiting.join(SETTLE_TIMEOUT_S)
        if waiting.is_alive():
            raise TransferError(
                f"{device} did not finish its copies within {SETTLE_TIMEOUT_S:.0f} s; copies to "
                "other devices may be among them",
                may_still_arrive=True,
            )


class _DeviceBytes:
    """Implements `StagingPages` over device memory. Every access is a separate copy.

    It serves rare or slow uses only: pages sent as `data`, and injected faults.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._stream: torch.cuda.Stream | None = None
        if tensor.device.type == "cuda":
            # Zeroing runs before all later work of this stream, and waits for no step.
            torch.cuda.current_stream(tensor.device).synchronize()
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self.shape = tuple(tensor.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        with on_stream(self._stream):
            found: NDArray[np.uint8] = self._tensor[index].cpu().numpy()
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        with on_stream(self._stream):
            self._tensor[index] = torch.from_numpy(np.array(value, np.uint8)).to(
                self._tensor.device
            )
            if self._stream is not None:
                self._stream.synchronize()
