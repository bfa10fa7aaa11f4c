"""The sampler of an engine: parameters by slot, one call per step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import InvalidRequest
from weft.contract.request import SamplingParams, StopCriteria, TokenLogprob
from weft.engine.base.device_copies import on_host
from weft.engine.sampling.device_draws import (
    CapturedDraw,
    RowsBehindDrafts,
    RowsOnDevice,
    Way,
    draw_on_device,
)
from weft.engine.sampling.edits import LogitEdits
from weft.engine.sampling.logprobs import token_logprobs
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.engine.sampling.slot_table import SlotTable, Words
from weft.kernels.ops.greedy import greedy_rows, is_faster
from weft.kernels.ops.sampling.cpu import Scratch, sample_rows, top_rows
from weft.kernels.ops.sampling.spec import GREEDY_TEMPERATURE, SlotParams, SlotTensors

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
    scales_logprobs: bool = False
    """Whether they are of logits divided by the temperature, unless the sample is greedy."""


@dataclass(slots=True)
class _Stops:
    """Stop tokens of a slot, which are masked before `min_tokens`."""

    ids: Int64Array
    """[n], distinct."""
    begin: int
    """Position from which on the slot may get them."""
    allowed: Words | None = None
    """The constraint's mask; None: all tokens."""


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
        self._vocab_size = vocab_size
        self._table = SlotTable(vocab_size, num_slots, device, max_masked_rows)
        self._scratch = Scratch(vocab_size, use_native=use_native)
        self._counting: set[int] = set()
        """Slots with penalties or rules of times."""
        self._stops: dict[int, _Stops] = {}
        """Of slots that must not get their stop tokens at first."""
        self._lacking_stops: set[int] = set()
        """Slots whose mask excludes their stop tokens at every position."""
        self._is_masked = np.zeros(num_slots, np.bool_)
        """Slots with a constraint's mask."""
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
    def plain_tensors(self) -> SlotTensors | None:
        """Parameters of slots without penalties or biases, on the device; None: the host samples
        the tokens.
        """
        return self._table.plain_tensors if self._table.is_on_device else None

    @property
    def is_on_device(self) -> bool:
        """Whether all tokens of a step are sampled at once, on the device of the logits."""
        return self._table.is_on_device

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
        params = row.params
        for token_id in params.logit_bias:
            if not 0 <= token_id < self._vocab_size:
                message = f"logit_bias: token id {token_id} is not below {self._vocab_size}"
                raise InvalidRequest(message, stage="sample", param="logit_bias")
        edits: LogitEdits | None = None
        if params.logit_bias or params.counts_tokens:
            edits = self._edits[slot] = LogitEdits(params, prompt_ids, output_ids)
        if params.counts_tokens:
            self._counting.add(slot)
        if stop_ids := self._stop_ids(row):
            ids = np.unique(np.array(stop_ids, np.int64))
            self._stops[slot] = _Stops(ids, len(prompt_ids) + row.stop.min_tokens)
        numbers = {name: getattr(params, name) for name in SlotParams._fields}
        own = SlotParams(**{**numbers, "seed": row.seed})
        self._num_generated[slot] = len(output_ids)
        self._is_special[slot] = edits is not None or row.top_logprobs is not None
        self._rows[slot] = row
        self._note_greedy(slot)
        self._table.add(slot, own, edits)
        if stop_ids:
            self._mask_stops(slot)

    def remove(self, slot: int) -> None:
        """Frees `slot`, even if `add` failed for it."""
        self._rows.pop(slot, None)
        self._is_masked[slot] = False
        self._edits.pop(slot, None)
        self._stops.pop(slot, None)
        self._counting.discard(slot)
        self._lacking_stops.discard(slot)
        self._table.remove(slot)

    def set_mask(self, slot: int, mask: Words | None) -> None:
        """Sets the tokens that the slot may get, until the next call.

        Args:
            mask: Bits from vocab_size on are 0. None: all tokens.
        """
        self._is_masked[slot] = mask is not None
        self._note_greedy(slot)
        if slot in self._stops:
            self._stops[slot].allowed = None if mask is None else mask.copy()
            self._mask_stops(slot)
        else:
            self._table.set_mask(slot, mask)

    def mask_memory(self) -> Words:
        """[num_slots, ceil(vocab_size / 32)]: where masks may be written before `set_masks`, once
        the tokens of all steps so far are known.
        """
        return self._table.mask_memory()

    def set_masks(self, slots: Int64Array, num_generated: Sequence[int]) -> None:
        """`set_mask` for each of these slots, with the mask in its row of `mask_memory`.

        Args:
            slots: [M], distinct.
            num_generated: Number of tokens that each of their samples has generated.
        """
        self._is_masked[slots] = True
        self._is_greedy[slots] = False
        self._num_generated[slots] = num_generated
        self._table.have_masks(slots)
        if self._stops:
            for slot in self._stops.keys() & slots.tolist():
                self._stops[slot].allowed = self._table.mask_memory()[slot].copy()
                self._mask_stops(slot)

    def advance(self, slot: int, num_generated: int) -> None:
        """Sets how many tokens a slot's sample has generated, when drafts of it were accepted."""
        self._num_generated[slot] = num_generated

    def continue_beams(
        self, slots: Sequence[int], parents: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Gives slots of a beam search the tokens so far of others, whose slots are `parents`, and
        one more each. What was drawn for them does not count.
        """
        found = [self._edits[parent].copy() for parent in parents if parent in self._edits]
        for slot, edits, token_id in zip(slots, found, token_ids, strict=False):
            edits.add_output(token_id)
            self._edits[slot] = edits

    def mask_rows(
        self,
        slots: Int64Array,
        masks: Sequence[Words | None],
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
        rows = zip(slots.tolist(), masks, num_generated, strict=True)
        return self._table.mask_rows(slots, [self._later_mask(*row) for row in rows])

    def _later_mask(self, slot: int, mask: Words | None, num_generated: int) -> Words | None:
        """The mask of a slot's sample after `num_generated` tokens. It excludes stop tokens while
        `min_tokens` is not reached and the mask allows other tokens.
        """
        if slot not in self._stops or num_generated >= self._rows[slot].stop.min_tokens:
            return mask
        words = self._without_stops(slot, mask)
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
        if slot_override is None and is_faster(logits) and self._is_greedy[slots].all():
            pending = PendingTokens.of_tokens(greedy_rows(logits), positions)
        elif self._table.is_on_device:
            self._allow_stops(slots)
            found = None if on_device is None else on_device()
            columns = (slots if slot_override is None else slot_override, positions)
            num_tops = self._num_tops(slots)
            heats = self._logprob_temperatures(slots, num_tops)
            pending = draw_on_device(self._table, logits, *columns, num_tops, heats, found, drafted)
        else:
            drawn = self._draw(on_host(logits), slots, positions)
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
        return "any" if self._table.is_on_device else None

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
        if self._table.is_on_device and way != "greedy":
            self._allow_stops(slots)
            self._table.send()
        self._num_generated[slots] += 1
        return draw(way, slot_override)

    def _draw(self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array) -> SampledRows:
        self._allow_stops(slots)
        if self._is_special[slots].any():
            return self._sample_special(logits, slots, positions)
        tokens = self._sample(logits, slots, positions)
        return SampledRows(tokens, [None] * len(slots))

    def _sample(self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array) -> Int64Array:
        tables = self._table.params, self._table.masks
        return sample_rows(logits, slots, positions, *tables, self._scratch)

    def _note_greedy(self, slot: int) -> None:
        is_cold = self._rows[slot].params.temperature < GREEDY_TEMPERATURE
        has_changes = self._is_special[slot] or self._is_masked[slot] or slot in self._stops
        self._is_greedy[slot] = is_cold and not has_changes

    def _mask_stops(self, slot: int) -> None:
        """Masks the slot's stop tokens. Without a constraint, drawing knows up to which position;
        with one, they come back in `_allow_stops`.
        """
        stops = self._stops[slot]
        words = self._without_stops(slot, stops.allowed)
        if stops.allowed is None:
            self._table.set_mask(slot, words, stops.begin)
        elif self._is_early(slot) and words.any():
            self._table.set_mask(slot, words)
            self._lacking_stops.add(slot)
            return
        else:
            self._table.set_mask(slot, stops.allowed)
        self._lacking_stops.discard(slot)

    def _allow_stops(self, slots: Int64Array) -> None:
        """Gives slots that have reached `min_tokens` all tokens that their constraints allow."""
        if self._lacking_stops:
            for slot in self._lacking_stops.intersection(slots.tolist()):
                if not self._is_early(slot):
                    self._mask_stops(slot)

    def _is_early(self, slot: int) -> bool:
        return bool(self._num_generated[slot] < self._rows[slot].stop.min_tokens)

    def _sample_special(
        self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array
    ) -> SampledRows:
        # Rows may share memory when they are forks of one prompt; edits must not.
        logits = logits.contiguous()
        rows = logits.numpy()
        edited = [(r, e) for r, s in enumerate(slots.tolist()) if (e := self._edits.get(s))]
        try:
            for r, edits in edited:
                edits.apply(rows[r])
            tokens = self._sample(logits, slots, positions)
            for _, edits in edited:
                if edits.times is None:
                    edits.take_back()
            logprobs = self._logprobs(logits, slots, tokens)
        finally:
            for _, edits in edited:
                edits.take_back()
        for r, edits in edited:
            if tokens[r] >= 0 and edits.params.beams is None:
                edits.add_output(int(tokens[r]))
        return SampledRows(tokens, logprobs)

    def _logprobs(
        self, logits: torch.Tensor, slots: Int64Array, tokens: Int64Array
    ) -> list[TokenLogprob | None]:
        logprobs: list[TokenLogprob | None] = [None] * len(slots)
        wanted = {r: top for r, top in self._num_tops(slots).items() if tokens[r] >= 0}
        if not wanted:
            return logprobs
        indices = list(wanted)
        chosen = logits if len(wanted) == len(slots) else logits[indices]
        if len(heats := self._logprob_temperatures(slots, indices)):
            chosen = chosen / torch.from_numpy(heats).float().unsqueeze(1)
        log_sums, top_ids = top_rows(chosen, max(wanted.values()), self._scratch)
        rows, own_tokens = chosen.numpy(), tokens[indices]
        drawn = np.take_along_axis(rows, own_tokens[:, None], 1)[:, 0] - log_sums
        top = np.take_along_axis(rows, top_ids, 1) - log_sums[:, None]
        for row, found in token_logprobs(wanted, own_tokens, drawn, top_ids, top).items():
            logprobs[row] = found
        return logprobs

    def _logprob_temperatures(
        self, slots: Int64Array, rows: Collection[int]
    ) -> npt.NDArray[np.float64]:
        """By which the logits of these rows are divided before they make log-probabilities; empty:
        by 1.
        """
        drawn = [self._rows[slots[row]] for row in rows]
        heats = [
            row.params.temperature
            if row.scales_logprobs and row.params.temperature >= GREEDY_TEMPERATURE
            else 1.0
            for row in drawn
        ]
        return np.array(heats if any(heat != 1.0 for heat in heats) else [], np.float64)

    def _num_tops(self, slots: Int64Array) -> dict[int, int]:
        if not self._is_special[slots].any():
            return {}
        return {
            r: min(top, self._vocab_size)
            for r, slot in enumerate(slots.tolist())
            if self._is_special[slot] and (top := self._rows[slot].top_logprobs) is not None
        }

    def _stop_ids(self, row: SamplerRow) -> tuple[int, ...]:
        if row.stop.min_tokens <= 0:
            return ()
        eos = () if row.stop.ignore_eos else row.eos_token_ids
        ids = {*eos, *row.stop.stop_token_ids}
        return tuple(i for i in ids if 0 <= i < self._vocab_size)

    def _without_stops(self, slot: int, mask: Words | None) -> Words:
        """A copy of the mask without the slot's stop tokens. `mask` None: all tokens."""
        ids, num_words = self._stops[slot].ids, self._table.masks.shape[1]
        words = np.full(num_words, 0xFFFFFFFF, np.uint32) if mask is None else mask.copy()
        bits = np.uint32(1) << (ids & 31).astype(np.uint32)
        np.bitwise_and.at(words, ids >> 5, ~bits)
        return words
