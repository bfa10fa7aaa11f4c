"""FlashAttention-3 over prompts without cached positions, where a package that has it is installed.

Shah et al., arXiv 2407.08608. It reads lengths from the device, so that its launches can be
captured for any lengths. On an H200 it is 1.3 times as fast as the Triton kernel and 1.2 times as
fast as cuDNN from 2,048 rows on, and not faster below. It does not attend to positions cached
before a prompt: the installed packages take no pages, and merging its result with the rest costs
more than it gains.

A tile at the end of a prompt also reads the rows after the prompt, with weights of zero, so that
values there that are not finite would spread. Therefore padding is computed as a prompt of its own,
and steps with adapters, which may produce such values, use other kernels.
"""

from __future__ import annotations

import functools
import importlib
import logging

import torch
from weft.kernels.ops.attention.spec import OwnKv, PromptRows
from weft.kernels.ops.latent_attention.spec import NOTHING

logger = logging.getLogger(__name__)

PACKAGES = {"fa3_fwd._C": "fa3_fwd", "flash_attn_3._C": "flash_attn_3"}
"""Modules of packages that have it, and the namespace in which each registers it: fa3-fwd on PyPI,
and FlashAttention's own build, of which the former is a part.
"""
_MAX_DIM = 256
MIN_TOKENS = 2048
"""Rows of a step below which it is not faster."""


def supports(dtype: torch.dtype, dim: int, tokens: int) -> bool:
    """Whether it is installed, takes such a step, and is faster."""
    is_fit = dtype == torch.bfloat16 and dim <= _MAX_DIM and dim % 8 == 0
    return is_fit and tokens >= MIN_TOKENS and _namespace() is not None


def prompt_rows(cu_q_lens: torch.Tensor, tokens: int) -> PromptRows:
    """The rows of a step that FlashAttention-3 takes.

    Args:
        cu_q_lens: [R + 1] int32.
        tokens: T, padding included.
    """
    cu_lens = torch.cat([cu_q_lens, cu_q_lens.new_full((1,), tokens)])
    lens = cu_lens.diff()
    lens[:-1] *= lens[:-1] > 1
    return PromptRows(cu_lens, lens)


def flash_attention(
    out: torch.Tensor, q: torch.Tensor, own: OwnKv, rows: PromptRows, scale: float
) -> None:
    """Writes the rows of `out` of padding and of requests with several rows: causal attention among
    the rows of each.

    Args:
        out: [T, Hq * D], dtype of `q`.
        q: [T, Hq, D] bfloat16.
        own: K and V of the same rows, all of them finite.
        rows: From `prompt_rows`.
    """
    namespace = _namespace()
    assert namespace is not None
    getattr(torch.ops, namespace).fwd(
        q,
        own.k,
        own.v,
        out=out.view(q.shape),
        cu_seqlens_q=rows.cu_lens,
        cu_seqlens_k=rows.cu_lens,
        seqused_q=rows.lens,
        seqused_k=rows.lens,
        # Upper bounds are enough: they only choose how the kernel is launched.
        max_seqlen_q=q.shape[0],
        max_seqlen_k=q.shape[0],
        softmax_scale=scale,
        is_causal=True,
        num_splits=1,
    )


def supports_own_rows(dtype: torch.dtype, dim: int, value_dim: int, tokens: int) -> bool:
    """Whether `own_attention` takes heads of `dim` elements, and pays for so many rows."""
    is_fit = dim == value_dim or (128 < dim <= 192 and 96 < value_dim <= 128)
    return is_fit and supports(dtype, dim, tokens)


def own_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q_lens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.ops.latent_attention.own_attention` for CUDA tensors; results for padding are
    finite.

    Rows of K and V must be finite; strides between rows and between heads are free.
    """
    bounds = torch.cat([cu_q_lens, cu_q_lens.new_full((1,), q.shape[0])])
    return _attend(q, k, v, bounds, bounds, scale, is_causal=True)


def earlier_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.ops.latent_attention.earlier_attention` for CUDA tensors, with the conditions
    of `own_attention`.
    """
    bounds = torch.cat([cu_q_lens, cu_q_lens.new_full((1,), q.shape[0])])
    kv_bounds = torch.cat([cu_kv_lens, cu_kv_lens[-1:]])
    out, sums = _attend(q, k, v, bounds, kv_bounds, scale, is_causal=False)
    # For rows without keys the library writes zeros and a log-sum-exp of minus infinity, which a
    # merge would turn into NaN.
    return out, sums.clamp(min=NOTHING)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    kv_bounds: torch.Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    namespace = _namespace()
    assert namespace is not None
    out, sums, *_ = getattr(torch.ops, namespace).fwd(
        q,
        k,
        v,
        cu_seqlens_q=bounds,
        cu_seqlens_k=kv_bounds,
        # Upper bounds are enough: they only choose how the kernel is launched.
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0],
        softmax_scale=scale,
        is_causal=is_causal,
        num_splits=1,
    )
    return out, sums.transpose(0, 1)


@functools.cache
def _namespace() -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    for module, namespace in PACKAGES.items():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError) as error:
            logger.warning("FlashAttention-3 is installed (%s) but not used: %s", module, error)
            continue
        return namespace
    return None
