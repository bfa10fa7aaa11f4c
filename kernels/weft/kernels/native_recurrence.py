"""The native form of operations whose heads have a matrix as state, on a CPU."""

from __future__ import annotations

import ctypes

import torch
from weft.kernels import cpu


def native_recurrence_for(
    v: torch.Tensor, states: torch.Tensor, *others: torch.Tensor
) -> cpu.NativeCpu | None:
    """The native operations if they can compute these rows, [T, H, Dv], and states,
    [S, H, Dk, Dv]; the other rows must have the dtype of `v`.
    """
    native = cpu.native_cpu_for(v)
    if native is None or states.dtype != torch.float32 or states.shape[2] > native.max_keys:
        return None
    return native if all(other.dtype == v.dtype for other in others) else None


def native_recurrence(
    native: cpu.NativeCpu,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    states: torch.Tensor,
    cu_lens: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    steps: torch.Tensor | None = None,
    skips: torch.Tensor | None = None,
    scale: float = 1.0,
    is_unit: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes rows through states one after another, so that a row's result is the same bit for bit
    wherever its sequence is cut.

    Args:
        native: From `native_recurrence_for`.
        q: [T, Hk, Dk].
        k: [T, Hk, Dk].
        v: [T, H, Dv].
        decay: [T, H] or [T, H, Dk]: logarithms of what is left of a state.
        states: [S, H, Dk, Dv] float32; not changed.
        cu_lens: [S + 1] int64: where each sequence begins.
        beta: [T, H]: with it, the delta rule; see `weft.kernels.gated_delta`.
        steps: [T, H]: factors on values.
        skips: [H]: share of the values that is added to the result.
        scale: Factor on queries.
        is_unit: Whether keys and queries are normalised to length 1.

    Returns:
        [T, H, Dv] of the dtype of `v`, and the states behind the last rows.
    """
    rows, heads, values = v.shape
    q, k = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k))
    v = v if v.stride(2) == 1 else v.contiguous()
    after = states.clone(memory_format=torch.contiguous_format)
    out = torch.empty((rows, heads, values), dtype=v.dtype)
    gates = [
        None if each is None else each.to(torch.float32).contiguous()
        for each in (decay, beta, steps, skips)
    ]
    bounds = cu_lens.contiguous()
    described = cpu.RecurrenceStruct(
        *(each.data_ptr() for each in (q, k, v)),
        *(each.stride(0) for each in (q, k, v)),
        *(each.stride(1) for each in (q, k, v)),
        *(None if each is None else each.data_ptr() for each in gates),
        *(each.data_ptr() for each in (after, out, bounds)),
        *(len(bounds) - 1, heads, heads // k.shape[1], k.shape[2], values),
        1 if decay.dim() == 2 else k.shape[2],
        scale,
        v.dtype == torch.bfloat16,
        is_unit,
    )
    native.recurrence(ctypes.byref(described))
    return out, after
