"""What adapters are to a step: their parameters, and which token uses which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from weft.kernels.ops.lora.layout import ROW_RANK, pack_b, packed_sizes, unpack_b

if TYPE_CHECKING:
    from weft.kernels.ops.replaced.spec import ReplacedMatrices

NO_SLOT = 0
"""The slot of tokens without an adapter."""

EMPTY_SLOT = int(np.iinfo(np.int32).max)
"""The slot of segments without tokens; it is larger than every real slot."""

Int32Array = npt.NDArray[np.int32]

Group = (
    Literal["qkv", "o", "gate_up", "down", "router", "embed", "lm_head"]
    | Literal["state_in", "state_z", "state_gates", "state_out"]
)
"""Projections that are computed as one product. `embed` and `lm_head` have one layer, number 0."""


class HostSegments(NamedTuple):
    token_slots: Int32Array
    order: Int32Array
    ordered: Int32Array
    starts: Int32Array
    slots: Int32Array


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """The adapter of each token of a step, T tokens in S segments; on the model's device."""

    token_slots: torch.Tensor
    """[T] int32: adapter slot of each token."""
    order: torch.Tensor
    """[T] int32: the tokens sorted by slot; tokens of one slot keep their order."""
    ordered: torch.Tensor
    """[T] int32: `token_slots` in that order."""
    starts: torch.Tensor
    """[S + 1] int32: where each segment begins in `order`."""
    slots: torch.Tensor
    """[S] int32, ascending: each segment's slot; EMPTY_SLOT for segments without tokens."""

    def __post_init__(self) -> None:
        tensors = (self.token_slots, self.order, self.ordered, self.starts, self.slots)
        tokens, order, ordered, starts, slots = (t.numel() for t in tensors)
        if (order, ordered, starts) != (tokens, tokens, slots + 1) or any(
            t.dtype != torch.int32 or t.dim() != 1 or not t.is_contiguous() for t in tensors
        ):
            raise ValueError(
                f"LoRA segments {[(tuple(t.shape), t.dtype) for t in tensors]} are not [T], [T], "
                "[T], [S + 1] and [S] int32, contiguous"
            )

    @classmethod
    def of(cls, host: HostSegments) -> LoraSegments:
        """Makes CPU tensors that share the arrays' memory."""
        return cls(*(torch.from_numpy(array) for array in host))

    def select(self, rows: torch.Tensor) -> LoraSegments:
        """The segments of some of the tokens, in their order; it does not wait for the device.

        Args:
            rows: [L] int64: tokens of this step.
        """
        token_slots = self.token_slots.index_select(0, rows)
        ordered, order = torch.sort(token_slots, stable=True)
        starts = self.starts.new_full((self.slots.shape[0] + 1,), rows.shape[0])
        starts[:-1] = torch.searchsorted(ordered, self.slots, out_int32=True)
        return LoraSegments(token_slots, order.to(torch.int32), ordered, starts, self.slots)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The parameters of all loaded adapters for one kind of projection ("q", "gate", ...).

    The tensors are never replaced. Loading an adapter writes its rows first, then table and counts.
    """

    a: torch.Tensor
    """[num_rows, ROW_RANK, in_features], contiguous, dtype of the model."""
    b: torch.Tensor
    """[num_rows, ROW_RANK, out_features], contiguous, dtype of the model: B transposed, times its
    scaling. For native operations these rows are packed (`pack_b`).
    """
    table: torch.Tensor
    """[layers, num_slots, max_rows] int32: rows of the slot's adapter in each layer. Entries from
    the count on are undefined. For experts, a slot here is slot * num_places + place
    (`ExpertWeights.num_places`).
    """
    counts: torch.Tensor
    """[layers, num_slots] int32: number of rows. If it is 0, as for slot 0, the adapter does not
    change the projection.
    """
    column: int = 0
    """First column of the projection's results in the fused product: k follows q's columns, v
    follows k's, and up follows gate's.
    """
    b_table: torch.Tensor | None = None
    """Like `table`, for rows of `b`. Experts may share one of the two matrices, so their rows of
    `a` and `b` differ. None: `table` holds for both.
    """
    is_a_shared: bool = False
    """Whether all experts of an adapter have the same rows of `a`."""
    is_b_shared: bool = False
    """Whether all experts of an adapter have the same rows of `b`."""
    packed_width: int | None = None
    """out_features of a packed `b`; None: it is not packed."""
    layers: frozenset[int] | None = None
    """Layers whose product has these sizes; None: all that have the product."""

    def __post_init__(self) -> None:
        (rows, rank, _), (b_rows, *b_sizes) = self.a.shape, self.b.shape
        layers, slots, _ = self.table.shape
        have_one_table = self.b_table is None
        if (
            rank != ROW_RANK
            or b_sizes != self._sizes_of_b
            or self.b.dtype != self.a.dtype
            or (have_one_table and b_rows != rows)
        ):
            raise ValueError(
                f"LoRA rows {tuple(self.a.shape)} {self.a.dtype} and {tuple(self.b.shape)} "
                f"{self.b.dtype} do not fit: both are [rows, {ROW_RANK}, features] of one dtype, "
                f"or B is packed (width: {self.packed_width})"
            )
        dtypes = {self.table.dtype, self.counts.dtype, self.rows_of_b.dtype}
        fits = self.counts.shape == (layers, slots) and self.rows_of_b.shape == self.table.shape
        if not fits or dtypes != {torch.int32}:
            raise ValueError(
                f"a LoRA table {tuple(self.table.shape)} and counts {tuple(self.counts.shape)}, "
                f"{dtypes}, are not [layers, slots, rows] and [layers, slots] int32"
            )
        tensors = (self.a, self.b, self.table, self.counts, self.rows_of_b)
        if not all(t.is_contiguous() for t in tensors):
            raise ValueError("LoRA rows, table and counts must be contiguous")

    @property
    def rows_of_b(self) -> torch.Tensor:
        return self.table if self.b_table is None else self.b_table

    @property
    def in_features(self) -> int:
        return self.a.shape[2]

    @property
    def out_features(self) -> int:
        return self.b.shape[2] if self.packed_width is None else self.packed_width

    @property
    def _sizes_of_b(self) -> list[int]:
        if self.packed_width is None:
            return [ROW_RANK, self.b.shape[2]]
        return list(packed_sizes(self.packed_width))

    def plain_b(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, ROW_RANK, out_features]: the rows of B with numbers `rows`, [n] int64, unpacked."""
        b = self.b.index_select(0, rows)
        return b if self.packed_width is None else unpack_b(b, self.packed_width)

    def pack(self) -> LoraWeights:
        """The same parameters with a packed copy of `b`; it must not be packed yet."""
        return replace(self, b=pack_b(self.b), packed_width=self.out_features)

    @property
    def max_rank(self) -> int:
        """The largest rank that a slot has room for."""
        return self.table.shape[2] * ROW_RANK


@dataclass(frozen=True, slots=True)
class LoraAddition:
    """The additions of a step's adapters to one product of one layer."""

    parts: tuple[LoraWeights, ...]
    """All projections in the product; no two cover the same columns."""
    layer: int
    segments: LoraSegments
    are_given: bool = False
    """Whether the segments were on the device before the step's first kernel was launched."""

    def before(self, column: int) -> LoraAddition | None:
        """The addition to the columns before `column`, at which a projection begins; None: nothing
        is added there.
        """
        parts = tuple(part for part in self.parts if part.column < column)
        return replace(self, parts=parts) if parts else None

    def select(self, rows: torch.Tensor) -> LoraAddition:
        """The addition to the tokens `rows`, [L] int64, in their order."""
        return replace(self, segments=self.segments.select(rows), are_given=False)


@dataclass(frozen=True, slots=True)
class ExpertAddition:
    """The additions of a step's adapters to the experts of one layer."""

    w13: tuple[LoraWeights, ...]
    """Gate and up, before the activation; their slots are slot * num_places + place."""
    w2: tuple[LoraWeights, ...]
    """Down, before the sum over experts."""
    layer: int
    token_slots: torch.Tensor
    """[T] int32: adapter slot of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraStep:
    """The adapters of one step: what they are, and which token uses which.

    A group without parts is one that no loaded adapter changes.
    """

    segments: LoraSegments
    qkv: tuple[LoraWeights, ...] = ()
    o: tuple[LoraWeights, ...] = ()
    gate_up: tuple[LoraWeights, ...] = ()
    down: tuple[LoraWeights, ...] = ()
    state_in: tuple[LoraWeights, ...] = ()
    """Parameters of the projection of the states' inputs, or of all inputs, in recurrent layers."""
    state_z: tuple[LoraWeights, ...] = ()
    """Parameters of the gate on the states' results, where it is a projection of its own."""
    state_gates: tuple[LoraWeights, ...] = ()
    """Parameters of the projections to the states' decays and betas."""
    state_out: tuple[LoraWeights, ...] = ()
    """Parameters of the projection of the states' results back to the stream."""
    router: tuple[LoraWeights, ...] = ()
    w13: tuple[LoraWeights, ...] = ()
    """Parameters of the experts' gate and up; their slots are slot * num_places + place."""
    w2: tuple[LoraWeights, ...] = ()
    embed: tuple[LoraWeights, ...] = ()
    """Parameters of the embedding, at most one; its input is the vocabulary."""
    lm_head: tuple[LoraWeights, ...] = ()
    embeddings: ReplacedMatrices | None = None
    """Embeddings of adapters that replace the model's; None: adapters may not bring any."""
    heads: ReplacedMatrices | None = None
    """LM heads of adapters that replace the model's; None: adapters may not bring any."""
    vocabulary_ends: torch.Tensor | None = None
    """[num_slots] int32: the first token id that the slot's adapter lacks; None: all adapters have
    the model's vocabulary.
    """
    are_given: bool = False
    """Whether the segments were complete on the device before the step's first kernel was launched.
    Kernels may then read them before the preceding kernels are complete.
    """

    def of(self, group: Group, layer: int) -> LoraAddition | None:
        """The addition to a group's product in a layer; None: nothing is added."""
        parts: tuple[LoraWeights, ...] = getattr(self, group)
        if any(part.layers is not None for part in parts):
            parts = tuple(part for part in parts if part.layers is None or layer in part.layers)
        return LoraAddition(parts, layer, self.segments, self.are_given) if parts else None

    def of_experts(self, layer: int) -> ExpertAddition | None:
        """The addition to a layer's experts; None: nothing is added."""
        if not (self.w13 or self.w2):
            return None
        return ExpertAddition(self.w13, self.w2, layer, self.segments.token_slots)

    def select(self, rows: torch.Tensor) -> LoraStep:
        """The adapters of the tokens `rows`, [L] int64, in their order."""
        return replace(self, segments=self.segments.select(rows), are_given=False)


def experts_addition(lora: LoraStep | None, layer: int) -> ExpertAddition | None:
    """What a step's adapters add to a layer's experts; None: nothing."""
    return None if lora is None else lora.of_experts(layer)


def addition_to(lora: LoraStep | None, group: Group, layer: int) -> LoraAddition | None:
    """What a step's adapters add to a group's product in a layer; None: nothing."""
    return None if lora is None else lora.of(group, layer)
