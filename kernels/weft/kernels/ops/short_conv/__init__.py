"""Short causal convolutions: each channel of a row is a weighted sum of its last few values."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.recurrence.segments import Segments
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.recurrence import triton_steps as _triton_steps
else:
    _triton_steps = deferred(__name__, "weft.kernels.ops.recurrence.triton_steps")


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    sequences: Sequences,
    *,
    has_silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolves the rows of ragged sequences.

    Args:
        x: [T, C].
        weight: [K, C], K at least 2, the weight of a row's own value last.
        bias: [C], or None.
        tails: [S, C, K - 1]: each sequence's values before its first row, latest last; zeros at the
            beginning of a context. Not changed.

    Returns:
        [T, C] of the dtype of `x`, computed in float32 or wider, and the tails after the last rows,
        [S, C, K - 1] of the dtype of `tails`.
    """
    taps, channels = weight.shape
    rows, count = sequences.num_rows, sequences.num_sequences
    if x.shape != (rows, channels) or tails.shape != (count, channels, taps - 1):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and tails {tuple(tails.shape)} do "
            f"not fit {rows} rows of {count} sequences"
        )
    if x.is_cuda:
        return _triton_steps.short_conv(x, weight, bias, tails, sequences, has_silu=has_silu)
    native = cpu.native_cpu_for(x)
    is_native = native is not None and taps <= native.max_taps_of_conv and tails.dtype == x.dtype
    if native is None or not is_native:
        bounds = sequences.cu_lens
        return short_conv_reference(x, weight, bias, tails, bounds, has_silu=has_silu)
    x = x if x.stride(1) == 1 else x.contiguous()
    factors = [None if w is None else w.to(torch.float32).contiguous() for w in (weight, bias)]
    left = tails.clone(memory_format=torch.contiguous_format)
    out, bounds = torch.empty(x.shape, dtype=x.dtype), sequences.cu_lens.contiguous()
    described = cpu.ConvolutionStruct(
        *(x.data_ptr(), x.stride(0)),
        *(None if each is None else each.data_ptr() for each in factors),
        *(each.data_ptr() for each in (left, out, bounds)),
        *(count, channels, taps),
        *(x.dtype == torch.bfloat16, has_silu),
    )
    native.convolution(ctypes.byref(described))
    return out, left


def short_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    cu_lens: torch.Tensor,
    *,
    has_silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    taps, channels = weight.shape
    segments, before = Segments.of(cu_lens), taps - 1
    count = len(segments.ends)
    # Each sequence's tail lies before its rows.
    places = torch.arange(segments.num_rows, device=x.device)
    places += (segments.sequences + 1) * before
    ends, behind = places[segments.ends], torch.arange(before, device=x.device)
    joined = x.new_empty((segments.num_rows + count * before, channels))
    first = cu_lens[:-1] + torch.arange(count, device=x.device) * before
    joined[first[:, None] + behind] = tails.transpose(1, 2).to(x.dtype)
    joined[places] = x
    wide = joined if x.dtype == torch.float64 else joined.float()
    factors = weight.to(wide.dtype)
    out = wide[places] * factors[-1]
    for back in range(1, taps):
        out += wide[places - back] * factors[-1 - back]
    if bias is not None:
        out += bias.to(wide.dtype)
    if has_silu:
        out = F.silu(out)
    left = joined[ends[:, None] - before + 1 + behind]
    return out.to(x.dtype), left.transpose(1, 2).to(tails.dtype)
