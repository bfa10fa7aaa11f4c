"""Masks by slot in a device's memory: those that were set are there once they were sent."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from weft.engine.sampling import masks as mask_module
from weft.engine.sampling.masks import DeviceMasks

WORDS = 5


@pytest.mark.parametrize("num_slots", [1, 7, 100])
def test_all_that_was_set_is_sent(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [0]

    class CountedMarks(mask_module.Marks):
        def add(self) -> mask_module.Mark:
            marks[0] += 1
            return super().add()

    monkeypatch.setattr(mask_module, "Marks", CountedMarks)
    masks = DeviceMasks(num_slots, WORDS, torch.device("cpu"))
    table, expected = masks.tensor, np.zeros((num_slots, WORDS), np.uint32)
    for step in range(30):
        before = expected.copy()
        for _ in range(random.choice([0, 1, 2, 9])):
            slot = random.randrange(num_slots)
            words = np.array([random.getrandbits(32) for _ in range(WORDS)], np.uint32)
            masks.set(slot, words)
            expected[slot] = words
            words[:] = 0  # Its memory is the caller's.
        assert (masks.tensor.numpy().view(np.uint32) == before).all(), step
        masks.send()
        assert (table.numpy().view(np.uint32) == expected).all(), step
        assert not masks.has_changes
    masks.send()
    assert marks[0] <= 30


def test_wide_gaps_are_not_sent() -> None:
    masks = DeviceMasks(300, WORDS, torch.device("cpu"))
    masks._host.fill_(3)
    masks.tensor.fill_(0)
    for slot in (0, 2, 7, 40, 41, 299):
        masks.set(slot, np.full(WORDS, 9, np.uint32))
    masks.send()
    sent = np.flatnonzero(masks.tensor[:, 0].numpy())
    assert sent.tolist() == [*range(8), 40, 41, 299]


def test_no_mask_is_written_while_copies_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class LateMark:
        def wait(self) -> None:
            waited.append(masks._host[1, 0].item())

    masks = DeviceMasks(3, WORDS, torch.device("cpu"))
    monkeypatch.setattr(masks, "_marks", SimpleNamespace(add=LateMark))
    for step in range(1, 4):
        for slot in range(3):
            masks.set(slot, np.full(WORDS, step, np.uint32))
        masks.send()
    assert waited == [1, 2], "before the first mask behind each send"
