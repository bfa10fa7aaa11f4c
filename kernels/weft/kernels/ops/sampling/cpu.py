"""Draws a token for each row of logits on a CPU, as `reference.py` defines it.

The native path (csrc/sampling.c) and the numpy path draw the same tokens.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from weft.kernels.ops.sampling.reference import (
    ERROR_NO_CANDIDATE,
    ERROR_NOT_FINITE,
    GREEDY_TEMPERATURE,
    MASKED_LOGIT,
    SlotParams,
    sample_rows_reference,
    top_rows_reference,
)
from weft.kernels.shared.build import NativeLibrary, load_native, loaded_openmp_library

__all__ = [
    "ERROR_NOT_FINITE",
    "ERROR_NO_CANDIDATE",
    "GREEDY_TEMPERATURE",
    "MASKED_LOGIT",
    "SamplingColumns",
    "SlotParams",
    "native_sampling",
    "sample_rows",
    "top_rows",
]

SOURCE = Path(__file__).parents[2] / "csrc" / "sampling.c"
MIN_PARALLEL_LOGITS = 1 << 16
"""Number of logits from which a call uses several threads; for fewer, waking them costs more."""


@functools.cache
def native_sampling() -> NativeLibrary:
    # The noise is defined without fused multiply-add, as `BASE_FLAGS` have it.
    flags = ("-fopenmp-simd",)
    native = load_native(SOURCE, openmp_library=loaded_openmp_library(), flags=flags)
    if native.library is not None:
        _declare(native.library)
    return native


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.weft_sample_rows.argtypes = [
        *(pointer, integer, integer, integer),  # logits, stride, rows, vocabulary
        *(pointer, pointer, pointer),  # slots, positions, columns
        *(pointer, ctypes.c_int, pointer),  # scratch, threads, tokens
    ]
    library.weft_sample_rows.restype = None
    library.weft_top_rows.argtypes = [
        *(pointer, integer, integer, integer, integer),  # logits, stride, rows, vocabulary, top
        *(pointer, ctypes.c_int, pointer, pointer),  # scratch, threads, log sums, ids
    ]
    library.weft_top_rows.restype = None
    library.weft_sampling_scratch_floats.argtypes = [integer]
    library.weft_sampling_scratch_floats.restype = integer
    library.weft_philox.argtypes = [pointer, ctypes.c_uint64, pointer]
    library.weft_philox.restype = None
    library.weft_gumbel.argtypes = [ctypes.c_uint64, ctypes.c_uint64, pointer, integer, pointer]
    library.weft_gumbel.restype = None


_COLUMNS: dict[str, type[np.generic]] = {
    **{"temperature": np.float64, "top_p": np.float64, "gap": np.float64},
    **{"top_n_sigma": np.float64, "seed": np.uint64, "top_k": np.int64},
}
"""Columns that hold a field of `SlotParams`, and their types, in the order of sampling.c."""


class _ColumnPointers(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_COLUMNS, "is_masked", "masks")),
        ("mask_words", ctypes.c_int64),
    )


class SamplingColumns:
    """Sampling parameters of each slot: an array [max_slots] for each field of `SlotParams`.

    It serves one thread at a time, since it holds the native path's scratch memory.
    """

    temperature: npt.NDArray[np.float64]
    """Slots below GREEDY_TEMPERATURE are greedy."""
    top_p: npt.NDArray[np.float64]
    gap: npt.NDArray[np.float64]
    top_n_sigma: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    top_k: npt.NDArray[np.int64]
    is_masked: npt.NDArray[np.bool_]
    """Whether only tokens of the slot's mask may be drawn."""
    masks: npt.NDArray[np.uint32]
    """[max_slots, ceil(vocab_size / 32)]: bit i % 32 of word i / 32 allows token i. Bits from
    vocab_size on have no meaning, and neither have rows of slots that are not masked.
    """

    def __init__(self, vocab_size: int, max_slots: int, *, use_native: bool = True) -> None:
        if vocab_size < 1 or max_slots < 1:
            raise ValueError(f"no vocabulary or no slots: {vocab_size}, {max_slots}")
        self.vocab_size = vocab_size
        self.max_slots = max_slots
        greedy = SlotParams()
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.full(max_slots, getattr(greedy, name), dtype))
        self.is_masked = np.zeros(max_slots, np.bool_)
        self.masks = np.zeros((max_slots, -(-vocab_size // 32)), np.uint32)
        self.native = native_sampling().library if use_native else None
        self.num_threads = torch.get_num_threads()
        if self.native is not None:
            floats = self.native.weft_sampling_scratch_floats(vocab_size)
            self._scratch = np.zeros(floats * self.num_threads, np.float32)
            self.scratch_pointer = self._scratch.ctypes.data
            arrays = (getattr(self, name) for name in (*_COLUMNS, "is_masked", "masks"))
            addresses = (array.ctypes.data for array in arrays)
            self._pointers = _ColumnPointers(*addresses, self.masks.shape[1])
            self.pointers_address = ctypes.addressof(self._pointers)

    def set(self, slot: int, params: SlotParams) -> None:
        for name in _COLUMNS:
            getattr(self, name)[slot] = getattr(params, name)

    def threads_for(self, num_rows: int) -> int:
        is_small = num_rows < 2 or num_rows * self.vocab_size < MIN_PARALLEL_LOGITS
        return 1 if is_small else self.num_threads


def sample_rows(
    logits: torch.Tensor,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    columns: SamplingColumns,
) -> npt.NDArray[np.int64]:
    """Draws one token per row.

    Args:
        logits: [L, vocab_size] float32 on the CPU, rows contiguous; not changed. Tokens at
            MASKED_LOGIT are never drawn, and neither are tokens that a slot's mask forbids.
        slots: [L]: slot whose parameters a row uses.
        positions: [L]: absolute position of the token to be drawn.

    Returns:
        [L] token ids; ERROR_NOT_FINITE where a row holds NaN or an infinity, even for a forbidden
        token; ERROR_NO_CANDIDATE where all of a row is masked.
    """
    num_rows = _check(logits, columns)
    if len(slots) != num_rows or len(positions) != num_rows:
        raise ValueError(f"{num_rows} rows, {len(slots)} slots, {len(positions)} positions")
    if num_rows == 0:
        return np.zeros(0, np.int64)
    slots = np.ascontiguousarray(slots, np.int64)
    positions = np.ascontiguousarray(positions, np.int64)
    if slots.min() < 0 or slots.max() >= columns.max_slots:
        raise ValueError(f"slots outside 0..{columns.max_slots - 1}: {slots}")
    if columns.native is None:
        return sample_rows_reference(logits.numpy(), slots, positions, columns)
    tokens = np.empty(num_rows, np.int64)
    columns.native.weft_sample_rows(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        columns.vocab_size,
        slots.ctypes.data,
        positions.ctypes.data,
        columns.pointers_address,
        columns.scratch_pointer,
        columns.threads_for(num_rows),
        tokens.ctypes.data,
    )
    return tokens


def top_rows(
    logits: torch.Tensor, num_top: int, columns: SamplingColumns
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Computes the inputs of log-probabilities: log_softmax(row)[i] = row[i] - log_sum.

    Args:
        logits: [L, vocab_size] float32 on the CPU, rows contiguous; not changed.
        num_top: Most likely tokens wanted a row, at most the vocabulary.
        columns: Holds the native path's scratch memory.

    Returns:
        Log-sum-exp of each row [L] (NaN for rows that are not finite), and ids [L, num_top] of
        the largest logits, largest first, lower ids first among equals (undefined for such rows).
    """
    num_rows = _check(logits, columns)
    if not 0 <= num_top <= columns.vocab_size:
        raise ValueError(f"{num_top} most likely of {columns.vocab_size} tokens")
    if columns.native is None or num_rows == 0:
        return top_rows_reference(logits.numpy(), num_top)
    log_sums = np.empty(num_rows, np.float64)
    top_ids = np.zeros((num_rows, num_top), np.int64)
    columns.native.weft_top_rows(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        columns.vocab_size,
        num_top,
        columns.scratch_pointer,
        columns.threads_for(num_rows),
        log_sums.ctypes.data,
        top_ids.ctypes.data,
    )
    return log_sums, top_ids


def _check(logits: torch.Tensor, columns: SamplingColumns) -> int:
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.dim() != 2:
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)} on {logits.device}")
    num_rows, width = logits.shape
    if width != columns.vocab_size or (width > 1 and logits.stride(1) != 1):
        raise ValueError(f"rows of {width} logits (vocabulary {columns.vocab_size}), or strided")
    return num_rows
