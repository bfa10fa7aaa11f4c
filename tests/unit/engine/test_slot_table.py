"""A slot table on a device: what was set is there once it was sent; copies are not disturbed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from weft.engine.sampling import slot_table
from weft.engine.sampling.slot_table import SlotTable
from weft.kernels.ops.sampling.spec import ALWAYS_MASKED, Field, SlotParams, pack_slot

VOCAB, WORDS = 150, 5


def table_of(num_slots: int) -> SlotTable:
    return SlotTable(VOCAB, num_slots, torch.device("cpu"))


@pytest.mark.parametrize("num_slots", [1, 7, 100])
def test_all_that_was_set_is_sent(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [0]

    class CountedMarks(slot_table.Marks):
        def add(self) -> slot_table.Mark:
            marks[0] += 1
            return super().add()

    monkeypatch.setattr(slot_table, "Marks", CountedMarks)
    table = table_of(num_slots)
    params, masks = table.plain_tensors[:2]
    masks_of, params_of = np.zeros((num_slots, WORDS), np.uint32), [pack_slot(SlotParams())]
    params_of *= num_slots
    table.send()
    for step in range(30):
        before = masks_of.copy()
        for _ in range(random.choice([0, 1, 2, 9])):
            slot = random.randrange(num_slots)
            words = np.array([random.getrandbits(32) for _ in range(WORDS)], np.uint32)
            own = SlotParams(temperature=random.random(), seed=random.getrandbits(64))
            table.add(slot, own, None)
            if is_written := random.random() < 0.5:
                table.mask_memory()[slot] = words
                table.have_masks(np.array([slot]))
            else:
                table.set_mask(slot, words, end=step)
            masks_of[slot] = words
            params_of[slot] = pack_slot(own, mask_end=ALWAYS_MASKED if is_written else step)
            words[:] = 0  # Its memory is the caller's.
        assert (masks.numpy().view(np.uint32) == before).all(), step
        table.send()
        assert (masks.numpy().view(np.uint32) == masks_of).all(), step
        assert (params.numpy() == np.stack(params_of)).all(), step
    table.send()
    assert marks[0] <= 30


def test_a_table_on_the_host_is_changed_at_once() -> None:
    table = SlotTable(VOCAB, 3)
    own = SlotParams(temperature=0.5, top_k=7)
    table.add(1, own, None)
    table.set_mask(1, np.full(WORDS, 9, np.uint32), end=4)
    assert (table.params[1].numpy() == pack_slot(own, mask_end=4)).all()
    assert table.masks[1].tolist() == [9] * WORDS
    table.set_mask(1, None)
    assert table.params[1, Field.MASK_END] == 0
    assert not table.is_on_device


def test_wide_gaps_are_not_sent() -> None:
    table = table_of(300)
    table.masks.fill_(3)
    for slot in (0, 2, 7, 40, 41, 299):
        table.set_mask(slot, np.full(WORDS, 9, np.uint32))
    table.send()
    sent = np.flatnonzero(table.plain_tensors.masks[:, 0].numpy())
    assert sent.tolist() == [*range(8), 40, 41, 299]


def test_no_mask_is_written_while_copies_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class LateMark:
        def wait(self) -> None:
            waited.append(table.masks[1, 0].item())

    table = table_of(3)
    monkeypatch.setattr(table._mirror, "_marks", SimpleNamespace(add=LateMark))
    for step in range(1, 4):
        for slot in range(3):
            table.set_mask(slot, np.full(WORDS, step, np.uint32))
        table.send()
    assert waited == [1, 2], "before the first mask behind each send"
