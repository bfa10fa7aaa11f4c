"""Memory that copies to a device start from is not handed out while a copy reads it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.engine.base import device_copies
from weft.engine.base.device_copies import HostCopies, Marks, PinnedBuffers


class LateStream:
    """Copies that a device makes in their order, at the latest when it is waited for."""

    def __init__(self) -> None:
        self.num_told = self.num_made = 0

    def event(self) -> Any:
        """An event as of CUDA."""
        event = SimpleNamespace(upto=0)
        event.record = lambda: setattr(event, "upto", self.num_told)
        event.synchronize = lambda: setattr(self, "num_made", max(self.num_made, event.upto))
        return event


def test_no_buffer_is_handed_out_while_a_copy_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stream = LateStream()
    monkeypatch.setattr(device_copies.torch.cuda, "Event", stream.event)
    empty = torch.empty
    monkeypatch.setattr(
        device_copies.torch, "empty", lambda size, dtype, pin_memory=False: empty(size, dtype=dtype)
    )
    buffers = PinnedBuffers(torch.device("cuda"))
    copies: dict[int, int] = {}
    kept = []
    num_behind = 0
    for _ in range(3_000):
        size = rng.choice((10, 100, 1 << 17))
        buffer, host = buffers.take(size)
        assert buffer.numel() >= size
        assert host.ctypes.data == buffer.data_ptr()
        kept.append(buffer)  # Its address names it.
        assert copies.get(buffer.data_ptr(), -1) < stream.num_made, "a copy still reads it"
        copies[buffer.data_ptr()] = stream.num_told
        stream.num_told += 1
        buffers.sent()
        num_behind = max(num_behind, stream.num_told - stream.num_made)
        if rng.random() < 0.05:
            stream.num_made = rng.randint(stream.num_made, stream.num_told)
    assert num_behind >= 8, "of two steps none waits for another"


def test_marks_share_events_only_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream()
    monkeypatch.setattr(device_copies.torch.cuda, "current_stream", lambda device: None)

    def event() -> Any:
        made = stream.event()
        made.record = lambda stream_of_device: setattr(made, "upto", stream.num_told)
        return made

    monkeypatch.setattr(device_copies.torch.cuda, "Event", event)
    marks = Marks(torch.device("cuda"), number=3)
    made = []
    for number in range(1, 10):
        stream.num_told = number
        made.append(marks.add())
        # The last three are waited for as far as they were told of.
        for back, mark in enumerate(reversed(made[-3:])):
            stream.num_made = 0
            mark.wait()
            assert stream.num_made == number - back


def test_copies_to_the_host_stay_for_a_few_further_ones() -> None:
    copies = HostCopies(torch.device("cpu"), 12, number=2)
    values, waits, expected = torch.zeros((3, 4), dtype=torch.int64), [], []
    for step in range(6):
        part = values[: 1 + step % 3]
        part.random_(0, 99)
        expected.append(part.clone())
        waits.append(copies.begin(part))
        part.fill_(-1)  # Later work may write there.
        for wait, wanted in zip(waits[-2:], expected[-2:], strict=True):
            assert torch.equal(wait(), wanted)
