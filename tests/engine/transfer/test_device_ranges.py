"""Ranges of GPU memory that another process has allocated, with a driver that stands for CUDA's."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from weft.contract.weights import GpuAllocation
from weft.pages.transfer import device_memory, device_ranges
from weft.pages.transfer.device_ranges import ForeignRanges, allocations_of
from weft.pages.transfer.nixl_ranges import MemoryRange
from weft.pages.transfer.nixl_wire import TransferError

_NOT_READY = 600


class Driver:
    """Memory of this process as if it were that of GPUs. A handle is an address in 64 bytes."""

    def __init__(self) -> None:
        self.allocations: dict[int, NDArray[np.uint8]] = {}
        self.opened: list[int] = []
        self.num_streams = 0
        self.is_stalled = False

    def allocate(self, num_bytes: int) -> int:
        memory = np.random.default_rng().integers(0, 256, num_bytes, np.uint8)
        self.allocations[memory.ctypes.data] = memory
        return memory.ctypes.data

    def polled(self) -> None:
        """Called when the end of copies is asked for."""

    @contextmanager
    def on(self, device_id: int) -> Iterator[None]:
        yield

    def call(self, name: str, *arguments: Any, accepted: int = 0) -> int:
        values = [getattr(one, "_obj", one) for one in arguments]
        match name:
            case "cuMemGetAddressRange_v2":
                begin, size, address = values
                begin.value, size.value = self._around(address.value)
            case "cuIpcGetMemHandle":
                ctypes.memmove(ctypes.addressof(values[0]), _handle(values[1].value), 64)
            case "cuIpcOpenMemHandle_v2":
                address, handle, _ = values
                (found,) = struct.unpack_from("<Q", bytes(handle))
                if found not in self.allocations:
                    raise TransferError("cuIpcOpenMemHandle_v2: CUDA error 1")
                address.value = found
                self.opened.append(found)
            case "cuIpcCloseMemHandle":
                self.opened.remove(values[0].value)
            case "cuStreamCreate":
                self.num_streams += 1
            case "cuStreamDestroy_v2":
                self.num_streams -= 1
            case "cuMemcpyDtoDAsync_v2":
                to, begin, count, _ = values
                ctypes.memmove(to.value, begin.value, count)
            case "cuEventQuery":
                self.polled()
                return _NOT_READY if self.is_stalled else 0
        return 0

    def _around(self, address: int) -> tuple[int, int]:
        for begin, memory in self.allocations.items():
            if begin <= address < begin + len(memory):
                return begin, len(memory)
        raise TransferError("cuMemGetAddressRange_v2: CUDA error 1")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(device_memory, "_driver", lambda: found)
    yield found
    assert found.num_streams == bool(found.opened)


def _handle(address: int) -> bytes:
    return struct.pack("<Q56x", address)


def _range(address: int, num_bytes: int) -> MemoryRange:
    return MemoryRange(address, num_bytes, "VRAM", 0)


def _pairs(driver: Driver, sizes: list[int]) -> list[tuple[MemoryRange, MemoryRange]]:
    """Some ranges of each of several allocations, for ranges of one."""
    found = []
    for size in sizes:
        ends = sorted(random.sample(range(1, size), 3))
        begin, own = driver.allocate(size), driver.allocate(size)
        for first, end in pairwise(ends):
            found.append((_range(own + first, end - first), _range(begin + first, end - first)))
    random.shuffle(found)
    return found


def _read(
    allocations: list[GpuAllocation], pairs: list[tuple[MemoryRange, MemoryRange]], **options: Any
) -> None:
    with closing(ForeignRanges(allocations, 0)) as memory:
        memory.read(pairs, **{"stall_s": 20.0, **options})


def _bytes(one: MemoryRange) -> bytes:
    return ctypes.string_at(one.address, one.num_bytes)


def test_ranges_come_and_nothing_beside_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_ranges, "_BATCH_BYTES", random.choice([1, 2000, 1 << 30]))
    pairs = _pairs(driver, [random.randrange(10, 5000) for _ in range(9)])
    allocations = allocations_of([theirs for _, theirs in pairs])
    assert len(allocations) == 9
    before = {begin: memory.copy() for begin, memory in driver.allocations.items()}
    told = list[int]()
    _read(allocations, pairs, report=told.append)
    assert told[-1] == sum(own.num_bytes for own, _ in pairs)
    assert told == sorted(told)
    assert not driver.opened
    for own, theirs in pairs:
        assert _bytes(own) == _bytes(theirs)
        (begin,) = [at for at, one in before.items() if at <= own.address < at + len(one)]
        at = own.address - begin
        before[begin][at : at + own.num_bytes] = np.frombuffer(_bytes(own), np.uint8)
    for begin, memory in before.items():
        assert np.array_equal(memory, driver.allocations[begin])


def test_what_does_not_fit_is_refused_before_anything_is_written(driver: Driver) -> None:
    pairs = _pairs(driver, [500, 700])
    allocations = allocations_of([theirs for _, theirs in pairs])
    own, theirs = pairs[0]
    before = _bytes(own)

    def check(
        told: list[GpuAllocation], asked: list[tuple[MemoryRange, MemoryRange]], why: str
    ) -> None:
        with pytest.raises(TransferError, match=why) as found:
            _read(told, asked)
        assert not found.value.may_still_arrive
        assert _bytes(own) == before
        assert not driver.opened

    far = theirs._replace(address=theirs.address + 1000), own._replace(num_bytes=1000)
    check(allocations, [*pairs, (far[1], far[0])], "of memory of")
    check([], pairs, "was not told")
    below = theirs._replace(address=min(one.address for one in allocations) - 1)
    check(allocations, [*pairs, (own, below)], "was not told")
    check(allocations, [*pairs, (own, theirs._replace(device_id=1))], "was not told")
    gone = [replace(one, handle=_handle(1)) for one in allocations]
    check(gone, pairs, "cuIpcOpenMemHandle")


def test_a_caller_that_fails_meanwhile_waits_for_the_copies(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_ranges, "_BATCH_BYTES", 1)
    pairs = _pairs(driver, [500])
    allocations = allocations_of([theirs for _, theirs in pairs])
    opened_at_poll = list[int]()
    monkeypatch.setattr(driver, "polled", lambda: opened_at_poll.append(len(driver.opened)))

    def fail(num_bytes: int) -> None:
        assert num_bytes == pairs[0][0].num_bytes
        raise MemoryError

    with pytest.raises(MemoryError):
        _read(allocations, pairs, report=fail)
    assert opened_at_poll == [1] * len(pairs)
    assert not driver.opened


def test_a_gpu_that_hangs_keeps_the_memory_open(driver: Driver) -> None:
    pairs = _pairs(driver, [500])
    allocations = allocations_of([theirs for _, theirs in pairs])
    driver.is_stalled = True
    with pytest.raises(TransferError, match="copied nothing") as found:
        _read(allocations, pairs, stall_s=0.01)
    assert found.value.may_still_arrive
    assert driver.opened


def test_memory_without_a_handle_is_not_offered(driver: Driver) -> None:
    with pytest.raises(TransferError):
        allocations_of([_range(1, 8)])
