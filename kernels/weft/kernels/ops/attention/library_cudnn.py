"""Causal attention of long prompts by cuDNN, for steps in which no request has cached positions and
all have equal lengths.

On an H200 it is 1.05 to 1.2 times as fast as the Triton kernel from 4,096 rows of 32 heads on (two
prompts of 4,096: 568 TFLOP/s against 488; one: 498 against 479), and not faster below.
bench/gpu_kernels.py has rows of both.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MIN_FLOPS = 100e9
"""Below this much work the Triton kernel is as fast."""


def is_dense(tokens: int, requests: int, max_q_len: int, max_kv_len: int) -> bool:
    """Whether all requests bring equally many rows and have no cached positions.

    Bounds suffice: with `requests` times `max_q_len` rows no request can be shorter, and no context
    is longer than `max_kv_len`.
    """
    return tokens == requests * max_q_len and max_kv_len == max_q_len


def is_faster(
    q: torch.Tensor, kv_heads: int, requests: int, max_q_len: int, max_kv_len: int
) -> bool:
    """Whether cuDNN supports a step's attention and is faster. `max_q_len` and `max_kv_len` may be
    bounds; the latter includes the new rows.
    """
    tokens, heads, dim = q.shape
    return is_long_and_cold(heads, dim, tokens, requests, max_q_len, max_kv_len) and _cudnn_takes(
        q.dtype, heads, kv_heads, dim, q.device.index
    )


def is_long_and_cold(
    heads: int, dim: int, tokens: int, requests: int, max_q_len: int, max_kv_len: int
) -> bool:
    """Whether a step is dense and has enough work to pay for the longer call."""
    flops = 2.0 * tokens * max_q_len * heads * dim
    return flops >= MIN_FLOPS and is_dense(tokens, requests, max_q_len, max_kv_len)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, requests: int, scale: float
) -> torch.Tensor:
    """Causal attention within each of `requests` equally long prompts.

    Args:
        q: [T, Hq, D], float16 or bfloat16.
        k: [T, Hkv, D], any stride between rows.
        v: [T, Hkv, D], likewise.
        requests: Prompts; divides T.

    Returns:
        [T, Hq * D], dtype of `q`.
    """
    query, keys, values = (x.view(requests, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2).reshape(q.shape[0], -1)


@functools.cache
def _cudnn_takes(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, device: int) -> bool:
    """Asks cuDNN, since devices before Hopper, head sizes and builds differ; cached by shape."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    q = torch.empty((1, heads, 128, dim), dtype=dtype, device=f"cuda:{device}")
    k = torch.empty((1, kv_heads, 128, dim), dtype=dtype, device=f"cuda:{device}")
    asked = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(asked)
