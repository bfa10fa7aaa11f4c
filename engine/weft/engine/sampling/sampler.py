"""The sampler of an engine: parameters by slot, one call per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import InvalidRequest
from weft.contract.request import SamplingParams, StopCriteria, TokenLogprob
from weft.engine.base.device_copies import Fetched
from weft.engine.sampling.device_sampling import (
    CapturedDraw,
    DeviceSampler,
    RowsBehindDrafts,
    RowsOnDevice,
    Way,
)
from weft.engine.sampling.edits import LogitEdits
from weft.engine.sampling.logprobs import token_logprobs
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.kernels.ops.greedy import greedy_rows
from weft.kernels.ops.sampling.cpu import (
    GREEDY_TEMPERATURE,
    SamplingColumns,
    SlotParams,
    sample_rows,
    top_rows,
)
from weft.kernels.ops.sampling.device import SlotTables

SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that all multiples below 2^64 are distinct."""


def derive_seed(seed: int, sample_index: int) -> int:
    """The seed of one sample of a request, different for each sample; sample 0 has the request's
    own. `seed` has unsigned 64 bits.
    """
    return (seed + sample_index * SEED_STEP) & 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True, kw_only=True)
class SamplerRow:
    """Sampling parameters of one running sample, fixed for its life."""

    params: SamplingParams
    stop: StopCriteria
    seed: int
    """Seed of this sample (`derive_seed`), unsigned 64 bits."""
    eos_token_ids: tuple[int, ...]
    """The model's end tokens; masked before `min_tokens` unless the request ignores them."""
    top_logprobs: int | None = None
    """Number of alternatives for each token's log-probability; None: no log-probabilities."""


class Sampler:
    """Samples the next token of each running sample.

    A token depends on the row's logits, its parameters and seed, the position and the sample's own
    tokens so far. It depends neither on the slot nor on other rows. Used by one thread.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        *,
        use_native: bool = True,
        device: torch.device | None = None,
        max_masked_rows: int = 0,
    ) -> None:
        """Creates a sampler in which all slots are free.

        Args:
            vocab_size: Length of a row of logits.
            max_rows: Slots are 0..max_rows - 1; `null_slot` is one more, which no request has.
            use_native: Whether to use native code. The numpy path samples the same tokens more
                slowly.
            device: Device of the logits, which samples the tokens, with the same result; None: the
                host does.
            max_masked_rows: Most rows of a step for `mask_rows`.
        """
        self.null_slot = max_rows
        """A slot that samples greedily and whose tokens are discarded. Several rows may use it."""
        num_slots = max_rows + 1
        self._device: DeviceSampler | None = None
        if device is not None:
            self._device = DeviceSampler(vocab_size, num_slots, device, max_masked_rows)
        self._stops_from = np.zeros(num_slots, np.int64)
        """Position from which on a slot may get its stop tokens."""
        self._counting: set[int] = set()
        """Slots with penalties."""
        self._lacking_stops: set[int] = set()
        """Slots whose mask on the device excludes their stop tokens at every position."""
        self._columns = SamplingColumns(vocab_size, num_slots, use_native=use_native)
        self._num_generated = np.zeros(num_slots, np.int64)
        self._is_special = np.zeros(num_slots, np.bool_)
        """Slots that need Python: their logits are edited, or log-probabilities are wanted. A free
        slot keeps the value of its last sample, since a row of it may still be sampled
        (`common_way`).
        """
        self._is_greedy = np.ones(num_slots, np.bool_)
        """Slots that take the largest unchanged logit. A free slot keeps its value, as in
        `_is_special`.
        """
        self._rows: dict[int, SamplerRow] = {}
        self._edits: dict[int, LogitEdits] = {}

    @property
    def plain_tables(self) -> SlotTables | None:
        """Parameters of slots without penalties or biases, on the device; None: the host samples
        the tokens.
        """
        return None if self._device is None else self._device.plain_tables

    @property
    def is_on_device(self) -> bool:
        """Whether all tokens of a step are sampled at once, on the device of the logits."""
        return self._device is not None

    def add(
        self, slot: int, row: SamplerRow, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Assigns `slot`, which must be free, to a sample.

        Args:
            output_ids: Tokens that it has already generated (before a preemption or elsewhere).

        Raises:
            InvalidRequest: logit_bias names a token that is not in the vocabulary.
        """
        if slot in self._rows:
            raise ValueError(f"slot {slot} is taken")
        params, columns = row.params, self._columns
        for token_id in params.logit_bias:
            if not 0 <= token_id < columns.vocab_size:
                message = f"logit_bias: token id {token_id} is not below {columns.vocab_size}"
                raise InvalidRequest(message, stage="sample", param="logit_bias")
        stop_ids = self._stop_ids(row)
        has_edits = bool(params.logit_bias) or params.has_penalties or bool(stop_ids)
        if has_edits:
            self._edits[slot] = LogitEdits(params, stop_ids, prompt_ids, output_ids)
        if params.has_penalties:
            self._counting.add(slot)
        numbers = {name: getattr(params, name) for name in SlotParams._fields}
        own = SlotParams(**{**numbers, "seed": row.seed})
        columns.set(slot, own)
        self._num_generated[slot] = len(output_ids)
        self._stops_from[slot] = len(prompt_ids) + row.stop.min_tokens
        self._is_special[slot] = has_edits or row.top_logprobs is not None
        self._rows[slot] = row
        self._note_greedy(slot)
        if self._device is not None:
            self._device.add(slot, own, self._edits.get(slot))
            if stop_ids:
                self._send_mask(slot)

    def remove(self, slot: int) -> None:
        """Frees `slot`, even if `add` failed for it."""
        self._rows.pop(slot, None)
        self._columns.is_masked[slot] = False
        self._edits.pop(slot, None)
        self._counting.discard(slot)
        self._lacking_stops.discard(slot)
        if self._device is not None:
            self._device.remove(slot)

    def set_mask(self, slot: int, mask: npt.NDArray[np.uint32] | None) -> None:
        """Sets the tokens that the slot may get, until the next call.

        Args:
            mask: [ceil(vocab_size / 32)]: bit i % 32 of word i / 32 allows token i, and bits from
                vocab_size on are 0. None: all tokens.
        """
        self._columns.is_masked[slot] = mask is not None
        if mask is not None:
            self._columns.masks[slot] = mask
        self._note_greedy(slot)
        if self._device is not None:
            self._send_mask(slot)

    def mask_memory(self) -> npt.NDArray[np.uint32]:
        """[num_slots, ceil(vocab_size / 32)]: where masks may be written before `set_masks`, once
        the tokens of all steps so far are known.
        """
        return self._columns.masks if self._device is None else self._device.mask_memory()

    def set_masks(self, slots: Int64Array, num_generated: Sequence[int]) -> None:
        """`set_mask` for each of these slots, with the mask in its row of `mask_memory`.

        Args:
            slots: [M], distinct.
            num_generated: Number of tokens that each of their samples has generated.
        """
        self._columns.is_masked[slots] = True
        self._is_greedy[slots] = False
        if self._device is None:
            return
        self._num_generated[slots] = num_generated
        self._device.have_masks(slots)
        for slot in self._edits.keys() & slots.tolist():
            if len(self._edits[slot].stop_ids):
                self._columns.masks[slot] = self._device.mask_memory()[slot]
                self._send_mask(slot)

    def advance(self, slot: int, num_generated: int) -> None:
        """Sets how many tokens a slot's sample has generated, when drafts of it were accepted."""
        self._num_generated[slot] = num_generated

    def mask_rows(
        self,
        slots: Int64Array,
        masks: Sequence[npt.NDArray[np.uint32] | None],
        num_generated: Sequence[int],
    ) -> Int64Array:
        """Gives rows that follow drafts separate masks, until the next call. On a device only.

        Args:
            slots: [M], of the rows.
            masks: A mask for each row, as in `set_mask`.
            num_generated: Number of tokens that the sample has generated before the row's.

        Returns:
            [M]: slots for `begin` to sample these rows with.
        """
        assert self._device is not None, "tokens are drawn on the host"
        rows = zip(slots.tolist(), masks, num_generated, strict=True)
        return self._device.mask_rows(slots, [self._later_mask(*row) for row in rows])

    def _later_mask(
        self, slot: int, mask: npt.NDArray[np.uint32] | None, num_generated: int
    ) -> npt.NDArray[np.uint32] | None:
        """The mask of a slot's sample after `num_generated` tokens. It excludes stop tokens while
        `min_tokens` is not reached and the mask allows other tokens.
        """
        if slot not in self._edits or num_generated >= self._rows[slot].stop.min_tokens:
            return mask
        words = _without(mask, self._edits[slot].stop_ids, self._columns.masks.shape[1])
        return words if mask is None or words.any() else mask

    def counts_tokens(self, slots: Int64Array) -> bool:
        """Whether the next token of any of these slots depends on its tokens so far."""
        return not self._counting.isdisjoint(slots.tolist())

    def draw(self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array) -> SampledRows:
        return self.begin(logits, slots, positions).wait()

    def begin(
        self,
        logits: torch.Tensor,
        slots: Int64Array,
        positions: Int64Array,
        on_device: Callable[[], RowsOnDevice] | None = None,
        drafted: RowsBehindDrafts | None = None,
        slot_override: Int64Array | None = None,
    ) -> PendingTokens:
        """Samples one token per row and counts it. Does not wait for a device.

        Args:
            logits: [L, vocab_size] float32; unchanged once the tokens are there.
            slots: [L]. A slot may occur twice only if it is `null_slot` or its tokens do not depend
                on the ones before (no mask, penalties only with `drafted`).
            positions: [L], absolute position of the token to be sampled (prompt length + number of
                tokens generated before it).
            on_device: Returns the parts of these arguments that are on the device of the logits,
                and positions that only the device knows. A sampler on the host cannot use it.
            drafted: Rows of a step with drafts, if `counts_tokens`; like `on_device`.
            slot_override: [L], slots by row with those of `mask_rows`; None: there are none.

        Raises:
            ValueError: Shapes or dtype are wrong.
        """
        if logits.is_cuda and slot_override is None and self._is_greedy[slots].all():
            pending = _draw_greedily(logits, positions)
        elif self._device is not None:
            found = None if on_device is None else on_device()
            columns = (slots, slots if slot_override is None else slot_override, positions)
            pending = self._draw_on_device(logits, *columns, found, drafted)
        else:
            on_host = Fetched(logits).wait() if logits.is_cuda else logits
            drawn = self._draw(on_host, slots, positions)
            pending = PendingTokens(torch.from_numpy(drawn.token_ids), positions, lambda: drawn)
        self._num_generated[slots] += 1
        return pending

    def common_way(self, slots: Int64Array) -> Way | None:
        """How a graph can sample rows of these slots; None: no graph can.

        A slot that became free since the step began counts with its last sample's parameters.
        """
        if self._is_special[slots].any():
            return None
        if self._is_greedy[slots].all():
            return "greedy"
        return "any" if self._device is not None else None

    def begin_captured(
        self,
        draw: CapturedDraw,
        way: Way,
        slots: Int64Array,
        slot_override: Int64Array | None = None,
    ) -> PendingTokens:
        """`begin` by a graph. `slots`, which the device has too, and `slot_override` are as for
        `begin`.
        """
        if slot_override is not None:
            way = "any"
        if self._device is not None and way != "greedy":
            self._device.send_changes()
        self._num_generated[slots] += 1
        return draw(way, slot_override)

    def _draw(self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array) -> SampledRows:
        if self._is_special[slots].any():
            return self._sample_special(logits, slots, positions)
        tokens = sample_rows(logits, slots, positions, self._columns)
        return SampledRows(tokens, [None] * len(slots))

    def _note_greedy(self, slot: int) -> None:
        columns = self._columns
        is_cold = columns.temperature[slot] < GREEDY_TEMPERATURE
        has_changes = self._is_special[slot] or columns.is_masked[slot]
        self._is_greedy[slot] = is_cold and not has_changes

    def _draw_on_device(
        self,
        logits: torch.Tensor,
        slots: Int64Array,
        slot_override: Int64Array,
        positions: Int64Array,
        on_device: RowsOnDevice | None,
        drafted: RowsBehindDrafts | None,
    ) -> PendingTokens:
        assert self._device is not None
        if self._lacking_stops:
            for slot in self._lacking_stops.intersection(slots.tolist()):
                if not self._is_masking(slot):
                    self._send_mask(slot)
        num_tops = self._num_tops(slots)
        return self._device.draw(logits, slot_override, positions, num_tops, on_device, drafted)

    def _send_mask(self, slot: int) -> None:
        """Copies the slot's mask, without stop tokens, to the device. Without a constraint, the
        device knows up to which position stop tokens are masked.
        """
        assert self._device is not None
        has_stops = slot in self._edits and len(self._edits[slot].stop_ids) > 0
        if has_stops and not self._columns.is_masked[slot]:
            end = int(self._stops_from[slot])
            self._device.set_mask(slot, self._without_stops(slot), end)
        elif has_stops and self._is_masking(slot):
            self._device.set_mask(slot, self._without_stops(slot))
            self._lacking_stops.add(slot)
            return
        else:
            is_masked = bool(self._columns.is_masked[slot])
            self._device.set_mask(slot, self._columns.masks[slot] if is_masked else None)
        self._lacking_stops.discard(slot)

    def _sample_special(
        self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array
    ) -> SampledRows:
        # Rows may share memory when they are forks of one prompt; edits must not.
        logits = logits.contiguous()
        rows = logits.numpy()
        edited = [(r, e) for r, s in enumerate(slots.tolist()) if (e := self._edits.get(s))]
        try:
            for r, edits in edited:
                edits.apply(rows[r], is_masking=self._is_masking(int(slots[r])))
            tokens = sample_rows(logits, slots, positions, self._columns)
        finally:
            for _, edits in edited:
                edits.take_back()
        for r, edits in edited:
            if edits.counts is not None and tokens[r] >= 0:
                edits.counts.add_output(int(tokens[r]))
        return SampledRows(tokens, self._logprobs(logits, slots, tokens))

    def _logprobs(
        self, logits: torch.Tensor, slots: Int64Array, tokens: Int64Array
    ) -> list[TokenLogprob | None]:
        logprobs: list[TokenLogprob | None] = [None] * len(slots)
        wanted = {r: top for r, top in self._num_tops(slots).items() if tokens[r] >= 0}
        if not wanted:
            return logprobs
        indices = list(wanted)
        chosen = logits if len(wanted) == len(slots) else logits[indices]
        log_sums, top_ids = top_rows(chosen, max(wanted.values()), self._columns)
        rows, own_tokens = chosen.numpy(), tokens[indices]
        drawn = np.take_along_axis(rows, own_tokens[:, None], 1)[:, 0] - log_sums
        top = np.take_along_axis(rows, top_ids, 1) - log_sums[:, None]
        for row, found in token_logprobs(wanted, own_tokens, drawn, top_ids, top).items():
            logprobs[row] = found
        return logprobs

    def _num_tops(self, slots: Int64Array) -> dict[int, int]:
        if not self._is_special[slots].any():
            return {}
        return {
            r: min(top, self._columns.vocab_size)
            for r, slot in enumerate(slots.tolist())
            if self._is_special[slot] and (top := self._rows[slot].top_logprobs) is not None
        }

    def _stop_ids(self, row: SamplerRow) -> tuple[int, ...]:
        if row.stop.min_tokens <= 0:
            return ()
        eos = () if row.stop.ignore_eos else row.eos_token_ids
        vocab_size = self._columns.vocab_size
        return tuple(i for i in {*eos, *row.stop.stop_token_ids} if 0 <= i < vocab_size)

    def _is_masking(self, slot: int) -> bool:
        """Whether `min_tokens` keeps the slot from stopping. It does not if the mask allows only
        stop tokens.
        """
        if self._num_generated[slot] >= self._rows[slot].stop.min_tokens:
            return False
        if not self._columns.is_masked[slot]:
            return True
        return bool(self._without_stops(slot).any())

    def _without_stops(self, slot: int) -> npt.NDArray[np.uint32]:
        columns = self._columns
        mask = columns.masks[slot] if columns.is_masked[slot] else None
        return _without(mask, self._edits[slot].stop_ids, columns.masks.shape[1])


def _draw_greedily(logits: torch.Tensor, positions: Int64Array) -> PendingTokens:
    tokens = greedy_rows(logits)
    fetched = Fetched(tokens)

    def fetch() -> SampledRows:
        return SampledRows(fetched.wait().numpy(), [None] * len(tokens))

    return PendingTokens(tokens, positions, fetch)


def _without(
    mask: npt.NDArray[np.uint32] | None, stop_ids: Int64Array, num_words: int
) -> npt.NDArray[np.uint32]:
    """`mask` None: all tokens are allowed."""
    words = np.full(num_words, 0xFFFFFFFF, np.uint32) if mask is None else mask.copy()
    bits = np.uint32(1) << (stop_ids & 31).astype(np.uint32)
    np.bitwise_and.at(words, stop_ids >> 5, ~bits)
    return words
