"""The input of one forward pass: a ragged batch of new tokens over cached pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from weft.engine.base.layer_waits import LayerWaits
from weft.engine.model.state_step import StateStep
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.kernels.ops.lora.spec import Group, LoraAddition, LoraStep
from weft.kernels.ops.routes import RouteRecord


class Inserted(NamedTuple):
    """Rows of a step whose embeddings are not those of their tokens."""

    rows: torch.Tensor
    """[M] int64: numbers of the rows."""
    embeddings: torch.Tensor
    """[M, row_width], as an encoder of media made them: embeddings, and additions to the stream
    after each of the first layers.
    """
    is_text: torch.Tensor | None = None
    """[M, 1]: rows that have the embeddings of their tokens after all, and additions of 0, as in a
    captured step; None: no row has.
    """


class AlignedRows(NamedTuple):
    """Rows of a request whose attention to the clip of its prompt is wanted."""

    request: int
    """Number of the request in the step."""
    rows: torch.Tensor
    """[A] int64: numbers of the rows."""
    num_frames: int
    """The clip's frames that count."""
    weights: list[torch.Tensor]
    """[heads, A, num_frames] float32 of each layer that has such heads, which the model adds."""


class RouteMemory(NamedTuple):
    """Where the experts of all rows are recorded."""

    routes: torch.Tensor
    """As `RouteRecord.routes`."""
    layers: Mapping[int, int]
    """Index in `routes` of each layer with experts, by the layer's number."""


class ChosenMemory(NamedTuple):
    """Where each step writes the experts of its rows, to be counted."""

    chosen: torch.Tensor
    """[layers with experts, most rows, k] int32."""
    layers: Mapping[int, int]
    """Index in `chosen` of each layer with experts, by the layer's number."""


class Gather(Protocol):
    """Where ranks divide a step's rows."""

    def __call__(self, mixer: Any, step: Step, pool: torch.Tensor) -> None:
        """Makes what `mixer` has written for this rank's rows known to all ranks, and waits for
        that of theirs.
        """
        ...

    def meet(self) -> None:
        """Waits for all ranks."""
        ...


@dataclass(slots=True, kw_only=True)
class Step:
    """A step's requests, each with `q_len >= 1` new tokens on top of its cached pages.

    T = new tokens of all requests, R = requests, L = rows whose logits are wanted. All tensors are
    on the model's device.
    """

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64: absolute positions; in a tree a row's position follows from its depth."""
    groups: tuple[AttentionMetadata, ...]
    """Where K and V lie, by page group. A layer names the group whose pages it uses."""
    logits_rows: torch.Tensor
    """[L] int64: rows whose logits are wanted; empty if nothing is sampled."""
    wants_all: bool = False
    """Whether `logits_rows` are all rows, in their order."""
    lora: LoraStep | None = None
    """None: no token uses an adapter."""
    token_types: torch.Tensor | None = None
    """[T] int64: 0 in the first of a pair of texts, 1 in the second; None: there are no pairs."""
    bounds: Bounds | None = None
    """Where requests begin, for models whose tokens also attend to later ones; else None."""
    slots: torch.Tensor | None = None
    """[R] int64: each request's slot; for padding the one after the last. None: no model needs
    it.
    """
    states: StateStep | None = None
    """Blocks and rings of the step's requests; None: the model has no recurrent layers."""
    per_layer: torch.Tensor | None = None
    """[T, layers, P]: additions of each layer by token (`PerLayerEmbedding`), which the stack
    computes; None: the model has none.
    """

    late: LayerWaits | None = None
    """Waits for layers of the pool that are still being loaded; None: the pool has all."""
    inserted: Inserted | None = None
    """Rows that come from media; None: all are of tokens."""
    aligned: Sequence[AlignedRows] = ()
    """Requests whose tokens are aligned to the clip of their prompt."""
    turned_by: torch.Tensor | None = None
    """[T] int64: each row's row in the tables of rotations, or in `turns`; None: `positions`."""
    axes: torch.Tensor | None = None
    """[T, 3] int64: positions along time, rows and columns, of which the stack makes `turns`; None:
    all axes have the same.
    """
    turns: torch.Tensor | None = None
    """[rows, D] float32: rotations of this step in place of the layers' tables, or None."""

    routes: RouteMemory | None = None
    """Where the experts of all rows are recorded; None: they are not."""

    def record_of(self, layer: int) -> RouteRecord | None:
        """Where a layer's routes go; None: they are not recorded."""
        if self.routes is None or (index := self.routes.layers.get(layer)) is None:
            return None
        return RouteRecord(self.routes.routes, self.groups[0].places, index)

    chosen: ChosenMemory | None = None
    """Where the experts of all rows are written; None: nobody counts them."""

    def chosen_of(self, layer: int) -> torch.Tensor | None:
        """[most rows, k] int32: where a layer's experts are written; None: nowhere."""
        if self.chosen is None or (index := self.chosen.layers.get(layer)) is None:
            return None
        return self.chosen.chosen[index]

    gather: Gather | None = None
    """Called between a layer's `write` and its `attend`; None: this process has all rows."""

    def added(self, group: Group, layer: int) -> LoraAddition | None:
        """The step's addition to a product of a layer (LoRA), or None."""
        return None if self.lora is None else self.lora.of(group, layer)

    def without_additions(self) -> Step:
        return replace(self, lora=None)

    @property
    def turn_rows(self) -> torch.Tensor:
        """[T] int64: the row of each row's rotation in a table of rotations."""
        return self.positions if self.turned_by is None else self.turned_by

    @property
    def has_trees(self) -> bool:
        """Whether rows form trees (`AttentionMetadata.ancestors`)."""
        return self.groups[0].ancestors is not None

    @property
    def sees_behind(self) -> bool:
        """Whether rows attend to later ones (`AttentionMetadata.key_ends`)."""
        return self.groups[0].key_ends is not None

    def one_row_requests(self) -> Step:
        """The rows of `logits_rows` alone, each as a separate request with one new token. A row
        attends to the positions up to its own, so its results do not change.
        """
        rows = self.logits_rows
        num_rows = rows.shape[0]
        cu_q_lens = self.groups[0].cu_q_lens
        requests = torch.searchsorted(cu_q_lens, rows.to(torch.int32), right=True) - 1
        positions = self.positions.index_select(0, rows)
        token_ids = self.token_ids.index_select(0, rows)
        one_each = torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device)
        kv_lens = (positions + 1).to(torch.int32)
        groups = tuple(
            AttentionMetadata(
                page_table=group.page_table.index_select(0, requests),
                places=group.places.index_select(0, rows),
                cu_q_lens=one_each,
                kv_lens=kv_lens,
                max_q_len=1,
                max_kv_len=group.max_kv_len,
                pool=group.pool,
            )
            for group in self.groups
        )
        return Step(
            token_ids=token_ids,
            positions=positions,
            groups=groups,
            logits_rows=torch.arange(num_rows, device=rows.device),
            lora=None if self.lora is None else self.lora.select(rows),
            slots=None if self.slots is None else self.slots.index_select(0, requests),
            per_layer=None if self.per_layer is None else self.per_layer.index_select(0, rows),
            turned_by=None if self.turned_by is None else self.turned_by.index_select(0, rows),
            turns=self.turns,
            chosen=self.chosen,
        )
