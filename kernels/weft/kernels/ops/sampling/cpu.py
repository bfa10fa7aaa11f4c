"""Draws a token for each row of logits on a CPU, as `reference.py` defines it.

The native path (csrc/sampling.c) and the numpy path draw the same tokens.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from weft.kernels.ops.sampling.reference import sample_rows_reference, top_rows_reference
from weft.kernels.ops.sampling.spec import NUM_FIELDS
from weft.kernels.shared.build import NativeLibrary, load_packaged, loaded_openmp_library
from weft.kernels.shared.c_declarations import c_function

SOURCE = Path(__file__).parents[2] / "csrc" / "sampling.c"
_FUNCTIONS = ("sample_rows", "top_rows", "sampling_scratch_floats", "philox", "gumbel")
MIN_PARALLEL_LOGITS = 1 << 16
"""Number of logits from which a call uses several threads; for fewer, waking them costs more."""


@functools.cache
def native_sampling() -> NativeLibrary:
    # The noise is defined without fused multiply-add, as `BASE_FLAGS` have it.
    flags = ("-fopenmp-simd",)
    native = load_packaged(SOURCE, openmp_library=loaded_openmp_library(), flags=flags)
    if native.library is not None:
        for name in _FUNCTIONS:
            c_function(native.library, f"weft_{name}")
    return native


class Scratch:
    """Memory of the native path for rows of one vocabulary. It serves one thread at a time."""

    def __init__(self, vocab_size: int, *, use_native: bool = True) -> None:
        if vocab_size < 1:
            raise ValueError(f"a vocabulary of {vocab_size} tokens")
        self.vocab_size = vocab_size
        self.mask_words = -(-vocab_size // 32)
        self.native = native_sampling().library if use_native else None
        """None: the numpy path draws."""
        self.num_threads = torch.get_num_threads()
        if self.native is not None:
            floats = self.native.weft_sampling_scratch_floats(vocab_size)
            self._memory = np.zeros(floats * self.num_threads, np.float32)
            self.pointer = self._memory.ctypes.data

    def threads_for(self, num_rows: int) -> int:
        is_small = num_rows < 2 or num_rows * self.vocab_size < MIN_PARALLEL_LOGITS
        return 1 if is_small else self.num_threads


def sample_rows(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    params: torch.Tensor,
    masks: torch.Tensor,
    scratch: Scratch,
) -> npt.NDArray[np.int64]:
    """Draws one token per row.

    Args:
        logits: [L, vocab_size] float32 on the CPU, rows contiguous; not changed. Tokens at
            MASKED_LOGIT are never drawn, and neither are tokens that a slot's mask forbids.
        slots: [L]: slot whose parameters a row uses.
        positions: [L]: absolute position of the token to be drawn.
        params: [max_slots, NUM_FIELDS] int64, rows of `pack_slot`. Rows of biases and counts are
            not used: the caller changes the logits.
        masks: [max_slots, ceil(vocab_size / 32)] int32: bit i % 32 of word i / 32 allows token i.
            Bits from vocab_size on have no meaning.

    Returns:
        [L] token ids; ERROR_NOT_FINITE where a row holds NaN or an infinity, even for a forbidden
        token; ERROR_NO_CANDIDATE where all of a row is masked.
    """
    num_rows = _check(logits, scratch)
    if len(slots) != num_rows or len(positions) != num_rows:
        raise ValueError(f"{num_rows} rows, {len(slots)} slots, {len(positions)} positions")
    max_slots = params.shape[0]
    if params.shape[1] != NUM_FIELDS or masks.shape != (max_slots, scratch.mask_words):
        raise ValueError(f"tables are {tuple(params.shape)}, {tuple(masks.shape)}")
    if num_rows == 0:
        return np.zeros(0, np.int64)
    slots = np.ascontiguousarray(slots, np.int64)
    positions = np.ascontiguousarray(positions, np.int64)
    if slots.min() < 0 or slots.max() >= max_slots:
        raise ValueError(f"slots outside 0..{max_slots - 1}: {slots}")
    if scratch.native is None:
        tables = params.numpy(), masks.numpy().view(np.uint32)
        return sample_rows_reference(logits.numpy(), slots, positions, *tables)
    tokens = np.empty(num_rows, np.int64)
    scratch.native.weft_sample_rows(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        scratch.vocab_size,
        slots.ctypes.data,
        positions.ctypes.data,
        params.data_ptr(),
        masks.data_ptr(),
        scratch.pointer,
        scratch.threads_for(num_rows),
        tokens.ctypes.data,
    )
    return tokens


def top_rows(
    logits: torch.Tensor, num_top: int, scratch: Scratch
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Computes the inputs of log-probabilities: log_softmax(row)[i] = row[i] - log_sum.

    Args:
        logits: [L, vocab_size] float32 on the CPU, rows contiguous; not changed.
        num_top: Most likely tokens wanted a row, at most the vocabulary.

    Returns:
        Log-sum-exp of each row [L] (NaN for rows that are not finite), and ids [L, num_top] of
        the largest logits, largest first, lower ids first among equals (undefined for such rows).
    """
    num_rows = _check(logits, scratch)
    if not 0 <= num_top <= scratch.vocab_size:
        raise ValueError(f"{num_top} most likely of {scratch.vocab_size} tokens")
    if scratch.native is None or num_rows == 0:
        return top_rows_reference(logits.numpy(), num_top)
    log_sums = np.empty(num_rows, np.float64)
    top_ids = np.zeros((num_rows, num_top), np.int64)
    scratch.native.weft_top_rows(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        scratch.vocab_size,
        num_top,
        scratch.pointer,
        scratch.threads_for(num_rows),
        log_sums.ctypes.data,
        top_ids.ctypes.data,
    )
    return log_sums, top_ids


def _check(logits: torch.Tensor, scratch: Scratch) -> int:
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.dim() != 2:
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)} on {logits.device}")
    num_rows, width = logits.shape
    if width != scratch.vocab_size or (width > 1 and logits.stride(1) != 1):
        raise ValueError(f"rows of {width} logits (vocabulary {scratch.vocab_size}), or strided")
    return num_rows
