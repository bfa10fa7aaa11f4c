"""Reads parts of tensors from files into memory of any device, in several threads.

For a GPU, threads read into pinned memory, and copies to the device run during the next reads. For
a CPU they read to where the numbers are wanted. No file is mapped: the host's memory holds the
pinned buffers and the numbers that are being converted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from weft.contract.cores import num_cores
from weft.engine.base.device_copies import copy_stream
from weft.kernels.shared.formats.fp8 import FP8

_MAX_THREADS = 8
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 4 << 20, 8 << 20
"""Least and most bytes that a thread reads at a time; a row that has more is read whole. Only one
thread at a time runs Python, so small pieces are slow: on an H100's host eight threads read 22
GiB/s in pieces of 8 MiB, 14 in pieces of 4 MiB, and in pieces of 2 MiB less than the 6 that one
thread reads.
"""
_CHECKED_BYTES = 64 << 20
"""Bytes of FP8 that a GPU checks at a time, for which it needs as much memory."""
_FP8_NAN = 0x7F
"""Bits of FP8's only value that is not finite, without its sign."""
_SMALL_BYTES = 64 << 10
"""Size up to which a tensor for a GPU is read and checked on the host. Pinning memory and starting
kernels takes longer than to read it.
"""
_BUFFERS_A_THREAD = 2
"""Buffers of a thread that reads for a GPU: one is copied while the thread reads into the other."""


class StoredTensor(NamedTuple):
    path: Path
    begin: int
    """Offset of the first byte in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class NotFiniteError(ValueError):
    """A tensor has a number that is not finite."""


class _Rows(NamedTuple):
    """Consecutive rows of a tensor in a file, and the part of each row that is wanted."""

    begin: int
    """Offset of the first row's first byte in the file."""
    num_rows: int
    shape: tuple[int, ...]
    """Shape of a row in the file."""
    dtype: torch.dtype
    part: tuple[int | slice, ...]
    """The part of each row to read; empty: the whole row."""

    @classmethod
    def of(cls, stored: StoredTensor, slices: Sequence[int | slice]) -> _Rows:
        """The rows of a part of a tensor, along the first axis whose index is not one number."""
        begin, shape, left = stored.begin, stored.shape, list(slices)
        while left and isinstance(left[0], int):
            begin += range(shape[0])[left[0]] * math.prod(shape[1:]) * stored.dtype.itemsize
            shape, left = shape[1:], left[1:]
        shape = shape or (1,)
        first = left[0] if left else slice(None)
        assert isinstance(first, slice)
        rows = range(shape[0])[first]
        begin += rows.start * math.prod(shape[1:]) * stored.dtype.itemsize
        axes = zip(shape[1:], left[1:], strict=False)
        is_whole = all(one == slice(None) or range(n)[one] == range(n) for n, one in axes)
        part = () if is_whole else tuple(left[1:])
        return cls(begin, len(rows), shape[1:], stored.dtype, part)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def wanted(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(self.dtype).view(-1, *self.shape)[:, *self.part]


class _Buffer:
    """Host memory that a thread reads into, pinned if its content goes to a GPU."""

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8. Waits until no copy reads it any more."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._memory.numel() < size:
            most = max(size, _MAX_PIECE_BYTES)
            self._memory = torch.empty(
                0, dtype=torch.uint8
            )  # Frees the old buffer before the new one exists.
            self._memory = torch.empty(most, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._memory[:size]

    def sent(self) -> None:
        """Call it when copies out of the buffer were enqueued on the current stream."""
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()


class _Way(NamedTuple):
    buffers: SimpleQueue[_Buffer]
    stream: torch.cuda.Stream | None
    """Stream of the copies; None: the device is a CPU."""


class TensorReads:
    """Threads that read tensors, and their buffers. Both are made when first needed."""

    def __init__(self) -> None:
        self._num_threads = min(_MAX_THREADS, num_cores())
        self._threads: ThreadPoolExecutor | None = None
        self._ways: dict[torch.device, _Way] = {}

    def close(self) -> None:
        """Ends the threads and frees the buffers. A later read makes new ones."""
        if self._threads is not None:
            self._threads.shutdown()
        self._threads = None
        self._ways.clear()

    def read(
        self, stored: StoredTensor, slices: Sequence[int | slice], out: torch.Tensor
    ) -> torch.Tensor | None:
        """Copies a part of a tensor, converted to the dtype of `out`.

        On a GPU the copy may still run on return; later work of the current stream waits for it.

        Args:
            slices: As in `TensorSlice`.
            out: Contiguous, of the part's shape.

        Returns:
            Whether all numbers of `out` are finite, [] bool, which a GPU may still compute. None:
            they are, or are no floats.

        Raises:
            OSError: The file cannot be read.
            EOFError: The file ends too early.
            NotFiniteError: A number of `out` is not finite, and that was found on the host.
        """
        rows = _Rows.of(stored, slices)
        way = self._way_to(out.device)
        if way.stream is not None and out.nbytes <= _SMALL_BYTES:
            host = torch.empty_like(out, device="cpu")
            self.read(stored, slices, host)
            out.copy_(host, non_blocking=True)  # The driver has read ordinary memory on return.
            return None
        # Bytes may be cut anywhere. Numbers that are to be converted are cut between rows.
        is_direct = not rows.part and rows.dtype == out.dtype
        unit = 1 if is_direct else rows.row_bytes
        count = rows.num_rows * rows.row_bytes // max(1, unit)
        if not count:
            return None
        target = out.view(-1).view(torch.uint8) if is_direct else out.view(out.shape or (1,))
        share = count * unit // (self._num_threads // 2 or 1)
        piece = max(1, min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, share)) // unit)
        if is_direct:
            piece -= piece % out.itemsize
        if way.stream is not None:
            way.stream.wait_stream(torch.cuda.current_stream(out.device))
        with stored.path.open("rb", buffering=0) as file:
            part = None if is_direct else rows
            read = partial(_read_piece, file.fileno(), part, rows.begin, target, out.dtype, way)
            firsts = range(0, count, piece)
            if len(firsts) == 1:
                read(0, count)
            else:
                self._read_all(read, [(first, min(first + piece, count)) for first in firsts])
        if way.stream is None:
            return None
        torch.cuda.current_stream(out.device).wait_stream(way.stream)
        return are_finite(out) if out.is_floating_point() else None

    def _read_all(
        self, read: Callable[[int, int], None], pieces: Sequence[tuple[int, int]]
    ) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, "read")
        futures = [self._threads.submit(read, *piece) for piece in pieces]
        wait(futures)  # After an error no thread may still write to the target.
        for future in futures:
            future.result()

    def _way_to(self, device: torch.device) -> _Way:
        if device not in self._ways:
            buffers: SimpleQueue[_Buffer] = SimpleQueue()
            stream = copy_stream(device)
            has_copies = stream is not None
            for _ in range(self._num_threads * (_BUFFERS_A_THREAD if has_copies else 1)):
                buffers.put(_Buffer(is_pinned=has_copies))
            self._ways[device] = _Way(buffers, stream)
        return self._ways[device]


def are_finite(values: torch.Tensor) -> torch.Tensor:
    """Whether all of these floats, at least one, are finite: [] bool on their device."""
    if values.dtype == FP8:
        bits = values.view(torch.uint8).view(-1)
        firsts = range(0, len(bits), _CHECKED_BYTES)
        parts = (bits[first : first + _CHECKED_BYTES] & _FP8_NAN for first in firsts)
        return torch.stack([(part != _FP8_NAN).all() for part in parts]).all()
    # `aminmax` reads the values once and allocates nothing. It returns NaN for both if any value
    # is NaN. NaN, and zero times infinity, equal nothing.
    lowest, highest = values.aminmax()
    return lowest * 0 == highest * 0


def _read_piece(
    file: int,
    rows: _Rows | None,
    begin: int,
    target: torch.Tensor,
    dtype: torch.dtype,
    way: _Way,
    first: int,
    end: int,
) -> None:
    """Reads units `first` to `end` of a target of `dtype`. A unit is a row; without `rows` it is a
    byte, and byte 0 of the target is the file's byte `begin`. Numbers for a CPU are also checked.
    """
    own, unit = target[first:end], 1 if rows is None else rows.row_bytes
    at, size = begin + first * unit, (end - first) * unit
    if rows is None and way.stream is None:
        _fill(file, own, at)
        _check(own.view(dtype))
        return
    buffer = way.buffers.get()
    try:
        memory = buffer.take(size)
        _fill(file, memory, at)
        if way.stream is None:
            assert rows is not None
            own.copy_(rows.wanted(memory))
            _check(own)
            return
        with torch.cuda.stream(way.stream):
            if rows is None:
                own.copy_(memory, non_blocking=True)
            else:
                own.copy_(rows.wanted(memory.to(target.device, non_blocking=True)))
            buffer.sent()
    finally:
        way.buffers.put(buffer)


def _check(values: torch.Tensor) -> None:
    if values.is_floating_point() and not bool(are_finite(values)):
        raise NotFiniteError


def _fill(file: int, memory: torch.Tensor, at: int) -> None:
    bytes_of: Any = memory.numpy()
    view = memoryview(bytes_of)
    while view:
        done = os.preadv(file, [view], at)
        if not done:
            raise EOFError("the file ends too early")
        view, at = view[done:], at + done
