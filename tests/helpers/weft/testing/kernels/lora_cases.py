"""Random adapters in a pool whose free rows and unused entries are poison."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora import triton_shrink as lora_shrink
from weft.kernels.ops.lora.layout import ROW_RANK
from weft.kernels.ops.lora.spec import LoraAddition, LoraSegments, LoraWeights
from weft.kernels.shared.dependent_launch import LaunchOptions

POISON_ROW = np.iinfo(np.int32).min // 2


class LoraRows(NamedTuple):
    """The A and B of one projection as rows of the pool."""

    a: torch.Tensor
    """[ceil(r / ROW_RANK), ROW_RANK, in_features]."""
    b: torch.Tensor
    """[ceil(r / ROW_RANK), ROW_RANK, out_features]."""


def rank_rows(a: torch.Tensor, b: torch.Tensor) -> LoraRows:
    """Cuts A [r, in_features] and B [out_features, r] into rows, the last filled up with zeros."""
    missing = -a.shape[0] % ROW_RANK

    def cut(values: torch.Tensor) -> torch.Tensor:
        filled = torch.nn.functional.pad(values, (0, 0, 0, missing))
        return filled.reshape(-1, ROW_RANK, values.shape[1])

    return LoraRows(cut(a), cut(b.t()))


def poison_new_memory(patch: pytest.MonkeyPatch) -> None:
    """Makes scratch memory of a GPU's kernels of adapters and experts contain NaN, or an invalid
    number.
    """
    # Here: the modules need Triton.
    from weft.kernels.ops.lora import triton_parts as lora_parts
    from weft.kernels.ops.lora import triton_rows as lora_rows
    from weft.kernels.ops.lora import triton_shrink as lora_shrink
    from weft.kernels.ops.lora import triton_tiles as lora_tiles
    from weft.kernels.ops.moe import gpu as moe
    from weft.kernels.ops.moe import triton_combine as moe_combine
    from weft.kernels.ops.moe import triton_direct as moe_direct
    from weft.kernels.ops.moe import triton_lora as moe_lora
    from weft.kernels.ops.moe import triton_lora_pairs as moe_lora_pairs

    experts = (moe, moe_combine, moe_direct, moe_lora, moe_lora_pairs)
    for module in (lora_parts, lora_rows, lora_shrink, lora_tiles, *experts):
        patch.setattr(module, "torch", _PoisonedTorch())


class _PoisonedTorch:
    """`torch` with poison in new memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, **options: Any) -> torch.Tensor:
        """See `torch.empty`."""
        out = torch.empty(*size, **options)
        return out.fill_(float("nan") if out.is_floating_point() else POISON_ROW)


@dataclass(frozen=True, slots=True)
class LoraCase:
    """Adapters for one kind of projection, as the pool holds them and plain."""

    weights: LoraWeights
    plain: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
    """By layer (for experts: expert) and slot: A [r, in] and B [out, r]."""

    def add(self, out: torch.Tensor, x: torch.Tensor, slots: list[int], layer: int) -> torch.Tensor:
        """Token by token in the dtype of `x`: what `add_lora` makes of `out`."""
        out, begin = out.clone(), self.weights.column
        for token, slot in enumerate(slots):
            if (layer, slot) in self.plain:
                a, b = (t.to(x.dtype) for t in self.plain[layer, slot])
                columns = out[token, begin : begin + b.shape[0]]
                columns += (x[token] @ a.T) @ b.T
        return out

    def packed(self) -> LoraCase:
        """The case for the native CPU operations."""
        return LoraCase(self.weights.pack(), self.plain)

    def to(self, device: str) -> LoraCase:
        """Copies the case to a device."""
        w = self.weights
        moved = replace(
            w,
            a=w.a.to(device),
            b=w.b.to(device),
            table=w.table.to(device),
            counts=w.counts.to(device),
            b_table=None if w.b_table is None else w.b_table.to(device),
        )
        return LoraCase(
            moved, {at: (a.to(device), b.to(device)) for at, (a, b) in self.plain.items()}
        )


def add_by(
    module: ModuleType,
    out: torch.Tensor,
    x: torch.Tensor,
    addition: LoraAddition,
    options: LaunchOptions,
) -> None:
    """`weft.kernels.ops.lora.add_lora` by the kernels of `triton_rows` or `triton_tiles`, or
    of a changed copy of one of them.
    """
    if hasattr(module, "shrink_rows"):
        slots = module.of_tokens(addition.segments.token_slots)
        where = addition.parts, addition.layer
        ranks = module.shrink_rows(x, *where, slots, options)
        module.expand_rows(out, ranks, *where, slots, options)
    else:
        ranks = lora_shrink.shrink_tiles(x, addition, options)
        module.expand_tiles(out, ranks, addition, options)


def make_lora(
    in_features: int,
    out_features: int,
    ranks: list[int],
    dtype: torch.dtype,
    *,
    column: int = 0,
    layers: int = 1,
    in_order: bool = False,
) -> LoraCase:
    """Creates one adapter per slot; rank 0 leaves the projection unchanged. The ranks rotate by
    layer. `in_order`: rows follow each other, as in a pool that is not full.
    """
    by_layer = [ranks[:1] + _turned(ranks[1:], layer) for layer in range(layers)]
    counts = torch.tensor([[-(-rank // 8) for rank in ranks] for ranks in by_layer])
    used, max_rows = int(counts.sum()), int(counts.max())
    num_rows = used + 3
    a = torch.full((num_rows, 8, in_features), float("nan"), dtype=dtype)
    b = torch.full((num_rows, 8, out_features), float("nan"), dtype=dtype)
    table = torch.full((layers, len(ranks), max(max_rows, 1)), POISON_ROW, dtype=torch.int32)
    free = random.sample(range(num_rows), num_rows)
    if in_order:
        free.sort(reverse=True)
    plain = {}
    for layer, of_slots in enumerate(by_layer):
        for slot, rank in enumerate(of_slots):
            if rank == 0:
                continue
            pair = (
                (torch.randn(rank, in_features) / in_features**0.5).to(dtype),
                (torch.randn(out_features, rank) / rank**0.5).to(dtype),
            )
            plain[layer, slot] = pair
            rows = rank_rows(*pair)
            places = [free.pop() for _ in rows.a]
            a[places], b[places] = rows
            table[layer, slot, : len(places)] = torch.tensor(places, dtype=torch.int32)
    weights = LoraWeights(a, b, table, counts.to(torch.int32), column)
    return LoraCase(weights, plain)


Shared = Literal["a", "b"] | None
"""Which of A and B all experts of an adapter share."""


def make_expert_lora(
    in_features: int,
    out_features: int,
    ranks: list[int],
    experts: int,
    dtype: torch.dtype,
    *,
    shared: Shared = None,
    column: int = 0,
) -> LoraCase:
    """Creates one adapter per slot, of one layer; `plain` is by expert and slot."""
    counts = torch.zeros(1, len(ranks) * experts, dtype=torch.int32)
    max_rows = max(-(-rank // 8) for rank in ranks)
    a_rows, b_rows = _Rows(), _Rows()
    plain = {}
    for slot, rank in enumerate(ranks):
        if rank == 0:
            continue
        draws = [
            (
                (torch.randn(rank, in_features) / in_features**0.5).to(dtype),
                (torch.randn(out_features, rank) / rank**0.5).to(dtype),
            )
            for _ in range(experts)
        ]
        first = rank_rows(*draws[0])
        for expert, pair in enumerate(draws):
            a = draws[0][0] if shared == "a" else pair[0]
            b = draws[0][1] if shared == "b" else pair[1]
            plain[expert, slot] = (a, b)
            at, rows = slot * experts + expert, rank_rows(a, b)
            counts[0, at] = len(rows.a)
            a_rows.put(
                at, first.a if shared == "a" else rows.a, is_new=shared != "a" or expert == 0
            )
            b_rows.put(
                at, first.b if shared == "b" else rows.b, is_new=shared != "b" or expert == 0
            )
    size = (len(ranks) * experts, max_rows)
    (a, a_table), (b, b_table) = a_rows.pool(*size), b_rows.pool(*size)
    flags = (shared == "a", shared == "b")
    return LoraCase(LoraWeights(a, b, a_table, counts, column, b_table, *flags), plain)


class _Rows:
    """Rows of A or of B, and who uses which."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._places: dict[int, list[int]] = {}
        self._last: list[int] = []

    def put(self, at: int, rows: torch.Tensor, *, is_new: bool) -> None:
        if is_new:
            self._last = list(range(len(self._rows), len(self._rows) + len(rows)))
            self._rows += list(rows)
        self._places[at] = self._last

    def pool(self, slots: int, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows in random order with poison between, and the table."""
        count = len(self._rows) + 2
        at = torch.randperm(count)[: len(self._rows)]
        rows = torch.full((count, *self._rows[0].shape), float("nan"), dtype=self._rows[0].dtype)
        rows[at] = torch.stack(self._rows)
        table = torch.full((1, slots, max_rows), POISON_ROW, dtype=torch.int32)
        for slot, places in self._places.items():
            table[0, slot, : len(places)] = at[places].int()
        return rows, table


def _turned(ranks: list[int], by: int) -> list[int]:
    by %= max(len(ranks), 1)
    return ranks[by:] + ranks[:by]


def draw_slots(count: int, num_slots: int) -> list[int]:
    """Slots of tokens, some of them in runs."""
    slots: list[int] = []
    while len(slots) < count:
        slots += [random.randrange(num_slots)] * random.choice((1, 1, 2, 7))
    return slots[:count]


def segments_of(slots: list[int], num_segments: int | None = None) -> LoraSegments:
    """The segments, on the CPU."""
    return LoraSegments.of(sort_tokens(np.array(slots, np.int32), num_segments))
