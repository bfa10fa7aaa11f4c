"""A model's parameters by their Hugging Face names, in the form with which layers compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Protocol

import torch
from weft.engine.model.stage import WHOLE, ModelShare
from weft.engine.model.weights.computed_format import ComputedFormat, dtype_name
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice
from weft.engine.model.weights.refill import Constant, Parameters
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.kernels.ops.linear.pack import packing_copies, weight_rows
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.moe.spec import ExpertWeights
from weft.kernels.shared.memory import WeightArena


class Scheme(Protocol):
    """Reads a checkpoint's format of product weights and converts them for layers."""

    def linear(self, spec: LinearSpec, weights: Weights) -> LinearWeight:
        """Reads, fuses and packs this rank's shard of a product, whose parameters lie below
        `weights`.
        """

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        """Reads, fuses and packs the experts' products, one expert after another."""

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        """Packs an LM head, [vocab, hidden] of the model's dtype, which is called `lm_head` below
        `weights` or is the embedding.
        """

    def fingerprint(self, dtype: torch.dtype, device: torch.device) -> bytes:
        """Canonical bytes that describe how numbers are converted from the files for layers of
        `dtype` on a device, a part of the model's digest. Empty if products keep the files' numbers
        in the model's dtype.
        """


class _Scratch:
    """Host memory that is used again for each read."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` numbers of any value. They overwrite those that were taken before."""
        size = count * dtype.itemsize
        if size > self._memory.numel():
            self._memory = torch.empty(
                0, dtype=torch.uint8
            )  # Frees the old memory before the new exists.
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype)


class Weights:
    """The parameters below one prefix of the names, such as `model.layers.3.mlp.`."""

    def __init__(
        self,
        reader: CheckpointReader,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
        *,
        share: ModelShare = WHOLE,
        arena: WeightArena | None = None,
        computed: ComputedFormat | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        """All parameters of a checkpoint.

        Args:
            share: What this process has of them.
            arena: Memory for packed weights; None: a new arena.
            computed: Counts the number formats of packed products; None: a new count.
            parameters: Records what is read; None: a new record.
        """
        self.dtype = dtype
        self.device = device
        self.shard = share.shard
        self.expert_shard, self.spare_experts = share.expert_shard, share.spare_experts
        self.peers = share.peers
        """Ranks that have all other shares; None: there are none."""
        self.stage = share.stage
        """The layers of this process; None: it has all of them."""
        self.exchange = share.exchange
        """Computes experts together with other processes; None: `peers` add up what theirs make."""
        self.arena = arena or WeightArena()
        """Memory for packed weights, one arena for the whole model."""
        self.reader = reader
        """Reads parameters by their full names."""
        self._computed = computed or ComputedFormat()
        self._parameters = parameters or Parameters()
        self._scheme = scheme
        self._prefix = ""
        self._scratch = _Scratch()

    @property
    def dtype_name(self) -> str:
        """Name of `dtype`, such as bfloat16."""
        return dtype_name(self.dtype)

    @property
    def has_own_formats(self) -> bool:
        """Whether each module of the checkpoint may be in a number format of its own."""
        return not getattr(self._scheme, "is_made_at_load", True)

    @property
    def constant(self) -> Constant:
        """Makes a tensor that the configuration alone decides, once for all updates."""
        return self._parameters.constant

    def at(self, name: str | int) -> Weights:
        """The parameters of the submodule `name`."""
        below = copy(self)
        below._prefix = f"{self._prefix}{name}."
        return below

    def over(self, reader: CheckpointReader) -> Weights:
        """The same parameters, read through another reader."""
        other = copy(self)
        other.reader = reader
        return other

    def of_layer(self, index: int) -> Weights:
        """These parameters, which are one layer's. If the layer is in another stage, they are on
        the meta device: names and shapes are checked, and nothing is read.
        """
        return self if self.stage is None or index in self.stage.layers else self._elsewhere()

    def of_embedding(self, *, is_head: bool) -> Weights:
        """As `of_layer`, for the embedding of tokens, which may be the LM head's matrix too."""
        stage = self.stage
        is_read_last = is_head or (stage is not None and stage.has_head)
        is_here = stage is None or stage.is_first or (is_read_last and stage.is_last)
        return self if is_here else self._elsewhere()

    def of_head(self) -> Weights:
        """As `of_layer`, for the LM head and the other weights that only the last stage has."""
        return self if self.stage is None or self.stage.is_last else self._elsewhere()

    def _elsewhere(self) -> Weights:
        other = copy(self)
        other.device, other.arena = torch.device("meta"), WeightArena()
        other._computed, other._parameters = ComputedFormat(), Parameters()
        return other

    def full_name(self, name: str) -> str:
        """The checkpoint's name of a parameter that is called `name` below this prefix."""
        return self._prefix + name

    def has(self, name: str) -> bool:
        return self.reader.has(self._prefix + name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """None: no parameter has this name, or the reader accepts any shape."""
        return self.reader.shape_of(self._prefix + name)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Dtype in the file; None: no parameter has this name, or its format is no dtype."""
        return self.reader.dtype_of(self._prefix + name)

    def linear(self, spec: LinearSpec) -> LinearWeight:
        packed = self._parameters.keep(self._scheme.linear(spec, self))
        if not spec.is_gate:
            self._computed.add_linear(packed)
        return packed

    def experts(self, spec: ExpertSpec) -> ExpertWeights:
        if self.expert_shard.size > 1:
            spec = spec.placed(self.expert_shard, self.spare_experts)
            self.skip_experts(spec)
        packed = self._parameters.keep(self._scheme.experts(spec, self))
        self._computed.add_experts(packed)
        return packed

    def placement(self, spec: ExpertSpec) -> torch.Tensor | None:
        """`ExpertWeights.placement` on the model's device; None: this rank has all experts."""
        found = spec.placement()
        return None if found is None else found.to(self.device)

    def skip_experts(self, spec: ExpertSpec) -> None:
        """Marks the experts of other ranks as not read here, in checkpoints where each expert is a
        separate module.
        """
        for number in set(range(spec.num_experts)) - set(spec.numbers):
            for module in (*spec.gate_up.modules, *spec.down.modules):
                self.reader.skip(f"{self._prefix}{number}.{module}.")

    def matrix(self, spec: LinearSpec) -> torch.Tensor:
        """The shard of a product's weight as one matrix of the model's dtype, [rows, columns]."""
        loose = copy(self)
        loose.arena = WeightArena(0)
        packed = self._scheme.linear(spec, loose)
        return weight_rows(packed, torch.arange(packed.out_features, device=self.device))

    def norm(self, name: str, size: int) -> torch.Tensor:
        """The weight, [size], of the norm `name`."""
        return self.read([TensorSlice(f"{name}.weight", (size,))])

    def vocabulary(self, name: str, rows: int, width: int, num_zeros: int = 0) -> torch.Tensor:
        """The matrix of an embedding or LM head, [rows + num_zeros, width], whole on every rank.
        The zeros come last.
        """
        return self.read([TensorSlice(f"{name}.weight", (rows, width))], num_zeros)

    def packed(self, matrix: torch.Tensor) -> LinearWeight:
        """An LM head of a matrix, [vocab, hidden], which may also be the embedding's."""
        return self._parameters.keep(self._scheme.head(matrix, self))

    def table(self, name: str, count: int) -> torch.Tensor:
        """Whole numbers: [count] int64 on the host. True counts as 1."""
        out = torch.zeros(count, dtype=torch.int64)
        self._read(TensorSlice(name, (count,)), out)
        return self._parameters.keep(out)

    def read(
        self,
        parts: Sequence[TensorSlice],
        num_zeros: int = 0,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Parts of tensors, stacked along their first axis: [rows of all parts + num_zeros, ...] on
        the model's device. Each is copied into its place.

        Args:
            parts: Parts by names below the prefix; their shapes differ at most in the first axis.
            num_zeros: Rows of zeros after them.
            dtype: Dtype of the result; None: the model's.
        """
        rows = sum(part.size[0] for part in parts) + num_zeros
        size = (rows, *parts[0].size[1:])
        out = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        self._read_all(parts, out)
        return self._parameters.keep(out)

    def joined(self, parts: Sequence[TensorSlice], axis: int) -> torch.Tensor:
        """As `read`, but the parts lie along another axis, in which alone they may differ."""
        found = [torch.empty(part.size, dtype=self.dtype, device=self.device) for part in parts]
        for part, out in zip(parts, found, strict=True):
            self._read(part, out)
        return self._parameters.keep(found[0] if len(found) == 1 else torch.cat(found, dim=axis))

    def read_to_pack(self, parts: Sequence[TensorSlice]) -> torch.Tensor:
        """Reads parts that are only packed, as `read` does. Where packing copies, the result is
        valid until the next call: writing memory that the system has just given out takes longer
        than packing.
        """
        if not packing_copies(self.dtype, self.device):
            return self.read(parts)
        size = (sum(part.size[0] for part in parts), *parts[0].size[1:])
        out = self._scratch.take(math.prod(size), self.dtype).view(size)
        self._read_all(parts, out)
        return out

    def tensor(self, part: TensorSlice, dtype: torch.dtype) -> torch.Tensor:
        """A part of one tensor, which may be a single number."""
        out = torch.empty(part.size, dtype=dtype, device=self.device)
        self._read(part, out)
        return self._parameters.keep(out)

    def stacked(
        self, numbers: Sequence[int], products: Sequence[Sequence[TensorSlice]]
    ) -> list[torch.Tensor]:
        """For each product the same parts of all submodules with these numbers: [numbers, rows of
        its parts, columns] on the model's device. They are read submodule after submodule, and are
        no parameters yet.
        """
        made, places = list[torch.Tensor](), list[Iterator[torch.Tensor]]()
        for parts in products:
            sizes = [part.size for part in parts]
            size = (len(numbers), sum(one[0] for one in sizes), *sizes[0][1:])
            made.append(torch.empty(size, dtype=self.dtype, device=self.device))
            counts = [math.prod(one) for one in sizes] * len(numbers)
            places.append(iter(torch.split(made[-1].view(-1), counts)))
        wanted, outs = list[TensorSlice](), list[torch.Tensor]()
        for number in numbers:
            prefix = f"{self._prefix}{number}."
            for parts, own in zip(products, places, strict=True):
                wanted += [TensorSlice(prefix + one.name, one.shape, one.slices) for one in parts]
                outs += islice(own, len(parts))
        self.reader.read_each(wanted, outs)
        return made

    def _read_all(self, parts: Sequence[TensorSlice], out: torch.Tensor) -> None:
        row = 0
        for part in parts:
            self._read(part, out[row : row + part.size[0]])
            row += part.size[0]
        out[row:].zero_()

    def _read(self, part: TensorSlice, out: torch.Tensor) -> None:
        self.reader.read_into(part._replace(name=self._prefix + part.name), out)
