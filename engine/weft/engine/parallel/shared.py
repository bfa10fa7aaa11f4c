"""A group of ranks on one host that communicate through shared memory.

The segment holds counters, a ring of frames from rank 0 to all other ranks, and slots for sums:

    counter        counts                                       written by
    arrived[r]     sums to which rank r has brought its part     rank r
    stop           1: the group ends; 2 + r: and its GPUs        any rank
                   have waited for rank r
    posted         slots of the ring that were filled            rank 0
    taken[r]       slots of the ring that rank r has read        rank r
    ended[r]       frames that rank r has done                   rank r
    limit[r]       longest wait of rank r in nanoseconds         rank r

Native code (csrc/peers.h) waits, by some spins and then a futex, and adds the sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

import numpy as np
import torch
from weft.contract.arrays import Int32Array, Int64Array
from weft.contract.errors import ConfigError, RanksLost
from weft.engine.parallel.segment import Segment
from weft.kernels.ops.attention.spec import PageRanks
from weft.kernels.ops.peers.spec import LATE
from weft.kernels.shared import cpu

_COUNTER_BYTES = 64
_RING_SLOTS = 8
_SLOT_BYTES = 1 << 18
_SLOT_HEADER = 2
"""Numbers that precede the frame's in a slot of the ring: how many of the frame's numbers are in
this slot, and how many in later ones.
"""
_SLOT_NUMBERS = _SLOT_BYTES // 8 - _SLOT_HEADER
"""Most numbers of a frame in one slot."""
_SUM_FLOATS = 1 << 18
"""Most numbers that one exchange adds up. Longer sums are cut into several exchanges."""
_FOREVER_S = 1e9
_AWAKE_NS = 25_000_000
"""Nanoseconds that a rank spins for a frame before it sleeps, if it may. This is longer than most
steps of a GPU, so that rank 0, which sends a frame or two for each step, wakes no rank between
steps.
"""
_STOPPED, _LATE, _DIFFER = 1, 2, 1 << 20
"""Results of native waits; a rank's number is added to the last two (csrc/peers.h)."""


def segment_bytes(size: int) -> int:
    return _sums_at(size) + 2 * size * _SUM_FLOATS * 4


def _ring_at(size: int) -> int:
    return -(-(4 * size + 2) * _COUNTER_BYTES // 4096) * 4096


def _sums_at(size: int) -> int:
    return _ring_at(size) + _RING_SLOTS * _SLOT_BYTES


class SharedGroup:
    """One rank's view of the group; implements `weft.kernels.ops.peers.spec.CpuPeers`.

    One thread uses it; any thread may call `stop`.
    """

    device_type: Literal["cpu"] = "cpu"
    width: int | None = None
    sums = "in shared memory"
    """How partial sums are added up, in words."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        size: int,
        limit_s: float,
        *,
        is_checked: bool = False,
        whole: SharedGroup | None = None,
        first_rank: int = 0,
    ) -> None:
        """Joins a group.

        Args:
            segment: Segment of `segment_bytes(size)` bytes.
            limit_s: Longest wait for another rank in a step.
            is_checked: Whether ranks compare a hash of each sum at the next one.
            whole: The group of which this one adds up the sums of some consecutive ranks, and with
                which it ends; None: this group has all ranks of its host.
            first_rank: The first of these ranks, among those of all hosts.

        Raises:
            ConfigError: The native operations are not available.
        """
        native = cpu.native_cpu()
        if native is None:
            raise ConfigError(
                f"tp = {size} needs the native operations ({cpu.native_cpu_missing()}): install a "
                "C compiler, or take tp = 1",
                param="tp",
            )
        self.rank = rank
        self.size = size
        self._native = native
        self._segment = segment
        self._ring = [
            segment.bytes_at(_ring_at(size) + slot * _SLOT_BYTES, _SLOT_BYTES).view(np.int64)
            for slot in range(_RING_SLOTS)
        ]
        self._stop = self._counter(size) if whole is None else whole.stop_address
        self._first_rank = first_rank if whole is None else whole.rank - rank
        self._whole = self if whole is None else whole
        self._parts: list[SharedGroup] = []
        self.pages: PageRanks | None = None
        self._posted = self._counter(size + 1)
        self._taken = [self._counter(size + 2 + other) for other in range(size)]
        self._ended = [self._counter(2 * size + 2 + other) for other in range(size)]
        self._struct = cpu.PeersStruct(
            rank,
            size,
            segment.address,
            self._stop,
            segment.address + _sums_at(size),
            _SUM_FLOATS,
            is_checked=is_checked,
        )
        self._num_slots = 0
        """Slots of the ring that this rank has filled or read."""
        self._num_free = 0
        """Slots of the ring that all other ranks are known to have read, and rank 0 may fill."""
        self.num_frames = 0
        """Frames that this rank has posted or taken."""
        self.num_alike = size
        """Ranks of a stage. A GPU that waits names a late rank by its number within the stage."""
        self._first_round = 0
        self.why: Callable[[], str] = lambda: "the group was stopped"
        """Returns the reason why the group has ended, for error messages."""
        self.limit(limit_s)
        if whole is not None:
            whole._parts.append(self)

    def limit(self, seconds: float) -> None:
        for part in self._parts:
            part.limit(seconds)
        self.limit_s = seconds
        self._struct.limit_ns = int(seconds * 1e9)
        ctypes.c_int64.from_address(self.limit_address).value = int(seconds * 1e9)

    @property
    def words(self) -> tuple[int, int]:
        """Address and number of bytes of the counters, whole pages."""
        return self._segment.address, _ring_at(self.size)

    @property
    def stop_address(self) -> int:
        """Address of the stop word, uint32."""
        return self._stop

    @property
    def limit_address(self) -> int:
        """Address of the longest wait in nanoseconds, int64."""
        return self._counter(3 * self.size + 2 + self.rank)

    @property
    def reason(self) -> str:
        if self._whole is not self:
            return self._whole.reason
        late = ctypes.c_uint32.from_address(self._stop).value - LATE
        if late < 0:
            return self.why()
        ranks = range(self._first_rank + late, self._first_rank + self.size, self.num_alike)
        told = " or ".join(map(str, ranks))
        return f"rank {told} has not come to a sum by {self._step} within {self.limit_s:g} s"

    def add_sum(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds in float32, in the order of the ranks, and rounds once. Raises RanksLost if a rank
        is gone, or has not come in time.
        """
        part = partial.float()
        out = torch.empty_like(residual)
        status = self._native.add_sum(
            ctypes.byref(self._struct),
            part.data_ptr(),
            part.numel(),
            residual.data_ptr(),
            out.data_ptr(),
            residual.dtype == torch.bfloat16,
        )
        self.check(status)
        return out

    def meet(self) -> None:
        """Waits until all ranks have come to this call. Raises as `add_sum` does."""
        nothing = torch.zeros(1)
        self.add_sum(nothing, nothing)

    def native(self) -> cpu.PeersStruct:
        return self._struct

    def check(self, lost: int) -> None:
        """Raises RanksLost if the native code's status `lost` says that a rank is gone, has not
        come in time, or has had other sums.
        """
        if lost:
            number = self._struct.round - self._first_round + 1
            if lost >= _DIFFER:
                self.fail(
                    f"rank {self._first_rank + lost - _DIFFER} has another stream than rank "
                    f"{self._whole.rank} before sum {number} of {self._step}"
                )
            self._lose(lost, self._first_rank + lost - _LATE, f"sum {number} of {self._step}")

    def post(self, parts: Sequence[Int64Array | Int32Array]) -> None:
        """Sends a frame, the concatenation of its parts, to all other ranks. Raises RanksLost if a
        rank no longer reads frames.
        """
        left = sum(map(len, parts))
        if left <= _SLOT_NUMBERS:
            self._fill_slot(parts, left, 0)
        else:
            frame = np.concatenate(parts, dtype=np.int64)
            for begin in range(0, len(frame), _SLOT_NUMBERS):
                piece = frame[begin : begin + _SLOT_NUMBERS]
                left -= len(piece)
                self._fill_slot((piece,), len(piece), left)
        self.num_frames += 1
        for group in (self, *self._parts):
            group._first_round = group._struct.round

    def _fill_slot(
        self, parts: Sequence[Int64Array | Int32Array], count: int, num_later: int
    ) -> None:
        """Waits until all other ranks have read the slot's earlier content."""
        if not self._num_free:
            self._num_free = self._await_room()
        slot = self._ring[self._num_slots % _RING_SLOTS]
        slot[0], slot[1] = count, num_later
        np.concatenate(parts, out=slot[_SLOT_HEADER : _SLOT_HEADER + count])
        self._num_slots += 1
        self._num_free -= 1
        self._native.announce(self._posted, self._num_slots & 0xFFFFFFFF)

    def _await_room(self) -> int:
        """Waits until a slot of the ring is free, and returns the number of free slots."""
        free = _RING_SLOTS
        for rank in range(1, self.size):
            least = self._num_slots + 1 - _RING_SLOTS
            self._await(self._taken[rank], least, rank, "room for a step")
            taken = ctypes.c_uint32.from_address(self._taken[rank]).value
            free = min(free, 1 + (taken - least & 0xFFFFFFFF))
        return free

    def take(self, *, spins: bool = False) -> Int64Array:
        """The next frame of rank 0. Waits for it without a limit.

        Args:
            spins: Whether the rank spins for some time before it sleeps, so that rank 0 need not
                wake it. Spinning takes a core, and yields it to any thread that needs it.

        Raises:
            RanksLost: The group ends.
        """
        parts: list[Int64Array] = []
        left = 1
        while left:
            awake_ns = _AWAKE_NS if spins else 0
            self._await(self._posted, self._num_slots + 1, 0, "a step", _FOREVER_S, awake_ns)
            slot = self._ring[self._num_slots % _RING_SLOTS]
            count, left = slot[:_SLOT_HEADER].tolist()
            parts.append(slot[_SLOT_HEADER : _SLOT_HEADER + count].copy())
            self._num_slots += 1
            self._native.announce(self._taken[self.rank], self._num_slots & 0xFFFFFFFF)
        self.num_frames += 1
        for group in (self, *self._parts):
            group._first_round = group._struct.round
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def end(self) -> None:
        """Announces that this rank has finished all frames that it has taken."""
        self._native.announce(self._ended[self.rank], self.num_frames & 0xFFFFFFFF)

    def await_ended(self) -> None:
        """Waits until all other ranks have finished all frames. Raises RanksLost if a rank is gone,
        or has not finished them in time.
        """
        self.await_ended_by(range(1, self.size), self.num_frames)

    def await_ended_by(self, ranks: Sequence[int], num_frames: int) -> None:
        """Waits until these ranks have finished so many frames. Raises as `await_ended` does."""
        for rank in ranks:
            self._await(self._ended[rank], num_frames, rank, f"the end of step {num_frames}")

    def stop(self) -> None:
        """Ends the group: from now on every wait of every rank fails. Any thread may call this."""
        self._native.announce(self._stop, 1)

    @property
    def is_stopped(self) -> bool:
        return bool(ctypes.c_uint32.from_address(self._stop).value)

    @property
    def _step(self) -> str:
        return f"step {self._whole.num_frames}"

    def _counter(self, index: int) -> int:
        return self._segment.address + index * _COUNTER_BYTES

    def _await(
        self,
        counter: int,
        count: int,
        rank: int,
        what: str,
        limit_s: float | None = None,
        awake_ns: int = 0,
    ) -> None:
        limit_ns = int((self.limit_s if limit_s is None else limit_s) * 1e9)
        count &= 0xFFFFFFFF
        status = self._native.await_count(counter, count, self._stop, limit_ns, awake_ns)
        if status:
            self._lose(status, self._first_rank + rank, what)

    def _lose(self, status: int, rank: int, what: str) -> None:
        if status == _STOPPED:
            raise RanksLost(f"{self.reason}, before {what}")
        self.fail(f"rank {rank} has not come to {what} within {self.limit_s:g} s")

    def fail(self, why: str) -> NoReturn:
        """Ends the group for this reason. Raises RanksLost."""
        self._whole.why = lambda: why
        self.stop()
        raise RanksLost(why)
