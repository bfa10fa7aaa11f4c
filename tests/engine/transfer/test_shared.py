"""Pages written into shared memory by another process: what arrives, and what ends a write."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.contract.fills import FillCommand
from weft.contract.handle import SharedTargetInfo
from weft.pages.transfer import shared
from weft.pages.transfer.nixl_wire import PoolRegion, TransferError
from weft.pages.transfer.shared import SharedSenders
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.shared_process import (
    KEY,
    PAGE_BYTES,
    PAGES,
    Connection,
    Owner,
    fill,
    fill_apart,
    own,
)
from weft.testing.models.tiny_models import make_tiny

NEW_IPC, NEW_NETWORK = 0x08000000, 0x40000000
"""CLONE_NEWIPC and CLONE_NEWNET."""


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, Connection]]]:
    """Starts processes that end with the test."""
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []

    def starter(run: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        here, there = context.Pipe()
        process = context.Process(target=run, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        started.append(process)
        return process, here

    yield starter
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.sharer.close()


def pages_to_write(count: int) -> tuple[list[int], list[int]]:
    return random.sample(range(PAGES), count), random.sample(range(PAGES), count)


def let_pass(filler: Connection, count: int) -> Any:
    """Lets a filler write pieces; what it says after them."""
    for _ in range(count):
        assert filler.recv() == "piece"
        filler.send(True)
    return filler.recv()


def test_pages_arrive_where_they_are_to(owner: Owner, start: Any) -> None:
    _, filler = start(fill, owner.target)
    pool = filler.recv()
    for count in (1, 5, PAGES):
        before = owner.pages.copy()
        sources, destinations = pages_to_write(count)
        filler.send((sources, destinations))
        while (said := filler.recv()) == "piece":
            filler.send(True)
        assert said == "done"
        before[destinations] = pool[sources]
        assert (owner.pages == before).all()


@pytest.mark.parametrize(("namespace", "answer"), [(NEW_IPC, "done"), (NEW_NETWORK, False)])
def test_containers_share_memory_if_they_share_a_network(
    owner: Owner, start: Any, namespace: int, answer: str | bool
) -> None:
    """Memory is handed over as an open file, for which IPC namespaces do not matter."""
    _, filler = start(fill_apart, owner.target, namespace)
    if (said := filler.recv()) is not True:
        pytest.skip(f"no namespaces here: {said}")
    pool = filler.recv()
    filler.send(([3], [5]))
    while (said := filler.recv()) == "piece":
        filler.send(True)
    assert said == answer
    assert (owner.pages[5] == (pool[3] if answer == "done" else 0)).all()


def test_a_lease_that_ends_in_the_middle_ends_the_write(owner: Owner, start: Any) -> None:
    _, filler = start(fill, owner.target)
    pool = filler.recv()
    sources, destinations = [0, 2, 4, 6], [3, 9, 1, 5]
    filler.send((sources, destinations))
    assert let_pass(filler, 2) == "piece"
    filler.send(False)
    assert filler.recv() is False  # No bytes may still arrive.
    assert (owner.pages[[3, 9]] == pool[[0, 2]]).all()
    owner.pages[:] = 0
    filler.send(([7], [7]))  # The same memory takes later writes.
    assert let_pass(filler, 1) == "done"
    assert (owner.pages[7] == pool[7]).all()
    assert not owner.pages[[0, 1, 3, 5, 9]].any()


def test_nothing_arrives_from_a_filler_that_is_gone(owner: Owner, start: Any) -> None:
    process, filler = start(fill, owner.target)
    filler.recv()
    filler.send(([0, 2, 4, 6], [3, 9, 1, 5]))
    assert let_pass(filler, 1) == "piece"
    filler.send(True)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    owner.pages[:] = 0
    _, other = start(fill, owner.target)
    pool = other.recv()
    other.send(([1], [8]))
    assert let_pass(other, 1) == "done"
    assert (owner.pages[8] == pool[1]).all()
    assert not np.delete(owner.pages, 8, axis=0).any()


def test_memory_of_an_owner_that_is_gone_is_given_back(start: Any) -> None:
    process, connection = start(own)
    target = connection.recv()
    pool = np.random.default_rng().integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)
    senders = SharedSenders(PoolRegion.of_array(pool))
    gc.collect()  # Other tests of this process may have left memory.
    before = num_mapped()
    assert senders.write(KEY, target, [1], [2], lambda: None).poll() == "done"
    senders.tidy()
    assert num_mapped() == before + 1

    def kill() -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    # A write in which the owner dies reaches nobody's memory.
    assert senders.write(KEY, target, [3], [4], kill).poll() == "done"
    senders.tidy()
    assert num_mapped() == before
    with pytest.raises(TransferError, match="no memory in common"):
        senders.write(KEY, target, [1], [2], lambda: None)


def num_mapped() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:weft-pages" in line for line in lines)


def test_no_one_gets_memory_without_the_secret(owner: Owner) -> None:
    pool = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    wrong = [
        replace(owner.target, secret=bytes(16)),
        replace(owner.target, socket="weft-of-another-host"),
        replace(owner.target, page_bytes=PAGE_BYTES // 2),
        replace(owner.target, num_pages=PAGES * 2),
        replace(owner.target, memory_type="VRAM"),
    ]
    for target in wrong:
        senders = SharedSenders(PoolRegion.of_array(pool))
        with pytest.raises(TransferError):
            senders.connect(KEY, target)
        assert not senders.has_peers
    senders = SharedSenders(PoolRegion.of_array(pool))
    senders.connect(KEY, owner.target)
    assert "to owner: memory shared on this host" in senders.describe()
    senders.close()


def test_an_owner_that_does_not_answer_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "CONNECT_TIMEOUT_S", 0.05)
    now = [0.0]
    pool = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    senders = SharedSenders(PoolRegion.of_array(pool), lambda: now[0])
    target = SharedTargetInfo(
        socket=f"weft-test-{os.getpid()}-{random.random()}",
        secret=bytes(16),
        page_bytes=PAGE_BYTES,
        num_pages=PAGES,
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + target.socket.encode())
        listener.listen()
        listener.setblocking(False)
        for number_of_calls in (1, 0):
            with pytest.raises(TransferError):
                senders.connect(KEY, target)
            calls = 0
            while True:
                try:
                    listener.accept()[0].close()
                except BlockingIOError:
                    break
                calls += 1
            assert calls == number_of_calls
        now[0] += shared.RETRY_S
        with pytest.raises(TransferError):
            senders.connect(KEY, target)
        listener.accept()[0].close()
    assert "to owner: gRPC data messages (no memory in common" in senders.describe()


@pytest.mark.parametrize(
    ("settings", "is_in_reach", "transport"),
    [
        ({"transport": "shared"}, True, "shared"),
        ({"transport": "shared"}, False, "data"),
        ({"transport": "data"}, True, "data"),
    ],
)
def test_each_pair_has_its_transport(
    settings: dict[str, Any], is_in_reach: bool, transport: str, tmp_path: Path
) -> None:
    """An owner that shares its memory, and a filler of this host, of another, or that only sends
    messages.
    """
    model_dir, clock = make_tiny("llama", tmp_path, seed=random.randrange(2**31)), ManualClock()
    owner = make_engine(model_dir, "decode", clock, transport="shared")
    pair = EnginePair(owner, [make_engine(model_dir, "prefill", clock, **settings)], clock)

    def pass_on(command: FillCommand) -> list[FillCommand]:
        if command.handle is None or command.handle.shared is None or is_in_reach:
            return [command]
        elsewhere = replace(command.handle.shared, socket="weft-of-another-host")
        return [replace(command, handle=replace(command.handle, shared=elsewhere))]

    pair.on_command = pass_on
    prompt = [random.randrange(3, 500) for _ in range(100)]
    alone = pair.finish(pair.submit(prompt, candidates=[]))
    owner.memory.flush_cache()
    request_id = pair.submit(prompt)
    assert pair.finish(request_id) == alone
    (record,) = pair.answers[request_id].finished[0].timeline.fills
    assert (record.transport, record.accepted_tokens, record.failure) == (transport, 96, "")
    told = {
        "shared": "to decode: memory shared on this host",
        "data": "to decode: gRPC data messages" if settings["transport"] == "shared" else "gRPC",
    }
    assert told[transport] in pair.fillers["prefill"].parts.transport.describe()
    pair.settle()
    pair.close()


def test_a_worker_that_cannot_share_memory_gets_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(num_bytes: int) -> None:
        raise TransferError(f"no {num_bytes} bytes")

    monkeypatch.setattr("weft.engine.transfer.build.MemoryFile", refuse)
    monkeypatch.setattr("weft.engine.transfer.staging_memory.MemoryFile", refuse)
    model_dir, clock = make_tiny("llama", tmp_path, seed=random.randrange(2**31)), ManualClock()
    for settings in ({}, {"force_staging": True}):
        values: dict[str, Any] = {"transport": "shared", **settings}
        owner = make_engine(model_dir, "decode", clock, **values)
        pair = EnginePair(owner, [make_engine(model_dir, "prefill", clock, **values)], clock)
        assert owner.parts.transport.transports == ["data"]
        request_id = pair.submit([random.randrange(3, 500) for _ in range(50)])
        pair.finish(request_id)
        (record,) = pair.answers[request_id].finished[0].timeline.fills
        assert (record.transport, record.accepted_tokens, record.failure) == ("data", 48, "")
        pair.close()
