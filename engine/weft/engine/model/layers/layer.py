"""A decoder layer: a mixer of positions and a feed-forward block over the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from weft.engine.model.step import Step
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import AnyNorm, Norm
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.stream.additions import Computed, Normed, Pending
from weft.kernels.ops.stream.reference import Stream

if TYPE_CHECKING:
    from weft.kernels.ops.attention.spec import OwnKv


class Query(NamedTuple):
    """Queries of rows for the positions to which they attend."""

    q: torch.Tensor
    """[T, Hq, D], rotated; of a recurrent layer its result, [T, all heads]."""
    own: OwnKv | None = None
    """K and V of the rows themselves, where kernels read them outside the pool; else None."""
    gate: torch.Tensor | None = None
    """[T, Hq], or one per element: factors on the result, before their activation; None: 1."""
    beside: torch.Tensor | None = None
    """[T, ...]: the result of the recurrent layer of a `ParallelBlock`, or None."""

    def of_rows(self, rows: torch.Tensor) -> Query:
        """The queries of some of the rows, [L] int64."""
        q, gate, beside = (
            None if each is None else each.index_select(0, rows)
            for each in (self.q, self.gate, self.beside)
        )
        assert q is not None
        return Query(q, gate=gate, beside=beside)


class Mixer(Protocol):
    """The block of a layer in which rows exchange information: attention or a recurrent layer."""

    @property
    def has_own_kv(self) -> bool:
        """Whether `write` stores anything; otherwise the layer reads the K and V that an earlier
        layer has stored.
        """

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        """Assigns the layer's data to a page group, there as the layer with index `in_pool` of its
        plane. A plane of None: the group has one plane.
        """

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        """Prepares a step for consecutive layers of this kind, all of whose rows attend.

        Args:
            step: The step, or the step that another of these layers has prepared.
            rows: T, the rows that attend.

        Raises:
            ValueError: The step does not fit.
        """

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        """Writes the rows' data for later rows to the pool. Returns the input of `attend`."""

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Pending:
        """The block's addition to each row."""

    def folds(self, rows: int, step: Step) -> bool:
        """Whether norms and additions need no separate launches for this many rows (`can_fold`)."""

    def shape_key(self) -> object:
        """Equal for blocks that can be in one run."""


class FeedForward(Protocol):
    """The block of a layer that computes each row by itself."""

    def __call__(self, x: Normed, step: Step) -> Pending:
        """The block's addition to each row."""

    def folds(self, rows: int, step: Step) -> bool:
        """Whether norms and additions need no separate launches for this many rows."""

    def shape_key(self) -> object:
        """Equal for blocks that can be in one run."""


class Form(NamedTuple):
    """Deviations of a layer from the usual form, which normalises before each block and adds the
    block's result.
    """

    mixer_post: AnyNorm | None = None
    """Norm of the mixer's result before its addition, or None."""
    feed_post: AnyNorm | None = None
    """Norm of the feed-forward block's result before its addition, or None."""
    multiplier: float = 1.0
    """Factor on the additions of both blocks."""
    is_parallel: bool = False
    """Whether both blocks read the layer's input."""
    last: FeedForward | None = None
    """A third block, which reads the stream without a norm, or None."""
    last_post: AnyNorm | None = None
    """Norm of the third block's result before its addition."""
    factor: torch.Tensor | None = None
    """[1]: a factor on the stream at the layer's end, or None."""
    kept: tuple[float, float] | None = None
    """Not None: the blocks' results are added to what the blocks read, times these factors, in
    place of the stream.
    """


class StackLayer(Protocol):
    """A layer as the stack sees it.

    A layer has two parts. The first is `begin` and `write` of its mixer, after which the last layer
    of a step may stop. The second is `finish`, which may take fewer rows.
    """

    @property
    def number(self) -> int:
        """Index in the stack."""

    @property
    def mixer(self) -> Mixer: ...

    def begin(self, stream: Stream) -> Normed:
        """Input of the mixer, from the stream as it enters the layer."""

    def finish(self, stream: Stream, query: Query, step: Step, pool: torch.Tensor) -> None:
        """The rest of the layer, after the mixer has written."""

    def folds(self, rows: int, step: Step) -> bool:
        """Whether norms and additions need no separate launches in a step of this many rows."""

    def shape_key(self) -> object:
        """Equal for layers that can be in one run."""


class Layer(NamedTuple):
    """Two blocks, each normalised before and added to the residual stream after: a `StackLayer`."""

    number: int
    """Index in the stack."""
    input_norm: AnyNorm | None
    """None: the mixer reads the stream without a norm."""
    mixer: Mixer
    post_norm: AnyNorm | None
    feed: FeedForward | None
    """None: the layer ends with its mixer."""
    form: Form = Form()

    def begin(self, stream: Stream) -> Normed:
        return stream.normed(self.input_norm)

    def finish(self, stream: Stream, query: Query, step: Step, pool: torch.Tensor) -> None:
        form = self.form
        mixed = self.mixer.attend(query, step, pool)
        if form.kept is not None:
            self._finish_kept(stream, mixed, step, form.kept)
            return
        if self.feed is None:
            stream.add(self._made(stream, mixed, form.mixer_post))
            return
        if form.is_parallel:
            made = self._made(stream, self.feed(stream.normed(self.post_norm), step), None)
            stream.add(self._made(stream, mixed, None))
            stream.add(made)
            return
        stream.add(self._made(stream, mixed, form.mixer_post))
        fed = self.feed(stream.normed(self.post_norm), step)
        stream.add(self._made(stream, fed, form.feed_post))
        if form.last is not None:
            stream.add(self._made(stream, form.last(stream.normed(None), step), form.last_post))
        if form.factor is not None:
            stream.scale(form.factor)

    def _finish_kept(
        self, stream: Stream, mixed: Pending, step: Step, kept: tuple[float, float]
    ) -> None:
        assert self.feed is not None, "such layers have both blocks"
        stream.replace(stream.normed(self.input_norm).value * kept[0])
        stream.add(self._made(stream, mixed, None))
        x = stream.normed(self.post_norm)
        fed = self._made(stream, self.feed(x, step), None)
        stream.replace(x.value * kept[1])
        stream.add(fed)

    def folds(self, rows: int, step: Step) -> bool:
        is_usual = self.form == Form() and all(
            isinstance(norm, Norm) for norm in (self.input_norm, self.post_norm)
        )
        if self.feed is None or not is_usual:
            return False
        return self.mixer.folds(rows, step) and self.feed.folds(rows, step)

    def shape_key(self) -> object:
        form = self.form
        norms = (self.input_norm, self.post_norm, form.mixer_post, form.feed_post, form.last_post)
        last = None if form.last is None else form.last.shape_key()
        rest = form.multiplier, form.is_parallel, last, form.factor is None, form.kept
        feed = None if self.feed is None else self.feed.shape_key()
        kinds = [type(norm) for norm in norms]
        return self.mixer.shape_key(), feed, kinds, rest

    def _made(self, stream: Stream, pending: Pending, norm: AnyNorm | None) -> Pending:
        form = self.form
        if norm is None and form.multiplier == 1.0 and not form.is_parallel:
            return pending
        value = stream.computed(pending)
        value = value if norm is None else norm(value)
        return Computed(value if form.multiplier == 1.0 else value * form.multiplier)


def shape_of(w: LinearWeight) -> tuple[object, ...]:
    """The properties of a product that must be equal in all layers of a run."""
    return w.out_features, w.in_features, w.dtype
