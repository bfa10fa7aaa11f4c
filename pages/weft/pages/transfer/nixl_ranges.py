"""Ranges of memory that other processes read over NIXL, such as the weights of a model.

The source registers its memory and takes no further part: over the lanes that are accepted here
the reader's agent fetches the bytes. So the source cannot be ended by a reader that dies, and after
the reader's agent is destroyed nothing lands any more. Nothing protects the bytes from a change
while they are read, so readers compare digests.
"""

from __future__ import annotations

import contextlib
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from weft.contract.start_work import CONNECTING, COPYING, START_WORK
from weft.pages.transfer.nixl_binding import Binding, is_destroyed, load_binding
from weft.pages.transfer.nixl_peer import ONE_SIDED_READ_LANES, new_agent_name
from weft.pages.transfer.nixl_wire import (
    MAX_AGENT_NAME_CHARS,
    NoOneSidedLane,
    TransferError,
    TransportMismatch,
)

MAX_RANGES_METADATA_BYTES = 16 << 20
_PIECE_BYTES = 16 << 20
"""Longest range of one descriptor."""
_AT_ONCE = 2
"""Batches under way: one is copied while the next one is prepared."""
_MAX_SLEEP_S = 1e-3


class MemoryRange(NamedTuple):
    address: int
    num_bytes: int
    memory_type: str
    """DRAM or VRAM."""
    device_id: int


_Pair = tuple[MemoryRange, MemoryRange]
"""A range of this process and one of another, of the same length."""


class _UnderWay(NamedTuple):
    handle: Any
    num_bytes: int


class RangesTarget(NamedTuple):
    """Where another process registered its ranges."""

    version: str
    """Of NIXL."""
    agent_name: str
    metadata: bytes


class SharedRanges:
    """Ranges of this process's memory that others may read until `close`."""

    def __init__(self, name: str, ranges: Sequence[MemoryRange]) -> None:
        """Registers the ranges, which must stay mapped. Raises TransportMismatch if NIXL cannot be
        used here, TransferError if it does not take the memory.
        """
        binding = load_binding()
        name = new_agent_name(name)
        with binding.calls("registering memory for others to read"):
            # Whoever reads does the work, so no thread is needed to make progress, but to accept
            # connections.
            agent = binding.create_agent(name, has_device=False)
            _register(agent, ranges)
            metadata = agent.get_agent_metadata()
        self.target = RangesTarget(binding.version, name, metadata)
        self._agent: Any = agent

    def close(self) -> None:
        """Takes the memory back: reads that are under way fail. Raises TransferError if it may
        still be registered.
        """
        if self._agent is None:
            return
        reference = weakref.ref(self._agent.agent)
        self._agent = None
        if not is_destroyed(reference):
            raise TransferError("memory cannot be deregistered: something holds its agent")


class RangesReader:
    """Reads ranges of one other process into memory of this one.

    Args:
        name: What is read, for messages.
        most_bytes: Bound of the bytes that `read` has under way at a time.
        stall_s: Time without progress after which reading fails.
    """

    def __init__(self, name: str, *, most_bytes: int, stall_s: float) -> None:
        self._what = name
        self._name = new_agent_name(name)
        self._most_bytes = most_bytes
        self._stall_s = stall_s
        self._agent: Any = None
        self.lanes = ""
        """The lanes that the bytes took, once something was read."""
        self._peer, self._has_lane = "", False
        self._reference: weakref.ref[Any] | None = None
        """The agent, once it should have ended."""

    def read(
        self,
        target: RangesTarget,
        pairs: Sequence[_Pair],
        report: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Copies each remote range, the second of a pair, to the local one of the same length.

        Args:
            report: Called with the bytes that have come so far. What it raises is passed on when
                nothing arrives any more.

        Raises:
            TransportMismatch: NIXL cannot be used, or not with this target; nothing was read.
            TransferError: The source is gone or does not answer. The local ranges have any bytes,
                and nothing arrives any more, unless `may_still_arrive` says so.
        """
        with START_WORK.time(CONNECTING):
            self.open(target, _whole([own for own, _ in pairs]))
        problem: Exception | None = None
        try:
            with START_WORK.time(COPYING):
                self._copy(pairs, report)
        except Exception as error:
            # The frames of the traceback hold handles of the agent, and would keep it from its end.
            traceback.clear_frames(error.__traceback__)
            problem = error
        if not self.close():
            raise TransferError(
                f"the agent that reads {self._what} cannot be ended", may_still_arrive=True
            ) from problem
        if problem is not None:
            raise problem

    def open(self, target: RangesTarget, ranges: Sequence[MemoryRange]) -> None:
        """Connects to the other process, unless that was done, and registers memory that is to be
        read into. Raises what `read` raises.
        """
        binding = load_binding()
        _check(target, binding.version)
        try:
            if self._agent is None:
                self._connect(binding, target)
            with binding.calls(f"registering memory for {self._what}"):
                _register(self._agent, ranges)
        except TransferError:
            self.close()
            raise

    def copy_rows(self, own: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> None:
        """Copies ranges of the other process's host memory after `open`.

        Args:
            own: [n, 3]: address, bytes and 0.
            theirs: Likewise.

        Raises:
            TransferError: As `read`, but bytes may arrive until `close`.
        """
        binding = load_binding()
        self._wait(binding, self._post(binding, ("DRAM", own, theirs), int(own[:, 1].sum())))

    def close(self) -> bool:
        """Ends all reads. Whether nothing arrives any more; if not, call it again."""
        if self._agent is not None:
            # No local variable has the agent: a frame of an exception would keep it from its end.
            self._reference = weakref.ref(self._agent.agent)
            self._agent = None
        return self._reference is None or is_destroyed(self._reference)

    def _connect(self, binding: Binding, target: RangesTarget) -> None:
        with binding.calls(f"reading {self._what}"):
            self._agent = binding.create_agent(self._name, has_device=False, has_thread=False)
        self._has_lane = False
        with binding.calls(f"connecting to another process for its {self._what}"):
            peer = self._agent.add_remote_agent(target.metadata)
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        if self._peer != target.agent_name:
            raise TransportMismatch("the metadata is of another agent than its name says")

    def _copy(self, pairs: Sequence[_Pair], report: Callable[[int], None]) -> None:
        binding = load_binding()
        under_way: deque[_UnderWay] = deque()
        done = 0
        try:
            for batch in _batches(pairs, self._most_bytes // _AT_ONCE):
                if len(under_way) == _AT_ONCE:
                    done += self._wait(binding, under_way.popleft())
                    report(done)
                rows = _rows([own for own, _ in batch]), _rows([other for _, other in batch])
                size = sum(own.num_bytes for own, _ in batch)
                under_way.append(self._post(binding, (batch[0][0].memory_type, *rows), size))
            while under_way:
                done += self._wait(binding, under_way.popleft())
                report(done)
        finally:
            for one in under_way:
                _release(binding, one)
            under_way.clear()
            self.lanes = binding.lanes(self._name) or self.lanes

    def _post(self, binding: Binding, rows: tuple[str, Any, Any], num_bytes: int) -> _UnderWay:
        kind, own, theirs = rows
        with binding.calls(f"reading {self._what}"):
            descriptors = [self._agent.get_xfer_descs(one, kind) for one in (own, theirs)]
            one = _UnderWay(
                self._agent.initialize_xfer("READ", *descriptors, self._peer), num_bytes
            )
        try:
            with binding.calls(f"reading {self._what}"):
                if not self._has_lane:
                    self._require_lane(binding)
                    self._has_lane = True
                self._agent.transfer(one.handle)  # A failure shows when it is waited for.
        except TransferError:
            _release(binding, one)
            raise
        return one

    def _wait(self, binding: Binding, one: _UnderWay) -> int:
        """Returns the bytes that have come."""
        until, sleep_s = time.monotonic() + self._stall_s, 1e-5
        try:
            while True:
                with binding.calls(f"reading {self._what}"):
                    state = self._agent.check_xfer_state(one.handle)
                if state == "DONE":
                    return one.num_bytes
                if state != "PROC":
                    raise TransferError(f"reading {self._what}: NIXL answered {state}")
                if time.monotonic() > until:
                    raise TransferError(f"no {self._what} have come for {self._stall_s:g} s")
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
        finally:
            _release(binding, one)

    def _require_lane(self, binding: Binding) -> None:
        lanes = binding.lanes(self._name) or ""
        names = {lane.partition("/")[0] for lane in lanes.split()}
        if names.isdisjoint(ONE_SIDED_READ_LANES):
            raise NoOneSidedLane(
                f"reading {self._what} would need the other process's help, and could end it: "
                f"{lanes or 'lanes unknown'}"
            )


def _check(target: RangesTarget, version: str) -> None:
    if target.version != version:
        raise TransportMismatch(f"nixl {target.version[:40]} there, {version} here: must equal")
    if not 0 < len(target.agent_name) <= MAX_AGENT_NAME_CHARS:
        raise TransportMismatch("bad length of the agent's name")
    if not 0 < len(target.metadata) <= MAX_RANGES_METADATA_BYTES:
        raise TransportMismatch("bad length of the agent's metadata")


def _register(agent: Any, ranges: Sequence[MemoryRange]) -> None:
    for kind in {one.memory_type for one in ranges}:
        rows = [(one.address, one.num_bytes, one.device_id, "") for one in ranges]
        own = [row for one, row in zip(ranges, rows, strict=True) if one.memory_type == kind]
        agent.register_memory(own, kind)


def _whole(ranges: Sequence[MemoryRange]) -> list[MemoryRange]:
    """The ranges without those that lie in others."""
    found: list[MemoryRange] = []
    for one in sorted(ranges, key=lambda one: (one.memory_type, one.device_id, one.address)):
        last = found[-1] if found else None
        if last is not None and last[2:] == one[2:] and one.address < last.address + last.num_bytes:
            end = max(last.address + last.num_bytes, one.address + one.num_bytes)
            found[-1] = last._replace(num_bytes=end - last.address)
        else:
            found.append(one)
    return found


def _batches(pairs: Sequence[_Pair], most_bytes: int) -> Iterator[list[_Pair]]:
    batch, size = list[_Pair](), 0
    for own, theirs in pairs:
        for at in range(0, own.num_bytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, own.num_bytes - at)
            if batch and (size + count > most_bytes or batch[-1][0][2:] != own[2:]):
                yield batch
                batch, size = [], 0
            one = own._replace(address=own.address + at, num_bytes=count)
            other = theirs._replace(address=theirs.address + at, num_bytes=count)
            batch.append((one, other))
            size += count
    if batch:
        yield batch


def _release(binding: Binding, one: _UnderWay) -> None:
    with contextlib.suppress(*binding.errors):
        one.handle.release()


def _rows(ranges: Sequence[MemoryRange]) -> list[tuple[int, int, int]]:
    return [(one.address, one.num_bytes, one.device_id) for one in ranges]
