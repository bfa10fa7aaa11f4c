"""Low-rank additions to linear layers (LoRA, Hu et al. 2021), many adapters in one batch.

An adapter is loaded as rows of ROW_RANK ranks each, so that adapters of different ranks share one
pool without padding to the largest rank (S-LoRA, Sheng et al. 2023, section 5). A step names the
adapter slot of each token. Its tokens are sorted by slot into segments, one for each adapter
(Punica, Chen et al. 2023, section 4).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from weft.kernels.ops.lora.spec import (
    B_COLUMNS,
    EMPTY_SLOT,
    NO_SLOT,
    ROW_RANK,
    Group,
    HostSegments,
    Int32Array,
    LoraSegments,
    NativeLora,
)
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.lora import gpu as _gpu
    from weft.kernels.ops.lora import triton_embedding as _triton_embedding
    from weft.kernels.ops.replaced import ReplacedMatrices
else:
    _gpu = deferred(__name__, "weft.kernels.ops.lora.gpu")
    _triton_embedding = deferred(__name__, "weft.kernels.ops.lora.triton_embedding")


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


def packed_sizes(width: int) -> tuple[int, int]:
    """[blocks, elements of a block] of a packed row of B with `width` columns."""
    return -(-width // B_COLUMNS), ROW_RANK * B_COLUMNS


def pack_b(rows: torch.Tensor) -> torch.Tensor:
    """Packs rows of B for native operations, which compute B_COLUMNS columns at a time.

    A block of B_COLUMNS columns is laid out as a panel of a weight (csrc/linear.h), in words of 32
    bits that hold a float or two bfloat16 of neighbouring ranks: first the first words of all
    columns, then all second words. The last block is filled up with zeros.

    Args:
        rows: [n, ROW_RANK, out_features], on the CPU.

    Returns:
        [n, blocks, ROW_RANK * B_COLUMNS].
    """
    count, _, width = rows.shape
    blocks, size = packed_sizes(width)
    packed = torch.zeros((count, blocks, size), dtype=rows.dtype)
    # Numpy, since torch would use the threads that steps run on.
    words, given = (t.view(_WORDS[rows.itemsize]).numpy() for t in (packed, rows))
    ranks = words.reshape(count, blocks, -1, B_COLUMNS, 4 // rows.itemsize)
    full = width // B_COLUMNS
    for rank in range(ROW_RANK):
        step, half = divmod(rank, 4 // rows.itemsize)
        to, some = ranks[:, :, step, :, half], given[:, rank]
        whole = some[:, : full * B_COLUMNS]
        to[:, :full] = whole.reshape(count, full, B_COLUMNS)
        if full < blocks:
            to[:, full, : width % B_COLUMNS] = some[:, full * B_COLUMNS :]
    return packed


def unpack_b(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Inverts `pack_b`; returns a new tensor, [n, ROW_RANK, width]."""
    count, blocks, _ = packed.shape
    per_word = 4 // packed.itemsize
    ranks = packed.view(count, blocks, -1, B_COLUMNS, per_word).permute(0, 2, 4, 1, 3)
    return ranks.reshape(count, ROW_RANK, blocks * B_COLUMNS)[:, :, :width].contiguous()


_WORDS = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by size in bytes, used instead of bfloat16, which numpy lacks."""


def sort_tokens(token_slots: Int32Array, num_segments: int | None = None) -> HostSegments:
    """Sorts a step's tokens by adapter.

    Example: slots [0, 1, 0, 2, 3, 0, 1, 3] have the order [0, 2, 5, 1, 6, 3, 4, 7] and the segments
    begin at [0, 3, 5, 6, 8].

    Args:
        token_slots: [T], each token's slot.
        num_segments: Segments of a padded step, of which unused ones are empty; None: one for each
            different slot.

    Raises:
        ValueError: There are more different slots than segments.
    """
    slots, counts = np.unique(token_slots, return_counts=True)
    size = len(slots) if num_segments is None else num_segments
    if len(slots) > size:
        raise ValueError(f"a step names {len(slots)} LoRA slots, there are {size} segments")
    starts = np.full(size + 1, len(token_slots), np.int32)
    starts[0] = 0
    starts[1 : len(slots) + 1] = np.cumsum(counts)
    padded = np.full(size, EMPTY_SLOT, np.int32)
    padded[: len(slots)] = slots
    order = np.argsort(token_slots, kind="stable").astype(np.int32)
    return HostSegments(token_slots, order, token_slots[order], starts, padded)


@dataclass(frozen=True, slots=True)
class LoraAddition:
    """The additions of a step's adapters to one product of one layer."""

    parts: tuple[LoraWeights, ...]
    """All projections in the product; no two cover the same columns."""
    layer: int
    segments: LoraSegments
    are_given: bool = False
    """As in `LoraStep`."""

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
    """As in `ExpertAddition`."""
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


def add_lora(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    """out[:, columns of each part] += (x @ A^T) @ B^T, with each token's own A and B, in place.

    It leaves the columns of a projection as they are for rows whose adapter does not change it,
    such as rows of slot 0.

    Args:
        out: [T, N], contiguous: the product without adapters.
        x: [T, K], contiguous, dtype of the parts.
    """
    check_addition(out.shape, x.shape, x.dtype, addition)
    if out.is_cuda:
        _gpu.add_lora(out, x, addition)
    else:
        add_lora_reference(out, x, addition)


def add_embedding_lora(out: torch.Tensor, token_ids: torch.Tensor, addition: LoraAddition) -> None:
    """out[t] += A[:, token_ids[t]]^T @ B^T, with each token's own A and B, in place.

    Args:
        out: [T, H], contiguous: the embeddings without adapters.
        token_ids: [T] int64.
        addition: One part, whose in_features is the vocabulary.
    """
    (part,) = addition.parts
    shape = (token_ids.shape[0], part.in_features)
    check_addition(out.shape, shape, out.dtype, addition)
    if out.is_cuda:
        _triton_embedding.add_embedding_lora(out, token_ids, addition)
        return
    for tokens, slot in segments_with_adapters(addition.segments):
        count = int(part.counts[addition.layer, slot])
        if count == 0:
            continue
        a_rows, b_rows = _rows_of(part, addition.layer, slot, count)
        given = part.a[a_rows[:, None], :, token_ids.index_select(0, tokens)[None, :]]
        shrunk = given.transpose(1, 2).flatten(0, 1).float()
        added = torch.zeros((tokens.shape[0], part.out_features))
        # Ranks are added one by one, since the order of sums in a product would depend on the
        # number of tokens.
        for ranks, b in zip(shrunk, part.plain_b(b_rows).flatten(0, 1), strict=True):
            added += ranks[:, None] * b.float()
        _add(out, tokens, part, added)


def add_lora_reference(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    """`add_lora` in eager torch, any device; sums in float32, rounds once."""
    for tokens, slot in segments_with_adapters(addition.segments):
        given = x.index_select(0, tokens).float()
        for part in addition.parts:
            count = int(part.counts[addition.layer, slot])
            if count:
                a_rows, b_rows = _rows_of(part, addition.layer, slot, count)
                shrunk = given @ part.a.index_select(0, a_rows).flatten(0, 1).float().t()
                b = part.plain_b(b_rows).flatten(0, 1).float()
                _add(out, tokens, part, shrunk @ b)


def segments_with_adapters(segments: LoraSegments) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields the tokens, [n] int64, and the slot of each segment that has an adapter and tokens."""
    starts = segments.starts.tolist()
    for index, slot in enumerate(segments.slots.tolist()):
        tokens = segments.order[starts[index] : starts[index + 1]].long()
        if tokens.shape[0] and slot != NO_SLOT:
            yield tokens, slot


def _rows_of(
    part: LoraWeights, layer: int, slot: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[count] int64 each: rows of A and of B."""
    a, b = (table[layer, slot, :count].long() for table in (part.table, part.rows_of_b))
    return a, b


def _add(out: torch.Tensor, tokens: torch.Tensor, part: LoraWeights, added: torch.Tensor) -> None:
    columns = out[:, part.column : part.column + part.out_features]
    columns[tokens] = (columns[tokens].float() + added).to(out.dtype)


def describe_lora(
    native: cpu.NativeCpu, groups: Sequence[tuple[LoraWeights, ...]], segments: LoraSegments
) -> NativeLora:
    """Checks what adapters add to the products of a step, and describes it to native operations.

    Raises:
        ValueError: The parts have different numbers of layers.
        IndexError: A segment or table has an index out of range.
    """
    tokens, num_segments = segments.token_slots.shape[0], segments.slots.shape[0]
    layers = {part.table.shape[0] for group in groups for part in group}
    if len(layers) > 1:
        raise ValueError(f"LoRA rows for different numbers of layers: {layers}")
    num_layers = max(layers, default=0)
    width = max(sum(part.max_rank for part in group) for group in groups)
    blocks = torch.empty(num_segments + 1, dtype=torch.int64)
    # AMX always reads the ranks of 16 tokens at a time.
    shrunk = torch.empty((tokens + 15) * width, dtype=torch.float32)
    described = cpu.LoraStruct(
        (cpu.LoraGroupStruct * 4)(*(describe_group(group) for group in groups)),
        segments.token_slots.data_ptr(),
        segments.order.data_ptr(),
        segments.starts.data_ptr(),
        segments.slots.data_ptr(),
        blocks.data_ptr(),
        shrunk.data_ptr(),
        *(tokens, num_segments, width),
    )
    address = ctypes.addressof(described)
    status = native.prepare_lora(address, 0, num_layers)
    if status:
        cpu.check_status(status, "describe_lora")
    return NativeLora(described, address, num_layers, (blocks, shrunk))


def describe_group(parts: tuple[LoraWeights, ...]) -> cpu.LoraGroupStruct:
    """Describes the parts of one product to native operations.

    Raises:
        ValueError: B is not packed.
    """
    described, offset = [], 0
    for part in parts:
        if part.packed_width is None:
            raise ValueError("LoRA rows of B are not packed for the native operations")
        described.append(
            cpu.LoraPartStruct(
                *(t.data_ptr() for t in (part.a, part.b, part.table, part.rows_of_b, part.counts)),
                part.a.shape[0],
                part.b.shape[0],
                *part.table.shape,
                part.in_features,
                part.out_features,
                part.column,
                offset,
            )
        )
        offset += part.max_rank
    return cpu.LoraGroupStruct((cpu.LoraPartStruct * 3)(*described), len(described))


def check_addition(
    out_shape: Sequence[int], x_shape: Sequence[int], dtype: torch.dtype, addition: LoraAddition
) -> None:
    """Raises ValueError unless an addition fits a product.

    Args:
        out_shape: [T, N] of the product.
        x_shape: [T, K] of its input.
    """
    rows, tokens = x_shape[0], addition.segments.token_slots.shape[0]
    if tokens != rows:
        raise ValueError(f"LoRA segments of {tokens} tokens, {rows} rows")
    check_parts(addition.parts, addition.layer, out_shape, x_shape, dtype)


def check_parts(
    parts: Sequence[LoraWeights],
    layer: int,
    out_shape: Sequence[int],
    x_shape: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Like `check_addition`, for some parts of an addition in a layer."""
    for part in parts:
        end = part.column + part.out_features
        if part.in_features != x_shape[1] or end > out_shape[1] or part.a.dtype != dtype:
            raise ValueError(
                f"LoRA rows of {part.in_features} to {part.out_features} {part.a.dtype} at column "
                f"{part.column} do not fit {tuple(x_shape)} to {tuple(out_shape)} {dtype}"
            )
        if not 0 <= layer < part.table.shape[0]:
            raise ValueError(f"layer {layer} of LoRA rows for {part.table.shape[0]}")
