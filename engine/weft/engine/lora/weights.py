"""An adapter in host memory as the rows that it will take on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.errors import AdapterError
from weft.engine.lora.adapter import Adapter, ExpertLora, LoraPair, VocabularyChange
from weft.engine.lora.projections import B_SUFFIX, EMBED_TOKENS, LM_HEAD, Projection
from weft.kernels.lora import ROW_RANK

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Half:
    """All As of one kind of projection, or all Bs."""

    rows: torch.Tensor
    """[n, ROW_RANK, features]."""
    index: Int32Array
    """[layers, experts, max_rows]: which of them each layer and expert has, first its first ranks;
    beyond its count: 0."""

    @property
    def num_bytes(self) -> int:
        """Of the rows."""
        return self.rows.numel() * self.rows.element_size()


@dataclass(frozen=True, slots=True)
class KindRows:
    """One kind of projection. But for experts A and B have the same index."""

    a: Half
    b: Half
    counts: Int32Array
    """[layers, experts]."""


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Implements `weft.engine.lora.host_cache.Weights`."""

    digest: bytes
    rank: int
    kinds: Mapping[str, KindRows]
    """By `Projection.name`."""

    @property
    def num_bytes(self) -> int:
        """See `Weights.num_bytes`."""
        return sum(kind.a.num_bytes + kind.b.num_bytes for kind in self.kinds.values())

    @property
    def needs(self) -> dict[str, int]:
        """See `Weights.needs`."""
        needs = {}
        for name, kind in self.kinds.items():
            needs[name] = len(kind.a.rows)
            if kind.counts.shape[1] > 1:
                needs[name + B_SUFFIX] = len(kind.b.rows)
        return needs


IsBase = Callable[[str, torch.Tensor], bool]
"""Whether a weight equals the model's own embed_tokens or lm_head."""


def host_weights(
    adapter: Adapter,
    projections: Sequence[Projection],
    max_rank: int,
    is_base: IsBase,
    *,
    is_pinned: bool,
) -> HostWeights:
    """Cuts an adapter into rows.

    Args:
        adapter: In the model's dtype.
        projections: What it may change.
        max_rank: Of any adapter.
        is_base: Looks into the model; asked of weights that were saved beside LoRA.
        is_pinned: In page-locked memory, from which a GPU copies by itself.

    Raises:
        AdapterError: It changes something else, or in a way that is not served.
    """
    kinds: dict[str, KindRows] = {}
    wanted = {(key, False) for _, key in adapter.modules} | {(k, True) for _, k in adapter.experts}
    vocabulary = {EMBED_TOKENS: adapter.embed_tokens, LM_HEAD: adapter.lm_head}
    wanted |= {(name, False) for name, change in vocabulary.items() if change is not None}
    known = {(part.kind, part.is_expert) for part in projections}
    if wanted - known:
        names = [f"{kind} of experts" if is_expert else kind for kind, is_expert in wanted - known]
        raise AdapterError(
            f"it changes {', '.join(sorted(names))}, for which no memory is set aside here: "
            f"lora_projections names {', '.join(part.name for part in projections)}"
        )
    max_rows = -(-max_rank // ROW_RANK)
    for part in projections:
        changes = _changes(adapter, part, is_base)
        if not any(change is not None for change in changes):
            continue
        halves = (
            _half([c.a if c else None for c in changes], part.num_experts, max_rows),
            _half([c.b.mT if c else None for c in changes], part.num_experts, max_rows),
        )
        if is_pinned:
            a, b = (Half(half.rows.pin_memory(), half.index) for half in halves)
        else:
            a, b = halves
        ranks = np.array([change.rank if change else 0 for change in changes], np.int32)
        counts = np.repeat(-(-ranks // ROW_RANK)[:, None], part.num_experts, axis=1)
        kinds[part.name] = KindRows(a, b, counts.astype(np.int32))
    return HostWeights(adapter.digest, adapter.rank, kinds)


def _changes(adapter: Adapter, part: Projection, is_base: IsBase) -> list[ExpertLora | None]:
    """What each layer of a projection has, as of experts, of which there may be one."""
    if part.is_expert:
        return [adapter.experts.get((layer, part.kind)) for layer in range(part.num_layers)]
    if part.kind in (EMBED_TOKENS, LM_HEAD):
        change = adapter.embed_tokens if part.kind == EMBED_TOKENS else adapter.lm_head
        pairs = [None if change is None else _only_lora(part.kind, change, is_base)]
    else:
        pairs = [adapter.modules.get((layer, part.kind)) for layer in range(part.num_layers)]
    return [ExpertLora(pair.a[None], pair.b[None]) if pair else None for pair in pairs]


def _only_lora(name: str, change: VocabularyChange, is_base: IsBase) -> LoraPair:
    """PEFT saves the embedding beside its LoRA, unless it is told not to: that changes nothing."""
    saved = change.weight
    is_same = saved is None or (change.is_frozen and is_base(name, saved))
    if not is_same or change.rows is not None or change.lora is None:
        raise AdapterError(
            f"it has weights of its own in the place of {name} (modules_to_save, or tokens trained "
            "one by one), which is not served: only LoRA is, target it instead"
        )
    return change.lora


def _half(layers: Sequence[torch.Tensor | None], num_experts: int, max_rows: int) -> Half:
    """Rows of [experts or 1, rank, features] for each layer; one is for all experts."""
    index = np.zeros((len(layers), num_experts, max_rows), np.int32)
    rows: list[torch.Tensor] = []
    used = 0
    for layer, values in enumerate(layers):
        if values is None:
            continue
        given, rank, features = values.shape
        count = -(-rank // ROW_RANK)
        filled = torch.nn.functional.pad(values, (0, 0, 0, count * ROW_RANK - rank))
        rows.append(filled.reshape(given * count, ROW_RANK, features))
        numbers = used + np.arange(given * count).reshape(given, count)
        index[layer, :, :count] = numbers  # One for all is broadcast.
        used += given * count
    return Half(torch.cat(rows), index)
