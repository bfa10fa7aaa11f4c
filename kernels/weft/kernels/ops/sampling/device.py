"""Sampling on the device of the logits: the counterpart of `weft.kernels.ops.sampling.cpu`.

`reference.py` defines how tokens are drawn. The host applies bias, penalties and masks to
the row itself; here they are parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.sampling.spec import NUM_FIELDS, DraftedRows, SlotTensors, TopLogits
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.sampling import triton_draw as _triton_draw
    from weft.kernels.ops.sampling import triton_top as _triton_top
else:
    _triton_draw = deferred(__name__, "weft.kernels.ops.sampling.triton_draw")
    _triton_top = deferred(__name__, "weft.kernels.ops.sampling.triton_top")


def draw_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tables: SlotTensors,
    drafted: DraftedRows | None = None,
) -> torch.Tensor:
    """Draws one token a row and counts it, without waiting for the device.

    With drafts, a request's tokens are counted up to the first row whose token differs from its
    draft.

    Args:
        logits: [L, vocab_size] float32, rows contiguous; not changed.
        slots: [L] int64: slot whose parameters a row uses. A slot with counts has one row, unless
            `drafted` is given.
        positions: [L] int64, absolute position of the token to be drawn.
        drafted: The rows that follow drafts, if any of their slots has counts; else None.

    Returns:
        [L] int64 on the device: token ids, ERROR_NOT_FINITE or ERROR_NO_CANDIDATE, as from
        `weft.kernels.ops.sampling.cpu.sample_rows`.
    """
    vocab_size = _check_logits(logits)
    for columns in (slots, positions):
        if columns.dtype != torch.int64 or columns.shape != logits.shape[:1]:
            raise ValueError(f"{len(logits)} rows, {columns.dtype} {tuple(columns.shape)}")
    words = -(-vocab_size // 32)
    if tables.params.shape[1:] != (NUM_FIELDS,) or tables.masks.shape[1:] != (words,):
        raise ValueError(f"tables are {tuple(tables.params.shape)}, {tuple(tables.masks.shape)}")
    for rows in (tables.biases, tables.counts):
        if rows.shape[1:] != (vocab_size,) or len(rows) < 1:
            raise ValueError(f"rows of tables are {tuple(rows.shape)}, vocabulary {vocab_size}")
    if drafted is not None and drafted.firsts.shape != slots.shape:
        raise ValueError(f"{tuple(drafted.firsts.shape)} first rows of {tuple(slots.shape)} rows")
    return _triton_draw.draw_rows(logits, slots, positions, tables, drafted)


def top_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    heats: torch.Tensor | None = None,
) -> TopLogits:
    """Computes the inputs of the log-probabilities of some rows, without copying the rows.

    Args:
        logits: [L, vocab_size] float32, rows contiguous; not changed.
        rows: [M] int64: rows of `logits` and `tokens` to compute.
        tokens: [L] int64, the tokens drawn.
        num_top: Most likely tokens wanted a row, at most the vocabulary.
        heats: [M] float64: by what each of these rows is divided first; None or empty: by 1.
    """
    vocab_size = _check_logits(logits)
    if heats is not None and len(heats) not in (0, len(rows)):
        raise ValueError(f"{len(heats)} divisors of {len(rows)} rows")
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"{num_top} most likely of {vocab_size} tokens")
    return _triton_top.top_logits(logits, rows, tokens, num_top, heats)


def _check_logits(logits: torch.Tensor) -> int:
    is_contiguous = logits.dim() == 2 and (logits.stride(1) == 1 or logits.shape[1] == 1)
    if logits.dtype != torch.float32 or not is_contiguous:
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)} {logits.stride()}")
    return logits.shape[1]
