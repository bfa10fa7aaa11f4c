"""Ranges of GPU memory that another process of this host has allocated, copied by the GPU.

The copy takes NVLink between two GPUs and stays within one. The other process does nothing for it
and nothing protects the bytes from a change meanwhile, so readers compare digests. The driver
keeps opened memory until it is closed here, also if its process ends.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from weft.contract.weights import GpuAllocation
from weft.pages.transfer.device_memory import (
    Copy,
    DeviceCopy,
    DeviceStream,
    ForeignMemory,
    exported,
)
from weft.pages.transfer.nixl_ranges import MemoryRange
from weft.pages.transfer.nixl_wire import TransferError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BATCH_BYTES = 1 << 30
"""Bytes after which progress is reported."""
_SLEEP_S = 1e-4

_Pair = tuple[MemoryRange, MemoryRange]


@cache
def host_name() -> str:
    """Names the running system of this host: the same in all its containers, another one after
    each start. Empty: the system does not tell.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def allocations_of(ranges: Sequence[MemoryRange]) -> list[GpuAllocation]:
    """The allocations in which ranges of GPU memory lie, each once. Raises TransferError if the
    driver has no handle of one: of expandable segments, for example.
    """
    found = dict[tuple[int, int], GpuAllocation]()
    for one in ranges:
        handle, offset = exported(one.address, one.device_id)
        address = one.address - offset
        found[one.device_id, address] = GpuAllocation(
            address=address, device_id=one.device_id, handle=handle
        )
    return list(found.values())


class ForeignRanges:
    """Memory of GPUs that another process of this host has allocated, for a GPU of this process to
    read, until `close`. Used by one thread at a time.

    Raises:
        TransferError: The memory cannot be opened.
    """

    def __init__(self, allocations: Sequence[GpuAllocation], device_id: int) -> None:
        self._known = sorted(allocations, key=_place)
        self._opened = list[ForeignMemory]()
        """That of each allocation."""
        self._stream = DeviceStream(device_id)
        with ExitStack() as stack:
            stack.callback(self._stream.close)
            for one in self._known:
                self._opened.append(ForeignMemory(one.handle, device_id))
                stack.callback(self._opened[-1].close)
            self._stack = stack.pop_all()

    def read(
        self,
        pairs: Sequence[_Pair],
        *,
        stall_s: float,
        report: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Copies ranges of the other process, the second of each pair, to those of this one, which
        lie on the GPU and have the same lengths.

        Args:
            stall_s: Time without progress after which reading fails.
            report: Called with the bytes that have come so far, in the order of the pairs. What it
                raises is passed on when nothing arrives any more.

        Raises:
            TransferError: The memory is smaller than the ranges say; or the GPU failed. With
                `may_still_arrive` bytes may come later.
        """
        under_way = [(part, self._stream.copy(part)) for part in _batches(self._copies(pairs))]
        done = 0
        try:
            for part, copy in under_way:
                if not _has_ended(copy, stall_s):
                    self._stack.pop_all()  # Memory that may still be read is not closed.
                    raise TransferError(
                        f"the GPU has copied nothing for {stall_s:g} s", may_still_arrive=True
                    )
                done += sum(one.num_bytes for one in part)
                report(done)
        except TransferError:
            raise
        except BaseException:
            if not all(_has_ended(copy, stall_s) for _, copy in under_way):
                self._stack.pop_all()
            raise

    def close(self) -> None:
        """Raises TransferError if the driver refuses."""
        self._stack.close()

    def _copies(self, pairs: Sequence[_Pair]) -> list[Copy]:
        copies = list[Copy]()
        for own, theirs in pairs:
            place = theirs.device_id, theirs.address
            at = bisect_right(self._known, place, key=_place) - 1
            if at < 0 or self._known[at].device_id != theirs.device_id:
                raise TransferError("weights lie in memory of a GPU whose handle was not told")
            memory, offset = self._opened[at], theirs.address - self._known[at].address
            if offset + own.num_bytes > memory.num_bytes:
                raise TransferError(
                    f"{own.num_bytes:,} bytes from {offset:,} on, of memory of {memory.num_bytes:,}"
                )
            copies.append(Copy(own.address, memory.address + offset, own.num_bytes))
        return copies


def _has_ended(copy: DeviceCopy, stall_s: float) -> bool:
    """Waits for it for a time."""
    until = time.monotonic() + stall_s
    while copy.poll() == "pending":
        if time.monotonic() > until:
            return False
        time.sleep(_SLEEP_S)
    return True


def _place(one: GpuAllocation) -> tuple[int, int]:
    return one.device_id, one.address


def _batches(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    batch, size = list[Copy](), 0
    for one in copies:
        batch.append(one)
        size += one.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
