"""The residual stream: the one contract between layers.

A layer reads the stream through a norm and returns what it adds, as `Pending`. The stream applies
it later, so that a GPU can compute an addition, the norm that follows it and the product that reads
that norm in fewer launches (`weft.kernels.ops.stream.gpu`). No layer writes to the stream itself,
so `Stream` is the place for code that concerns every addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.norm import add_layer_norm
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.stream.additions import Sum
from weft.kernels.ops.stream.reference import Stream
from weft.kernels.ops.stream.taps import Taps
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.stream import gpu as _gpu
else:
    _gpu = deferred(__name__, "weft.kernels.ops.stream.gpu")


def stream_of(hidden: torch.Tensor, taps: Taps | None, peers: Peers | None = None) -> Stream:
    """The stream through consecutive layers, in the form that is fast on its device.

    Args:
        hidden: [T, H], contiguous; on a GPU it is overwritten.
    """
    if not hidden.is_cuda or (peers is not None and peers.device_type != "cuda"):
        return Stream(hidden, taps, peers)
    return _gpu.GpuStream(hidden, taps) if peers is None else _gpu.RankedStream(hidden, taps, peers)


def norm_of_sum(
    added: Sum, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """[T, H]: the layer norm of `residual` plus an addition, with arguments as in
    `weft.kernels.ops.norm.add_layer_norm`. A GPU adds within the norm, a CPU within the product.
    """
    if residual.is_cuda:
        return add_layer_norm(added.value(), residual, weight, bias, eps)
    return F.layer_norm(added.added_to(residual), weight.shape, weight, bias, eps)


def can_fold(
    rows: int,
    first: LinearWeight,
    to_first: LoraAddition | None,
    last: LinearWeight,
    to_last: LoraAddition | None,
) -> bool:
    """Whether, on a GPU and for `rows` rows, a block's first product can include the norm before it
    and its last product can add to the stream, which saves two launches.
    """
    if not first.data.is_cuda:
        return False
    return _gpu.can_fold(rows, first, to_first, last, to_last)
