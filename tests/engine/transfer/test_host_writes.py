"""Hosts of one engine, in this process, each of which writes its share of pages to an owner."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from weft.contract.clock import monotonic
from weft.contract.handle import NixlTargetInfo
from weft.contract.layout import PagePart, PagePiece, PageShare
from weft.engine.executor.ranks.host_memory import OtherHosts
from weft.engine.executor.ranks.host_writes import (
    HostPool,
    HostSenders,
    HostWriter,
    OtherWriters,
    SharesSource,
    _target_to_json,
    open_senders,
)
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.host_sockets import receive_message, send_message
from weft.engine.transfer import transport
from weft.engine.transfer.transport import Transport
from weft.pages.transfer.chunks import RAN_OUT, LeaseTerm, ShipChunk, ShipResult
from weft.pages.transfer.digest import digest_pages
from weft.pages.transfer.nixl import (
    PoolRegion,
    ReceiveAgent,
    SendAgents,
    TransferError,
    encode_notification,
)
from weft.pages.transfer.shared import WriteHandle
from weft.pages.transfer.ship import ShipThread
from weft.pages.transfer.source import PageSource, Reading
from weft.testing.services.fill_commands import nixl_target

pytestmark = pytest.mark.needs("nixl")

NUM_PAGES, EPOCH, LEASE, LIMIT_S = 24, 7, bytes(16), 60.0
OTHER_LEASE = bytes([1] * 16)
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
        self.others = others
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


class PlayedHost:
    """The one other host of a group, whose answers the test sends."""

    def __init__(self, stack: ExitStack) -> None:
        here, self._end = socket.socketpair()
        self._end.settimeout(LIMIT_S)
        self.group = HostGroup({}, LIMIT_S)
        memory = OtherHosts((), self.group, lambda: None)
        self.others = OtherWriters([here], self.group, lambda: None, memory)
        part = PagePart(1, 0, 0, 8)
        rows = torch.zeros((NUM_PAGES, 8), dtype=torch.uint8)
        self.pool = HostPool(rows, PageShare(8, (PagePiece(part, part),)))
        self.source = SharesSource(self.pool, self.others, has_digests=True)
        for close in (self.others.close, self._end.close):
            stack.callback(close)

    def read(self, page: int) -> Any:
        return self.source.begin([page], None)

    def answer(self, **values: object) -> None:
        """Answers the next query."""
        send_message(self._end, {"number": receive_message(self._end)["number"]} | values)

    def say(self, **values: object) -> None:
        send_message(self._end, values)


@pytest.fixture
def played() -> Iterator[PlayedHost]:
    with ExitStack() as stack:
        yield PlayedHost(stack)


def chunk_to(target: NixlTargetInfo, lease_id: bytes, remote_page: int) -> ShipChunk:
    """Page 1 on its way to an owner."""
    return ShipChunk(
        lease_id=lease_id,
        index=0,
        start_token=0,
        end_token=1,
        local_pages=[1],
        remote_pages=[remote_page],
        digests=None,
        target=target,
        owner_id=OWNER[0],
        owner_epoch=EPOCH,
        term=LeaseTerm(600.0, monotonic),
    )


def results_of(thread: ShipThread) -> dict[bytes, ShipResult]:
    """Results since the last call, by lease."""
    return {item.lease_id: item for item in thread.take() if isinstance(item, ShipResult)}


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
    """As after its process was stopped, or the message was late."""
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
def test_a_write_that_hosts_refuse_ends_no_other_write_to_the_owner(
    hosts_of: Callable[[int], Hosts],
) -> None:
    hosts = hosts_of(random.choice((2, 3)))
    is_held, (writer, *_) = threading.Event(), hosts.writers
    has_ended = writer._has_ended
    thread = ShipThread(hosts.source, hosts.senders, lambda: None)
    results: dict[bytes, ShipResult] = {}

    def result_of(lease_id: bytes) -> ShipResult:
        await_that(lambda: results.update(results_of(thread)) or lease_id in results)
        return results[lease_id]

    def held(number: int, handle: Any) -> bool:
        return is_held.is_set() and has_ended(number, handle)

    with (
        mock.patch.object(writer, "_has_ended", held),
        mock.patch.object(hosts.senders, "close_peer") as close_peer,
    ):
        thread.ship(chunk_to(hosts.owner.target(), LEASE, 2))
        thread.ship(chunk_to(hosts.owner.target(), OTHER_LEASE, NUM_PAGES))
        refused = result_of(OTHER_LEASE)
        assert "host 1" in refused.error
        assert not refused.needs_fence
        assert LEASE not in results
        is_held.set()
        assert not result_of(LEASE).error
    close_peer.assert_not_called()
    thread.close()
    assert (hosts.arrived[2] == hosts.whole[1]).all()
    assert not hosts.lost.is_set()


def test_shipping_goes_on_after_an_error_that_nobody_expects() -> None:
    senders = mock.Mock()
    senders.write.return_value.poll.side_effect = [ValueError("odd"), "done"]
    senders.close_peer.return_value = True
    thread = ShipThread(PageSource(np.zeros((2, 8), np.uint8)), senders, lambda: None)
    results: dict[bytes, ShipResult] = {}
    for lease_id in (LEASE, OTHER_LEASE):
        thread.ship(chunk_to(nixl_target(8, NUM_PAGES), lease_id, 2))
        await_that(lambda wanted=lease_id: results.update(results_of(thread)) or wanted in results)
    thread.close()
    assert "odd" in results[LEASE].error
    assert results[LEASE].needs_fence
    assert not results[OTHER_LEASE].error


def test_a_close_that_a_host_does_not_answer_fails_alone(played: PlayedHost) -> None:
    played.group.limit_s = 0.01
    query = played.others.ask("close", [{}])
    with pytest.raises(TransferError, match="no answer") as raised:
        played.others.wait(query)
    assert raised.value.may_still_arrive
    assert not played.group.is_stopped


def test_answers_that_came_while_nobody_looked_are_in_time(played: PlayedHost) -> None:
    readings = [played.read(1), played.read(2)]
    for reading in readings:
        played.answer(clock=1.0, digests=[5])
        reading._query.due_at = 0.0
    assert all(reading.is_done() for reading in readings)
    assert not played.group.is_stopped


def test_a_host_that_waits_for_an_owner_is_not_late(played: PlayedHost) -> None:
    played.others.ask("connect", [{}])
    reading = played.read(1)
    reading._query.due_at = 0.0
    assert not reading.is_done()
    assert not played.group.is_stopped
    played.say(number=1)
    reading._query.due_at = 0.0
    assert not reading.is_done()
    assert not played.group.is_stopped
    reading._query.due_at = 0.0
    with pytest.raises(TransferError, match="no answer"):
        reading.is_done()
    assert played.group.is_stopped


@pytest.mark.parametrize(
    "answer",
    [
        {"clock": float("nan"), "digests": [5]},
        {"clock": "1", "digests": [5]},
        {"clock": 1.0, "digests": []},
        {"clock": 1.0, "digests": [1 << 64]},
        {"clock": 1.0, "digests": [True]},
        {"clock": 1.0},
        {"number": 7, "clock": 1.0, "digests": [5]},
    ],
)
def test_an_answer_that_is_no_reading_ends_the_group(
    answer: dict[str, Any], played: PlayedHost
) -> None:
    reading = played.read(1)
    played.answer(**answer)
    for _ in range(2):
        with pytest.raises(TransferError):
            reading.is_done()
    assert played.group.is_stopped


def test_agents_that_cannot_be_closed_leave_no_query(hosts_of: Callable[[int], Hosts]) -> None:
    hosts = hosts_of(2)
    failing = mock.patch.object(
        hosts.senders._own_agents, "close_unused", side_effect=TransferError("pending")
    )
    with failing, pytest.raises(TransferError, match="pending"):
        hosts.senders.close_unused()
    assert not hosts.others._queries


def test_users_learn_that_a_host_has_another_nixl(played: PlayedHost) -> None:
    notices: list[str] = []
    played.say(version="0.0.1")
    assert open_senders(mock.Mock(), played.pool, played.others, notices) is None
    (notice,) = notices
    assert "host 1: it has 0.0.1" in notice


def test_where_nixl_fails_no_host_writes_over_it() -> None:
    pages = np.zeros((NUM_PAGES, 8), np.uint8)
    exchange = mock.Mock(memory=None, staging=None, pages=pages)
    exchange.region.return_value = PoolRegion.of_array(pages)
    config = mock.Mock(transport="auto", role="prefill", worker_id="p")
    senders = mock.Mock()
    with mock.patch.object(transport, "ReceiveAgent", side_effect=TransferError("no device")):
        plane = Transport(config, exchange, lambda: None, senders, mock.Mock())
    senders.close.assert_called_once()
    assert plane.lanes.nixl_version is None
    assert any("NIXL is not usable" in notice for notice in plane.notices)
    plane.close()


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
        {
            **{"kind": "write", "number": 1, "owner": OWNER, "until": float("nan")},
            **{"pages": [1], "remote_pages": [1]},
        },
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
    if "until" in message:
        message["target"] = _target_to_json(hosts.owner.target())
    send_message(here, message)
    here.settimeout(LIMIT_S)
    assert here.recv(1) == b""
    running.join(LIMIT_S)
    here.close()
