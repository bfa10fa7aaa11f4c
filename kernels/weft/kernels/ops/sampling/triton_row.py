"""Loads rows of logits with bias, penalties and mask applied."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.sampling.spec import MASKED_LOGIT, NUM_FIELDS, Field
from weft.kernels.ops.sampling.triton_noise import key_of

_NUM_FIELDS = tl.constexpr(NUM_FIELDS)
_MASK_END = tl.constexpr(int(Field.MASK_END))
_BIAS_ROW = tl.constexpr(int(Field.BIAS_ROW))
_COUNT_ROW = tl.constexpr(int(Field.COUNT_ROW))
_REPETITION = tl.constexpr(int(Field.REPETITION))
_FREQUENCY = tl.constexpr(int(Field.FREQUENCY))
_PRESENCE = tl.constexpr(int(Field.PRESENCE))
_MASKED = tl.constexpr(MASKED_LOGIT)


NOT_DRAFTED, CHAINS, TREES = 2, 3, 4
"""Values of `Source.drafted`. They are not 0 or 1, for which Triton would compile separate
kernels.
"""
_NOT_DRAFTED, _TREES = tl.constexpr(NOT_DRAFTED), tl.constexpr(TREES)


class Source(NamedTuple):
    """Logits [L, vocab] float32 with `stride` between rows, each row's slot and position,
    `SlotTensors` and, if rows are `drafted`, `DraftedRows`.
    """

    logits: torch.Tensor
    stride: int
    vocab: int
    slots: torch.Tensor
    positions: torch.Tensor
    params: torch.Tensor
    masks: torch.Tensor
    biases: torch.Tensor
    counts: torch.Tensor
    firsts: torch.Tensor
    row_tokens: torch.Tensor
    words: torch.Tensor
    drafted: int


@triton.jit
def whole_field(source: Source, slot: tl.tensor, FIELD: tl.constexpr) -> tl.tensor:
    """An integer parameter of a slot, int64."""
    return tl.load(source.params + slot * _NUM_FIELDS + FIELD)


@triton.jit
def real_field(source: Source, slot: tl.tensor, FIELD: tl.constexpr) -> tl.tensor:
    """A slot's parameter, float64."""
    return whole_field(source, slot, FIELD).to(tl.float64, bitcast=True)


@triton.jit
def load_logits(
    source: Source, row: tl.tensor, slot: tl.tensor, column: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Logits after all changes, and where they were not finite before the mask.

    Columns from the vocabulary's size on are 0 and count as finite.
    """
    inside = column < source.vocab
    logits = tl.load(source.logits + row * source.stride + column, mask=inside, other=0.0)
    bias_row = whole_field(source, slot, _BIAS_ROW)
    if bias_row >= 0:
        at = source.biases + bias_row * source.vocab + column
        logits = logits + tl.load(at, mask=inside, other=0.0)
    count_row = whole_field(source, slot, _COUNT_ROW)
    if count_row >= 0:
        at = source.counts + count_row * source.vocab + column
        words = tl.load(at, mask=inside, other=0)
        if source.drafted != _NOT_DRAFTED:
            words += 2 * _drafts_before(source, row, column)
        logits = tl.where(words != 0, _penalised(source, slot, logits, words >> 1), logits)
    # x - x is 0 only for finite numbers.
    is_bad = inside & (logits - logits != 0.0)
    if tl.load(source.positions + row) < whole_field(source, slot, _MASK_END):
        at = source.masks + slot * tl.cdiv(source.vocab, 32) + column // 32
        words = tl.load(at, mask=inside, other=0)
        logits = tl.where((words >> (column % 32)) & 1 != 0, logits, _MASKED)
    return logits, is_bad


@triton.jit
def _drafts_before(source: Source, row: tl.tensor, column: tl.tensor) -> tl.tensor:
    first = tl.load(source.firsts + row)
    counts = tl.zeros_like(column)
    for at in range(first + 1, row + 1):
        is_same = column == tl.load(source.row_tokens + at)
        counts += (is_same & is_before(source, row, first, at)).to(tl.int32)
    return counts


@triton.jit
def is_before(source: Source, row: tl.tensor, first: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Whether row `at` is one that this row follows, or this row itself."""
    found = at <= row
    if source.drafted == _TREES:
        word = tl.load(source.words + row)
        found = (at == row) | ((word >> (at - first)) & 1 != 0)
    return found


@triton.jit
def load_keys(source: Source, row: tl.tensor, slot: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Keys of the logits after all changes."""
    logits, _ = load_logits(source, row, slot, column)
    return key_of(logits)


@triton.jit
def _penalised(source: Source, slot: tl.tensor, logits: tl.tensor, counts: tl.tensor) -> tl.tensor:
    """Repetition divides or multiplies; frequency and presence subtract."""
    repetition = real_field(source, slot, _REPETITION).to(tl.float32)
    repetition = tl.zeros_like(logits) + repetition
    frequency = real_field(source, slot, _FREQUENCY).to(tl.float32)
    presence = real_field(source, slot, _PRESENCE).to(tl.float32)
    logits = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
    logits = logits - frequency * counts.to(tl.float32)
    return logits - presence * (counts > 0).to(tl.float32)
