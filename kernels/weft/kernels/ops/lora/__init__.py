"""Low-rank additions to linear layers (LoRA, Hu et al. 2021), many adapters in one batch.

An adapter is loaded as rows of ROW_RANK ranks each, so that adapters of different ranks share one
pool without padding to the largest rank (S-LoRA, Sheng et al. 2023, section 5). A step names the
adapter slot of each token. Its tokens are sorted by slot into segments, one for each adapter
(Punica, Chen et al. 2023, section 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from weft.kernels.ops.lora.checks import check_addition
from weft.kernels.ops.lora.reference import add_embedding_reference, add_lora_reference
from weft.kernels.ops.lora.spec import EMPTY_SLOT, HostSegments, Int32Array, LoraAddition
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.lora import gpu as _gpu
    from weft.kernels.ops.lora import triton_embedding as _triton_embedding
else:
    _gpu = deferred(__name__, "weft.kernels.ops.lora.gpu")
    _triton_embedding = deferred(__name__, "weft.kernels.ops.lora.triton_embedding")


def sort_tokens(token_slots: Int32Array, num_segments: int | None = None) -> HostSegments:
    """Sorts a step's tokens by adapter.

    Example: slots [0, 1, 0, 2, 3, 0, 1, 3] have the order [0, 2, 5, 1, 6, 3, 4, 7] and the segments
    begin at [0, 3, 5, 6, 8].

    Args:
        token_slots: [T], each token's slot.
        num_segments: Segments of a padded step, of which unused ones are empty; None: one for each
            different slot.

    Raises:
        ValueError: There are more different slots than segments.
    """
    slots, counts = np.unique(token_slots, return_counts=True)
    size = len(slots) if num_segments is None else num_segments
    if len(slots) > size:
        raise ValueError(f"a step names {len(slots)} LoRA slots, there are {size} segments")
    starts = np.full(size + 1, len(token_slots), np.int32)
    starts[0] = 0
    starts[1 : len(slots) + 1] = np.cumsum(counts)
    padded = np.full(size, EMPTY_SLOT, np.int32)
    padded[: len(slots)] = slots
    order = np.argsort(token_slots, kind="stable").astype(np.int32)
    return HostSegments(token_slots, order, token_slots[order], starts, padded)


def add_lora(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    """out[:, columns of each part] += (x @ A^T) @ B^T, with each token's own A and B, in place.

    It leaves the columns of a projection as they are for rows whose adapter does not change it,
    such as rows of slot 0.

    Args:
        out: [T, N], contiguous: the product without adapters.
        x: [T, K], contiguous, dtype of the parts.
    """
    check_addition(out.shape, x.shape, x.dtype, addition)
    if out.is_cuda:
        _gpu.add_lora(out, x, addition)
    else:
        add_lora_reference(out, x, addition)


def add_embedding_lora(out: torch.Tensor, token_ids: torch.Tensor, addition: LoraAddition) -> None:
    """out[t] += A[:, token_ids[t]]^T @ B^T, with each token's own A and B, in place.

    Args:
        out: [T, H], contiguous: the embeddings without adapters.
        token_ids: [T] int64.
        addition: One part, whose in_features is the vocabulary.
    """
    (part,) = addition.parts
    shape = (token_ids.shape[0], part.in_features)
    check_addition(out.shape, shape, out.dtype, addition)
    if out.is_cuda:
        _triton_embedding.add_embedding_lora(out, token_ids, addition)
    else:
        add_embedding_reference(out, token_ids, addition)
