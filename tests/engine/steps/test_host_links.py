"""What the first ranks of hosts do with their connections, both in this process."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from weft.cli.up.ports import free_ports
from weft.contract.errors import ConfigError, RanksLost
from weft.contract.version import version
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks import hosts
from weft.engine.executor.ranks.hosts import HostRanks, Joined, end_when_silent, join
from weft.engine.parallel.host_sockets import (
    connect,
    parse_address,
    receive_message,
    send_message,
)
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup, segment_bytes
from weft.engine.parallel.stage_links import SocketStages
from weft.kernels.ops.peers.spec import LATE

LONG_S, LARGE = 60.0, (512, 1024)
"""LARGE: rows that fit into no buffer of a connection."""


def join_and_agree(config: EngineConfig) -> Joined:
    host = join(config)
    host.link.send({"phase": "connected", "number": 0, "text": "", "notices": []})
    host.link.receive()
    return host


def config_of(count: int) -> EngineConfig:
    (port,) = free_ports("127.0.0.1", 1)
    return EngineConfig(model_dir=Path(), pp=count, hosts=count, rendezvous=f"127.0.0.1:{port}")


@contextmanager
def two_hosts(wake: Callable[[], None] = lambda: None) -> Iterator[tuple[HostRanks, Joined]]:
    config = config_of(2)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(join_and_agree, replace(config, host_rank=1))
        ranks = HostRanks(config, wake)
        try:
            yield ranks, other.result(LONG_S)
        finally:
            ranks.close()


def test_closing_ends_the_thread_that_reads_rows_ahead(seed: int) -> None:
    with two_hosts() as (ranks, other):
        first = SocketStages(other.rows, other.group, 0, ("", "host 0"), LARGE[0])
        rows, neighbours = torch.randn(LARGE), ranks.neighbours
        assert isinstance(neighbours, SocketStages)
        first.send(rows)
        assert torch.equal(neighbours.receive(rows.shape, rows.dtype), rows)
        ranks.close()
        # The other host's connection is still open, so nothing else ends that thread.
        assert neighbours._coming is not None
        assert neighbours._coming.done()
        first.close()


def test_a_host_that_is_lost_without_a_word_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that the network reaches no more: one connection ends, the others seem to be there."""
    monkeypatch.setattr(hosts, "_REASON_S", 0.05)
    is_woken = threading.Event()
    with two_hosts(is_woken.set) as (ranks, other):
        (frames,) = other.group._ends.values()
        frames.shutdown(socket.SHUT_RDWR)
        assert is_woken.wait(LONG_S)
        with pytest.raises(RanksLost, match=r"rank 1 \(host 127\.0\.0\.1\) is gone"):
            ranks.check()


def test_a_gpu_of_host_0_that_waits_for_too_long_ends_the_group() -> None:
    """The kernel that waits there writes to the stop word that the host's ranks share."""
    is_woken = threading.Event()
    with two_hosts(is_woken.set) as (ranks, other):
        local = SharedGroup(Segment.create(segment_bytes(2), "test"), 0, 2, LONG_S)
        ranks.group.local = local
        ctypes.c_uint32.from_address(local.stop_address).value = LATE + 1
        assert is_woken.wait(LONG_S)
        with pytest.raises(RanksLost, match="rank 1 has not come"):
            ranks.check()
        with pytest.raises(RanksLost, match="host of rank 0 is gone"):
            other.group.take()


def test_hosts_end_when_host_0_runs_no_more() -> None:
    """As one whose process is stopped: its connections stay."""
    with two_hosts() as (ranks, other):
        ranks.begin(LONG_S)
        other.beats.settimeout(LONG_S)
        assert other.beats.recv(1)
        with mock.patch.object(ranks, "_beat"):
            end_when_silent(other.beats, other.group, 0.2)
            with pytest.raises(RanksLost, match="host 0 has been silent"):
                other.group.take()


def test_a_host_that_leaves_before_all_are_there_may_come_again() -> None:
    config = config_of(3)
    with ThreadPoolExecutor(3) as threads, ExitStack() as stack:
        leading = threads.submit(HostRanks, config)
        leave_again(config)
        others = []
        for number in (2, 1):
            others.append(threads.submit(join_and_agree, replace(config, host_rank=number)))
            time.sleep(0.5)  # So that all connections of host 2 have come before host 1.
        stack.callback(leading.result(LONG_S).close)
        assert [one.result(LONG_S).config.hosts for one in others] == [3, 3]


def leave_again(config: EngineConfig) -> None:
    """Comes as host 1 with all of its connections, and ends them."""
    at, deadline = parse_address(config.rendezvous), float("inf")
    with connect(at, None, deadline, is_patient=True) as link, ExitStack() as stack:
        about = {"hosts": config.hosts, "version": version(), "device": "cpu"}
        about |= {"role": config.role, "rows_at": list(link.getsockname())}
        send_message(link, {"kind": "link", "host_rank": 1} | about)
        assert receive_message(link) == {"welcome": 1}
        for kind in ("frames", "memory", "writes", "beats"):
            end = stack.enter_context(connect(at, None, deadline, is_patient=False))
            send_message(end, {"kind": kind, "host_rank": 1})
        time.sleep(0.5)  # So that host 0 has them all.


def test_a_host_of_another_service_is_refused_and_the_right_one_may_come() -> None:
    config = config_of(2)
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        leading = threads.submit(HostRanks, config)
        why = "host 1 is of a prefill worker, host 0 of a decode worker: .* --rendezvous"
        with pytest.raises(ConfigError, match=why):
            join(replace(config, host_rank=1, role="prefill"))
        right = threads.submit(join_and_agree, replace(config, host_rank=1))
        stack.callback(leading.result(LONG_S).close)
        assert right.result(LONG_S).config.role == "decode"


def test_a_host_that_is_started_twice_is_refused() -> None:
    config = config_of(3)
    with ThreadPoolExecutor(4) as threads, ExitStack() as stack:
        leading = threads.submit(HostRanks, config)
        ones = [threads.submit(join_and_agree, replace(config, host_rank=1)) for _ in range(2)]
        (refused,), _ = wait(ones, LONG_S, FIRST_COMPLETED)
        with pytest.raises(ConfigError, match="--host-rank 1: another host has this number"):
            refused.result()
        last = threads.submit(join_and_agree, replace(config, host_rank=2))
        stack.callback(leading.result(LONG_S).close)
        (first,) = (one for one in ones if one is not refused)
        assert [one.result(LONG_S).config.hosts for one in (first, last)] == [3, 3]
