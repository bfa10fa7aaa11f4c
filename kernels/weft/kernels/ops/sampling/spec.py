"""Parameters and results of draws, and how tables hold them."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below it are greedy."""
MASKED_LOGIT = float(np.finfo(np.float32).min)
"""Logit of a token that must not be drawn: finite, so that infinities remain faults."""
ERROR_NOT_FINITE = -1
ERROR_NO_CANDIDATE = -2


class SlotParams(NamedTuple):
    """How the tokens of a slot are drawn: the fields of `weft.contract.request.SamplingParams` that
    decide it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    seed: int = 0
    """Unsigned, 64 bits."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def gap(self) -> float:
        """The least (z - max z) / T that `min_p` keeps; minus infinity: all."""
        return math.log(self.min_p) if self.min_p > 0.0 else -math.inf


class Field(IntEnum):
    """Columns of a slot's row of parameters; real numbers are the bits of a float64."""

    TEMPERATURE = 0
    TOP_P = 1
    GAP = 2
    SEED = 3
    TOP_K = 4
    MASK_END = 5
    """From this position on the slot's mask does not count; 0: it never counts."""
    BIAS_ROW = 6
    """Row of `SlotTensors.biases`; -1: none."""
    COUNT_ROW = 7
    """Row of `SlotTensors.counts`; -1: none."""
    REPETITION = 8
    FREQUENCY = 9
    PRESENCE = 10
    TOP_N_SIGMA = 11


NUM_FIELDS = len(Field)
ALWAYS_MASKED = 1 << 62
"""Value of `Field.MASK_END` with which the mask counts at every position."""


def pack_slot(
    params: SlotParams, *, mask_end: int = 0, bias_row: int = -1, count_row: int = -1
) -> Int64Array:
    """Packs one slot's row of parameters. Before position `mask_end` only tokens of the slot's
    mask may be drawn. `bias_row` -1: no biases. `count_row` is the row of the counts that penalties
    use; -1: none.
    """
    row = np.zeros(NUM_FIELDS, np.int64)
    reals = row.view(np.float64)
    reals[Field.TEMPERATURE], reals[Field.TOP_P] = params.temperature, params.top_p
    reals[Field.GAP], reals[Field.TOP_N_SIGMA] = params.gap, params.top_n_sigma
    row[Field.SEED] = np.uint64(params.seed).astype(np.int64)
    row[Field.TOP_K], row[Field.MASK_END] = params.top_k, mask_end
    row[Field.BIAS_ROW], row[Field.COUNT_ROW] = bias_row, count_row
    reals[Field.REPETITION] = params.repetition_penalty
    reals[Field.FREQUENCY], reals[Field.PRESENCE] = (
        params.frequency_penalty,
        params.presence_penalty,
    )
    return row


class SlotTensors(NamedTuple):
    """Sampling parameters of each slot, on the device of the logits."""

    params: torch.Tensor
    """[max_slots, NUM_FIELDS] int64, rows of `pack_slot`."""
    masks: torch.Tensor
    """[max_slots, ceil(vocab_size / 32)] int32: bit i % 32 of word i / 32 allows token i."""
    biases: torch.Tensor
    """[num_rows, vocab_size] float32, added to the logits before anything else; num_rows >= 1."""
    counts: torch.Tensor
    """[num_rows, vocab_size] int32: twice a token's occurrences in the output, plus 1 if the prompt
    has it; num_rows >= 1. Drawing updates them.
    """


class DraftedRows(NamedTuple):
    """Rows that follow drafts, several for one slot. Each draws as if the drafts before it were
    text.
    """

    firsts: torch.Tensor
    """[L] int64: the first row of each row's request: the row itself without drafts."""
    tokens: torch.Tensor
    """[T] int64: the input token of each row."""
    words: torch.Tensor | None
    """[T] int64: bit i is set if the i-th row of the request is this row or one before it, as in
    `weft.kernels.ops.attention.paged_attention`. None: chains.
    """


class TopLogits(NamedTuple):
    """The inputs of log-probabilities: log_softmax(row)[i] = row[i] - log_sum."""

    log_sums: torch.Tensor
    """[M] float64; NaN for rows that are not finite."""
    drawn: torch.Tensor
    """[M] float32: logit of the token drawn; undefined where there is none."""
    ids: torch.Tensor
    """[M, num_top] int64: ids of the largest logits, largest first, lower ids first among equals.
    """
    logits: torch.Tensor
    """[M, num_top] float32."""
