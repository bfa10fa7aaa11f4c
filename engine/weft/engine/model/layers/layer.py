"""A decoder layer: a mixer of positions and a feed-forward block over the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from weft.engine.model.step import Step
from weft.kernels.linear import LinearWeight
from weft.kernels.lora import LoraStep
from weft.kernels.norm import Norm
from weft.kernels.stream import Normed, Pending, Stream

if TYPE_CHECKING:
    from weft.kernels.gpu.extend_attention import OwnKv


class Query(NamedTuple):
    """What rows ask of the positions that they see."""

    q: torch.Tensor
    """[T, Hq, D], rotated."""
    own: OwnKv | None = None
    """See `weft.kernels.attention.own_kv`."""

    def of_rows(self, rows: torch.Tensor) -> Query:
        """The same of some of the rows ([L] int64)."""
        return Query(self.q.index_select(0, rows))


class Mixer(Protocol):
    """The block of a layer in which rows see one another: attention."""

    def move(self, group: int, in_pool: int) -> None:
        """Puts what the layer keeps into a page group, as the layer with this index of it."""

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        """Prepares a step for consecutive layers of this kind, all of whose rows attend.

        Args:
            step: The step, or what another of these layers has made of it.
            rows: T, the rows that attend.
            pool: As in `write`.

        Raises:
            ValueError: The step does not fit.
        """

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        """Writes what later rows see of these to the pool; returns what `attend` needs of them."""

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Pending:
        """What the rows take in of what they see."""

    def folds(self, rows: int, lora: LoraStep | None) -> bool:
        """Whether so many rows need no launches for norms and additions; see `can_fold`."""

    def shape_key(self) -> object:
        """Equal for blocks that can be in one run."""


class FeedForward(Protocol):
    """The block of a layer that computes each row by itself."""

    def __call__(self, x: Normed, step: Step) -> Pending:
        """What is added to each row."""

    def folds(self, rows: int, lora: LoraStep | None) -> bool:
        """See `Mixer.folds`."""

    def shape_key(self) -> object:
        """See `Mixer.shape_key`."""


class Layer(NamedTuple):
    """Two blocks, each normalised before and added to the residual stream after.

    It is cut in two where the last layer of a step may stop, or go on with fewer rows.
    """

    number: int
    """Its index in the stack."""
    input_norm: Norm
    mixer: Mixer
    post_norm: Norm
    feed: FeedForward

    def finish(self, stream: Stream, query: Query, step: Step, pool: torch.Tensor) -> None:
        """The rest of the layer once the mixer has written."""
        stream.add(self.mixer.attend(query, step, pool))
        stream.add(self.feed(stream.normed(self.post_norm), step))


def shape_of(w: LinearWeight) -> tuple[object, ...]:
    """What must be equal of a product in all layers of a run."""
    return w.out_features, w.in_features, w.dtype
