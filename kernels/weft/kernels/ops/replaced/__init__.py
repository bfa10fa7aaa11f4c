"""Embeddings and LM heads of adapters that replace the model's own, and tokens that adapters add.

PEFT saves a module that was trained as a whole (`modules_to_save`) in addition to the low-rank
pairs. Such a matrix is not added to the model's: a token whose adapter has one uses it instead, and
other tokens never read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import weight_rows
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora import add_embedding_lora, add_lora
from weft.kernels.ops.lora.reference import segments_with_adapters
from weft.kernels.ops.lora.spec import LoraAddition, LoraSegments, LoraStep
from weft.kernels.ops.replaced.spec import ReplacedMatrices
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.lora import gpu as _lora_gpu
    from weft.kernels.ops.replaced import triton_replaced as _triton_replaced
else:
    _lora_gpu = deferred(__name__, "weft.kernels.ops.lora.gpu")
    _triton_replaced = deferred(__name__, "weft.kernels.ops.replaced.triton_replaced")


def adapt_embeddings(out: torch.Tensor, token_ids: torch.Tensor, lora: LoraStep) -> None:
    """Changes embeddings [T, H] of tokens [T] in place as their adapters do."""
    if lora.embeddings is not None:
        replace_embeddings(out, token_ids, lora.embeddings, lora.segments)
    added = lora.of("embed", 0)
    if added is not None:
        add_embedding_lora(out, token_ids, added)


def replace_embeddings(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    replaced: ReplacedMatrices,
    segments: LoraSegments,
) -> None:
    """Overwrites rows of `out`, the model's own embeddings, [T, H], contiguous, for tokens whose
    adapters have an embedding of their own. token_ids: [T] int64.
    """
    if out.is_cuda:
        assert replaced.on_device is not None
        _triton_replaced.replace_embeddings(
            out, token_ids, replaced.on_device, replaced.places, segments.token_slots
        )
        return
    for tokens, slot in segments_with_adapters(segments):
        matrix = replaced.matrix_of(slot)
        if matrix is not None:
            out[tokens] = weight_rows(matrix, token_ids.index_select(0, tokens))


def replaced_linear(
    x: torch.Tensor,
    w: LinearWeight,
    replaced: ReplacedMatrices,
    segments: LoraSegments,
    lora: LoraAddition | None,
) -> torch.Tensor:
    """Logits of each token by the LM head of its adapter.

    Args:
        x: [L, K], contiguous, the weight's dtype.
        w: The model's own LM head.
        replaced: LM heads of adapters.
        lora: What adapters add to the product with either head, or None.

    Returns:
        [L, N] float32. A row's result is independent of the other rows if it is in `linear`.
    """
    if x.is_cuda:
        assert replaced.on_device is not None
        out = linear(x, w, out_dtype=torch.float32)
        matrices, places = replaced.on_device, replaced.places
        _triton_replaced.replace_products(out, x, matrices, places, segments, is_fixed=w.is_fixed)
        if lora is not None:
            (_lora_gpu.add_fixed_lora if w.is_fixed else add_lora)(out, x, lora)
        return out
    out = linear(x, w, out_dtype=torch.float32, lora=lora)
    for tokens, slot in segments_with_adapters(segments):
        matrix = replaced.matrix_of(slot)
        if matrix is not None:
            own = None if lora is None else lora.select(tokens)
            some = x.index_select(0, tokens)
            out[tokens] = linear(some, matrix, out_dtype=torch.float32, lora=own)
    return out


UNKNOWN_LOGIT = -1e30
"""Logit of tokens that an adapter does not have. It is finite, as samplers require, and has
probability 0 at any temperature that they take.
"""


def hide_unknown_tokens(logits: torch.Tensor, vocab_size: int, lora: LoraStep | None) -> None:
    """Hides tokens that only some adapters add from rows whose adapter does not have them.

    Args:
        logits: [L, vocab_size + added], overwritten.
        vocab_size: Tokens of the model itself.
        lora: Adapters of these rows; None: no adapter is in the step.
    """
    added = logits[:, vocab_size:]
    if lora is None or lora.vocabulary_ends is None:
        added.fill_(UNKNOWN_LOGIT)
        return
    ends = lora.vocabulary_ends.index_select(0, lora.segments.token_slots)
    ids = torch.arange(vocab_size, logits.shape[1], dtype=torch.int32, device=logits.device)
    added.masked_fill_(ids >= ends[:, None], UNKNOWN_LOGIT)
