"""Stages whose links are enqueued, as those between GPUs of several hosts: rows come in order and
whole, and nothing waits for ever. The links here are threads in place of NCCL.
"""

from __future__ import annotations

import ctypes
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract.errors import ConfigError, GroupFailed, RanksLost
from weft.engine.base.device_copies import Mark
from weft.engine.parallel import linked_stages, nccl_links
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.linked_stages import BorderRows, BroadcastStages, LinkedStages
from weft.engine.parallel.nccl_links import interface_of, link_over_nccl
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup, segment_bytes
from weft.engine.parallel.stage_links import StageEnds
from weft.kernels.ops.peers.spec import LATE

ROWS, WIDTH, DTYPE, CPU, LONG_S = 64, 16, torch.float32, torch.device("cpu"), 60.0


class Reached(Mark):
    """Reached when a job of a link has ended."""

    def __init__(self, job: Future[None]) -> None:
        super().__init__(CPU)
        self._job = job

    def wait(self) -> None:
        self._job.result(LONG_S)

    def is_reached(self) -> bool:
        return self._job.done()


class ThreadLink:
    """One end of a link. Rows are read from their place only when the other end takes them, as late
    as NCCL may.
    """

    def __init__(self, rows: queue.Queue[Callable[[], torch.Tensor]]) -> None:
        self._rows, self._thread = rows, ThreadPoolExecutor(1)
        self._is_over = threading.Event()
        self.is_broken = False
        self.num_aborts = 0

    def send(self, rows: torch.Tensor, written: Mark) -> Mark:
        self._check()
        taken = Future[None]()

        def take() -> torch.Tensor:
            copy = rows.clone()
            taken.set_result(None)
            return copy

        def run() -> None:
            written.wait()
            self._rows.put(take)
            while not taken.done() and not self._is_over.wait(0.001):
                pass

        return Reached(self._thread.submit(run))

    def receive(self, out: torch.Tensor, left: Mark | None) -> Mark:
        self._check()

        def run() -> None:
            if left is not None:
                left.wait()
            while not self._is_over.is_set():
                try:
                    out.copy_(self._rows.get(timeout=0.001)())
                    return
                except queue.Empty:
                    continue

        return Reached(self._thread.submit(run))

    def abort(self) -> None:
        self.num_aborts += 1
        self._is_over.set()
        self._thread.shutdown()

    def _check(self) -> None:
        if self.is_broken:
            raise GroupFailed("NCCL: remote process exited")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        return listener.accept()[0], other


def ends_of(count: int) -> list[StageEnds]:
    pairs = [tcp_pair() for _ in range(count - 1)]
    befores, afters = [None, *(one for one, _ in pairs)], [*(one for _, one in pairs), None]
    return [StageEnds(*ends) for ends in zip(befores, afters, strict=True)]


@contextmanager
def group_of(limit_s: float) -> Iterator[HostGroup]:
    end, there = tcp_pair()
    group = HostGroup({1: end}, limit_s)
    try:
        yield group
    finally:
        group.close()
        there.close()


class Pair:
    """The last two stages of three, and what the first of them is linked to."""

    def __init__(self, stack: ExitStack, limit_s: float) -> None:
        rows: queue.Queue[Callable[[], torch.Tensor]] = queue.Queue()
        self.links = ThreadLink(rows), ThreadLink(rows)
        self.groups = [stack.enter_context(group_of(limit_s)) for _ in range(2)]
        sizes = CPU, ROWS, WIDTH, DTYPE
        names = ("", "stage 1 (rank 0)"), ("stage 0 (rank 1)", "")
        self.first = LinkedStages(None, self.links[0], self.groups[0], names[0], *sizes)
        self.last = LinkedStages(self.links[1], None, self.groups[1], names[1], *sizes)
        stack.callback(self.first.close)
        stack.callback(self.last.close)

    def receive(self, num_rows: int) -> torch.Tensor:
        return self.last.receive((num_rows, WIDTH), DTYPE)


@contextmanager
def pair(limit_s: float = LONG_S) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, limit_s)


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, dtype=DTYPE)


def test_rows_of_all_sizes_come_in_order(seed: int) -> None:
    sizes = [int(size) for size in torch.randint(1, ROWS + 1, (40,))]
    sent = [rows_of(size) for size in sizes]
    with pair() as stages, ThreadPoolExecutor(1) as threads:
        done = threads.submit(lambda: [stages.first.send(one.clone()) for one in sent])
        for one in sent:
            assert torch.equal(stages.receive(len(one)), one)
        done.result(LONG_S)


def test_captured_steps_read_and_write_fixed_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As graphs do: both calls are seen once, and each replay has the rows of its own step."""
    sizes = torch.randint(1, ROWS + 1, (20,)).tolist()
    with pair() as stages, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(LinkedStages, "_is_capturing", True)
        entered = [stages.receive(size) for size in sizes]
        of_steps = list[tuple[BorderRows, BorderRows]]()
        for size in sizes:
            stages.receive(size)
            stages.first.send(fixed := rows_of(size))
            of_steps.append((stages.first.captured, stages.last.captured))
            leaving = stages.first._going.fixed
            assert torch.equal(leaving[:size], fixed)
        monkeypatch.setattr(LinkedStages, "_is_capturing", False)
        sent = [rows_of(size) for size in sizes]

        def replay() -> None:
            for one, (border, _) in zip(sent, of_steps, strict=True):
                with stages.first.replaying(border):
                    leaving[: len(one)] = one

        done = threads.submit(replay)
        for one, own, (_, border) in zip(sent, entered, of_steps, strict=True):
            with stages.last.replaying(border):
                assert torch.equal(own, one)
        done.result(LONG_S)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_all_ranks_of_a_stage_get_the_rows_of_its_link(
    is_capturing: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the first alone has one; in steps that are captured the rows of each replay."""
    size, sizes = 3, torch.randint(1, ROWS + 1, (9,)).tolist()
    sent = [rows_of(size) for size in sizes]
    segment = Segment.create(segment_bytes(size), "test")
    with pair() as stages, ThreadPoolExecutor(size + 1) as threads:
        monkeypatch.setattr(LinkedStages, "_is_capturing", property(lambda _: is_capturing))

        def take(rank: int) -> list[torch.Tensor]:
            peers = SharedGroup(segment, rank, size, LONG_S)
            ranks = BroadcastStages(None if rank else stages.last, peers, CPU)
            found = []
            for count, one in zip(sizes, sent, strict=True):
                if is_capturing and not rank:  # What a replay copies there before it begins.
                    stages.last._coming.fixed[:count] = one
                found.append(ranks.receive((count, WIDTH), DTYPE))
            ranks.send(found[0])  # The last stage's first rank has no link after it.
            return found

        if not is_capturing:
            threads.submit(lambda: [stages.first.send(one.clone()) for one in sent])
        monkeypatch.setattr(stages.last, "send", lambda rows: None)
        for future in [threads.submit(take, rank) for rank in range(size)]:
            for found, one in zip(future.result(LONG_S), sent, strict=True):
                assert torch.equal(found, one)


def test_a_gpu_of_this_host_that_waits_for_too_long_ends_the_group() -> None:
    """The kernels of ranks tell the host by the stop word of its ranks alone."""
    segment = Segment.create(segment_bytes(2), "test")
    with group_of(LONG_S) as group:
        group.local = SharedGroup(segment, 0, 2, LONG_S, first_rank=2)
        assert not group.is_stopped
        ctypes.c_uint32.from_address(group.local.stop_address).value = LATE + 1
        assert group.is_stopped
        assert "rank 3 has not come to a sum" in group.reason
        with pytest.raises(RanksLost, match="rank 3"):
            group.post([np.zeros(1, np.int64)])
        lost: list[str] = []
        group.lose("its rows have not come", lambda: lost.append(group.reason))
        assert "rank 3" in lost[0]


def test_a_late_rank_of_one_of_several_stages_is_named_by_its_place() -> None:
    group = SharedGroup(Segment.create(segment_bytes(6), "test"), 0, 6, LONG_S)
    group.num_alike = 2
    ctypes.c_uint32.from_address(group.stop_address).value = LATE + 1
    assert "rank 1 or 3 or 5 has not come to a sum" in group.reason


def test_a_stage_goes_on_while_nobody_takes_the_rows_of_two_steps(seed: int) -> None:
    first, second, third = (rows_of(ROWS) for _ in range(3))
    with pair() as stages, ThreadPoolExecutor(1) as threads:
        stages.first.send(first)
        stages.first.send(second)  # Neither waits for anybody.
        late = threads.submit(stages.first.send, third)
        for one in (first, second, third):
            assert torch.equal(stages.receive(ROWS), one)
        late.result(LONG_S)


def test_rows_that_do_not_come_end_the_group_and_the_link() -> None:
    with pair(limit_s=0.2) as stages:
        assert stages.receive(ROWS).shape == (ROWS, WIDTH)  # Ended by the abort, with anything.
        assert stages.groups[1].is_stopped
        assert stages.groups[1].reason == "the rows of stage 0 (rank 1) have not come within 0.2 s"
        with pytest.raises(RanksLost, match=r"stage 0 \(rank 1\) have not come"):
            stages.receive(ROWS)
        stages.last.close()
        assert stages.links[1].num_aborts == 1


def test_rows_that_are_not_taken_end_the_group() -> None:
    with pair(limit_s=0.2) as stages:
        stages.first.send(rows_of(ROWS))
        stages.first._watcher.join(LONG_S)
        with pytest.raises(RanksLost, match=r"stage 1 \(rank 0\) has not taken rows within"):
            stages.first.send(rows_of(ROWS))


def test_a_group_that_ends_frees_who_waits_for_rows() -> None:
    with pair() as stages, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stages.receive, ROWS)
        stages.groups[1].lose("the host of rank 1 is gone", lambda: None)
        waiting.exception(LONG_S)
        with pytest.raises(RanksLost, match="the host of rank 1 is gone"):
            stages.receive(ROWS)


def test_a_link_that_fails_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linked_stages, "_REASON_S", 0.05)
    with pair() as stages:
        stages.links[0].is_broken = True
        with pytest.raises(RanksLost, match=r"stage 1 \(rank 0\) is gone: NCCL: remote process"):
            stages.first.send(rows_of(ROWS))
        assert stages.groups[0].is_stopped


class NamedLink:
    """In place of an end of a link over NCCL: knows its communicator's name."""

    def __init__(self, name: bytes, rank: int, device: torch.device, end: socket.socket) -> None:
        self.name, self.rank, self.gbit_s = name, rank, 12.34

    def abort(self) -> None: ...


def meet(
    stages: list[StageEnds], monkeypatch: pytest.MonkeyPatch, versions: dict[int, int]
) -> list[Future[LinkedStages]]:
    """Links the stages, each in a thread of its own, to which NCCL has the version of its number in
    `versions`, or 2.28.9.
    """
    number = threading.local()

    def make_id() -> bytes:
        return bytes([number.own]) * 128

    monkeypatch.setattr(nccl_links, "NcclLink", NamedLink)
    monkeypatch.setattr(nccl_links, "new_id", make_id)
    monkeypatch.setattr(nccl_links, "nccl_version", lambda: versions.get(number.own, 22809))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7")

    def link(own: int) -> LinkedStages:
        number.own = own
        names = f"stage {own - 1}", f"stage {own + 1}"
        with group_of(LONG_S) as group:
            return link_over_nccl(stages[own], group, names, CPU, ROWS, WIDTH, DTYPE)

    with ThreadPoolExecutor(len(stages)) as threads:
        return [threads.submit(link, own) for own in range(len(stages))]


def test_stages_beside_one_another_get_the_name_of_one_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = ends_of(3)
    found = [one.result(LONG_S) for one in meet(stages, monkeypatch, {})]
    links: list[tuple[Any, Any]] = [(one._before, one._after) for one in found]
    assert (links[0][0], links[2][1]) == (None, None)
    for number in range(2):
        sender, receiver = links[number][1], links[number + 1][0]
        assert sender.name == receiver.name == bytes([number]) * 128
        assert (sender.rank, receiver.rank) == (0, 1)
    assert "over NCCL 2.28.9 by eth7, without TLS" in found[0].how
    assert "over NCCL 2.28.9 by eth7 at 12.3 Gbit/s, without TLS" in found[2].how
    for one, ends in zip(found, stages, strict=True):
        one.close()
        ends.close()


def test_hosts_with_other_versions_of_nccl_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = ends_of(2)
    first, last = meet(stages, monkeypatch, {1: 22703})
    for one, told in ((first, "stage 1 has NCCL 22703"), (last, "stage 0 has NCCL 22809")):
        error = one.exception(LONG_S)
        assert isinstance(error, ConfigError)
        assert told in error.message
    for ends in stages:
        ends.close()


def test_a_host_that_ends_before_stages_are_linked_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, last = ends_of(2)
    last.close()
    (found,) = meet([first], monkeypatch, {})
    with pytest.raises(ConfigError, match="no link over NCCL to stage 1"):
        found.result(LONG_S)
    first.close()


def test_rows_are_said_to_be_there_once_they_are_written() -> None:
    """By which the other end begins to receive them; in their order."""
    here, there = tcp_pair()
    with here, there:
        there.settimeout(LONG_S)
        sender, written = nccl_links._Sender(here), [Future[None](), Future[None]()]
        for job in written:
            sender.tell(Reached(job))
        written[1].set_result(None)
        assert not select.select([there], [], [], 0.05)[0]
        written[0].set_result(None)
        for _ in written:
            assert len(there.recv(1)) == 1
        sender.close()


def test_the_network_device_of_an_address_is_found() -> None:
    """By it NCCL connects; an address that no device has leaves the choice to NCCL."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") == ""
    assert interface_of("2001:db8::7") == ""
