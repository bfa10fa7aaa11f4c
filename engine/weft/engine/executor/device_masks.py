"""Token masks by slot in the memory of the device that draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.base.device_copies import Mark, Marks

_MAX_GAP = 8
"""Slots between two whose masks have changed up to which all of them are sent in one copy: telling
the device of another one takes the host longer.
"""


class DeviceMasks:
    """Masks by slot, sent without waiting from host memory of the same layout.

    Args:
        num_slots: Slots are 0..num_slots - 1.
        num_words: Words of 32 tokens in a mask.
        device: Where they are read.
    """

    def __init__(self, num_slots: int, num_words: int, device: torch.device) -> None:
        shape, is_cuda = (num_slots, num_words), device.type == "cuda"
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        """[num_slots, num_words], which stays where it is."""
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._words: npt.NDArray[np.uint32] = self._host.numpy().view(np.uint32)
        self._changed: set[int] = set()
        """Slots whose masks are to be sent."""
        self._marks = Marks(device, number=1)
        self._sent: Mark | None = None
        """Behind the last copies; None: they have ended."""

    @property
    def has_changes(self) -> bool:
        """Whether `send` has something to do."""
        return bool(self._changed)

    def set(self, slot: int, words: npt.NDArray[np.uint32]) -> None:
        """Sets a slot's mask.

        Args:
            slot: Which.
            words: [num_words], copied.
        """
        self.memory()[slot] = words
        self._changed.add(slot)

    def memory(self) -> npt.NDArray[np.uint32]:
        """[num_slots, num_words]: masks on the host, of which `changed` says which to send."""
        if self._sent is not None:
            # The tokens drawn after those copies are known to the host, so the copies have ended.
            self._sent.wait()
            self._sent = None
        return self._words

    def changed(self, slots: Sequence[int]) -> None:
        """Has the masks of slots sent that were written to `memory`."""
        self._changed.update(slots)

    def send(self) -> None:
        """Sends the masks set since the last call, and may be some others again."""
        if not self._changed:
            return
        for slots in _ranges(sorted(self._changed)):
            self.tensor[slots].copy_(self._host[slots], non_blocking=True)
        self._changed.clear()
        self._sent = self._marks.add()


def _ranges(slots: Sequence[int]) -> Iterator[slice]:
    """Ranges that have all of these slots, ascending, and those in small gaps between them."""
    first = last = slots[0]
    for slot in slots:
        if slot - last > 1 + _MAX_GAP:
            yield slice(first, last + 1)
            first = slot
        last = slot
    yield slice(first, last + 1)
