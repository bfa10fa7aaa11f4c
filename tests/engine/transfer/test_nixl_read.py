"""Reads of another process's pool over NIXL, and what ends them for certain."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from weft.testing.engine.nixl_process import NixlProcess, RemoteError

pytestmark = pytest.mark.needs("nixl")
LANES = ["", "tcp"]
Start = Callable[..., NixlProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that end with the test."""
    processes: list[NixlProcess] = []

    def starter(num_pages: int = 16, page_bytes: int = 4096, lanes: str = "") -> NixlProcess:
        processes.append(NixlProcess(num_pages, page_bytes, lanes))
        return processes[-1]

    yield starter
    for process in processes:
        process.end()


def start_pair(start: Start, **options: Any) -> tuple[NixlProcess, NixlProcess, dict[str, Any]]:
    """A source, a reader that takes any lane, and the source's target."""
    source, reader = start(**options), start(**options)
    target = source.call("open_owner")
    reader.call("open_reader", lanes=["tcp"])
    return source, reader, target


def scattered(count: int, of: int) -> list[int]:
    return random.sample(range(of), count)


@pytest.mark.parametrize("lanes", LANES)
def test_scattered_pages_are_read_and_no_others_change(start: Start, lanes: str) -> None:
    num_pages = 48
    source, reader, target = start_pair(start, num_pages=num_pages, page_bytes=60_008, lanes=lanes)
    there = source.call("digests")
    for count in (1, 7, num_pages):
        reader.call("randomise")
        expected = reader.call("digests")
        remote, local = scattered(count, num_pages), scattered(count, num_pages)
        number = reader.call("read", peer="a", target=target, remote=remote, local=local)
        assert reader.call("wait_read", number=number) == "done"
        for page_there, page_here in zip(remote, local, strict=True):
            expected[page_here] = there[page_there]
        assert reader.call("digests") == expected
    assert source.call("digests") == there
    assert "from a" in reader.call("describe_reader")
    reader.call("close_read_peer", peer="a")
    assert source.call("wait_notifications", count=1, timeout_s=0.05) == []


def test_what_does_not_fit_is_refused_before_anything_is_posted(start: Start) -> None:
    _, reader, target = start_pair(start)
    before = reader.call("digests")
    changes: list[dict[str, Any]] = [{"version": "1.1.0"}, {"page_bytes": 8192}, {"num_pages": 0}]
    changes += [{"agent_metadata": target["agent_metadata"][:-2]}, {"memory_type": "FILE"}]
    for change in changes:
        with pytest.raises(RemoteError, match="TransportMismatch"):
            reader.call("read", peer="a", target=target | change, remote=[0], local=[0])
    for remote, local in (([0], [16]), ([16], [0]), ([0, 1], [2, 2]), ([0], [0, 1]), ([], [])):
        with pytest.raises(RemoteError, match="TransportMismatch"):
            reader.call("read", peer="a", target=target, remote=remote, local=local)
    assert reader.call("digests") == before


def test_a_lane_that_needs_the_sources_help_is_refused(start: Start) -> None:
    """UCX would end the source if the reader went away in the middle."""
    source, reader = start(lanes="tcp"), start(lanes="tcp")
    target = source.call("open_owner")
    reader.call("open_reader")
    with pytest.raises(RemoteError, match=r"NoOneSidedLane.*tcp"):
        reader.call("read", peer="a", target=target, remote=[0], local=[0])
    reader.call("open_reader", lanes=["tcp"])
    number = reader.call("read", peer="a", target=target, remote=[0], local=[0])
    assert reader.call("wait_read", number=number) == "done"


@pytest.mark.full_after(1)
@pytest.mark.parametrize("lanes", LANES)
def test_nothing_is_put_down_after_the_readers_agent_is_closed(start: Start, lanes: str) -> None:
    """The first read from a source that stands still waits for the connection to come about."""
    num_pages = 64
    source, reader, target = start_pair(start, num_pages=num_pages, page_bytes=1 << 20, lanes=lanes)
    source.stop()
    pages = list(range(num_pages))
    number = reader.call("read", peer="a", target=target, remote=pages, local=pages)
    assert reader.call("wait_read", number=number, timeout_s=0.3) == "pending"
    reader.call("close_read_peer", peer="a")
    reader.call("fill", value=77)  # The destination is free again.
    source.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert reader.call("changed_bytes", value=77) == 0
    with pytest.raises(RemoteError, match="closed"):
        reader.call("wait_read", number=number)
    number = reader.call("read", peer="a", target=target, remote=[3], local=[5])
    assert reader.call("wait_read", number=number) == "done"
    assert reader.call("digests", pages=[5]) == source.call("digests", pages=[3])


@pytest.mark.full_after(1)
@pytest.mark.parametrize("lanes", LANES)
def test_an_agent_closed_in_mid_read_puts_nothing_more_down(start: Start, lanes: str) -> None:
    """Over TCP that may end the source, which is why the lane is refused otherwise."""
    num_pages = 96
    source, reader, target = start_pair(start, num_pages=num_pages, page_bytes=1 << 20, lanes=lanes)
    warm = reader.call("read", peer="a", target=target, remote=[0], local=[0])
    assert reader.call("wait_read", number=warm) == "done"
    pages = list(range(num_pages))
    if lanes == "tcp":
        source.stop()
    number = reader.call("read", peer="a", target=target, remote=pages, local=pages)
    if lanes == "tcp":
        assert reader.call("wait_read", number=number, timeout_s=0.2) == "pending"
    reader.call("close_read_peer", peer="a")
    reader.call("fill", value=77)
    source.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert reader.call("changed_bytes", value=77) == 0


@pytest.mark.parametrize("lanes", LANES)
def test_a_source_killed_in_mid_read_is_a_transfer_error(start: Start, lanes: str) -> None:
    num_pages = 64
    source, reader, target = start_pair(start, num_pages=num_pages, page_bytes=1 << 20, lanes=lanes)
    source.stop()
    pages = list(range(num_pages))
    number = reader.call("read", peer="a", target=target, remote=pages, local=pages)
    source.signal(signal.SIGKILL)
    with pytest.raises(RemoteError) as caught:
        reader.call("wait_read", number=number, timeout_s=20)
    assert (caught.value.kind, caught.value.may_still_arrive) == ("TransferError", True)
    reader.call("close_read_peer", peer="a")
    replacement = start(num_pages=num_pages, page_bytes=1 << 20, lanes=lanes)
    new_target = replacement.call("open_owner")
    number = reader.call("read", peer="a", target=new_target, remote=[1], local=[2], epoch=8)
    assert reader.call("wait_read", number=number) == "done"
    assert reader.call("digests", pages=[2]) == replacement.call("digests", pages=[1])


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_a_reader_that_goes_away_in_mid_read_leaves_its_source_alive(
    start: Start, ending: str
) -> None:
    num_pages = 64
    source = start(num_pages=num_pages, page_bytes=1 << 20)
    target = source.call("open_owner")
    for is_connected in (True, False, True):
        reader = start(num_pages=num_pages, page_bytes=1 << 20)
        reader.call("open_reader")
        if is_connected:
            warm = reader.call("read", peer="a", target=target, remote=[0], local=[0])
            assert reader.call("wait_read", number=warm) == "done"
        pages = random.sample(range(num_pages), num_pages)
        source.stop()
        reader.send("read", peer="a", target=target, remote=pages, local=pages)
        time.sleep(random.random() * 0.1)
        if ending == "close":
            reader.receive()
            reader.call("close_read_peer", peer="a")
        reader.end()
        source.signal(signal.SIGCONT)
        time.sleep(0.4)
        assert len(source.call("digests")) == num_pages
