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
from weft.kernels.ops.norm import AnyNorm, add_layer_norm
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.stream.additions import Computed, GatedSum, Normed, Pending, Sum
from weft.kernels.ops.stream.taps import Taps
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.stream import gpu as _gpu
else:
    _gpu = deferred(__name__, "weft.kernels.ops.stream.gpu")


class Stream:
    """The stream of one forward pass, computed operation by operation on any device.

    Args:
        value: [T, H].
        peers: Ranks that hold parts of what is added; every addition sums the parts, so that all
            ranks have equal streams. None: this process computes all of it.
    """

    def __init__(
        self, value: torch.Tensor, taps: Taps | None = None, peers: Peers | None = None
    ) -> None:
        self._value = value
        self.taps = taps
        self.peers = peers

    @property
    def rows(self) -> int:
        """T."""
        return self._value.shape[0]

    def begin_run(self, folds: bool) -> None:
        """Begins a run of layers of equal shape. `folds`: whether `can_fold` holds for all their
        blocks.
        """

    def enter(self, layer: int) -> None:
        """Notes that the present stream enters this layer of the pool."""
        if self.taps is not None:
            self.taps.take(layer, self._value)

    def normed(self, norm: AnyNorm | None) -> Normed:
        """The normalised stream for the products of one block; without a norm, the stream itself,
        valid until the next addition.
        """
        return Normed(self._value if norm is None else norm(self._value))

    def add(self, pending: Pending) -> None:
        """Adds to the stream."""
        if self.peers is None or (isinstance(pending, Computed) and not pending.is_partial):
            self._value = pending.added_to(self._value)
        else:
            self._value = self.peers.add_sum(pending.partial(), self._value)

    def computed(self, pending: Pending) -> torch.Tensor:
        """What an addition adds, [T, H], summed over ranks: for a caller that changes it before it
        is added.
        """
        if self.peers is not None:
            return self.peers.add_sum(pending.partial(), torch.zeros_like(self._value))
        if isinstance(pending, GatedSum):
            pending = pending.inner()
        if isinstance(pending, Sum):
            return pending.value()
        return pending.added_to(torch.zeros_like(self._value))

    def settle(self) -> torch.Tensor:
        """The stream with all additions, [T, H]."""
        return self._value

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies the stream, with all additions, by `factor`, [1]."""
        self._value = self.settle() * factor

    def replace(self, value: torch.Tensor) -> None:
        """Continues with `value`, [T, H], in place of the stream; `value` may be overwritten. Call
        it directly after `normed`.
        """
        self._value = value

    def of_rows(self, rows: torch.Tensor) -> Stream:
        """A stream of the rows with numbers `rows`, [L] int64."""
        return Stream(self.settle().index_select(0, rows), peers=self.peers)


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
