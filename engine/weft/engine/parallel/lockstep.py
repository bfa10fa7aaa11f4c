"""Engines that enter steps together or not at all, and meet in shared memory.

Each engine plans steps of its own requests. What they share makes them wait for one another within
a step, so that one that has nothing to compute takes an empty step as soon as another has begun
one. If none has work, all sleep. The segment holds counters:

    counter        counts                                       written by
    stop           1: the group ends                            any rank
    step           steps that some rank has begun               any rank
    lost           1 + the rank that has ended                  any rank
    drain          1: the group drains                          any rank
    hand_backs     orders to hand requests back                 any rank
    limit          longest wait of a device in nanoseconds      any rank
    arrived[r]     meetings to which rank r has come            rank r
    idle[r]        1: rank r has no work                        rank r
    forms[2][r]    what rank r proposed at the last meetings    rank r
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from weft.contract.errors import ConfigError, RanksLost
from weft.engine.parallel.segment import Segment
from weft.kernels.ops.peers.spec import LATE
from weft.kernels.shared import cpu

_COUNTER_BYTES = 64
_STOP, _STEP, _LOST, _DRAIN, _HAND_BACKS, _LIMIT, _RANKS = range(7)
_FOREVER_NS = 1 << 60
_LOOK_S = 1.0
"""A sleeper looks for the end of the group this often."""
_STOPPED = 1
"""Result of a native wait (csrc/peers.h)."""
_PAGE = 4096


def lockstep_bytes(size: int) -> int:
    """Bytes of the counters of `size` ranks, whole pages."""
    return -(-(_RANKS + 4 * size) * _COUNTER_BYTES // _PAGE) * _PAGE


class Lockstep:
    """One rank's view of the group.

    One thread uses it; any thread may call `lose`.

    Args:
        segment: Segment of at least `lockstep_bytes(size)` bytes.
        limit_s: Longest wait for another rank in a step.
        wake: Called from another thread when the engine should turn: another rank has begun a step
            that this one has not, or the group has ended.

    Raises:
        ConfigError: The native operations are not available.
    """

    def __init__(
        self, segment: Segment, rank: int, size: int, limit_s: float, wake: Callable[[], None]
    ) -> None:
        native = cpu.native_cpu()
        if native is None:
            raise ConfigError(
                f"attention_dp = {size} needs the native operations ({cpu.native_cpu_missing()}): "
                "install a C compiler, or take attention_dp = 1",
                param="attention_dp",
            )
        self.rank, self.size = rank, size
        self.is_alone = True
        """Whether no other rank takes part yet: experts of others then add nothing."""
        self.num_steps = self.num_empty_steps = 0
        self.wait_s = 0.0
        """Time spent waiting for other ranks in steps."""
        self._native, self._segment, self._limit_s, self._wake = native, segment, limit_s, wake
        words = segment.bytes_at(0, lockstep_bytes(size)).view(np.uint32)
        self._words = words[:: _COUNTER_BYTES // 4]
        ctypes.c_int64.from_address(self.limit_address).value = int(limit_s * 1e9)
        self._round = 0
        self._num_hand_backs = 0
        self._why = ""
        self._entered = threading.Condition()
        self._listener = threading.Thread(target=self._listen, name="lockstep", daemon=True)

    def begin_together(self) -> None:
        """From now on all ranks take part in each step."""
        self.is_alone = False
        self._listener.start()

    # -- steps -----------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether another rank has begun a step that this one has not."""
        return not self.is_alone and self._behind()

    def begin(self) -> None:
        """Enters the next step. Other ranks follow."""
        with self._entered:
            self.num_steps += 1
            self._entered.notify()
        if not self.is_alone:
            self._native.announce(self._address(_STEP), self.num_steps & 0xFFFFFFFF)

    def meet(self) -> None:
        """Waits until all ranks have come to this call. Raises RanksLost if one is gone, or has not
        come in time.
        """
        self._round += 1
        count = self._round & 0xFFFFFFFF
        self._native.announce(self._address(_RANKS + self.rank), count)
        began_at = time.perf_counter()
        for rank in range(self.size):
            if rank != self.rank:
                self._await(rank, count)
        self.wait_s += time.perf_counter() - began_at

    def propose(self, form: int) -> list[int]:
        """Meets, and returns what each rank proposes, below 2**32. Raises RanksLost as `meet` does.

        Two sets of counters take turns: a rank proposes again in the first one only after all have
        come to the meeting of the second one, and so have read the first one.
        """
        begin = _RANKS + 2 * self.size + self._round % 2 * self.size
        self._words[begin + self.rank] = form
        self.meet()
        return [int(word) for word in self._words[begin : begin + self.size]]

    def _await(self, rank: int, count: int) -> None:
        status = self._native.await_count(
            self._address(_RANKS + rank), count, self._address(_STOP), int(self._limit_s * 1e9), 0
        )
        if status == _STOPPED:
            raise RanksLost(self.reason)
        if status:
            self.fail(self._told_late(rank), rank)

    def _told_late(self, rank: int) -> str:
        return (
            f"worker {rank} of {self.size} with shared experts has not come to step "
            f"{self.num_steps} within {self._limit_s:g} s"
        )

    def _listen(self) -> None:
        """Runs in a separate thread."""
        step, stop = self._address(_STEP), self._address(_STOP)
        while not self.is_stopped:
            wanted = self.num_steps + 1
            self._native.await_count(step, wanted & 0xFFFFFFFF, stop, _FOREVER_NS, 0)
            if self.num_steps < wanted:
                self._wake()
            with self._entered:
                while self.num_steps < wanted and not self.is_stopped:
                    self._entered.wait(_LOOK_S)
        self._wake()

    def _behind(self) -> bool:
        ahead = (int(self._words[_STEP]) - self.num_steps) & 0xFFFFFFFF
        return 0 < ahead < 1 << 31

    # -- drains ----------------------------------------------------------------------------------

    @property
    def drains(self) -> bool:
        """Whether the group drains."""
        return bool(self._words[_DRAIN])

    def set_drain(self, drains: bool) -> None:
        self._words[_DRAIN] = drains

    def order_hand_back(self) -> None:
        """Lets all ranks hand their requests back; this one has."""
        self._words[_HAND_BACKS] += 1
        self._num_hand_backs = int(self._words[_HAND_BACKS])

    def takes_hand_back(self) -> bool:
        """Whether another rank has ordered to hand requests back since the last call."""
        known, self._num_hand_backs = self._num_hand_backs, int(self._words[_HAND_BACKS])
        return known != self._num_hand_backs

    def all_idle(self, is_idle: bool) -> bool:
        """Whether no rank has work. `is_idle` is this rank's state, which others see."""
        own = self._words[_RANKS + self.size : _RANKS + 2 * self.size]
        own[self.rank] = is_idle
        return bool(own.all())

    # -- the end ---------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        return bool(self._words[_STOP])

    @property
    def is_lost(self) -> bool:
        """Whether a rank has ended or failed, and none has ended the group by `close`."""
        return bool(self._words[_LOST]) or int(self._words[_STOP]) >= LATE

    @property
    def reason(self) -> str:
        """Why the group has ended."""
        late = int(self._words[_STOP]) - LATE
        if late >= 0 and not self._why:
            return self._told_late(late)
        if self._why or not (lost := int(self._words[_LOST])):
            return self._why or "a worker with shared experts has ended, and all end together"
        return f"worker {lost - 1} of {self.size} with shared experts has ended or failed"

    def check(self) -> None:
        """Raises RanksLost if the group has ended."""
        if self.is_stopped:
            raise RanksLost(self.reason)

    def lose(self, why: str, rank: int) -> None:
        """Ends the group for this reason, which `rank` has caused. Any thread may call it."""
        self._why = self._why or why
        if not self._words[_LOST]:
            self._words[_LOST] = 1 + rank
        self._native.announce(self._address(_STOP), 1)
        with self._entered:
            self._entered.notify()

    def fail(self, why: str, rank: int) -> NoReturn:
        """As `lose`. Raises RanksLost."""
        self.lose(why, rank)
        raise RanksLost(why)

    def close(self) -> None:
        """Ends the group without a fault of this rank."""
        self._native.announce(self._address(_STOP), 1)
        with self._entered:
            self._entered.notify()
        if self._listener.is_alive():
            self._listener.join()

    # -- devices ---------------------------------------------------------------------------------

    @property
    def counters(self) -> tuple[int, int]:
        """Address and number of bytes of all counters, whole pages."""
        return self._segment.address, lockstep_bytes(self.size)

    @property
    def stop_address(self) -> int:
        """Address of the stop counter, uint32."""
        return self._address(_STOP)

    @property
    def limit_address(self) -> int:
        """Address of a device's longest wait in nanoseconds, int64."""
        return self._address(_LIMIT)

    def _address(self, counter: int) -> int:
        return self._segment.address + counter * _COUNTER_BYTES
