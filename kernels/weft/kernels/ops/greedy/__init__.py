"""The most likely token of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.sampling.spec import ERROR_NOT_FINITE
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.greedy import triton_rows as _triton_rows
else:
    _triton_rows = deferred(__name__, "weft.kernels.ops.greedy.triton_rows")


def is_faster(logits: torch.Tensor) -> bool:
    """Whether `greedy_rows` is faster than `weft.kernels.ops.sampling` for rows that take the
    largest logit: on a GPU it is one launch, and no host waits for the logits.
    """
    return logits.is_cuda


def greedy_rows(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, on the device of the logits, [L, vocab_size] float32, rows
    contiguous, which are not changed. Returns [L] int64: the lowest id among equally likely ones;
    ERROR_NOT_FINITE where a row holds NaN or an infinity.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)} {logits.stride()}")
    if logits.is_cuda:
        return _triton_rows.greedy_rows(logits)
    return greedy_rows_reference(logits)


def greedy_rows_reference(logits: torch.Tensor) -> torch.Tensor:
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    is_largest = logits == logits.amax(dim=1, keepdim=True)
    # `argmax` would return any of several equal logits, so the lowest id is searched here.
    ids = torch.arange(logits.shape[1], device=logits.device)
    tokens = torch.where(is_largest, ids, logits.shape[1]).amin(dim=1)
    return tokens.masked_fill(~torch.isfinite(logits).all(dim=1), ERROR_NOT_FINITE)
