"""Sampling in numpy: what the native sampler computes, and the path where there is no compiler.

A row of logits is drawn from as follows; `z` are float32 logits with every change (bias, penalties,
masks) already made, everything else is float64. A slot's mask is applied to a copy of its row: the
logit of each token without a bit is MASKED_LOGIT.

1. Temperature below `GREEDY_TEMPERATURE`: the largest `z`, the lowest id of equals.
2. top_k (0 = off): tokens stay of which fewer than k tokens have a larger `z`.
3. top_p (1 = off): of these, tokens stay for which all tokens with a larger `z` have together less
   than `top_p` of the mass of exp(z / T). So it is the smallest set whose mass is at least top_p.
4. min_p (0 = off): of these, tokens stay with (z - max z) / T >= ln(min_p).
5. top_n_sigma (0 = off): of these, tokens stay with z >= max z - top_n_sigma * sigma, where sigma
   is the standard deviation of the `z` of all tokens that the mask allows (Tang et al. 2024,
   arXiv 2411.07641).
6. The token with the largest z / T + noise (noise.py), the lowest id of equals.

Tokens of equal logits stay or go together: what is kept never depends on an order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from weft.kernels.ops.sampling.noise import gumbel_noise
from weft.kernels.ops.sampling.spec import (
    ERROR_NO_CANDIDATE,
    ERROR_NOT_FINITE,
    GREEDY_TEMPERATURE,
    MASKED_LOGIT,
    Field,
    Int64Array,
)

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
UInt32Array = npt.NDArray[np.uint32]

NOISE_SPREAD = 36.74 + 3.61
"""Largest minus smallest noise. A token that is further below the largest scaled logit cannot win.
"""
SMALL = 64
"""A search sorts the values once at most so many are left."""


def sample_rows_reference(
    logits: Float32Array,
    slots: Int64Array,
    positions: Int64Array,
    params: Int64Array,
    masks: UInt32Array,
) -> Int64Array:
    """Reference of `sample_rows` in numpy."""
    is_finite = np.isfinite(logits.max(axis=1)) & np.isfinite(logits.min(axis=1))
    is_masked = positions < params[slots, Field.MASK_END]
    if is_masked.any():
        logits = _under_masks(logits, masks[slots], is_masked)
    largest = logits.max(axis=1)
    tokens: Int64Array = logits.argmax(axis=1)
    tokens[largest == MASKED_LOGIT] = ERROR_NO_CANDIDATE
    tokens[~is_finite] = ERROR_NOT_FINITE
    temperatures = params.view(np.float64)[slots, Field.TEMPERATURE]
    is_drawn = (temperatures >= GREEDY_TEMPERATURE) & (tokens >= 0)
    for r in np.flatnonzero(is_drawn):
        tokens[r] = _draw(logits[r], int(positions[r]), params[slots[r]])
    return tokens


def top_rows_reference(logits: Float32Array, num_top: int) -> tuple[Float64Array, Int64Array]:
    """Reference of `top_rows` in numpy."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        largest = wide.max(axis=1)
        log_sums = largest + np.log(np.exp(wide - largest[:, None]).sum(axis=1))
    log_sums[~np.isfinite(wide).all(axis=1)] = np.nan
    top = np.zeros((len(logits), num_top), np.int64)
    if num_top:
        for r in np.flatnonzero(~np.isnan(log_sums)):
            threshold = np.partition(logits[r], -num_top)[-num_top]
            ids = np.flatnonzero(logits[r] >= threshold)
            top[r] = ids[np.argsort(-logits[r][ids], kind="stable")][:num_top]
    return log_sums, top


def _under_masks(
    logits: Float32Array, masks: UInt32Array, is_masked: npt.NDArray[np.bool_]
) -> Float32Array:
    logits = logits.copy()
    for r in np.flatnonzero(is_masked):
        words = masks[r].astype("<u4").view(np.uint8)
        allowed = np.unpackbits(words, count=logits.shape[1], bitorder="little")
        logits[r, allowed == 0] = MASKED_LOGIT
    return logits


def _draw(row: Float32Array, position: int, params: Int64Array) -> int:
    """`row` is finite, and the slot with these parameters, [NUM_FIELDS], is not greedy."""
    reals = params.view(np.float64)
    temperature = float(reals[Field.TEMPERATURE])
    ids = np.arange(len(row))
    if 0 < (top_k := int(params[Field.TOP_K])) < len(row):
        ids = np.flatnonzero(row >= np.partition(row, -top_k)[-top_k])
    scaled = (row[ids].astype(np.float64) - float(row.max())) / temperature
    if (top_p := float(reals[Field.TOP_P])) < 1.0:
        keep = scaled >= _top_p_threshold(scaled, top_p)
        ids, scaled = ids[keep], scaled[keep]
    gap = max(float(reals[Field.GAP]), -NOISE_SPREAD)
    if (count := float(reals[Field.TOP_N_SIGMA])) > 0.0:
        gap = max(gap, -(count * _deviation(row)) / temperature)
    ids = ids[scaled >= gap]
    seed = int(params.view(np.uint64)[Field.SEED])
    noise = gumbel_noise(seed, position, ids)
    return int(ids[np.argmax(row[ids].astype(np.float64) / temperature + noise)])


def _deviation(row: Float32Array) -> float:
    z = row[row > MASKED_LOGIT].astype(np.float64)
    return math.sqrt(max(float((z * z).mean()) - float(z.mean()) ** 2, 0.0))


def _top_p_threshold(scaled: Float64Array, top_p: float) -> float:
    """Smallest kept value. The search halves the range of values until few are left to sort."""
    limit = top_p * float(np.exp(scaled).sum())
    above = 0.0
    while len(scaled) > SMALL and (low := scaled.min()) != (high := scaled.max()):
        middle = low + (high - low) / 2
        is_upper = scaled > middle
        mass = float(np.exp(scaled[is_upper]).sum())
        if above + mass >= limit:
            scaled = scaled[is_upper]
        else:
            above += mass
            scaled = scaled[~is_upper]
    values = np.unique(scaled)[::-1]
    counts = np.array([np.count_nonzero(scaled == value) for value in values])
    masses = np.exp(values) * counts
    mass_above = above + np.concatenate([[0.0], np.cumsum(masses)[:-1]])
    num_kept = max(1, int(np.count_nonzero(mass_above < limit)))
    return float(values[num_kept - 1])
