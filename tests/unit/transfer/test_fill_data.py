"""Data of fills between gRPC and shared memory: what travels, and where data may be put."""

from __future__ import annotations

import platform
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from weft.common.worker.fill_data import (
    IncomingData,
    data_to_wire,
    event_from_wire,
    event_to_wire,
)
from weft.contract.codec.pairs import event_to_proto
from weft.contract.handle import FillEvent
from weft.pages.fills.data_budget import DataSlots
from weft.testing.services.fill_commands import fill_handle
from weft.v1 import kv_pb2

PAGES, PAGE_BYTES, PAGE_SIZE = 20, 64, 4


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**40),
    st.binary(min_size=1, max_size=300),
    st.integers(0, 100),
)
def test_data_travel_as_protobuf_would_send_them(
    chunk: int, start: int, offset: int, data: bytes, held_at: int
) -> None:
    event = FillEvent(kind="data", chunk=chunk, start_token=start, offset=offset, data=data)
    plain = event_to_proto(event)
    memory = np.zeros((2, 400), np.uint8)
    memory.reshape(-1)[held_at : held_at + len(data)] = np.frombuffer(data, np.uint8)
    held = FillEvent(kind="data", chunk=chunk, start_token=start, offset=offset)
    held.held_at, held.num_held = held_at, len(data)
    wire = data_to_wire(held, memory)
    assert kv_pb2.FillEvent.FromString(wire) == plain
    for sent in (wire, event_to_wire(plain)):
        found, view = event_from_wire(sent)
        assert bytes(view) == data
        found.data = data
        assert found == event


@given(st.binary(max_size=60), st.booleans())
def test_anything_else_is_left_to_protobuf(tail: bytes, looks_like_data: bool) -> None:
    wire = b"\x22" + bytes((len(tail),)) + tail if looks_like_data else tail
    try:
        expected = kv_pb2.FillEvent.FromString(wire)
    except DecodeError:
        with pytest.raises(DecodeError):
            event_from_wire(wire)
        return
    found, view = event_from_wire(wire)
    if expected.WhichOneof("event") == "data":
        assert bytes(view) == expected.data.data
        assert (found.chunk, found.offset) == (expected.data.chunk, expected.data.offset)
    else:
        assert not view


def incoming() -> tuple[IncomingData, np.ndarray, list[int]]:
    """Of a fill of six pages from position 8 on."""
    pages = random.sample(range(PAGES), 6)
    plain = fill_handle(bytes(16), page_size=PAGE_SIZE)
    handle = replace(plain, start_token=8, end_token=32, pages=pages)
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    return IncomingData(memory, handle), memory, pages


def put(taker: IncomingData, start: int, offset: int, count: int) -> list[FillEvent]:
    event = FillEvent(kind="data", start_token=start, offset=offset)
    return taker.put(event, memoryview(b"\xff" * count))


def test_data_are_put_where_the_handle_says() -> None:
    taker, memory, pages = incoming()
    told = [*put(taker, 16, 8, 24), *put(taker, 28, 0, PAGE_BYTES), *taker.untold()]
    assert sum(event.num_held for event in told) == 24 + PAGE_BYTES
    assert not any(event.data for event in told)
    expected = np.zeros_like(memory)
    expected[pages[2], 8:32] = 0xFF
    expected[pages[5]] = 0xFF
    assert (memory == expected).all()
    assert not taker.untold()


@pytest.mark.parametrize(
    ("start", "offset", "count"),
    [(4, 0, 8), (9, 0, 8), (32, 0, 8), (8, PAGE_BYTES - 7, 8), (8, 0, 0), (8, -1, 4)],
)
def test_data_that_do_not_fit_are_the_engines_to_judge(start: int, offset: int, count: int) -> None:
    taker, memory, _ = incoming()
    told = put(taker, start, offset, count)
    assert told[-1].data == b"\xff" * count
    assert not memory.any()


def test_nothing_is_put_into_pages_that_are_not_the_fills_any_more() -> None:
    taker, memory, _ = incoming()
    taker.written(16)
    assert put(taker, 12, 0, 8)[-1].data
    taker.accepted(24)
    assert put(taker, 24, 0, 8)[-1].data
    assert not memory.any()
    put(taker, 16, 0, 8)
    assert memory.any()
    memory[:] = 0
    taker.is_stopped = True
    assert put(taker, 20, 0, 8)[-1].data
    assert not memory.any()


def test_a_place_is_free_when_it_is_written_and_taken() -> None:
    slots = DataSlots(3)
    writing: dict[int, int] = {}
    sending: dict[int, int] = {}
    for turn in range(5000):
        choice = random.random()
        if choice < 0.4:
            slot = slots.take(turn, 100)
            busy = {*writing, *sending}
            assert (slot is None) == (len(busy) == 3)
            if slot is not None:
                assert slot not in busy
                writing[slot] = sending[slot] = turn
        elif choice < 0.7 and writing:
            slot = random.choice(list(writing))
            del writing[slot]
            slots.written(slot)
        elif sending:
            slot = random.choice(list(sending))
            slots.taken(sending.pop(slot))
    assert slots.take(0, 1 << 40) is None


FAULTS_OF_MESSAGES = """
import resource, threading
from weft.common.worker.fill_data import keep_message_memory
keep_message_memory()
message = memoryview(bytearray(1 << 20))
def pass_on(count):
    for _ in range(count):
        [bytes(message) for _ in range(8)]  # Some are under way at once.
def count_faults():
    pass_on(20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pass_on(100)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
count_faults()
thread = threading.Thread(target=count_faults)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_messages_follow_one_another_in_the_same_memory() -> None:
    """In the main thread and another one, which allocate from different arenas."""
    command = [sys.executable, "-c", FAULTS_OF_MESSAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    # 800 MiB have 204,800 pages.
    assert all(int(faults) < 20_000 for faults in done.stdout.split()), done.stdout
