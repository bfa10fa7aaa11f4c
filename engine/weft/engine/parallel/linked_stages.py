"""How stages with a GPU each, on several hosts, hand over the residual stream.

A link to a stage has a stream of its own, on which rows travel while the stages compute. Both ends
have room for the rows of two steps. A captured step reads and writes fixed memory, and its rows are
copied there from the link before it, and to the link after it: NCCL is outside of the graphs, which
could otherwise not be ended while it waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch
from weft.contract.errors import GroupFailed, RanksLost
from weft.engine.base.device_copies import Mark
from weft.engine.parallel.host_group import HostGroup
from weft.kernels.ops.peers.spec import Peers

_LOOK_S = 0.02
_REASON_S = 2.0
"""A stage whose link fails waits so long for the reason before it fails."""


class RowsLink(Protocol):
    """One end of a link between two consecutive stages, which rows pass in one direction, in order.
    Its calls wait for nothing on the host. They raise GroupFailed if the other end is gone.
    """

    def send(self, rows: torch.Tensor, written: Mark) -> Mark:
        """Sends contiguous rows once they are written; the mark is reached when they may be
        overwritten.
        """
        ...

    def receive(self, out: torch.Tensor, left: Mark | None) -> Mark:
        """Receives rows once what was in `out` has been left; the mark is reached when they have
        come.
        """
        ...

    def abort(self) -> None:
        """Ends what is under way; its marks are reached."""
        ...


class BorderRows(NamedTuple):
    """Rows that come to a step of a stage and that go on from it: padding, and states of earlier
    layers, count.
    """

    coming: int
    going: int


class _Places:
    """Room for the rows of two steps, used in turns."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, name: str
    ) -> None:
        self._memory = torch.empty((2, rows, width), dtype=dtype, device=device)
        self._ended: list[Mark | None] = [None, None]
        self._turn = 0
        self.fixed = torch.zeros((rows, width), dtype=dtype, device=device)
        """What captured steps read or write."""
        self.num_captured = 0
        """Rows of the step that was captured last."""
        self.name = name
        """The stage at the other end."""

    def next(self, num_rows: int) -> tuple[torch.Tensor, Mark | None]:
        """A place, and the end of its last use."""
        return self._memory[self._turn, :num_rows], self._ended[self._turn]

    def end(self, mark: Mark) -> None:
        """Notes the mark that ends the use of the place that `next` returned last."""
        self._ended[self._turn] = mark
        self._turn = 1 - self._turn


class LinkedStages:
    """Implements `weft.engine.model.stage.Neighbours` through links whose work is enqueued.

    Args:
        before: From the stage before; None: there is none.
        after: To the stage after; None: there is none.
        names: Names of these stages, for messages.
        rows: Most rows of a step.
        width: Entries of a row.
        how: How rows travel, in words.
    """

    def __init__(
        self,
        before: RowsLink | None,
        after: RowsLink | None,
        group: HostGroup,
        names: tuple[str, str],
        device: torch.device,
        rows: int,
        width: int,
        dtype: torch.dtype,
        how: str = "",
    ) -> None:
        self.how = how
        self._before, self._after, self._group, self._device = before, after, group, device
        sizes = rows, width, dtype, device
        self._coming = None if before is None else _Places(*sizes, names[0])
        self._going = None if after is None else _Places(*sizes, names[1])
        self._lock = threading.Lock()
        """Held while work is enqueued on a link, or the links end."""
        self._has_ended = False
        self._under_way = deque[tuple[Mark, float, str]]()
        """What links do: when it ends, when it was enqueued, what failed if it does not end."""
        self._has_more = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="stage-links", daemon=True)
        self._watcher.start()

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._coming is not None, "the first stage receives nothing"
        assert dtype == self._coming.fixed.dtype
        if self._is_capturing:
            self._coming.num_captured = shape[0]
            return self._coming.fixed[: shape[0]]
        out = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._take(out)
        return out

    def send(self, stream: torch.Tensor) -> None:
        assert self._going is not None, "the last stage sends nothing"
        if self._is_capturing:
            self._going.num_captured = stream.shape[0]
            self._going.fixed[: stream.shape[0]].copy_(stream)
        else:
            self._hand_on(stream)

    @property
    def captured(self) -> BorderRows:
        """Of the step that was captured last."""
        ends = self._coming, self._going
        return BorderRows(*(0 if end is None else end.num_captured for end in ends))

    @contextlib.contextmanager
    def replaying(self, rows: BorderRows) -> Iterator[None]:
        """A block in which a captured step is replayed. Raises RanksLost if a stage beside is
        gone.
        """
        if self._coming is not None:
            self._take(self._coming.fixed[: rows.coming])
        yield
        if self._going is not None:
            self._hand_on(self._going.fixed[: rows.going])

    def close(self) -> None:
        self._end()
        self._watcher.join(2 * _REASON_S)

    @property
    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def _computing(self) -> torch.cuda.Stream | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._device)

    def _take(self, out: torch.Tensor) -> None:
        assert self._before is not None
        assert self._coming is not None
        place, left = self._coming.next(len(out))
        with self._enqueuing(self._coming.name):
            come = self._before.receive(place, left)
        self._note(come, f"the rows of {self._coming.name} have not come")
        come.hold(self._computing)
        out.copy_(place)
        self._coming.end(Mark(self._device))

    def _hand_on(self, rows: torch.Tensor) -> None:
        assert self._after is not None
        assert self._going is not None
        place, sent = self._going.next(len(rows))
        if sent is not None:
            sent.hold(self._computing)
        place.copy_(rows)
        with self._enqueuing(self._going.name):
            sent = self._after.send(place, Mark(self._device))
        self._note(sent, f"{self._going.name} has not taken rows")
        self._going.end(sent)

    @contextlib.contextmanager
    def _enqueuing(self, name: str) -> Iterator[None]:
        try:
            with self._lock:
                if self._has_ended:
                    raise RanksLost(self._group.reason)
                yield
        except GroupFailed as error:
            self._lose(f"{name} is gone: {error.message}")

    def _lose(self, why: str) -> NoReturn:
        """Raises RanksLost with what the group knows, usually more than a link does."""
        until = time.monotonic() + _REASON_S
        while not self._group.is_stopped and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if self._group.is_stopped:
            raise RanksLost(self._group.reason)
        self._group.fail(why)

    def _note(self, mark: Mark, otherwise: str) -> None:
        with self._has_more:
            self._under_way.append((mark, time.monotonic(), otherwise))
            self._has_more.notify()

    def _watch(self) -> None:
        """Runs in a separate thread. Ends the links when the group has ended, or what one of them
        does takes too long, since nothing else would end it.
        """
        since = 0.0
        while not self._has_ended:
            with self._has_more:
                self._has_more.wait_for(lambda: self._under_way or self._has_ended)
            while self._under_way and not self._has_ended:
                mark, began, otherwise = self._under_way[0]
                try:
                    if mark.is_reached():
                        self._under_way.popleft()
                        since = time.monotonic()
                        continue
                except RuntimeError as error:
                    self._group.lose(f"{otherwise}: {error}", lambda: None)
                if time.monotonic() - max(began, since) > self._group.limit_s:
                    why = f"{otherwise} within {self._group.limit_s:g} s"
                    self._group.lose(why, lambda: None)
                if self._group.is_stopped:
                    self._end()
                else:
                    time.sleep(_LOOK_S)

    def _end(self) -> None:
        # Whoever enqueues work holds the lock, unless it waits for a link that only this can end.
        has_lock = self._lock.acquire(timeout=_REASON_S)
        has_ended, self._has_ended = self._has_ended, True
        if has_lock:
            self._lock.release()
        with self._has_more:
            self._has_more.notify()
        if not has_ended:
            for link in (self._before, self._after):
                if link is not None:
                    link.abort()


class BroadcastStages:
    """Implements `weft.engine.model.stage.Neighbours` for the ranks of a stage, of which the first
    alone has links. It gives the rows to the others by a sum to which they bring zeros.

    Args:
        linked: The links; None: this is not the first rank.
    """

    def __init__(self, linked: LinkedStages | None, peers: Peers, device: torch.device) -> None:
        self.linked, self._peers, self._device = linked, peers, device

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nothing = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        rows = nothing if self.linked is None else self.linked.receive(shape, dtype)
        return self._peers.add_sum(rows, nothing)

    def send(self, stream: torch.Tensor) -> None:
        if self.linked is not None:
            self.linked.send(stream)

    def close(self) -> None:
        if self.linked is not None:
            self.linked.close()
