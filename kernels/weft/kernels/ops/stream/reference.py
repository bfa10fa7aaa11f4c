"""The residual stream, computed operation by operation."""

from __future__ import annotations

import torch
from weft.kernels.ops.norm import AnyNorm
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.stream.additions import Computed, GatedSum, Normed, Pending, Sum
from weft.kernels.ops.stream.taps import Taps


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
