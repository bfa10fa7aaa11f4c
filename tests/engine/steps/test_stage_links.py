"""Rows between stages: a link works while stages compute, and what goes wrong on it is named."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import pytest
import torch
from weft.contract.errors import RanksLost
from weft.engine.parallel.stage_links import SocketStages, StageEnds, connected_ends

WIDTH, DTYPE, LONG_S = 1024, torch.float32, 60.0
LARGE = 1024
"""Rows that fit into no buffer of a connection."""


class Group:
    """The other ranks, as a stage sees them."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.num_frames, self.is_stopped, self.reason = limit_s, 1, False, ""

    def stop(self) -> None:
        self.is_stopped = True

    def fail(self, why: str) -> NoReturn:
        self.stop()
        raise RanksLost(why)


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, dtype=DTYPE)


@contextmanager
def two_stages(limit_s: float = LONG_S) -> Iterator[tuple[SocketStages, SocketStages]]:
    with ExitStack() as stack:
        group, names = Group(limit_s), [("", "stage 1"), ("stage 0", "")]
        made = [
            SocketStages(ends, group, number, names[number], LARGE)
            for number, ends in enumerate(connected_ends(2))
        ]
        for one in made:
            stack.callback(one.close)
        stack.callback(group.stop)
        yield made[0], made[1]


def receive(stage: SocketStages, like: torch.Tensor) -> torch.Tensor:
    return stage.receive(like.shape, like.dtype)


def test_rows_of_all_sizes_come_in_order(seed: int) -> None:
    sizes = [int(size) for size in torch.randint(0, 200, (40,))]
    sizes[::7] = [LARGE] * len(sizes[::7])
    sent = [rows_of(size) for size in sizes]
    with two_stages() as (first, last), ThreadPoolExecutor(1) as threads:
        done = threads.submit(lambda: [first.send(one) for one in sent])
        for one in sent:
            assert torch.equal(receive(last, one), one)
        done.result(LONG_S)


def test_a_stage_goes_on_while_nobody_takes_its_rows(seed: int) -> None:
    first_rows, second_rows = rows_of(LARGE), rows_of(LARGE)
    with two_stages() as (first, last), ThreadPoolExecutor(1) as threads:
        first.send(first_rows)  # Waits for nobody, though nothing reads.
        second = threads.submit(first.send, second_rows)
        assert torch.equal(receive(last, first_rows), first_rows)
        second.result(LONG_S)
        assert torch.equal(receive(last, second_rows), second_rows)


def test_rows_come_while_a_stage_computes(seed: int) -> None:
    """The next rows arrive whole before the stage asks for them."""
    first_rows, second_rows = rows_of(LARGE), rows_of(LARGE)
    with two_stages() as (first, last):
        first.send(first_rows)
        assert torch.equal(receive(last, first_rows), first_rows)
        first.send(second_rows)
        first.send(rows_of(1))  # Returns once the rows before are on their way as a whole.
        assert torch.equal(receive(last, second_rows), second_rows)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    "size", [(LARGE, WIDTH + 1), (LARGE + 1, WIDTH), (1 << 40, WIDTH), (-1, WIDTH)]
)
def test_other_rows_than_those_that_are_due_are_refused(
    size: tuple[int, int], is_ahead: bool, seed: int
) -> None:
    """Before memory is taken for them, also where they are read ahead."""
    here, there = socket.socketpair()
    group, rows = Group(LONG_S), rows_of(LARGE)
    stage = SocketStages(StageEnds(here, None), group, 1, ("stage 0", ""), LARGE)
    header = struct.Struct("<qqqq")

    def send() -> None:
        if is_ahead:
            there.sendall(header.pack(1, *rows.shape, 0) + rows.numpy().tobytes())
        there.sendall(header.pack(1 + is_ahead, *size, 0))

    sender = threading.Thread(target=send)
    sender.start()
    if is_ahead:
        assert torch.equal(receive(stage, rows), rows)
    with pytest.raises(RanksLost, match=f"stage 0 has sent rows .*{size[0]}"):
        receive(stage, rows)
    sender.join()
    assert group.is_stopped
    there.close()
    stage.close()


@pytest.mark.parametrize("what", ["sent", "read ahead"])
def test_closing_ends_what_waits_for_the_other_stage(what: str, seed: int) -> None:
    rows = rows_of(LARGE)
    with two_stages() as (first, last):
        first.send(rows)
        if what == "read ahead":
            receive(last, rows)
        first._group.stop()  # type: ignore[attr-defined]
        closing = threading.Thread(target=(first if what == "sent" else last).close)
        closing.start()
        closing.join(LONG_S)
        assert not closing.is_alive()


def test_rows_that_nobody_takes_end_the_group_after_its_limit(seed: int) -> None:
    with two_stages(limit_s=0.2) as (first, _):
        first.send(rows_of(LARGE))
        with pytest.raises(RanksLost, match="stage 1 has not taken rows within"):
            first.send(rows_of(1))


def test_rows_that_do_not_come_end_the_group_after_its_limit(seed: int) -> None:
    with two_stages() as (first, last):
        rows = rows_of(LARGE)
        first.send(rows)
        receive(last, rows)
        last._group.limit_s = 0.2  # type: ignore[misc]
        with pytest.raises(RanksLost, match="the rows of stage 0 have not come within"):
            receive(last, rows)
