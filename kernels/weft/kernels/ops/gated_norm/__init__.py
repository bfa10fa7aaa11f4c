"""RMS norms of the results of recurrent layers, together with the gates on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.gated_norm.spec import GateForm
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.gated_norm import triton_norm as _triton_norm
else:
    _triton_norm = deferred(__name__, "weft.kernels.ops.gated_norm.triton_norm")


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    form: GateForm = "silu",
    gates_first: bool = False,
) -> torch.Tensor:
    """Normalises groups of elements and multiplies them by a gate.

    Args:
        x: [T, G, D]: each group of D is normalised by itself.
        gate: [T, G, D], before its activation; or [T, G / N, N, D], where the distance between
            groups may vary.
        weight: [G, D] or [D] of the norm; None: there is no norm, only the gate.
        gates_first: Whether the gate comes before the norm.

    Returns:
        [T, G, D], dtype of `gate`; computed in float32.
    """
    if gate.dim() == 3:
        gate = gate[:, :, None]
    if x.is_cuda:
        return _triton_norm.gated_norm(x, gate, weight, eps, form=form, gates_first=gates_first)
    gate, wide = gate.flatten(1, 2), x.float()
    factor = F.silu(gate.float()) if form == "silu" else torch.sigmoid(gate.float())
    if gates_first or weight is None:
        wide = wide * factor
    if weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        if not gates_first:
            wide = wide * factor
    return wide.to(gate.dtype)
