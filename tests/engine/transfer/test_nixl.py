"""The NIXL data plane between real processes; contents are compared by digests."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft.contract.handle import FillEvent, NixlTargetInfo
from weft.pages.transfer.nixl import (
    Notification,
    PoolRegion,
    TransportMismatch,
    encode_notification,
    nixl_available,
)
from weft.pages.transfer.nixl_wire import (
    MAX_NOTIFIED_DIGESTS,
    check_pages,
    check_target,
    metadata_digest,
)
from weft.testing.engine.nixl_process import EPOCH, LEASE, NixlProcess, RemoteError

IS_AVAILABLE, REASON = nixl_available()
needs_nixl = pytest.mark.skipif(not IS_AVAILABLE, reason=f"nixl: {REASON}")
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
    """An owner, a filler, and the owner's target."""
    owner, filler = start(**options), start(**options)
    target = owner.call("open_owner")
    filler.call("open_filler")
    return owner, filler, target


LANES = ["", "tcp"]
PAIR_PAGES, PAIR_PAGE_BYTES = 64, 60_008
Pair = tuple[NixlProcess, NixlProcess, dict[str, Any]]


@pytest.fixture(scope="module", params=LANES)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """An owner, a filler and the owner's target for tests that leave both alive."""
    processes = [NixlProcess(PAIR_PAGES, PAIR_PAGE_BYTES, request.param) for _ in range(2)]
    owner, filler = processes
    yield owner, filler, owner.call("open_owner")
    for process in processes:
        process.end()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """The shared pair with no connection, no notification and fresh random pages."""
    owner, filler, _ = shared_pair
    filler.call("open_filler")
    filler.call("randomise")
    owner.call("randomise")
    owner.call("wait_notifications", count=1 << 30, timeout_s=0.05)
    return shared_pair


def scattered(count: int, of: int) -> list[int]:
    return random.sample(range(of), count)


# -- without processes ---------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1))
def test_notification_survives_the_wire(epoch: int, lease: bytes, chunk: int) -> None:
    message = encode_notification(epoch, lease, chunk)
    assert Notification.parse(message) == Notification(epoch, lease, chunk)
    for wrong in (message[:-1], message + b"x", b"x" + message[1:], b""):
        assert Notification.parse(wrong) is None


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=MAX_NOTIFIED_DIGESTS),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.none() | st.integers(0, 2**32 - 2),
)
def test_a_notification_carries_the_chunks_report(
    digests: list[int], tokens: tuple[int, int], computed: int | None
) -> None:
    report = FillEvent(
        kind="written",
        chunk=3,
        start_token=tokens[0],
        end_token=tokens[1],
        digests=digests,
        computed_tokens=computed,
    )
    message = encode_notification(9, LEASE, 3, report)
    assert Notification.parse(message) == Notification(9, LEASE, 3, report)
    for wrong in (message[:-1], message + b"x", message[: 32 + 12], b"x" + message[1:]):
        assert Notification.parse(wrong) is None
    too_many = dataclasses.replace(report, digests=[0] * (MAX_NOTIFIED_DIGESTS + 1))
    for wrong_report in (too_many, dataclasses.replace(report, digests=[])):
        with pytest.raises(ValueError):
            encode_notification(9, LEASE, 3, wrong_report)


@given(st.binary(max_size=80))
def test_garbage_is_no_notification(message: bytes) -> None:
    assert Notification.parse(message) is None


def test_notification_fields_out_of_range_are_refused() -> None:
    for fields in ((-1, LEASE, 0), (2**64, LEASE, 0), (1, LEASE[:-1], 0), (1, LEASE, 2**32)):
        with pytest.raises(ValueError):
            encode_notification(*fields)


def a_target(**changes: Any) -> NixlTargetInfo:
    metadata = random.randbytes(300)
    target = NixlTargetInfo(
        version="1.2.3",
        agent_name="agent",
        agent_metadata=metadata,
        agent_metadata_digest=metadata_digest(metadata),
        base_address=1 << 40,
        page_bytes=4096,
        num_pages=100,
    )
    return dataclasses.replace(target, **changes)


BAD_TARGETS: dict[str, dict[str, Any]] = {
    "nixl 9 there": {"version": "9"},
    "agent_name": {"agent_name": ""},
    "length of agent_metadata": {"agent_metadata": b""},
    "the digest given": {"agent_metadata_digest": bytes(32)},
    "memory_type": {"memory_type": "FILE"},
    "device_id": {"device_id": -1},
    "pages of 2048 bytes": {"page_bytes": 2048},
    "num_pages": {"num_pages": 0},
    "address space": {"base_address": 2**64 - 100 * 4096 + 1},
}


@pytest.mark.parametrize("message", BAD_TARGETS)
def test_target_that_does_not_fit_is_refused(message: str) -> None:
    check_target(a_target(), version="1.2.3", page_bytes=4096)
    with pytest.raises(TransportMismatch, match=message):
        check_target(a_target(**BAD_TARGETS[message]), version="1.2.3", page_bytes=4096)


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        ([], [], "0"),
        ([1, 2], [1], "2"),
        ([10], [0], "source pages 10"),
        ([0], [20], "destination pages 20"),
        ([-1], [0], "source"),
        ([0], [1 << 40], "destination"),
        ([0, 1], [5, 5], "twice"),
        ([0.0], [1], "integers"),
    ],
)
def test_pages_that_do_not_fit_are_refused(local: Any, remote: Any, message: str) -> None:
    check_pages([3, 3, 9], [19, 0, 1], num_sources=10, num_destinations=20)
    with pytest.raises(TransportMismatch, match=message):
        check_pages(local, remote, num_sources=10, num_destinations=20)


def test_region_of_an_array_that_is_no_pool_is_refused() -> None:
    for pool in (np.zeros((4, 6), np.uint8), np.zeros((4, 8), np.int8), np.zeros(8, np.uint8)):
        with pytest.raises(ValueError):
            PoolRegion.of_array(pool)
    with pytest.raises(ValueError):
        PoolRegion.of_array(np.zeros((8, 16), np.uint8)[:, :8])


def test_without_nixl_the_module_imports_and_says_why_it_is_of_no_use() -> None:
    code = """
import sys
for name in ("nixl", "nixl_cu13", "nixl_cu12"):
    sys.modules[name] = None
import numpy as np
from weft.pages.transfer import nixl
is_available, reason = nixl.nixl_available()
assert not is_available and "nixl" in reason, reason
try:
    nixl.SendAgents("prefill", nixl.PoolRegion.of_array(np.zeros((2, 8), np.uint8)))
except nixl.TransportMismatch:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


# -- bytes ---------------------------------------------------------------------------------------


@needs_nixl
def test_scattered_pages_arrive_and_no_others_change(pair: Pair) -> None:
    owner, filler, target = pair
    num_pages = PAIR_PAGES
    for count in (1, 7, num_pages):
        filler.call("randomise")
        before, source = owner.call("digests"), filler.call("digests")
        local, remote = scattered(count, num_pages), scattered(count, num_pages)
        write = filler.call(
            "write", peer="a", target=target, local=local, remote=remote, chunk=count
        )
        assert filler.call("wait", number=write) == "done"
        assert owner.call("wait_notifications", count=1) == [[EPOCH, LEASE.hex(), count]]
        after = owner.call("digests")
        expected = list(before)
        for source_page, destination in zip(local, remote, strict=True):
            expected[destination] = source[source_page]
        assert after == expected
    assert filler.call("num_peers") == 1
    assert "tcp" in filler.call("describe")
    assert "tcp" in owner.call("describe")
    assert owner.call("ucx_log_settings") == []  # Nothing that a child process would inherit.
    assert filler.call("close_filler") is False


@needs_nixl
def test_a_notification_implies_that_its_bytes_are_there(pair: Pair) -> None:
    owner, filler, target = pair
    num_pages, pages_a_chunk = PAIR_PAGES, 5
    num_chunks = -(-num_pages // pages_a_chunk)
    for _ in range(8):
        filler.call("randomise")
        source = filler.call("digests")
        local, remote = scattered(num_pages, num_pages), scattered(num_pages, num_pages)
        chunks = [
            slice(first, first + pages_a_chunk) for first in range(0, num_pages, pages_a_chunk)
        ]
        owner.send("digest_on_notification", pages_of_chunks=[remote[chunk] for chunk in chunks])
        writes = [
            {"peer": "a", "target": target, "local": local[c], "remote": remote[c], "chunk": i}
            for i, c in enumerate(chunks)
        ]
        numbers = filler.call("write_in_threads", writes=writes)
        assert [filler.call("wait", number=n) for n in numbers] == ["done"] * num_chunks
        seen = owner.receive()
        assert seen == {str(i): [source[page] for page in local[c]] for i, c in enumerate(chunks)}


@needs_nixl
def test_two_peers_at_once(start: Start) -> None:
    owners = {"a": start(num_pages=32), "b": start(num_pages=48)}
    filler = start(num_pages=40)
    filler.call("open_filler")
    targets = {name: owner.call("open_owner") for name, owner in owners.items()}
    source = filler.call("digests")
    plans = {name: (scattered(20, 40), scattered(20, 32)) for name in owners}
    writes = [
        {"peer": name, "target": targets[name], "local": local, "remote": remote}
        for name, (local, remote) in plans.items()
    ]
    for number in filler.call("write_in_threads", writes=writes):
        assert filler.call("wait", number=number) == "done"
    for name, owner in owners.items():
        local, remote = plans[name]
        assert len(owner.call("wait_notifications", count=1)) == 1
        assert owner.call("digests", pages=remote) == [source[page] for page in local]
    assert filler.call("num_peers") == 2


@needs_nixl
def test_garbage_notifications_are_counted_and_dropped(pair: Pair) -> None:
    owner, filler, target = pair
    before = owner.call("num_garbage")
    for garbage in (b"", b"hello", random.randbytes(32), random.randbytes(5000)):
        number = filler.call(
            "write", peer="a", target=target, local=[0], remote=[0], notification=garbage.hex()
        )
        assert filler.call("wait", number=number) == "done"
    last = filler.call("write", peer="a", target=target, local=[1], remote=[1], chunk=5)
    assert filler.call("wait", number=last) == "done"
    assert owner.call("wait_notifications", count=1) == [[EPOCH, LEASE.hex(), 5]]
    assert owner.call("num_garbage") - before >= 3  # An empty one may not be sent at all.


# -- refusals ------------------------------------------------------------------------------------


@needs_nixl
def test_what_does_not_fit_is_refused_before_anything_is_posted(pair: Pair) -> None:
    owner, filler, target = pair
    before = owner.call("digests")
    metadata = bytes.fromhex(target["agent_metadata"])
    flipped = bytearray(metadata)
    flipped[random.randrange(len(flipped))] ^= 0xFF
    bad_targets = [
        {"version": "1.1.0"},
        {"agent_metadata": bytes(flipped).hex()},
        {"agent_metadata": metadata[:-1].hex()},
        {"page_bytes": 8192},
        {"num_pages": 0},
    ]
    for change in bad_targets:
        with pytest.raises(RemoteError) as caught:
            filler.call("write", peer="a", target=target | change, local=[0], remote=[0])
        assert (caught.value.kind, caught.value.may_still_arrive) == ("TransportMismatch", False)
    end = PAIR_PAGES
    for local, remote in (([0], [end]), ([end], [0]), ([-1], [0]), ([0, 1], [0]), ([0, 1], [2, 2])):
        with pytest.raises(RemoteError, match="TransportMismatch"):
            filler.call("write", peer="a", target=target, local=local, remote=remote)
    assert filler.call("num_peers") == 0
    assert owner.call("wait_notifications", count=1, timeout_s=0.2) == []
    assert owner.call("digests") == before


@needs_nixl
def test_metadata_that_nixl_refuses_is_a_typed_error(pair: Pair) -> None:
    owner, filler, target = pair
    garbage = random.randbytes(400)
    with_garbage = target | {
        "agent_metadata": garbage.hex(),
        "agent_metadata_digest": metadata_digest(garbage).hex(),
    }
    for bad in (with_garbage, target | {"agent_name": "another"}):
        with pytest.raises(RemoteError) as caught:
            filler.call("connect", peer="a", target=bad)
        assert caught.value.may_still_arrive is False
    # The pool is larger than what the owner registered: NIXL itself refuses such a page.
    with pytest.raises(RemoteError):
        filler.call("write", peer="b", target=target | {"num_pages": 1000}, local=[0], remote=[999])
    filler.call("connect", peer="a", target=target)
    number = filler.call("write", peer="a", target=target, local=[0], remote=[0])
    assert filler.call("wait", number=number) == "done"
    assert len(owner.call("wait_notifications", count=1)) == 1


# -- peers that fail -----------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("lanes", LANES)
def test_an_owner_killed_in_mid_write_is_a_transfer_error(start: Start, lanes: str) -> None:
    num_pages = 64
    owner, filler, target = start_pair(start, num_pages=num_pages, page_bytes=1 << 20, lanes=lanes)
    pages = scattered(num_pages, num_pages)
    warm = filler.call("write", peer="a", target=target, local=[0], remote=[0])
    assert filler.call("wait", number=warm) == "done"
    owner.stop()  # So that the write cannot end before the kill.
    number = filler.call("write", peer="a", target=target, local=pages, remote=pages)
    assert filler.call("poll", number=number) == "pending"
    owner.signal(signal.SIGKILL)
    with pytest.raises(RemoteError) as caught:
        filler.call("wait", number=number, timeout_s=20)
    assert (caught.value.kind, caught.value.may_still_arrive) == ("TransferError", True)
    with pytest.raises(RemoteError, match="TransferError"):  # The state is final.
        filler.call("poll", number=number)
    assert filler.call("close_peer", peer="a") is True
    assert filler.call("close_peer", peer="a") is False


@needs_nixl
def test_an_owner_killed_while_idle_fails_the_next_write_only(start: Start) -> None:
    owner, filler, target = start_pair(start)
    filler.call("connect", peer="a", target=target)
    filler.call("wait", number=filler.call("write", peer="a", target=target, local=[0], remote=[0]))
    owner.end()
    with pytest.raises(RemoteError, match="TransferError"):
        filler.call(
            "wait", number=filler.call("write", peer="a", target=target, local=[0], remote=[0])
        )
    replacement = start()
    target = replacement.call("open_owner")
    number = filler.call("write", peer="a", target=target, local=[1], remote=[2], epoch=EPOCH + 1)
    assert filler.call("wait", number=number) == "done"
    assert replacement.call("digests", pages=[2]) == filler.call("digests", pages=[1])


@needs_nixl
@pytest.mark.parametrize("lanes", LANES)
def test_a_stopped_owner_keeps_writes_pending_until_the_peer_is_closed(
    start: Start, lanes: str
) -> None:
    num_pages = 64
    owner, filler, target = start_pair(start, num_pages=num_pages, page_bytes=1 << 20, lanes=lanes)
    warm = filler.call("write", peer="a", target=target, local=[0], remote=[0])
    assert filler.call("wait", number=warm) == "done"
    owner.call("wait_notifications", count=1)
    owner.stop()
    pages = list(range(num_pages))
    number = filler.call("write", peer="a", target=target, local=pages, remote=pages)
    assert filler.call("wait", number=number, timeout_s=0.5) == "pending"
    assert filler.call("num_pending", peer="a") == 1
    assert filler.call("num_settled") == 0
    assert filler.call("close_peer", peer="a") is True
    assert filler.call("num_settled") == 1, "what a device was told is waited for"
    with pytest.raises(RemoteError, match="closed"):
        filler.call("poll", number=number)
    filler.call("fill", value=99)  # The source is free again.
    owner.signal(signal.SIGCONT)

    # The owner's half of the fence: from here on nothing of that write can arrive.
    new_target = owner.call("reopen")
    owner.call("fill", value=5)
    time.sleep(0.5)
    assert owner.call("changed_bytes", value=5) == 0
    assert owner.call("wait_notifications", count=1, timeout_s=0.1) == []

    # The old target is dead, a new agent to the new one works.
    with pytest.raises(RemoteError):
        filler.call(
            "wait", number=filler.call("write", peer="a", target=target, local=[0], remote=[0])
        )
    number = filler.call(
        "write", peer="a", target=new_target, local=[3], remote=[4], chunk=8, epoch=EPOCH + 1
    )
    assert filler.call("wait", number=number) == "done"
    assert owner.call("wait_notifications", count=1) == [[EPOCH + 1, LEASE.hex(), 8]]
    assert owner.call("changed_bytes", value=5) == 1 << 20


@needs_nixl
def test_closing_a_peer_without_unfinished_writes_leaves_nothing_to_fear(pair: Pair) -> None:
    owner, filler, target = pair
    for epoch in (EPOCH, EPOCH + 1):
        number = filler.call("write", peer="a", target=target, local=[0], remote=[0], epoch=epoch)
        assert filler.call("wait", number=number) == "done"
        assert filler.call("num_pending", peer="a", epoch=epoch) == 0
        assert filler.call("close_peer", peer="a", epoch=epoch) is False
        assert filler.call("num_settled") == 0
    assert filler.call("num_peers") == 0
    assert len(owner.call("wait_notifications", count=2)) == 2


@needs_nixl
@pytest.mark.full_after(1)
@pytest.mark.parametrize("lanes", LANES)
def test_closing_while_other_threads_write(start: Start, lanes: str) -> None:
    options = {"num_pages": PAIR_PAGES, "page_bytes": PAIR_PAGE_BYTES, "lanes": lanes}
    owner, filler, target = start_pair(start, **options)
    outcomes = filler.call("write_while_closing", target=target, rounds=8)
    assert outcomes["closed"] == 8
    assert outcomes["done"] > 0
    filler.call("close_filler")
    target = owner.call("reopen")  # What those writes left on the way cannot arrive behind this.
    number = filler.call("write", peer="a", target=target, local=[3], remote=[9], epoch=EPOCH + 1)
    assert filler.call("wait", number=number) == "done"
    assert owner.call("digests", pages=[9]) == filler.call("digests", pages=[3])


@needs_nixl
def test_agents_are_bounded_and_busy_ones_are_never_closed_for_others(start: Start) -> None:
    num_pages, page_bytes = 16, 1 << 20
    owners = [start(num_pages=num_pages, page_bytes=page_bytes, lanes="tcp") for _ in range(2)]
    targets = [owner.call("open_owner") for owner in owners]
    filler = start(num_pages=num_pages, page_bytes=page_bytes, lanes="tcp")
    filler.call("open_filler", max_peers=1, idle_s=0.0)

    def write(owner: int, count: int = 1) -> int:
        pages = list(range(count))
        return int(
            filler.call(
                "write", peer=f"owner{owner}", target=targets[owner], local=pages, remote=pages
            )
        )

    for owner in (0, 1, 0):
        assert filler.call("wait", number=write(owner)) == "done"
        assert filler.call("num_peers") == 1
    owners[0].stop()
    pending = write(0, num_pages)
    with pytest.raises(RemoteError, match="busy"):
        write(1)
    assert filler.call("close_idle") == 0
    owners[0].signal(signal.SIGCONT)
    assert filler.call("wait", number=pending) == "done"
    assert filler.call("wait", number=write(1)) == "done"
    assert filler.call("close_idle") == 1
    assert filler.call("num_peers") == 0


@needs_nixl
def test_agents_towards_a_worker_that_was_replaced_are_closed(start: Start) -> None:
    """A worker that dies again and again would leave one behind each time."""
    num_pages, page_bytes = 16, 4096
    owners = [start(num_pages=num_pages, page_bytes=page_bytes) for _ in range(3)]
    targets = [owner.call("open_owner") for owner in owners]
    filler = start(num_pages=num_pages, page_bytes=page_bytes)
    filler.call("open_filler")
    for epoch, target in enumerate(targets, EPOCH):
        where = {"peer": "a", "target": target, "epoch": epoch}
        number = filler.call("write", local=[3], remote=[9], **where)
        assert filler.call("wait", number=number) == "done"
        assert filler.call("num_peers") == 1
    number = filler.call("write", peer="b", target=targets[0], local=[3], remote=[9])
    assert filler.call("wait", number=number) == "done"
    assert filler.call("num_peers") == 2


@needs_nixl
def test_idle_agents_sleep(pair: Pair) -> None:
    owner, filler, target = pair
    filler.call("connect", peer="a", target=target)
    begin_s = time.monotonic(), cpu_time_s(owner.pid), cpu_time_s(filler.pid)
    time.sleep(1.0)
    end_s = time.monotonic(), cpu_time_s(owner.pid), cpu_time_s(filler.pid)
    wall, *used = (end - begin for begin, end in zip(begin_s, end_s, strict=True))
    assert max(used) < wall / 4


def cpu_time_s(pid: int) -> float:
    """Seconds that a process's threads have run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
