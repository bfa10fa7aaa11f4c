"""Sampling on the device that computes the logits. The device keeps sampling parameters by slot, so
that only tokens are fetched.

Tokens are drawn and counted in the order of the calls. No call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.arrays import Int64Array
from weft.contract.request import TokenLogprob
from weft.engine.base.device_copies import DeviceCopies, Fetched
from weft.engine.sampling.edits import LogitEdits
from weft.engine.sampling.logprobs import token_logprobs
from weft.engine.sampling.masks import DeviceMasks
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.kernels.ops.sampling.device import (
    ALWAYS_MASKED,
    NUM_FIELDS,
    DraftedRows,
    Field,
    SlotTables,
    TopLogits,
    draw_rows,
    pack_slot,
    top_logits,
)
from weft.kernels.ops.sampling.reference import SlotParams

Float64Array = npt.NDArray[np.float64]

Way = Literal["greedy", "any"]
"""How the tokens of a step are drawn: all as the most likely ones, or each by its slot's
parameters.
"""
WAYS: tuple[Way, ...] = ("greedy", "any")


class RowsOnDevice(NamedTuple):
    """Slots and positions of the rows of logits, where the device has them already."""

    slots: torch.Tensor | None
    """[L] int64; None: the host must send them."""
    positions: torch.Tensor
    """[L] int64: positions of the tokens to be drawn."""


class RowsBehindDrafts(NamedTuple):
    """Rows of a step that verifies drafts, some of whose requests have penalties, so that their
    tokens are counted.
    """

    firsts: Int64Array
    """[L]: the first row of each row's request."""
    rows: torch.Tensor
    """[2, T] int64 on the device: the rows' tokens, and their ancestor masks if they form trees."""
    are_trees: bool


CapturedDraw = Callable[[Way, Int64Array | None], PendingTokens]
"""Draws by a graph, in the given way. The second argument has slots by row, [L], if some rows draw
with other slots than their requests'.
"""


class DeviceSampler:
    """A sampler on a device. It sends changes since the last step in one copy, and masks
    separately.

    Args:
        max_slots: Slots are 0..max_slots - 1. A slot that was not added draws greedily.
        max_masked_rows: Most rows of a step for `mask_rows`.
    """

    def __init__(
        self, vocab_size: int, max_slots: int, device: torch.device, max_masked_rows: int = 0
    ) -> None:
        self._first_beside = max_slots
        max_slots += max_masked_rows
        self._vocab_size = vocab_size
        self._copies = DeviceCopies(device)
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)
        words = -(-vocab_size // 32)
        self._params = torch.zeros((max_slots, NUM_FIELDS), dtype=torch.int64, device=device)
        self._masks = DeviceMasks(max_slots, words, device)
        self._no_biases = torch.zeros((1, vocab_size), device=device)
        self._no_counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._biases = _Rows(vocab_size, self._first_beside, torch.float32, device)
        self._counts = _Rows(vocab_size, self._first_beside, torch.int32, device)
        greedy = pack_slot(SlotParams())
        self._host_params = np.tile(greedy, (max_slots, 1))
        self._changed = set(range(max_slots))

    def add(self, slot: int, params: SlotParams, edits: LogitEdits | None) -> None:
        """Assigns a free slot to a sample.

        Args:
            edits: Bias and tokens so far of the sample. Stop tokens are masked by `set_mask`.
        """
        bias_row = count_row = -1
        if edits is not None and len(edits.bias_ids):
            bias_row = self._biases.take(slot, edits.bias_ids, edits.bias)
        if edits is not None and edits.counts is not None:
            count_row = self._counts.take(slot, edits.counts.ids, edits.counts.words)
        self._host_params[slot] = pack_slot(params, bias_row=bias_row, count_row=count_row)
        self._changed.add(slot)

    def remove(self, slot: int) -> None:
        """Frees `slot`. Its parameters are still sent, because one of its rows may still be drawn
        while the device has the parameters of an earlier sample.
        """
        self._biases.give_back(slot)
        self._counts.give_back(slot)

    def set_mask(
        self, slot: int, words: npt.NDArray[np.uint32] | None, end: int = ALWAYS_MASKED
    ) -> None:
        """Sets the tokens that the slot may draw from now on.

        Args:
            words: [ceil(vocab_size / 32)], one bit per token, copied; None: all tokens.
            end: Position from which on the slot may draw all tokens.
        """
        mask_end = 0 if words is None else end
        if self._host_params[slot, Field.MASK_END] != mask_end:
            self._host_params[slot, Field.MASK_END] = mask_end
            self._changed.add(slot)
        if words is not None:
            self._masks.set(slot, words)

    def mask_memory(self) -> npt.NDArray[np.uint32]:
        """[num_slots, ceil(vocab_size / 32)]: the masks, which the caller may write now."""
        return self._masks.memory()

    def have_masks(self, slots: Int64Array) -> None:
        """Applies the masks that the caller wrote to these slots' rows of `mask_memory`."""
        ends = self._host_params[slots, Field.MASK_END]
        self._changed.update(slots[ends != ALWAYS_MASKED].tolist())
        self._host_params[slots, Field.MASK_END] = ALWAYS_MASKED
        self._masks.changed(slots.tolist())

    def mask_rows(
        self, slots: Int64Array, masks: Sequence[npt.NDArray[np.uint32] | None]
    ) -> Int64Array:
        """Gives rows separate masks, for steps with several rows of one slot.

        Args:
            slots: [M]: slots of the rows. Their parameters must not change until the step draws.
            masks: Masks by row, as in `set_mask`, but without an `end`.

        Returns:
            [M]: slots that draw like `slots` except for the mask, valid until the next call.
        """
        beside = self._first_beside + np.arange(len(slots))
        params = self._host_params[slots]
        params[:, Field.MASK_END] = [0 if mask is None else ALWAYS_MASKED for mask in masks]
        # Usually the same slots have drafts as in the step before.
        are_new = (self._host_params[beside] != params).any(axis=1)
        self._host_params[beside] = params
        self._changed.update(beside[are_new].tolist())
        for slot, mask in enumerate(masks, self._first_beside):
            if mask is not None:
                self._masks.set(slot, mask)
        return beside

    @property
    def plain_tables(self) -> SlotTables:
        """Tables of slots without biases and counts. They never move."""
        return SlotTables(self._params, self._masks.tensor, self._no_biases, self._no_counts)

    def send_changes(self) -> None:
        """Sends and applies all changes so far, as `draw` does."""
        nothing = np.zeros(0, np.int64)
        self._send(nothing)

    def draw(
        self,
        logits: torch.Tensor,
        slots: Int64Array,
        positions: Int64Array,
        num_tops: Mapping[int, int],
        on_device: RowsOnDevice | None = None,
        drafted: RowsBehindDrafts | None = None,
    ) -> PendingTokens:
        """Draws one token per row and counts it. In steps with drafts only tokens of accepted rows
        are counted.

        Args:
            logits: [L, vocab_size] float32 on the device; unchanged.
            slots: [L]. A slot may occur twice if it was not added, or if its tokens do not depend
                on the ones before.
            positions: [L]: absolute positions of the tokens to be drawn; the largest possible ones
                if only the device knows them.
            num_tops: By row: number of most likely tokens wanted in addition to the log-probability
                of the drawn one.
            on_device: Positions, and perhaps slots, that are on the device already and replace
                these.
            drafted: Rows of a step with drafts, if some slot counts its tokens; else None.
        """
        rows, nothing = np.fromiter(num_tops, np.int64), slots[:0]
        firsts = nothing if drafted is None else drafted.firsts
        if on_device is not None:
            slots = slots if on_device.slots is None else nothing
        sent = self._send(slots, positions if on_device is None else nothing, rows, firsts)
        device_slots, device_positions, device_rows, device_firsts = sent
        if on_device is not None:
            device_positions = on_device.positions
            device_slots = device_slots if on_device.slots is None else on_device.slots
        behind = None
        if drafted is not None:
            row_tokens, words = drafted.rows
            behind = DraftedRows(device_firsts, row_tokens, words if drafted.are_trees else None)
        tables = SlotTables(
            self._params, self._masks.tensor, self._biases.tensor, self._counts.tensor
        )
        tokens = draw_rows(logits, device_slots, device_positions, tables, behind)
        if not num_tops:
            fetched = Fetched(tokens)

            def fetch() -> SampledRows:
                return SampledRows(fetched.wait().numpy(), [None] * len(tokens))

            return PendingTokens(tokens, positions, fetch)
        num_top = max(num_tops.values())
        top = top_logits(logits, device_rows, tokens, num_top)
        together = Fetched(torch.cat([tokens, *_as_int64(top)]))
        return PendingTokens(
            tokens, positions, partial(_with_logprobs, together, num_tops, num_top)
        )

    def _send(self, *columns: Int64Array) -> list[torch.Tensor]:
        self._masks.send()
        has_rows = self._biases.has_changes or self._counts.has_changes
        if not (self._changed or has_rows):
            if not any(map(len, columns)):
                return [self._nothing] * len(columns)
            return self._copies.send(columns)
        changed = np.fromiter(self._changed, np.int64)
        sent = self._copies.send(
            (
                *columns,
                *(changed, self._host_params[changed]),
                *self._biases.take_changes(),
                *self._counts.take_changes(),
            )
        )
        changes = sent[len(columns) :]
        if len(changed):
            self._params.index_copy_(0, changes[0], changes[1].view(-1, NUM_FIELDS))
        self._biases.apply(changes[2], changes[3])
        self._counts.apply(changes[4], changes[5])
        self._changed.clear()
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


def _as_int64(top: TopLogits) -> list[torch.Tensor]:
    """Packs all results as int64 bits, so that one copy fetches them with the tokens.
    `_with_logprobs` unpacks them.
    """
    return [
        top.log_sums.view(torch.int64),
        top.drawn.double().view(torch.int64),
        top.ids.view(-1),
        top.logits.double().view(torch.int64).view(-1),
    ]


def _with_logprobs(together: Fetched, num_tops: Mapping[int, int], num_top: int) -> SampledRows:
    """`together` has the tokens, then what `_as_int64` has packed for the rows of `num_tops`."""
    fetched, count = together.wait().numpy(), len(num_tops)
    num_rows = len(fetched) - count * (2 + 2 * num_top)
    tokens, bits = fetched[:num_rows], fetched[num_rows:]
    log_sums, drawn = bits[: 2 * count].view(np.float64).reshape(2, count)
    ids, logits = bits[2 * count :].reshape(2, count, num_top)
    values = logits.view(np.float64) - log_sums[:, None]
    own_tokens = tokens[np.fromiter(num_tops, np.int64)]
    logprobs: list[TokenLogprob | None] = [None] * num_rows
    found = token_logprobs(num_tops, own_tokens, drawn - log_sums, ids, values)
    for row, logprob in found.items():
        logprobs[row] = logprob
    return SampledRows(tokens, logprobs)
