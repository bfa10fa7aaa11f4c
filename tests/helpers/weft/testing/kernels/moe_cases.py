"""Random mixtures of experts and what they compute exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.lora.spec import ExpertAddition, LoraWeights
from weft.kernels.ops.moe.reference import route_reference
from weft.kernels.ops.moe.spec import ExpertWeights, Routing, SparseMlpWeight
from weft.kernels.ops.stream.additions import Combine, GatedSum, Normed, SharedCombine
from weft.kernels.shared.formats.packed_groups import PackedExperts, pack_groups
from weft.kernels.shared.formats.quantised import Fp8Experts
from weft.testing.kernels.fp8_cases import draw_matrix
from weft.testing.kernels.group_cases import draw_groups
from weft.testing.kernels.lora_cases import LoraCase, Shared, draw_slots, make_expert_lora


@dataclass(frozen=True)
class Adapters:
    """The additions of adapters to the experts."""

    slots: list[int]
    """Adapter slot of each row."""
    w13: tuple[LoraCase, ...]
    w2: tuple[LoraCase, ...]

    def packed(self) -> Adapters:
        """The adapters for the native CPU operations."""
        w13, w2 = (tuple(case.packed() for case in cases) for cases in (self.w13, self.w2))
        return Adapters(self.slots, w13, w2)

    def addition(self, device: str = "cpu") -> ExpertAddition:
        """The additions in the operation's form."""
        return ExpertAddition(
            tuple(case.to(device).weights for case in self.w13),
            tuple(case.to(device).weights for case in self.w2),
            0,
            torch.tensor(self.slots, dtype=torch.int32, device=device),
        )


def make_adapters(
    case: MoECase, is_shared: bool, ranks: Sequence[int] = (0, 8, 3, 0, 20)
) -> Adapters:
    """Creates adapters of gate, up and down, with separate experts, or sharing A of gate and up and
    B of down.
    """
    experts, (hidden, inner), dtype = len(case.w2), case.w2.shape[1:], case.x.dtype

    def make(k: int, n: int, shared: Shared, column: int = 0) -> LoraCase:
        one = shared if is_shared else None
        return make_expert_lora(k, n, list(ranks), experts, dtype, shared=one, column=column)

    return Adapters(
        draw_slots(len(case.x), len(ranks)),
        (make(hidden, inner, "a"), make(hidden, inner, "a", inner)),
        (make(inner, hidden, "b"),),
    )


def share_of_adapters(whole: ExpertAddition, own: torch.Tensor, experts: int) -> ExpertAddition:
    """The additions to some experts, with a place for all others."""

    def of(table: torch.Tensor) -> torch.Tensor:
        by_expert = table.unflatten(1, (-1, experts))
        return torch.cat([by_expert[:, :, own], by_expert[:, :, :1] * 0], 2).flatten(1, 2)

    def part_of(part: LoraWeights) -> LoraWeights:
        b_table = None if part.b_table is None else of(part.b_table)
        return replace(part, table=of(part.table), counts=of(part.counts), b_table=b_table)

    w13, w2 = (tuple(map(part_of, parts)) for parts in (whole.w13, whole.w2))
    return replace(whole, w13=w13, w2=w2)


@dataclass(frozen=True)
class MoECase:
    """One mixture of experts and its input."""

    x: torch.Tensor
    residual: torch.Tensor
    routing: Routing
    w13: torch.Tensor
    """[E, 2 * I, H]."""
    w2: torch.Tensor
    """[E, H, I]."""

    def experts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The experts in the form for `pack_experts`."""
        return list(zip(self.w13, self.w2, strict=True))

    def compute(self, dtype: torch.dtype, adapters: Adapters | None = None) -> torch.Tensor:
        """Row by row and expert by expert in `dtype`."""
        out = self.residual.to(dtype, copy=True)
        x, w13, w2 = (t.to(dtype) for t in (self.x, self.w13, self.w2))
        for row, (ids, shares) in enumerate(zip(*self.routing, strict=True)):
            for expert, share in zip(ids.tolist(), shares.to(dtype), strict=True):
                both = w13[expert] @ x[row]
                if adapters is not None:
                    slot = adapters.slots[row]
                    for case in adapters.w13:
                        both = case.add(both[None], x[row : row + 1], [slot], expert)[0]
                gate, up = both.chunk(2)
                inner = F.silu(gate) * up
                product = w2[expert] @ inner
                if adapters is not None:
                    for case in adapters.w2:
                        product = case.add(product[None], inner[None], [slot], expert)[0]
                out[row] += share * product
        return out


def moe_case(
    rows: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    *,
    is_crowded: bool = False,
) -> MoECase:
    """Rows that choose experts at random, or all the same ones."""
    crowd = random.sample(range(experts), top_k)
    chosen = [crowd if is_crowded else random.sample(range(experts), top_k) for _ in range(rows)]
    ids = torch.tensor([sorted(row) for row in chosen], dtype=torch.int32).reshape(rows, top_k)
    return MoECase(
        torch.randn(rows, hidden).to(dtype),
        torch.randn(rows, hidden).to(dtype),
        Routing(ids, torch.rand(rows, top_k) + 0.05),
        (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype),
    )


def shared_case(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[SharedCombine, Callable[[torch.dtype, torch.Tensor], torch.Tensor]]:
    """A mixture with a shared expert that a gate multiplies, as models on a GPU have it, and what
    it adds to rows, row by row.

    Args:
        sizes: As of `moe_case`.
        dtype: Of weights and rows.
        device: Where they lie.
    """
    _, hidden, inner, experts, top_k = sizes
    routed = moe_case(*sizes, dtype)
    shapes = (experts, hidden), (2 * inner, hidden), (hidden, inner), (1, hidden)
    weights = [(torch.randn(n, k) / k**0.5).to(dtype) for n, k in shapes]
    x, w13, w2, *here = (each.to(device) for each in (routed.x, routed.w13, routed.w2, *weights))
    router, gate_up, down, gate = (
        LinearWeight(*each.shape, dtype, each is here[1], PlainForm(each), None) for each in here
    )
    packed = ExpertWeights(hidden, inner, dtype, (), (), (w13, w2), None)
    combine = Combine(Normed(x), SparseMlpWeight(router, packed, top_k, True), None, 0)
    case = replace(
        routed, routing=route_reference(combine.router_logits().cpu(), top_k, renormalise=True)
    )

    def compute(kind: torch.dtype, residual: torch.Tensor) -> torch.Tensor:
        x, up, down, gate = (each.to(kind) for each in (routed.x, *weights[1:]))
        first, second = (x @ up.T).chunk(2, dim=1)
        added = (F.silu(first) * second) @ down.T * (x @ gate.T).sigmoid()
        return replace(case, residual=residual.cpu()).compute(kind) + added

    shared = GatedSum(Normed(x), gate_up, down, None, None)
    return SharedCombine(shared, gate, combine), compute


def experts_of(name: str, count: int, rows: int, columns: int) -> tuple[Any, torch.Tensor]:
    """Matrices of experts in a format, and in float32: "fp8" in blocks of 16 rows, "fp8 wide" of
    128, or "mxfp4".
    """
    if name in ("fp8", "fp8 wide"):
        block_rows = 16 if name == "fp8" else 128
        blocks = [draw_matrix(rows, columns, block_rows) for _ in range(count)]
        stacked = Fp8Experts.empty(count, blocks[0])
        for index, matrix in enumerate(blocks):
            stacked.put(index, matrix)
        return stacked, torch.stack([matrix.dequantised(torch.float32) for matrix in blocks])
    groups = [draw_groups(rows, columns, 32, "e2m1") for _ in range(count)]
    packed = PackedExperts.empty(count, pack_groups(groups[0]))
    for index, one in enumerate(groups):
        packed = packed.put(index, pack_groups(one))
    return packed, torch.stack([one.dequantised(torch.float32) for one in groups])


def share_of(weight: Any, own: torch.Tensor) -> Any:
    """The matrices of some experts."""
    if isinstance(weight, torch.Tensor):
        return weight[own].contiguous()
    parts = {
        name: getattr(weight, name)[own].contiguous()
        for name in ("data", "scales", "offsets")
        if getattr(weight, name, None) is not None
    }
    return replace(weight, **parts)
