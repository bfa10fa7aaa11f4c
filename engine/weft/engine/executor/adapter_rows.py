"""The device's memory for adapters: rows of rank 8 for each kind of projection, and the tables that
map slots to rows. All of it is allocated at start, before the KV pool is sized, and never moves,
since captured graphs read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.checkpoint.adapters.limits import LoraLimits
from weft.checkpoint.adapters.names import ROUTER, VOCABULARY
from weft.checkpoint.adapters.plan import DENSE, EXPERTS
from weft.checkpoint.adapters.projections import (
    B_SUFFIX,
    EMBED_TOKENS,
    LM_HEAD,
    WHOLE_SUFFIX,
    Projection,
)
from weft.checkpoint.adapters.rows import DevicePlace, Rows
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.vocabularies import num_tokens
from weft.contract.errors import AdapterError, ConfigError, ModelError
from weft.contract.give_way import give_way
from weft.engine.base.config import EngineConfig
from weft.engine.base.device_copies import copy_stream, on_stream
from weft.engine.executor.adapter_projections import adapted_projections
from weft.engine.model.adapters.adapter import Adapter, LoraPair
from weft.engine.model.adapters.formats import read_adapter
from weft.engine.model.adapters.weights import HostWeights, LoraMatrix, WholeMatrix, host_weights
from weft.engine.model.loader import LoadedModel
from weft.engine.model.model_reader import open_checkpoint
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.layout import ROW_RANK, packed_sizes
from weft.kernels.ops.lora.spec import LoraSegments, LoraStep, LoraWeights
from weft.kernels.ops.replaced.spec import OWN, ReplacedMatrices
from weft.kernels.shared.memory import huge_zeros

logger = logging.getLogger(__name__)

DEFAULT_RANK = 16
"""Rank of the adapters that the default of `lora_memory_bytes` is sized for."""
DEFAULT_DRAFT_RANK = 32
"""Draft adapters of at least this rank have room; each changes a single layer."""


def plan_lora(
    config: EngineConfig, projections: Sequence[Projection], dtype: torch.dtype
) -> LoraLimits:
    """Divides the adapter memory among the kinds of projections, in the proportions that an adapter
    on all of them needs.

    Rows for the draft head are added on top, an equal part for each of `max_loras` adapters. So
    draft adapters never take room from adapters. Raises ConfigError if the memory holds less than
    one row of each kind.
    """
    shares: dict[str, tuple[int, int]] = {}
    drafts: dict[str, tuple[int, int]] = {}
    for part in projections:
        (drafts if part.is_draft else shares).update(part.rows(dtype.itemsize))
    unit = sum(count * size for count, size in shares.values())
    size = config.lora_memory_bytes
    if size is None:
        size = config.max_loras * (DEFAULT_RANK // ROW_RANK) * unit
    num_rows = {name: size * count // unit for name, (count, _) in shares.items()}
    if not all(num_rows.values()):
        raise ConfigError(
            f"lora_memory_bytes = {size:,} holds not one row of rank {ROW_RANK} of each of "
            f"{', '.join(num_rows)}; an adapter of rank {ROW_RANK} on all of them takes {unit:,} "
            "bytes",
            param="lora_memory_bytes",
        )
    rows_each = max(DEFAULT_DRAFT_RANK // ROW_RANK, size // unit // config.max_loras)
    rows_each = min(rows_each, -(-config.max_lora_rank // ROW_RANK))
    whole = {
        part.name + WHOLE_SUFFIX: part.in_features * part.out_features * dtype.itemsize
        for part in projections
        if part.kind in VOCABULARY and config.lora_whole_matrices
    }
    num_rows |= dict.fromkeys(drafts, config.max_loras * rows_each)
    num_rows |= dict.fromkeys(whole, config.lora_whole_matrices)
    row_bytes = {name: row_bytes for name, (_, row_bytes) in (shares | drafts).items()}
    return LoraLimits(
        max_loras=config.max_loras,
        memory_bytes=size,
        num_rows=num_rows,
        row_bytes=row_bytes | whole,
        host_bytes=config.lora_host_bytes,
    )


class DraftParts(Protocol):
    """The projections of the draft head that adapters may change."""

    projections: tuple[Projection, ...]
    """Projections of the head's only layer, number 0, grouped as in `LoraStep`."""

    def read(self, folder: Path, max_rank: int) -> Mapping[str, LoraPair]:
        """Reads an adapter's changes to the draft head, scaled, in float32, by `Projection.kind`.
        `folder` may be missing. Empty if the draft adapter cannot be used, which is logged.
        """
        ...


class RankMemory(Protocol):
    """Memory that each rank of an engine allocates and rank 0 writes."""

    rank: int
    size: int
    """Ranks that divide the layers. Where each has whole layers, it is 1."""

    def memory(self, num_bytes: int) -> Sequence[torch.Tensor]:
        """Makes zeros of [num_bytes] uint8 on each rank, all of which rank 0 can write. All ranks
        must call it together.
        """
        ...

    def publish(self) -> None:
        """Sends what rank 0 has written to ranks whose memory it does not map."""
        ...


class _Tables(NamedTuple):
    weights: dict[str, LoraWeights]
    """Weights by `Projection.name`."""
    replaced: dict[str, ReplacedMatrices]
    vocabulary_ends: torch.Tensor
    """[max_slots] int32: the first token id that each slot's adapter does not have."""


_NewZeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
_ALIGNMENT = 256
"""Each tensor in a rank's memory begins at a multiple of so many bytes."""


class _Sizes:
    num_bytes = 0

    def add(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype, device="meta")
        self.num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return tensor


class _RowComponents:
    def __init__(self, flat: torch.Tensor) -> None:
        self._left = flat

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(size).numel() * dtype.itemsize
        tensor = self._left[:num_bytes].view(dtype).view(size)
        self._left = self._left[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return tensor


class LoraPool:
    """Rows and tables of adapters, which the LoRA manager fills. `read` and `write` are called by
    one thread each. `write` touches only memory that no step uses. On a GPU it works on a separate
    stream, so neither it nor the steps wait for the other. Rank 0 writes the rows of all ranks.

    Args:
        projections: Projections that adapters may change, with the sizes that one rank has.
        drafts: The `projections` of the draft head; None: draft adapters are ignored.
        ranks: None: the model is not divided.

    Raises:
        ConfigError: There is not enough memory.
    """

    def __init__(
        self,
        limits: LoraLimits,
        projections: Sequence[Projection],
        model: ModelConfig,
        model_dir: Path,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        drafts: DraftParts | None = None,
        ranks: RankMemory | None = None,
    ) -> None:
        self.limits = limits
        self._projections = {part.name: part for part in projections}
        self._model = model
        self._model_dir = model_dir
        self._max_rank = max_rank
        self._dtype = dtype
        self._is_cuda = device.type == "cuda"
        self.max_slots = limits.max_loras + 1
        """Slots of the tables, slot 0 for no adapter included."""
        try:
            self._of_ranks = self._make(device, ranks)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"lora_memory_bytes: {limits.describe()}: they do not fit: {error}"
            ) from error
        own = self._of_ranks[0 if ranks is None else ranks.rank]
        self._weights, self._replaced, self._vocabulary_ends = own
        self._groups: dict[str, Any] = {}
        """Tuples of LoraWeights by field of `LoraStep`."""
        self._draft_groups: dict[str, Any] = {}
        """Tuples of LoraWeights of the draft head, by field of `LoraStep`."""
        for part in projections:
            groups = self._draft_groups if part.is_draft else self._groups
            groups[part.group] = (*groups.get(part.group, ()), self._weights[part.name])
        self._drafts = drafts
        self.has_drafts = np.zeros(self.max_slots, np.bool_)
        """[max_slots]: whether the adapter in each slot brings a draft adapter."""
        self._stream = copy_stream(device)
        self._ranks, self._num_shares = ranks, 1 if ranks is None else ranks.size

    def _make(self, device: torch.device, ranks: RankMemory | None) -> list[_Tables]:
        def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            is_large = not self._is_cuda and dtype == self._dtype
            make = huge_zeros if is_large else partial(torch.zeros, device=device)
            return make(size, dtype=dtype)

        if ranks is None:
            return [self._tables(zeros)]
        sizes = _Sizes()
        self._tables(sizes.add)
        return [self._tables(_RowComponents(flat).take) for flat in ranks.memory(sizes.num_bytes)]

    def _tables(self, zeros: _NewZeros) -> _Tables:
        parts = self._projections.values()
        weights = {part.name: self._new(part, zeros) for part in parts}
        replaced = {
            part.name: self._new_replaced(part, count, zeros)
            for part in parts
            if (count := self.limits.num_rows.get(part.name + WHOLE_SUFFIX))
        }
        ends = zeros((self.max_slots,), torch.int32).fill_(self._model.vocab_size)
        return _Tables(weights, replaced, ends)

    def _new(self, part: Projection, zeros: _NewZeros) -> LoraWeights:
        counts, own_b = self.limits.num_rows, part.name + B_SUFFIX
        max_rows = -(-self._max_rank // ROW_RANK)
        slots = (part.num_layers, self.max_slots * part.num_places)
        num_b = counts[own_b if part.is_expert else part.name]
        width = part.out_features
        sizes_of_b = (ROW_RANK, width) if self._is_cuda else packed_sizes(width)
        return LoraWeights(
            a=zeros((counts[part.name], ROW_RANK, part.in_features), self._dtype),
            b=zeros((num_b, *sizes_of_b), self._dtype),
            table=zeros((*slots, max_rows), torch.int32),
            counts=zeros(slots, torch.int32),
            column=part.column,
            b_table=zeros((*slots, max_rows), torch.int32) if part.is_expert else None,
            is_a_shared=part.is_a_shared,
            is_b_shared=part.is_b_shared,
            packed_width=None if self._is_cuda else width,
            layers=None if part.layers is None else frozenset(part.layers),
        )

    def _new_replaced(self, part: Projection, count: int, zeros: _NewZeros) -> ReplacedMatrices:
        places = zeros((self.max_slots,), torch.int32).fill_(OWN)
        if not self._is_cuda:
            return ReplacedMatrices(places, on_host=[None] * count)
        size = (count, self._model.num_embeddings, self._model.hidden_size)
        return ReplacedMatrices(places, zeros(size, self._dtype))

    @property
    def projections(self) -> list[str]:
        """Names of the projections that adapters may change, without the draft head's."""
        return [name for name, part in self._projections.items() if not part.is_draft]

    @property
    def changes_logits(self) -> bool:
        """Whether adapters may change the LM head."""
        return "lm_head" in self._groups

    def step(self, segments: LoraSegments) -> LoraStep:
        """The LoRA inputs of a step whose rows these segments sort by adapter."""
        return LoraStep(
            segments=segments,
            embeddings=self._replaced.get(EMBED_TOKENS),
            heads=self._replaced.get(LM_HEAD),
            vocabulary_ends=self._vocabulary_ends,
            **self._groups,
        )

    @property
    def takes_drafts(self) -> bool:
        return self._drafts is not None

    def draft_step(self, segments: LoraSegments) -> LoraStep:
        """The LoRA inputs of the draft head's only layer, number 0, for these segments."""
        return LoraStep(segments=segments, **self._draft_groups)

    def read(self, directory: str, *, is_lenient: bool) -> HostWeights:
        """Reads and checks an adapter. Raises AdapterError if the adapter cannot be used."""
        with torch.inference_mode():
            adapter = read_adapter(
                Path(directory),
                self._model,
                max_rank=self._max_rank,
                max_bytes=self.limits.host_bytes,
                dtype=self._dtype,
                parts=self._parts,
                is_lenient=is_lenient,
                num_tokens=partial(num_tokens, self._model_dir, self._model),
            )
            parts = tuple(self._projections.values())
            try:
                weights = self._cut(adapter, parts)
            except AdapterError as error:
                raise AdapterError(f"adapter {directory}: {error.message}") from error
            return self._with_drafts(weights, Path(directory) / DRAFT_FOLDER)

    def _cut(self, adapter: Adapter, parts: Sequence[Projection]) -> HostWeights:
        return host_weights(
            adapter,
            parts,
            self._max_rank,
            self._own_weight,
            vocab_size=self._model.vocab_size,
            for_gpu=self._is_cuda,
            takes_whole=bool(self._replaced),
            num_ranks=self._num_shares,
        )

    def _with_drafts(self, weights: HostWeights, folder: Path) -> HostWeights:
        if self._drafts is None:
            return weights
        parts = self._drafts.projections
        share = min(self.limits.num_rows[part.name] for part in parts) // self.limits.max_loras
        pairs = self._drafts.read(folder, min(self._max_rank, share * ROW_RANK))
        modules = {
            (0, kind): LoraPair(pair.a.to(self._dtype), pair.b.to(self._dtype))
            for kind, pair in pairs.items()
        }
        if not modules:
            return weights
        adapter = Adapter(digest=weights.digest, rank=0, modules=modules)
        drafts = self._cut(adapter, parts)
        if weights.num_bytes + drafts.num_bytes > self.limits.host_bytes:
            logger.warning(
                "drafts go without %s: %d bytes beside the adapter's %d are more than "
                "lora_host_bytes",
                *(folder, drafts.num_bytes, weights.num_bytes),
            )
            return weights
        return replace(weights, kinds={**weights.kinds, **drafts.kinds})

    def _own_weight(self, name: str) -> torch.Tensor | None:
        model = self._model
        size = (model.vocab_size, model.hidden_size, model.num_added_tokens)
        try:
            with open_checkpoint(self._model_dir) as base:
                weights = Weights(base, PlainScheme(), self._dtype, torch.device("cpu"))
                if name == EMBED_TOKENS or not weights.has(f"{name}.weight"):
                    return weights.at("model").vocabulary(EMBED_TOKENS, *size)
                return weights.vocabulary(name, *size)
        except ModelError:  # The model has no checkpoint, such as one of random weights.
            return None

    @property
    def _parts(self) -> set[str]:
        parts = {DENSE}
        for projection in self._projections.values():
            if projection.is_expert:
                parts.add(EXPERTS)
            elif projection.kind in (ROUTER, *VOCABULARY):
                parts.add(projection.kind)
        return parts

    def write(self, place: DevicePlace, weights: HostWeights) -> None:
        """Writes all rows of a place, which no step uses, and its table entries. Returns when the
        device has them.
        """
        with torch.inference_mode(), on_stream(self._stream):
            for rank, tables in enumerate(self._of_ranks):
                self._write(rank % self._num_shares, tables, place, weights)
        kinds = (self._projections[name] for name in weights.kinds)
        self.has_drafts[place.slot] = any(projection.is_draft for projection in kinds)
        if self._stream is not None:
            self._stream.synchronize()
        if self._ranks is not None:
            self._ranks.publish()

    def _write(self, rank: int, tables: _Tables, place: DevicePlace, weights: HostWeights) -> None:
        for name, target in tables.weights.items():
            count = self._projections[name].num_places
            slots = slice(place.slot * count, (place.slot + 1) * count)
            given = weights.kinds.get(name)
            if given is None:
                target.counts[:, slots].zero_()
                continue
            a, b = given.of_rank(rank)
            rows = place.rows[name]
            rows_of_b = place.rows.get(name + B_SUFFIX, rows)
            _write_half(target.a, target.table[:, slots], rows, a)
            _write_half(target.b, target.rows_of_b[:, slots], rows_of_b, b)
            target.counts[:, slots].copy_(torch.from_numpy(given.counts))
        for name, replaced in tables.replaced.items():
            _write_whole(replaced, place, weights.whole.get(name), name + WHOLE_SUFFIX)
        tables.vocabulary_ends[place.slot] = weights.vocab_end


def _write_half(target: torch.Tensor, table: torch.Tensor, rows: Rows, given: LoraMatrix) -> None:
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1  # Cuts the rows into runs of consecutive ones.
    for begin, end in pairwise([0, *cuts.tolist(), len(rows)]):
        give_way()
        first, count = int(rows[begin]), end - begin
        target[first : first + count].copy_(given.rows[begin:end], non_blocking=True)
    table.copy_(torch.from_numpy(rows[given.index]))


def _write_whole(
    replaced: ReplacedMatrices, place: DevicePlace, given: WholeMatrix | None, kind: str
) -> None:
    number = OWN
    if given is not None:
        (number,) = place.rows[kind].tolist()
        if isinstance(given, LinearWeight):
            replaced.on_host[number] = given
        else:
            assert replaced.on_device is not None, "of a GPU"
            replaced.on_device[number].copy_(given, non_blocking=True)
    replaced.places[place.slot] = number


def make_lora_pool(
    config: EngineConfig,
    loaded: LoadedModel,
    device: torch.device,
    drafts: DraftParts | None = None,
    ranks: RankMemory | None = None,
) -> LoraPool | None:
    """None if no adapters are served. Raises ConfigError if the memory does not fit, or the model
    cannot have adapters.
    """
    if not config.enable_lora:
        return None
    model = loaded.config
    dtype: torch.dtype = getattr(torch, loaded.dtype)
    projections = adapted_projections(config, model)
    projections += () if drafts is None else drafts.projections
    limits, rank = plan_lora(config, projections, dtype), config.max_lora_rank
    return LoraPool(
        limits, projections, model, config.model_dir, rank, dtype, device, drafts, ranks
    )
