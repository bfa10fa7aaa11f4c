"""The native form of operations whose heads have a matrix as state, on a CPU."""

from __future__ import annotations

import ctypes

import torch
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.shared import cpu


def native_recurrence_for(
    v: torch.Tensor, states: torch.Tensor, *others: torch.Tensor
) -> cpu.NativeCpu | None:
    """The native operations if they can compute rows [T, H, Dv] and states [S, H, Dk, Dv]; `others`
    must have the dtype of `v`.
    """
    native = cpu.native_cpu_for(v)
    if native is None or states.dtype != torch.float32 or states.shape[2] > native.max_keys:
        return None
    return native if all(other.dtype == v.dtype for other in others) else None


def native_recurrence(
    native: cpu.NativeCpu, rows: HeadRows, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes rows of S sequences through states one after another, so that a row's result has the
    same bits wherever its sequence is cut. `states`, [S, H, Dk, Dv] float32, are not changed.
    Returns [T, H, Dv] of the dtype of `v`, and the states after the last rows.
    """
    q, k, v, decay, sequences, beta, steps, skips, scale, is_unit = rows.packed()
    bounds = sequences.cu_lens.contiguous()
    heads, values = v.shape[1:]
    after = states.clone(memory_format=torch.contiguous_format)
    out = torch.empty(v.shape, dtype=v.dtype)
    gates = decay, beta, steps, skips
    described = cpu.RecurrenceStruct(
        *(each.data_ptr() for each in (q, k, v)),
        *(each.stride(0) for each in (q, k, v)),
        *(each.stride(1) for each in (q, k, v)),
        *(None if each is None else each.data_ptr() for each in gates),
        *(each.data_ptr() for each in (after, out, bounds)),
        *(sequences.num_sequences, heads, rows.shared, k.shape[2], values),
        1 if decay.dim() == 2 else k.shape[2],
        scale,
        v.dtype == torch.bfloat16,
        is_unit,
    )
    native.recurrence(ctypes.byref(described))
    return out, after
