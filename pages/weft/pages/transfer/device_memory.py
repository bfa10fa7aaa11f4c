"""GPU memory that two processes of one host reach: CUDA IPC, through the driver alone.

The driver is there wherever a GPU is, whichever CUDA PyTorch was built for, and this module needs
no PyTorch. Memory is allocated here and not by PyTorch, whose expandable segments cannot be
exported, and whose blocks hold other tensors too.

Importing this module loads no driver.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Literal, NamedTuple

from weft.pages.transfer.nixl_wire import PoolRegion, TransferError, TransportMismatch

_NONCE_BYTES = 16
_EXPORT = struct.Struct("<64s16sQ")
"""The driver's handle, a random number that stands behind the memory, bytes of the memory."""
_NOT_READY = 600
_LAZY_PEER_ACCESS, _NON_BLOCKING, _NO_TIMING = 1, 1, 2

_own: weakref.WeakValueDictionary[bytes, DeviceMemory] = weakref.WeakValueDictionary()
"""This process's memory by its random number. The driver opens no handle where it was made."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * 64),)


class DeviceMemory:
    """Memory of a GPU that other processes can open. It is freed with this object, which
    everything that uses the memory must refer to. PyTorch makes tensors of it without a copy.

    Args:
        device_id: Ordinal of the GPU.

    Raises:
        TransferError: There is no driver, or not that much memory.
    """

    def __init__(self, num_bytes: int, device_id: int) -> None:
        self._device_id = device_id
        self._num_bytes = num_bytes
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        driver, address = _driver(), c_uint64()
        with driver.on(device_id):
            driver.call("cuMemAlloc_v2", ctypes.byref(address), num_bytes + _NONCE_BYTES)
            driver.call("cuMemsetD8_v2", address, 0, num_bytes)
            driver.call("cuMemcpyHtoD_v2", _at(address.value, num_bytes), self._nonce, _NONCE_BYTES)
        self.address = address.value
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        weakref.finalize(self, _free, self.address, device_id).atexit = False
        _own[self._nonce] = self

    def export(self) -> bytes:
        """What `DeviceWriter.open` needs in another process, 88 bytes.

        Raises:
            TransferError: The driver refuses; some containers forbid it.
        """
        driver, handle = _driver(), _IpcHandle()
        with driver.on(self._device_id):
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), c_uint64(self.address))
        whole = ctypes.string_at(ctypes.addressof(handle), ctypes.sizeof(handle))
        return _EXPORT.pack(whole, self._nonce, self._num_bytes)


class ForeignMemory:
    """Memory of a GPU that another process has allocated and exported, by the driver's handle,
    until `close`. PyTorch makes tensors of it without a copy. The process may have allocated it by
    itself: only memory of `cuMemAlloc`, and not expandable segments, has such handles.

    Args:
        handle: 64 bytes.
        device_id: Ordinal of the GPU.

    Raises:
        TransferError: The driver refuses the handle, as that of this process's own memory.
    """

    def __init__(self, handle: bytes, device_id: int) -> None:
        driver, address = _driver(), c_uint64()
        begin, size = c_uint64(), c_size_t()
        self._device_id = device_id
        with driver.on(device_id):
            copied = _IpcHandle.from_buffer_copy(handle)
            driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, _LAZY_PEER_ACCESS)
            self.address = address.value
            try:
                found = ctypes.byref(begin), ctypes.byref(size)
                driver.call("cuMemGetAddressRange_v2", *found, address)
            except TransferError:
                self.close()
                raise
        self.num_bytes = left = begin.value + size.value - self.address
        self.__cuda_array_interface__ = {
            "shape": (left,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def close(self) -> None:
        """No work on the memory may be under way."""
        driver = _driver()
        with driver.on(self._device_id):
            driver.call("cuIpcCloseMemHandle", c_uint64(self.address))


def exported(address: int, device_id: int) -> tuple[bytes, int]:
    """The driver's handle of the memory that has this address, 64 bytes, and the offset of the
    address in it: for another process's `ForeignMemory`.

    Raises:
        TransferError: The driver refuses.
    """
    driver, handle = _driver(), _IpcHandle()
    begin, size = c_uint64(), c_size_t()
    with driver.on(device_id):
        found = ctypes.byref(begin), ctypes.byref(size)
        driver.call("cuMemGetAddressRange_v2", *found, c_uint64(address))
        driver.call("cuIpcGetMemHandle", ctypes.byref(handle), begin)
    whole = ctypes.string_at(ctypes.addressof(handle), ctypes.sizeof(handle))
    return whole, address - begin.value


class DeviceCopy:
    """Copies that a GPU was told to make, to be polled until they end."""

    def __init__(self, device_id: int, event: c_void_p) -> None:
        self._device_id = device_id
        self._event: c_void_p | None = event

    def poll(self) -> Literal["pending", "done"]:
        """Returns whether the copies have ended.

        Raises:
            TransferError: The GPU failed.
        """
        if self._event is None:
            return "done"
        driver = _driver()
        with driver.on(self._device_id):
            if driver.call("cuEventQuery", self._event, accepted=_NOT_READY) == _NOT_READY:
                return "pending"
            driver.call("cuEventDestroy_v2", self._event)
        self._event = None
        return "done"


class Copy(NamedTuple):
    to: int
    begin: int
    """Address of the first byte to read."""
    num_bytes: int


class DeviceStream:
    """Enqueues copies of a GPU between any memory that it reaches, until `close` or the process's
    end. Used by one thread.

    Raises:
        TransferError: There is no driver.
    """

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._stream = c_void_p()
        driver = _driver()
        with driver.on(device_id):
            driver.call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)

    def copy(self, copies: Iterable[Copy]) -> DeviceCopy:
        """Raises TransferError if the GPU failed. What was enqueued before has ended then."""
        driver, event = _driver(), c_void_p()
        with driver.on(self._device_id):
            driver.call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
            try:
                for one in copies:
                    ends = c_uint64(one.to), c_uint64(one.begin)
                    driver.call("cuMemcpyDtoDAsync_v2", *ends, one.num_bytes, self._stream)
                driver.call("cuEventRecord", event, self._stream)
            except TransferError:
                driver.call("cuStreamSynchronize", self._stream)
                raise
        return DeviceCopy(self._device_id, event)

    def close(self) -> None:
        """Copies that are under way end by themselves."""
        driver = _driver()
        with driver.on(self._device_id):
            driver.call("cuStreamDestroy_v2", self._stream)


class DeviceWriter:
    """Copies from a region of this process's GPU into memory that other processes export. Used by
    one thread.

    Raises:
        TransferError: There is no driver.
    """

    def __init__(self, region: PoolRegion) -> None:
        self._region = region
        self._stream = DeviceStream(region.device_id)
        self._opened: set[int] = set()

    def open(self, export: bytes) -> int:
        """Address at which this process's GPU reaches another process's memory.

        Raises:
            TransferError: The GPUs do not reach each other, or the driver refuses.
        """
        handle, nonce, num_bytes = _EXPORT.unpack(export)
        if (memory := _own.get(nonce)) is not None:
            return memory.address
        driver, address = _driver(), c_uint64()
        with driver.on(self._region.device_id):
            driver.call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _IpcHandle.from_buffer_copy(handle),
                _LAZY_PEER_ACCESS,
            )
            self._opened.add(address.value)
            found = ctypes.create_string_buffer(_NONCE_BYTES)
            driver.call("cuMemcpyDtoH_v2", found, _at(address.value, num_bytes), _NONCE_BYTES)
        if found.raw != nonce:
            self.forget(address.value)
            raise TransportMismatch("GPU memory was opened that is not the owner's")
        return address.value

    def copy(self, address: int, copies: Sequence[tuple[int, int, int]]) -> DeviceCopy:
        """Enqueues copies to opened memory: (offset in the region, offset there, bytes) each.

        Raises:
            TransferError: The GPU failed. What was enqueued before has ended.
        """
        begin = self._region.address
        return self._stream.copy(
            Copy(address + offset, begin + source, count) for source, offset, count in copies
        )

    def forget(self, address: int) -> None:
        """Closes opened memory, behind all copies.

        Raises:
            TransferError: The GPU did not finish its copies.
        """
        if self._region.settle is not None:
            self._region.settle()
        if address in self._opened:
            self._opened.remove(address)
            driver = _driver()
            with driver.on(self._region.device_id):
                driver.call("cuIpcCloseMemHandle", c_uint64(address))


def _at(address: int, offset: int) -> c_uint64:
    return c_uint64(address + offset)


def _free(address: int, device_id: int) -> None:
    driver = _driver()
    with driver.on(device_id):
        driver.call("cuMemFree_v2", c_uint64(address))


@functools.cache
def _driver() -> _Driver:
    return _Driver()


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, ctypes.c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_char_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
}


_SHORT = frozenset(
    {
        *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemcpyDtoDAsync_v2"),
        *("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventDestroy_v2"),
    }
)
"""Functions that return at once. They keep the interpreter's lock: a thread that gives it away for
each of many copies waits each time until the engine's thread gives it back.
"""


class _Driver:
    def __init__(self) -> None:
        try:
            long, short = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
            self._functions = {
                name: getattr(short if name in _SHORT else long, name) for name in _ARGUMENTS
            }
        except (OSError, AttributeError) as error:
            raise TransferError(f"there is no CUDA driver: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            self._functions[name].argtypes = arguments
            self._functions[name].restype = c_int
        self._contexts: dict[int, c_void_p] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any, accepted: int = 0) -> int:
        """Returns the status: 0 or `accepted`. Raises TransferError at any other."""
        status: int = self._functions[name](*arguments)
        if status not in (0, accepted):
            words = c_char_p()
            self._functions["cuGetErrorName"](status, ctypes.byref(words))
            told = (words.value or b"unknown").decode()
            raise TransferError(f"{name}: CUDA error {status} ({told})")
        return status

    @contextmanager
    def on(self, device_id: int) -> Iterator[None]:
        """Makes the context of a GPU that PyTorch also uses current in this thread."""
        if (context := self._contexts.get(device_id)) is None:
            device, context = c_int(), c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), device_id)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))
