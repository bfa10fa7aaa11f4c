"""Activations of MLPs, gated and plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.activation.spec import ACTIVATIONS, Activation
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.activation import triton_activation as _triton_activation
else:
    _triton_activation = deferred(__name__, "weft.kernels.ops.activation.triton_activation")


_GLU: Mapping[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
"""Activations that a GPU computes together with the multiplication by their factor."""
_GRAIN = 32_768
"""Least number of elements that torch gives to each thread."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, the SwiGLU of Shazeer 2020.

    Args:
        x: [T, 2 * I], contiguous, gate columns first; not changed.

    Returns:
        [T, I], dtype of `x`; computed in float32, rounded once.
    """
    if x.is_cuda:
        return _triton_activation.activate(x, "silu", is_gated=True)
    native = cpu.native_cpu_for(x)
    if native is None:
        return silu_and_mul_reference(x)
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    rows, width = x.shape
    out = torch.empty((rows, width // 2), dtype=x.dtype)
    native.silu_and_mul(x.dtype == torch.bfloat16, out.data_ptr(), x.data_ptr(), rows, width // 2)
    return out


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def activate(x: torch.Tensor, activation: Activation, *, is_gated: bool) -> torch.Tensor:
    """An activation, or an activated gate times what it gates.

    Args:
        x: [T, I], or gated [T, 2 * I], contiguous, gate columns first; not changed.

    Returns:
        [T, I], dtype of `x`; computed in float32, rounded once.
    """
    if is_gated and activation == "silu":
        return silu_and_mul(x)
    if x.is_cuda:
        return _triton_activation.activate(x, activation, is_gated=is_gated)
    gate, up = x.float().chunk(2, dim=-1) if is_gated else (x.float(), None)
    made = ACTIVATIONS[activation](gate)
    return (made if up is None else made * up).to(x.dtype)


def activate_alike(
    x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], *, is_fixed: bool
) -> torch.Tensor:
    """One of torch's activations of each number of x, [T, N].

    On a CPU torch computes the end of each thread's part with another form of the function. With
    `is_fixed` each part is whole rows, so that a row's bits do not depend on the others.
    """
    if not is_fixed or x.is_cuda:
        return function(x)
    blocks = torch.split(x.contiguous(), max(1, _GRAIN // x.shape[1]))
    return torch.cat([function(block) for block in blocks])


def glu(
    x: torch.Tensor,
    activation: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_fixed: bool,
) -> torch.Tensor:
    """activation(a) * b, where a and b are the halves of each row.

    Args:
        x: [T, 2 * I], contiguous, columns of a first; not changed.
        function: The activation in torch, for devices that have no operation of that name.
        is_fixed: Whether a row's bits must not depend on the other rows.

    Returns:
        [T, I], dtype of `x`.
    """
    if x.is_cuda and activation in _GLU:
        return activate(x, _GLU[activation], is_gated=True)
    half, factor = x.chunk(2, dim=-1)
    return activate_alike(half, function, is_fixed=is_fixed) * factor
