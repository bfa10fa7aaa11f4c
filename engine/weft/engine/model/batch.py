"""The input of one forward step: a ragged extend (see docs/architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from weft.kernels.lora import LoraStep


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """A step's requests, each with `q_len >= 1` new tokens on top of its cached pages.

    T = new tokens of all requests, R = requests, L = rows whose logits are wanted.
    All tensors live on the model's device.
    """

    token_ids: torch.Tensor
    """Token ids, [T] int64."""
    positions: torch.Tensor
    """Absolute positions, [T] int64."""
    cu_q_lens: torch.Tensor
    """[R + 1] int32: request r brings rows cu_q_lens[r]:cu_q_lens[r + 1]."""
    kv_lens: torch.Tensor
    """[R] int32: cached tokens including this step's."""
    page_table: torch.Tensor
    """[R, max_pages] int32, row-contiguous; entries beyond kv_len are undefined."""
    slots: torch.Tensor
    """[T] int64: page * page_size + offset where each token's K and V go."""
    logits_rows: torch.Tensor
    """[L] int64: rows of T whose logits are wanted; empty if nothing is sampled."""
    max_q_len: int
    max_kv_len: int
    wants_all: bool = False
    """`logits_rows` are all rows, in their order."""
    lora: LoraStep | None = None
    """The step's adapters; None if no token uses one."""
    request_slots: torch.Tensor | None = None
    """[R] int64: each request's slot; for padding the one after the last. None where no model needs
    it.
    """
    ancestors: torch.Tensor | None = None
    """[T] int64: the rows of its own request that each row sees, where rows form trees
    (`weft.kernels.attention.paged_attention`); such a row's position is given by its depth, and its
    slot is where it would be in a chain. None: all rows before it.
    """
    is_cold: bool = False
    """Requests of several rows are known to have nothing before the step."""
