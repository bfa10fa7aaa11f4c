"""Sampling parameters by slot, on the host and, where a device draws, in its memory too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.arrays import Int64Array
from weft.engine.base.device_copies import DeviceCopies, Mark, Marks, host_zeros
from weft.engine.sampling.edits import LogitEdits
from weft.kernels.ops.sampling.spec import (
    ALWAYS_MASKED,
    NUM_FIELDS,
    Field,
    SlotParams,
    SlotTensors,
    pack_slot,
)

Words = npt.NDArray[np.uint32]
"""A mask, [ceil(vocab_size / 32)]: bit i % 32 of word i / 32 allows token i."""

_MAX_GAP = 8
"""Longest gap of unchanged masks that is sent along with the changed ones. A second copy would take
the host longer.
"""


class SlotTable:
    """Parameters and masks of each slot. They are changed on the host; `send` brings the changes to
    the device in one copy, and masks separately, without waiting. Slots that were not added draw
    greedily.

    Args:
        device: Device that draws; None: the host does.
        max_masked_rows: Most rows of a step for `mask_rows`.
    """

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        device: torch.device | None = None,
        max_masked_rows: int = 0,
    ) -> None:
        self._first_beside = num_slots
        num_all = num_slots + max_masked_rows
        words = (num_all, -(-vocab_size // 32))
        self.params = torch.from_numpy(np.tile(pack_slot(SlotParams()), (num_all, 1)))
        """[num_slots, NUM_FIELDS] int64 on the host, rows of `pack_slot`."""
        self.masks = host_zeros(words, torch.int32, device)
        """[num_slots, ceil(vocab_size / 32)] int32 on the host."""
        self._params: Int64Array = self.params.numpy()
        self._words: Words = self.masks.numpy().view(np.uint32)
        self._mirror: _Mirror | None = None
        if device is not None:
            self._mirror = _Mirror(vocab_size, num_slots, num_all, device)

    @property
    def is_on_device(self) -> bool:
        return self._mirror is not None

    @property
    def tensors(self) -> SlotTensors:
        """The table on the device, valid until a slot is added."""
        assert self._mirror is not None
        mirror = self._mirror
        rows = mirror.biases.tensor, mirror.counts.tensor
        return SlotTensors(mirror.params, mirror.masks, *rows)

    @property
    def plain_tensors(self) -> SlotTensors:
        """The table on the device for slots without biases and counts. It never moves."""
        assert self._mirror is not None
        mirror = self._mirror
        return SlotTensors(mirror.params, mirror.masks, mirror.no_biases, mirror.no_counts)

    def add(self, slot: int, params: SlotParams, edits: LogitEdits | None) -> None:
        """Assigns a free slot to a sample without a mask.

        Args:
            edits: Biases and tokens so far of the sample, which a device needs to draw.
        """
        bias_row = count_row = -1
        mirror = self._mirror
        if mirror is not None and edits is not None:
            if len(edits.bias_ids):
                bias_row = mirror.biases.take(slot, edits.bias_ids, edits.bias)
            if edits.counts is not None:
                count_row = mirror.counts.take(slot, edits.counts.ids, edits.counts.words)
        self._params[slot] = pack_slot(params, bias_row=bias_row, count_row=count_row)
        if mirror is not None:
            mirror.changed.add(slot)

    def remove(self, slot: int) -> None:
        """Frees `slot`. A device still gets its parameters, because one of its rows may still be
        drawn while the device has the parameters of an earlier sample.
        """
        if self._mirror is not None:
            self._mirror.biases.give_back(slot)
            self._mirror.counts.give_back(slot)

    def set_mask(self, slot: int, words: Words | None, end: int = ALWAYS_MASKED) -> None:
        """Sets the tokens that the slot may draw from now on.

        Args:
            words: Copied; None: all tokens.
            end: Position from which on the slot may draw all tokens.
        """
        self._set_end(slot, 0 if words is None else end)
        if words is not None:
            self._set_words(slot, words)

    def mask_memory(self) -> Words:
        """[num_slots, ceil(vocab_size / 32)]: the masks, which the caller may write now. Call
        `have_masks` afterwards.
        """
        if self._mirror is not None and self._mirror.sent_masks is not None:
            # The tokens drawn after those copies are known to the host, so the copies have ended.
            self._mirror.sent_masks.wait()
            self._mirror.sent_masks = None
        return self._words

    def have_masks(self, slots: Int64Array) -> None:
        """Applies the masks that the caller wrote to these slots' rows of `mask_memory`."""
        mirror = self._mirror
        if mirror is not None:
            ends = self._params[slots, Field.MASK_END]
            mirror.changed.update(slots[ends != ALWAYS_MASKED].tolist())
            mirror.changed_masks.update(slots.tolist())
        self._params[slots, Field.MASK_END] = ALWAYS_MASKED

    def mask_rows(self, slots: Int64Array, masks: Sequence[Words | None]) -> Int64Array:
        """Gives rows separate masks, for steps with several rows of one slot. On a device only.

        Args:
            slots: [M]: slots of the rows. Their parameters must not change until the step draws.
            masks: Masks by row, as in `set_mask`, but without an `end`.

        Returns:
            [M]: slots that draw like `slots` except for the mask, valid until the next call.
        """
        assert self._mirror is not None, "tokens are drawn on the host"
        beside = self._first_beside + np.arange(len(slots))
        params = self._params[slots]
        params[:, Field.MASK_END] = [0 if mask is None else ALWAYS_MASKED for mask in masks]
        # Usually these are the same slots as in the step before.
        are_new = (self._params[beside] != params).any(axis=1)
        self._params[beside] = params
        self._mirror.changed.update(beside[are_new].tolist())
        for slot, mask in enumerate(masks, self._first_beside):
            if mask is not None:
                self._set_words(slot, mask)
        return beside

    def send(self, *columns: Int64Array) -> list[torch.Tensor]:
        """Sends all changes so far and these columns to the device, and applies the changes.
        Returns the columns there.
        """
        assert self._mirror is not None
        self._mirror.send_masks(self.masks)
        return self._mirror.send(self._params, columns)

    def _set_end(self, slot: int, end: int) -> None:
        if self._params[slot, Field.MASK_END] != end:
            self._params[slot, Field.MASK_END] = end
            if self._mirror is not None:
                self._mirror.changed.add(slot)

    def _set_words(self, slot: int, words: Words) -> None:
        self.mask_memory()[slot] = words
        if self._mirror is not None:
            self._mirror.changed_masks.add(slot)


class _Mirror:
    """The table in the memory of the device that draws."""

    def __init__(
        self, vocab_size: int, max_rows: int, num_slots: int, device: torch.device
    ) -> None:
        words = -(-vocab_size // 32)
        self.params = torch.zeros((num_slots, NUM_FIELDS), dtype=torch.int64, device=device)
        self.masks = torch.zeros((num_slots, words), dtype=torch.int32, device=device)
        self.no_biases = torch.zeros((1, vocab_size), device=device)
        self.no_counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self.biases = _Rows(vocab_size, max_rows, torch.float32, device)
        self.counts = _Rows(vocab_size, max_rows, torch.int32, device)
        self.changed = set(range(num_slots))
        """Slots whose parameters are to be sent."""
        self.changed_masks: set[int] = set()
        self.sent_masks: Mark | None = None
        """The device passes it after the last copies of masks; None: the copies have ended."""
        self._marks = Marks(device, number=1)
        self._copies = DeviceCopies(device)
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)

    def send_masks(self, masks: torch.Tensor) -> None:
        """Sends the masks that have changed since the last call, and perhaps unchanged ones between
        them.
        """
        if not self.changed_masks:
            return
        for slots in _ranges(sorted(self.changed_masks)):
            self.masks[slots].copy_(masks[slots], non_blocking=True)
        self.changed_masks.clear()
        self.sent_masks = self._marks.add()

    def send(self, params: Int64Array, columns: Sequence[Int64Array]) -> list[torch.Tensor]:
        if not (self.changed or self.biases.has_changes or self.counts.has_changes):
            if not any(map(len, columns)):
                return [self._nothing] * len(columns)
            return self._copies.send(columns)
        changed = np.fromiter(self.changed, np.int64)
        rows = self.biases.take_changes(), self.counts.take_changes()
        sent = self._copies.send((*columns, changed, params[changed], *rows[0], *rows[1]))
        changes = sent[len(columns) :]
        if len(changed):
            self.params.index_copy_(0, changes[0], changes[1].view(-1, NUM_FIELDS))
        self.biases.apply(changes[2], changes[3])
        self.counts.apply(changes[4], changes[5])
        self.changed.clear()
        return sent[: len(columns)]


class _Rows:
    """Rows of the vocabulary's length for the slots that need one. Their number grows with the most
    that were needed at once.
    """

    def __init__(
        self, vocab_size: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._max_rows = max_rows
        self.tensor = torch.zeros((1, vocab_size), dtype=dtype, device=device)
        self._numpy_dtype = np.float32 if dtype.is_floating_point else np.int32
        self._row_of: dict[int, int] = {}
        self._free = [0]
        self._new: dict[int, tuple[Int64Array, npt.NDArray[np.generic]]] = {}

    def take(self, slot: int, ids: Int64Array, values: npt.NDArray[np.generic]) -> int:
        """Assigns a row to the slot, filled with 0 except for the values of `ids`."""
        if not self._free:
            count = len(self.tensor)
            more = self.tensor.new_zeros(min(count, self._max_rows - count), self.tensor.shape[1])
            self.tensor = torch.cat([self.tensor, more])
            self._free = list(range(count, len(self.tensor)))
        row = self._row_of[slot] = self._free.pop()
        self._new[row] = (ids + row * self.tensor.shape[1], values.astype(self._numpy_dtype))
        return row

    def give_back(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._new.pop(row, None)
            self._free.append(row)

    @property
    def has_changes(self) -> bool:
        return bool(self._new)

    def take_changes(self) -> tuple[Int64Array, npt.NDArray[np.generic]]:
        """Indices and values of the changed entries. Zeroes new rows."""
        changes, self._new = self._new, {}
        for row in changes:
            self.tensor[row].zero_()
        indices = [np.zeros(0, np.int64), *(at for at, _ in changes.values())]
        values = [np.zeros(0, self._numpy_dtype), *(value for _, value in changes.values())]
        return np.concatenate(indices), np.concatenate(values)

    def apply(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        if len(indices):
            self.tensor.view(-1).index_copy_(0, indices, values)


def _ranges(slots: Sequence[int]) -> Iterator[slice]:
    first = last = slots[0]
    for slot in slots:
        if slot - last > 1 + _MAX_GAP:
            yield slice(first, last + 1)
            first = slot
        last = slot
    yield slice(first, last + 1)
