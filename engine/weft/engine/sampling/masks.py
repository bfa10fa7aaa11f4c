"""Token masks by slot, in the memory of the device that draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.base.device_copies import Mark, Marks

_MAX_GAP = 8
"""Longest gap of unchanged slots that is sent along with the changed ones. A second copy would take
the host longer.
"""


class DeviceMasks:
    """Masks by slot. The host writes them to memory of the same layout and sends them without
    waiting.

    Args:
        num_words: 32-bit words of a mask, one bit per token.
    """

    def __init__(self, num_slots: int, num_words: int, device: torch.device) -> None:
        shape, is_cuda = (num_slots, num_words), device.type == "cuda"
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        """[num_slots, num_words]; it never moves."""
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._words: npt.NDArray[np.uint32] = self._host.numpy().view(np.uint32)
        self._changed: set[int] = set()
        self._marks = Marks(device, number=1)
        self._sent: Mark | None = None
        """The device passes it after the last copies; None: the copies have ended."""

    @property
    def has_changes(self) -> bool:
        return bool(self._changed)

    def set(self, slot: int, words: npt.NDArray[np.uint32]) -> None:
        """Sets a slot's mask: `words`, [num_words], is copied."""
        self.memory()[slot] = words
        self._changed.add(slot)

    def memory(self) -> npt.NDArray[np.uint32]:
        """[num_slots, num_words]: the masks on the host. Call `changed` after writing here."""
        if self._sent is not None:
            # The tokens drawn after those copies are known to the host, so the copies have ended.
            self._sent.wait()
            self._sent = None
        return self._words

    def changed(self, slots: Sequence[int]) -> None:
        """The masks of these slots were written in `memory`; `send` then sends them."""
        self._changed.update(slots)

    def send(self) -> None:
        """Sends the masks that have changed since the last call, and perhaps unchanged ones between
        them.
        """
        if not self._changed:
            return
        for slots in _ranges(sorted(self._changed)):
            self.tensor[slots].copy_(self._host[slots], non_blocking=True)
        self._changed.clear()
        self._sent = self._marks.add()


def _ranges(slots: Sequence[int]) -> Iterator[slice]:
    first = last = slots[0]
    for slot in slots:
        if slot - last > 1 + _MAX_GAP:
            yield slice(first, last + 1)
            first = slot
        last = slot
    yield slice(first, last + 1)
