"""Memory of a GPU whose addresses outlive it.

PyTorch takes the memory of an arena from here: addresses that are reserved, and memory of the
driver that is mapped there. While the rank sleeps the memory is unmapped and released; afterwards
other memory is mapped at the same addresses. Captured graphs and tables of pointers so stay right.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any

import torch
from weft.contract.errors import ConfigError
from weft.engine.executor.memory_spans import Span, spans_of, without

logger = logging.getLogger(__name__)

_PINNED, _DEVICE, _READ_WRITE, _NO_MEMORY = 1, 1, 3, 2


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("metadata", c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class Driver:
    """Memory of one GPU by the calls of its driver. Each needs the GPU's context in its thread."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"the GPU's driver cannot be loaded: {error}") from error
        number = torch.cuda.current_device() if device.index is None else device.index
        location = _Location(_DEVICE, number)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        size = c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), 0
        )
        self.granularity = int(size.value)

    def reserve(self, size: int) -> int:
        """Reserves addresses without memory."""
        address = c_uint64()
        self._call(
            *("cuMemAddressReserve", ctypes.byref(address), c_size_t(size), c_size_t(0)),
            *(c_uint64(0), c_uint64(0)),
        )
        return int(address.value)

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def map(self, address: int, size: int) -> int:
        """Maps new memory; returns its handle. Raises ConfigError if there is not enough."""
        handle = c_uint64()
        self._call(
            *("cuMemCreate", ctypes.byref(handle), c_size_t(size)),
            *(ctypes.byref(self._properties), c_uint64(0)),
        )
        try:
            self._call(
                "cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), handle, c_uint64(0)
            )
            self._call(
                *("cuMemSetAccess", c_uint64(address), c_size_t(size)),
                *(ctypes.byref(self._access), c_size_t(1)),
            )
        except ConfigError:
            # Memory that was mapped stays so if its access cannot be set. Where it was not mapped,
            # the call fails, which changes nothing.
            self._library.cuMemUnmap(c_uint64(address), c_size_t(size))
            self._library.cuMemRelease(handle)
            raise
        return int(handle.value)

    def unmap(self, address: int, size: int) -> None:
        """Takes the memory from the addresses, which stay reserved."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def release(self, handle: int) -> None:
        """Gives memory back that is mapped nowhere."""
        self._call("cuMemRelease", c_uint64(handle))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            what = "the GPU has not enough memory" if status == _NO_MEMORY else f"error {status}"
            raise ConfigError(f"{name}: {what}")


class _Piece:
    """One piece of memory that PyTorch has taken."""

    def __init__(self, address: int, size: int, handle: int) -> None:
        self.address, self.size = address, size
        self.handle: int | None = handle
        """None: there is no memory behind the addresses."""


class _Pieces:
    """The memory that PyTorch has taken for one pool. PyTorch may give pieces back after their
    arena has gone, and calls functions that Python made for it, and its own allocator object, of
    which it has only the address. So all of these live as long as the process.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.lock = threading.RLock()
        """Taking memory may run Python's garbage collector, which may give memory back."""
        self.taken: dict[int, _Piece] = {}
        self.freed: list[Span] = []
        """Pieces that were given back since the arena has last looked."""
        self.take = ctypes.CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)(self.on_take)
        self.free = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p)(self.on_free)
        self.allocator: Any = None

    def pool(self) -> Any:
        """A pool of PyTorch's whose memory comes from here."""
        take, free = (ctypes.cast(one, c_void_p).value for one in (self.take, self.free))
        assert take is not None
        assert free is not None
        self.allocator = torch._C._cuda_customAllocator(take, free)
        _ALL.append(self)
        return torch.cuda.MemPool(self.allocator)

    def on_take(self, size: int, device: int, stream: int | None) -> int:
        # An exception cannot pass through PyTorch's code, which takes 0 for "no memory".
        try:
            with self.lock:
                rounded = -(-size // self.driver.granularity) * self.driver.granularity
                address = self.driver.reserve(rounded)
                try:
                    handle = self.driver.map(address, rounded)
                except ConfigError:
                    self.driver.free(address, rounded)
                    return 0
                self.taken[address] = _Piece(address, rounded, handle)
                return address
        except ConfigError:
            return 0

    def on_free(self, address: int | None, size: int, device: int, stream: int | None) -> None:
        with self.lock:
            piece = None if address is None else self.taken.pop(address, None)
            if piece is None:
                return
            self.freed.append(Span(piece.address, piece.address + piece.size))
            try:
                try:
                    self.give_back(piece)
                finally:
                    if piece.handle is None:
                        self.driver.free(piece.address, piece.size)
            except ConfigError as error:
                # An exception cannot pass through PyTorch's code.
                logger.error("%s bytes of the GPU are lost: %s", f"{size:,}", error.message)

    def give_back(self, piece: _Piece) -> None:
        """Gives a piece's memory back. Raises ConfigError if the driver fails. Memory that it has
        unmapped and does not release is lost, and no longer the piece's.
        """
        if piece.handle is None:
            return
        self.driver.unmap(piece.address, piece.size)
        handle, piece.handle = piece.handle, None
        self.driver.release(handle)


_ALL: list[_Pieces] = []
_GONE: list[Any] = []
"""Pools whose arenas have gone, until `_end_gone`. PyTorch aborts the process where a pool ends
while tensors are made in another one, and the garbage collector may run there.
"""
_taking: list[object] = []
"""One for each block in which tensors are made in some arena."""


def _end_gone() -> None:
    if not _taking:
        _GONE.clear()


class DeviceArena:
    """Memory of one kind: weights, or KV pools.

    Args:
        tensors: Returns the tensors whose content is not kept when the memory leaves without being
            put away: an update fills them. None: nothing is ever kept.
        host_bytes: Pinned memory of the host that is taken at once, for what is put away.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tensors: Callable[[], Sequence[torch.Tensor]] | None = None,
        host_bytes: int = 0,
        driver: Driver | None = None,
    ) -> None:
        self._device = device
        self._driver = driver or Driver(device)
        self.tensors = tensors
        self._memory = _Pieces(self._driver)
        self._is_away = False
        self._kept = list[Span]()
        """What was put away, in the order in which it lies in the host's memory."""
        self._host = torch.empty(0, dtype=torch.uint8)
        if host_bytes:
            self._host = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=True)
        self._pool: Any = None

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Tensors that are made on the GPU inside, by any thread, lie in the arena."""
        _end_gone()
        if self._pool is None:
            self._pool = self._memory.pool()
            weakref.finalize(self, _GONE.append, self._pool).atexit = False
        number = torch.cuda.current_device() if self._device.index is None else self._device.index
        # `torch.cuda.use_mem_pool` is for one thread, and several load a model.
        _taking.append(self)
        torch._C._cuda_beginAllocateToPool(number, self._pool.id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(number, self._pool.id)
            torch._C._cuda_releasePool(number, self._pool.id)
            _taking.pop()

    @property
    def num_bytes(self) -> int:
        """Bytes of the GPU's memory that the arena has now."""
        return sum(piece.size for piece in self._memory.taken.values() if piece.handle is not None)

    def leave(self, *, keeps: bool) -> None:
        """As `Memory.leave`. Without `keeps` the content beside `tensors` is put away all the same,
        such as tables that were computed while the model was loaded.
        """
        if self._is_away:
            if not keeps:
                self._forget()
            return
        kept = list[Span]()
        if self.tensors is not None:
            kept = [
                Span(one.address, one.address + one.size) for one in self._memory.taken.values()
            ]
            kept = kept if keeps else without(kept, spans_of(self.tensors()))
        self._put_away(kept)
        torch.cuda.synchronize(self._device)
        self._is_away = True  # From the first piece on: `come_back` maps those that have gone.
        for piece in self._memory.taken.values():
            try:
                self._memory.give_back(piece)
            except ConfigError as error:
                raise OSError(f"not all memory was given back: {error.message}") from error

    def come_back(self) -> None:
        if not self._is_away:
            return
        torch.cuda.empty_cache()
        for piece in self._memory.taken.values():
            if piece.handle is None:
                piece.handle = self._driver.map(piece.address, piece.size)
                if self.tensors is None:
                    self._view(piece.address, piece.address + piece.size).zero_()
        at, dropped = 0, self._dropped
        for begin, end in self._kept:
            place = self._host[at : at + end - begin]
            if begin not in dropped:
                self._view(begin, end).copy_(place, non_blocking=True)
            at += end - begin
        torch.cuda.synchronize(self._device)
        self._memory.freed.clear()
        self._is_away = False

    @property
    def _dropped(self) -> set[int]:
        """Begins of those spans that were put away and whose memory was freed meanwhile. It may be
        another's.
        """
        freed = self._memory.freed
        return {
            begin for begin, _ in self._kept if any(first <= begin < last for first, last in freed)
        }

    def _put_away(self, spans: Sequence[Span]) -> None:
        size = sum(end - begin for begin, end in spans)
        if size > len(self._host):
            try:
                self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                raise ConfigError(
                    f"the host has no {size:,} bytes for weights that sleep: {error}",
                    param="sleep_host_bytes",
                ) from error
        at = 0
        for begin, end in spans:
            place = self._host[at : at + end - begin]
            place.copy_(self._view(begin, end), non_blocking=True)
            at += end - begin
        self._kept = list(spans)
        self._memory.freed.clear()

    def _forget(self) -> None:
        """Keeps only what an update does not fill. The host's memory stays, for the next time."""
        parameters = [] if self.tensors is None else spans_of(self.tensors())
        kept, at, to, dropped = list[Span](), 0, 0, self._dropped
        for begin, end in self._kept:
            left = [] if begin in dropped else without([Span(begin, end)], parameters)
            for first, last in left:
                source = self._host[at + first - begin : at + last - begin].clone()
                self._host[to : to + last - first].copy_(source)
                kept.append(Span(first, last))
                to += last - first
            at += end - begin
        self._kept = kept
        self._memory.freed.clear()

    def _view(self, begin: int, end: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(begin, end - begin), device=self._device)


class _Bytes:
    """Bytes of a GPU, as PyTorch takes them from others."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
