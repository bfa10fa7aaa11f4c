"""Routing and experts as single operations, on a CPU."""

from __future__ import annotations

import torch
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora.spec import ExpertAddition, LoraAddition, LoraSegments, LoraWeights
from weft.kernels.ops.moe.spec import SOFTMAX, ExpertWeights, RouterForm, Routing


def route_reference(
    logits: torch.Tensor, top_k: int, *, renormalise: bool, form: RouterForm = SOFTMAX
) -> Routing:
    if form.jitter is not None:
        return _mixed_route(logits, top_k, form.jitter)
    scores = logits.sigmoid() if form.is_sigmoid else torch.softmax(logits, dim=-1)
    choice = scores if form.correction is None else scores + form.correction
    if form.groups > 1:
        grouped = choice.view(len(choice), form.groups, -1)
        of_groups = grouped.topk(form.summed, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool)
        kept.scatter_(-1, of_groups.topk(form.kept_groups, dim=-1).indices, value=True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(top_k, dim=-1).indices.sort(dim=-1).values
    shares = scores.gather(-1, ids)
    if renormalise:
        shares = shares / shares.sum(dim=-1, keepdim=True).clamp(min=form.least_sum)
    if form.scale != 1.0:
        shares = shares * form.scale
    if form.factors is not None:
        shares = shares * form.factors[ids]
    return Routing(ids.to(torch.int32), shares.to(torch.float32))


def placed(ids: torch.Tensor, placement: torch.Tensor | None) -> torch.Tensor:
    """The places of experts, [T, k] int32 of the first T rows of a step, on this rank."""
    if placement is None:
        return ids
    if placement.dim() == 1:
        return placement[ids]
    cycle = torch.arange(ids.shape[0], device=ids.device).remainder_(placement.shape[0])
    return placement[cycle.unsqueeze(1), ids]


def _mixed_route(logits: torch.Tensor, top_k: int, jitter: float) -> Routing:
    left, chosen, shares = logits, list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(top_k):
        largest, best = left.max(dim=-1, keepdim=True)
        sizes = torch.maximum(logits.abs(), largest)
        near = left.masked_fill((largest - logits) / sizes > 2.0 * jitter, float("-inf"))
        shares.append(near.softmax(dim=-1).gather(-1, best))
        chosen.append(best)
        left = left.scatter(-1, best, float("-inf"))
    ids, order = torch.cat(chosen, dim=-1).sort(dim=-1)
    return Routing(ids.to(torch.int32), torch.cat(shares, dim=-1).gather(-1, order))


def moe_reference(
    x: torch.Tensor,
    routing: Routing,
    w: ExpertWeights,
    residual: torch.Tensor | None = None,
    lora: ExpertAddition | None = None,
) -> torch.Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in sorted(set(routing.ids.flatten().tolist())):
        if w.placement is not None and expert == w.num_experts:
            continue  # An expert of another rank.
        rows, places = torch.where(routing.ids == expert)
        to_w13, to_w2 = _of_expert(lora, rows, expert, w.num_places)
        inner = gate_up_silu(x.index_select(0, rows), w.w13[expert], to_w13)
        product = linear(inner, w.w2[expert], out_dtype=torch.float32, lora=to_w2)
        total.index_add_(0, rows, product * routing.weights[rows, places, None])
    if residual is not None:
        total += residual
    return total.to(x.dtype)


def _of_expert(
    lora: ExpertAddition | None, rows: torch.Tensor, expert: int, num_places: int
) -> tuple[LoraAddition | None, LoraAddition | None]:
    if lora is None:
        return None, None
    slots = lora.token_slots.index_select(0, rows)
    slots = torch.where(slots == 0, 0, slots * num_places + expert)
    segments = LoraSegments.of(sort_tokens(slots.numpy()))

    def of(parts: tuple[LoraWeights, ...]) -> LoraAddition | None:
        return LoraAddition(parts, lora.layer, segments) if parts else None

    return of(lora.w13), of(lora.w2)
