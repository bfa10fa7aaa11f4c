"""Hosts of one engine, in this process, each of which writes its share of pages to an owner."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from weft.contract.clock import monotonic
from weft.contract.layout import PagePart, PagePiece, PageShare
from weft.engine.executor.ranks.host_memory import OtherHosts
from weft.engine.executor.ranks.host_writes import (
    HostPool,
    HostSenders,
    HostWriter,
    OtherWriters,
    SharesSource,
)
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.host_sockets import send_message
from weft.pages.transfer.chunks import RAN_OUT, LeaseTerm
from weft.pages.transfer.digest import digest_pages
from weft.pages.transfer.nixl import (
    PoolRegion,
    ReceiveAgent,
    SendAgents,
    TransferError,
    encode_notification,
)
from weft.pages.transfer.shared import WriteHandle
from weft.pages.transfer.source import Reading

pytestmark = pytest.mark.needs("nixl")

NUM_PAGES, EPOCH, LEASE, LIMIT_S = 24, 7, bytes(16), 60.0
OWNER = ("d", EPOCH)


def random_plane(num_layers: int) -> NDArray[np.uint8]:
    """[pages, heads, layers, bytes]."""
    shape = (NUM_PAGES, random.choice((1, 3)), num_layers, 8 * random.randint(1, 5))
    return np.random.default_rng(random.getrandbits(32)).integers(0, 256, shape, np.uint8)


class Hosts:
    """Pages of random planes, of which each host has some layers, and an owner of whole pages."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        layers = [random.randint(1, 4) for _ in range(count)]
        self.planes = [random_plane(sum(layers)) for _ in range(random.choice((1, 2)))]
        self.whole = self._rows(self.planes)
        ends = [(sum(layers[:host]), sum(layers[: host + 1])) for host in range(count)]
        pools = [self._pool(*each) for each in ends]
        self.lost = threading.Event()
        self.group = HostGroup({}, LIMIT_S)
        self.sockets: list[socket.socket] = []
        self.writers: list[HostWriter] = []
        here = []
        for number, pool in enumerate(pools[1:], 1):
            end, there = socket.socketpair()
            here.append(end)
            self.sockets.append(there)
            agents = SendAgents(f"p-{number}", pool.region)
            self.writers.append(HostWriter(there, HostGroup({}, LIMIT_S), pool, agents))
            threading.Thread(target=self.writers[-1].run, daemon=True).start()
        memory = OtherHosts((), self.group, self.lost.set)
        others = OtherWriters(here, self.group, self.lost.set, memory)
        self.source = SharesSource(pools[0], others, has_digests=True)
        self.senders = HostSenders(SendAgents("p-0", pools[0].region), self.source, others)
        self.arrived = np.zeros_like(self.whole)
        self.owner = ReceiveAgent("d", PoolRegion.of_array(self.arrived))
        for close in (self.owner.close, others.close, self.senders.close):
            stack.callback(close)

    @staticmethod
    def _rows(planes: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        return np.ascontiguousarray(
            np.concatenate([plane.reshape(NUM_PAGES, -1) for plane in planes], axis=1)
        )

    def _pool(self, first: int, end: int) -> HostPool:
        """What a host with these layers has."""
        own = self._rows([plane[:, :, first:end] for plane in self.planes])
        pieces, of_page, of_own = [], 0, 0
        for plane in self.planes:
            _, heads, layers, size = plane.shape
            count = (end - first) * size
            whole = PagePart(heads, layers * size, of_page + first * size, count)
            pieces.append(PagePiece(whole, PagePart(heads, count, of_own, count)))
            of_page, of_own = of_page + heads * layers * size, of_own + heads * count
        return HostPool(torch.from_numpy(own), PageShare(of_page, tuple(pieces)))

    def read(self, pages: list[int]) -> Reading:
        reading = self.source.begin(pages, None)
        assert reading is not None
        await_that(reading.is_done)
        return reading

    def write(self, pages: list[int], to: list[int], lease_s: float = 600.0) -> WriteHandle:
        message = encode_notification(EPOCH, LEASE, 3)
        term = LeaseTerm(lease_s, monotonic)
        return self.senders.write(OWNER, self.owner.target(), pages, to, message, term)


def await_that(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.fixture
def hosts_of() -> Iterator[Callable[[int], Hosts]]:
    with ExitStack() as stack:
        yield lambda count: Hosts(stack, count)


@pytest.mark.usefixtures("seed")
def test_each_host_writes_its_share_and_one_notification_follows_all(
    hosts_of: Callable[[int], Hosts],
) -> None:
    hosts = hosts_of(random.choice((2, 3)))
    pages, to = (random.sample(range(NUM_PAGES), 9) for _ in range(2))
    assert hosts.read(pages).digests() == digest_pages(hosts.whole, pages).tolist()
    handle = hosts.write(pages, to)
    await_that(lambda: handle.poll() == "done")
    notes: list[Any] = []
    await_that(lambda: notes.extend(hosts.owner.poll()) or notes)
    expected = np.zeros_like(hosts.whole)
    expected[to] = hosts.whole[pages]
    assert (hosts.arrived == expected).all()
    assert [(note.lease_id, note.chunk) for note in notes] == [(LEASE, 3)]
    assert hosts.owner.num_garbage == 0
    hosts.senders.close_unused()
    assert not hosts.senders.close_peer(OWNER)
    assert not hosts.lost.is_set()


@pytest.mark.usefixtures("seed")
def test_a_host_whose_clock_says_that_the_lease_is_over_posts_nothing(
    hosts_of: Callable[[int], Hosts],
) -> None:
    """As after it was suspended, or the message was late."""
    hosts = hosts_of(2)
    hosts.read([1])
    hosts.source.clocks = [clock - 600.0 for clock in hosts.source.clocks]
    handle = hosts.write([1], [2], lease_s=599.0)
    with pytest.raises(TransferError, match=RAN_OUT) as raised:
        await_that(lambda: handle.poll() == "done")
    assert not raised.value.may_still_arrive
    assert not hosts.senders.close_peer(OWNER)
    assert not hosts.owner.poll()
    assert not hosts.arrived.any()


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("when", ["reading", "writing"])
def test_a_host_that_is_lost_ends_the_write_and_the_group(
    when: str, hosts_of: Callable[[int], Hosts]
) -> None:
    hosts = hosts_of(3)
    hosts.read([1, 2])
    hosts.sockets[1].shutdown(socket.SHUT_RDWR)

    def go_on() -> None:
        if when == "reading":
            hosts.read([1, 2])
        handle = hosts.write([1, 2], [3, 4])
        await_that(lambda: handle.poll() == "done")

    with pytest.raises(TransferError) as raised:
        go_on()
    assert raised.value.may_still_arrive
    assert hosts.lost.is_set()
    assert hosts.group.is_stopped
    assert not hosts.owner.poll()


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize(
    "message",
    [
        {"kind": "read", "number": 1, "pages": [NUM_PAGES], "frames": 0},
        {"kind": "read", "number": 1, "pages": [True], "frames": 0},
        {"kind": "write", "number": 1},
        {"kind": "connect", "owner": "d", "target": {}},
        {"kind": "other"},
        {},
    ],
)
def test_what_is_no_request_ends_the_connection(
    message: dict[str, Any], hosts_of: Callable[[int], Hosts]
) -> None:
    here, there = socket.socketpair()
    hosts = hosts_of(2)
    of_host = hosts.writers[0]
    writer = HostWriter(there, HostGroup({}, LIMIT_S), of_host._pool, of_host._agents)
    running = threading.Thread(target=writer.run)
    running.start()
    send_message(here, message)
    here.settimeout(LIMIT_S)
    assert here.recv(1) == b""
    running.join(LIMIT_S)
    here.close()
