"""A stack of decoder layers: embedding, runs of layers, final norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch
from weft.engine.base.layer_waits import LayerWaits, group_of
from weft.engine.model.layers.altup import Copies
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Form, Layer, StackLayer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.layers.per_layer import PerLayerEmbedding
from weft.engine.model.layers.rotary import AxisTurns
from weft.engine.model.stage import Stage
from weft.engine.model.step import Inserted, Step
from weft.kernels.ops.dense_run import DenseLayer, DenseRun
from weft.kernels.ops.divided_pages import divided
from weft.kernels.ops.norm import AnyNorm, Norm
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.replaced import adapt_embeddings
from weft.kernels.ops.stream import stream_of
from weft.kernels.ops.stream.reference import Stream
from weft.kernels.ops.stream.taps import Taps


class Run:
    """Consecutive layers of equal shape, the unit in which a step goes through a stack.

    On a CPU a run of layers with grouped-query attention and a gated MLP is one native operation.
    All other runs apply single operations to the stream, which fuses some of them.
    """

    def __init__(self, layers: Sequence[StackLayer]) -> None:
        self.layers = tuple(layers)
        self._dense = DenseRun.of([_dense_layer(layer) for layer in layers])
        self._parts: tuple[Run, ...] = ()
        """What `parts` made last."""

    def __call__(self, stream: Stream, step: Step, pool: torch.Tensor) -> Step:
        """Runs the layers. Returns the step with their preparations, for further runs."""
        peers = stream.peers
        if (
            self._dense is None
            or not self._dense.fits(pool)
            or step.turns is not None
            or step.gather is not None
            or step.groups[0].here is not None
            or (peers is not None and peers.device_type != "cpu")
        ):
            return self.by_operation(stream, step, pool)
        first, hidden = self.layers[0], stream.settle()
        group, *further = step.groups
        parts = step.lora, stream.taps, further, peers
        self._dense(hidden, step.turn_rows, group, pool, first.number, *parts)
        return step

    def parts(self, late: LayerWaits | None) -> tuple[Run, ...]:
        """The run, cut where the step may wait for layers of the pool."""
        if late is None:
            return (self,)
        if not self._parts:
            numbers = (group_of(late.groups, layer.number) for layer in self.layers)
            same = groupby(zip(numbers, self.layers, strict=True), itemgetter(0))
            self._parts = tuple(Run([layer for _, layer in pairs]) for _, pairs in same)
        return self._parts

    def by_operation(self, stream: Stream, step: Step, pool: torch.Tensor) -> Step:
        """A call that always uses single operations."""
        rows = stream.rows
        stream.begin_run(self.layers[0].folds(rows, step))
        for layer in self.layers:
            stream.enter(layer.number)
            x = layer.begin(stream)
            step = layer.mixer.prepare(step, rows, pool)
            query = layer.mixer.write(x, step, pool)
            if step.gather is not None and layer.mixer.has_own_kv:
                step.gather(layer.mixer, step, pool)
            layer.finish(stream, query, step, pool)
        return step


def run_all(
    runs: Sequence[Run],
    hidden: torch.Tensor,
    step: Step,
    pool: torch.Tensor,
    taps: Taps | None = None,
    peers: Peers | None = None,
    added: Sequence[Inserted] = (),
) -> torch.Tensor:
    """Takes all rows of a step through runs of layers. Returns [T, hidden].

    Args:
        hidden: [T, hidden], contiguous; may be overwritten.
        taps: Gets the inputs of the layers that it names, or None.
        peers: Ranks that have all other shares of the layers; None: there are none.
        added: What is added to the stream after each of the first runs.
    """
    stream = stream_of(hidden, taps, peers)
    for number, run in enumerate(runs):
        for part in run.parts(step.late):
            if step.late is not None:
                step.late.wait(part.layers[0].number)
            step = part(stream, step, pool)
        if number < len(added):
            stream.settle().index_add_(0, added[number].rows, added[number].embeddings)
    return stream.settle()


def runs_of(layers: Sequence[StackLayer]) -> tuple[Run, ...]:
    return tuple(Run(tuple(same)) for _, same in groupby(layers, _shape_key))


def _shape_key(layer: StackLayer) -> object:
    return layer.shape_key()


def _dense_layer(layer: StackLayer) -> DenseLayer | None:
    if not isinstance(layer, Layer):
        return None
    mixer, feed, norms = layer.mixer, layer.feed, (layer.input_norm, layer.post_norm)
    is_usual = isinstance(mixer, Attention) and mixer.is_usual and layer.form == Form()
    if not (is_usual and isinstance(mixer, Attention) and isinstance(feed, GatedMLP)):
        return None
    input_norm, post_norm = norms
    if not (isinstance(input_norm, Norm) and isinstance(post_norm, Norm)):
        return None
    return DenseLayer(
        input_norm=input_norm,
        qkv=mixer.qkv_proj,
        q_norm=mixer.q_norm,
        k_norm=mixer.k_norm,
        o=mixer.o_proj,
        post_norm=post_norm,
        gate_up=feed.gate_up_proj,
        down=feed.down_proj,
        cos_sin=mixer.cos_sin,
        spec=mixer.spec,
        group=mixer.group,
        pool_shift=mixer.in_pool - mixer.layer,
    )


class Stack:
    def __init__(
        self,
        embed_tokens: torch.Tensor,
        layers: Sequence[StackLayer],
        norm: AnyNorm,
        multiplier: float = 1.0,
        peers: Peers | None = None,
        per_layer: PerLayerEmbedding | None = None,
        positions: torch.Tensor | None = None,
        copies: Copies | None = None,
        axes: AxisTurns | None = None,
        num_taps: int = 0,
        stage: Stage | None = None,
    ) -> None:
        """Assembles the stack from its parts.

        Args:
            embed_tokens: [vocab, hidden], whole on every rank.
            multiplier: Factor on rows of the embedding as they enter the stream, rounded to their
                dtype.
            positions: [max_positions, hidden], added to each row by its position, or None.
            copies: Makes the copies of the stream that the layers take, or None.
            axes: Makes rotations by several axes, or None.
            num_taps: First layers after which rows of media are added to the stream.
            stage: The layers that run here; the others have no weights. None: all run here.
        """
        self.peers = peers
        """Ranks that have all other shares of the layers; None: there are none."""
        self.embed_tokens = embed_tokens
        self._multiplier = None if multiplier == 1.0 else embed_tokens.new_tensor([multiplier])
        self.norm = norm
        self.layers = tuple(layers)
        self._per_layer, self._positions, self._copies = per_layer, positions, copies
        self._axes, self._num_taps = axes, num_taps
        self._stage = stage
        own = layers if stage is None else layers[stage.layers.start : stage.layers.stop]
        self._whole = runs_of(own)
        singles = (Run([layer]) for layer in layers[:num_taps])
        self._tapped = (*singles, *runs_of(layers[num_taps:])) if num_taps else self._whole
        last = max(
            (number for number, layer in enumerate(own) if layer.mixer.has_own_kv), default=None
        )
        self._last = None if last is None else own[last]
        """The last layer here that stores K and V or states. Later layers compute only the wanted
        rows. None: no layer here stores any.
        """
        before, behind = (own, ()) if last is None else (own[:last], own[last + 1 :])
        self._before_last, self._behind_last = runs_of(before), runs_of(behind)

    @property
    def waits_for_layers(self) -> bool:
        """Whether each layer reads one layer of the pool, that of its number, so that a step may
        begin before the later ones are there (`Step.late`).
        """
        has_all = self._stage is None and self.peers is None
        return has_all and all(layer.mixer.has_own_kv for layer in self.layers)

    def with_layers(self, layers: Sequence[StackLayer]) -> Stack:
        multiplier = 1.0 if self._multiplier is None else float(self._multiplier)
        return Stack(
            self.embed_tokens,
            layers,
            self.norm,
            multiplier,
            self.peers,
            positions=self._positions,
            axes=self._axes,
            num_taps=self._num_taps,
            stage=self._stage,
        )

    def __call__(self, step: Step, pool: torch.Tensor, taps: Taps | None = None) -> torch.Tensor:
        """Runs a step: [L, hidden], the normalised hidden states of `step.logits_rows`."""
        (hidden, step), rows, peers = self._enter(step, taps), step.logits_rows, self.peers
        step = self._divided(step, pool)
        if self._stage is not None and not self._stage.is_last:
            self._leave(self._stage, run_all(self._whole, hidden, step, pool, taps, peers), taps)
            return hidden.new_zeros((rows.shape[0], hidden.shape[1]))
        if added := self._added(step):
            hidden = run_all(self._tapped, hidden, step, pool, taps, peers, added)
            return self._end(hidden if step.wants_all else hidden.index_select(0, rows))
        if step.wants_all:
            return self._end(run_all(self._whole, hidden, step, pool, taps, peers))
        # A row of a tree cannot become a request, since it does not see all rows before it, nor can
        # one that sees later rows.
        last = self._last
        takes_all = 2 * rows.shape[0] > hidden.shape[0] or step.has_trees or step.sees_behind
        takes_all |= step.routes is not None  # Rows have experts in the last layers too.
        if last is None or takes_all:
            hidden = run_all(self._whole, hidden, step, pool, taps, peers)
            return self._end(hidden.index_select(0, rows))
        # The last layer writes K and V of all rows, but computes only the wanted ones.
        stream = Stream(run_all(self._before_last, hidden, step, pool, taps, peers), taps, peers)
        stream.enter(last.number)
        if step.late is not None:
            step.late.wait(last.number)
        query = last.mixer.write(last.begin(stream), step, pool)
        if step.gather is not None:
            step.gather(last.mixer, step, pool)
        if rows.shape[0] == 0:
            return hidden.new_empty((0, self.embed_tokens.shape[1]))
        query, stream = query.of_rows(rows), stream.of_rows(rows)
        wanted = self._divided(step.one_row_requests(), pool)
        last.finish(stream, query, wanted, pool)
        if not self._behind_last:
            return self._end(stream.settle())
        hidden = stream.settle().contiguous()
        return self._end(run_all(self._behind_last, hidden, wanted, pool, None, peers))

    def of_all_rows(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """Runs a step: [T, hidden], the normalised hidden states of all rows. Of several stages
        only the last one has them.
        """
        assert self._stage is None or self._stage.is_last
        hidden, step = self._enter(self._divided(step, pool))
        added = self._added(step)
        runs = self._tapped if added else self._whole
        return self._end(run_all(runs, hidden, step, pool, None, self.peers, added))

    def turned(self, step: Step) -> Step:
        """A step whose rotations by several axes are computed, if it has some."""
        if step.axes is None or step.turns is not None:
            return step
        assert self._axes is not None, "only models with axes get steps with them"
        numbers = torch.arange(len(step.axes), device=step.axes.device)
        return replace(step, turns=self._axes.of(step.axes), turned_by=numbers)

    def _divided(self, step: Step, pool: torch.Tensor) -> Step:
        """The step with this rank's share of the pages, if ranks divide them."""
        pages = None if self.peers is None else self.peers.pages
        if pages is None:
            return step
        (group,) = step.groups
        return replace(step, groups=(divided(group, pages, pool.shape[-2]),))

    def _added(self, step: Step) -> Sequence[Inserted]:
        if step.inserted is None or not self._num_taps:
            return ()
        rows, embeddings, _ = step.inserted
        _, *parts = embeddings.chunk(1 + self._num_taps, dim=1)
        return [Inserted(rows, part) for part in parts]

    def _end(self, stream: torch.Tensor) -> torch.Tensor:
        return self.norm(stream if self._copies is None else self._copies.merged(stream))

    def _enter(self, step: Step, taps: Taps | None = None) -> tuple[torch.Tensor, Step]:
        """The stream as it enters this process's layers; `taps` gets those of earlier stages."""
        stage = self._stage
        if stage is None or stage.is_first:
            return self._embed(step)
        assert stage.neighbours is not None
        rows, width = step.token_ids.shape[0], self.embed_tokens.shape[1]
        tapped = [] if taps is None else taps.before(stage.layers.start)
        shape = (1 + len(tapped)) * rows, width
        received = stage.neighbours.receive(shape, self.embed_tokens.dtype)
        hidden, *states = torch.split(received, rows)
        for place, state in zip(tapped, states, strict=True):
            place.copy_(state)
        return hidden, self.turned(step)

    def _leave(self, stage: Stage, hidden: torch.Tensor, taps: Taps | None) -> None:
        """Sends the next stage the stream, then the states that `taps` has so far."""
        assert stage.neighbours is not None
        tapped = [] if taps is None else taps.before(stage.layers.stop)
        stage.neighbours.send(torch.cat([hidden, *tapped]) if tapped else hidden)

    def _embed(self, step: Step) -> tuple[torch.Tensor, Step]:
        hidden = self.embed_tokens.index_select(0, step.token_ids)
        if step.lora is not None:
            adapt_embeddings(hidden, step.token_ids, step.lora)
        hidden = hidden if self._multiplier is None else hidden.mul_(self._multiplier)
        if step.inserted is not None:
            rows, embeddings, is_text = step.inserted
            embeddings = embeddings[:, : hidden.shape[1]]
            if is_text is not None:
                embeddings = torch.where(is_text, hidden, embeddings)
            hidden.index_copy_(0, rows, embeddings)
        if self._positions is not None:
            hidden = hidden.add_(self._positions.index_select(0, step.positions))
        if self._per_layer is not None:
            step = replace(step, per_layer=self._per_layer(step.token_ids, hidden))
        if self._copies is not None:
            hidden = self._copies.spread(hidden)
        return hidden, self.turned(step)
