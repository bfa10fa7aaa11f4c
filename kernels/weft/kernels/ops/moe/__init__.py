"""Mixture of experts: a router picks a few MLPs for each row, and their results are weighed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.lora.checks import check_parts
from weft.kernels.ops.lora.spec import ExpertAddition
from weft.kernels.ops.moe.cpu import native_moe
from weft.kernels.ops.moe.reference import moe_reference, placed, route_reference
from weft.kernels.ops.moe.spec import SOFTMAX, ExpertParts, ExpertWeights, RouterForm, Routing
from weft.kernels.ops.routes import RouteRecord, record_routes
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.moe import gpu as _gpu
else:
    _gpu = deferred(__name__, "weft.kernels.ops.moe.gpu")


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    placement: torch.Tensor | None = None,
    record: RouteRecord | None = None,
    chosen: torch.Tensor | None = None,
) -> Routing:
    """Scores all experts and keeps the `top_k` best of each row.

    Args:
        logits: [T, E] float32.
        top_k: 1 to the number of experts in the groups that a row may choose from.
        renormalise: Whether shares add up to 1, apart from the form's scale.
        placement: As `ExpertWeights.placement`.
        record: Where the experts, by their numbers among all ranks, are written too.
        chosen: [at least T, top_k] int32: its first T rows get these numbers; or None.
    """
    if logits.is_cuda:
        outputs = placement, record, chosen
        return Routing(*_gpu.recorded_route(logits, top_k, renormalise, form, *outputs))
    ids, shares = route_reference(logits, top_k, renormalise=renormalise, form=form)
    if record is not None:
        record_routes(record, ids)
    if chosen is not None:
        chosen[: len(ids)] = ids
    return Routing(placed(ids, placement), shares)


def by_pair(x: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Routing]:
    """Multiplies rows x, [T, H], by their experts' shares, for shares that scale the input. Returns
    a row for each pair, [T * k, H], dtype of `x`, and the routing of these rows, one expert each
    with share 1.
    """
    ids, shares = routing
    scaled = (x.unsqueeze(1) * shares.to(x.dtype).unsqueeze(2)).flatten(0, 1)
    return scaled, Routing(ids.reshape(-1, 1).contiguous(), torch.ones_like(shares).view(-1, 1))


def moe(
    x: torch.Tensor,
    routing: Routing,
    w: ExpertWeights,
    residual: torch.Tensor | None = None,
    lora: ExpertAddition | None = None,
) -> torch.Tensor:
    """residual + sum over a row's experts of share * down(gated(gate(x), up(x))).

    No row is dropped, however many choose the same expert. Experts are summed in ascending order. A
    row's result does not depend on the other rows on a CPU, and on a GPU with
    `ExpertWeights.is_fixed`.

    Args:
        x: [T, H], contiguous, dtype of the weights; T may be 0.
        residual: [T, H], contiguous, dtype of `x`, or None; not changed.

    Returns:
        [T, H], dtype of `x`; rounded to the dtype between the two products, summed in float32.

    Raises:
        IndexError: An expert or a row of an adapter does not exist.
    """
    _check(x, routing, w, residual)
    if lora is not None:
        _check_lora(x, w, lora)
    if x.shape[0] == 0:
        return x.clone()
    if w.stacked is not None:
        ids, shares = routing
        more = ExpertParts(w.gating, w.biases, w.placement)
        return _gpu.moe(x, ids, shares, *w.stacked, residual, lora, more, is_fixed=w.is_fixed)
    if w.native is not None:
        return native_moe(x, routing, w, w.native, residual, lora)
    return moe_reference(x, routing, w, residual, lora)


def _check_lora(x: torch.Tensor, w: ExpertWeights, lora: ExpertAddition) -> None:
    rows = x.shape[0]
    slots = lora.token_slots
    if slots.shape != (rows,) or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ValueError(f"LoRA slots {tuple(slots.shape)} {slots.dtype} of {rows} rows")
    for parts, columns, width in (
        (lora.w13, 2 * w.inner_size, w.hidden_size),
        (lora.w2, w.hidden_size, w.inner_size),
    ):
        check_parts(parts, lora.layer, (rows, columns), (rows, width), w.dtype)


def _check(
    x: torch.Tensor, routing: Routing, w: ExpertWeights, residual: torch.Tensor | None
) -> None:
    if x.dim() != 2 or x.shape[1] != w.hidden_size or x.dtype != w.dtype or not x.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} contiguous={x.is_contiguous()} does not fit experts of "
            f"{w.hidden_size} {w.dtype} columns"
        )
    ids, weights = routing
    if ids.shape != weights.shape or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(f"routing {tuple(ids.shape)}, {tuple(weights.shape)} of {len(x)} rows")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"routing is {ids.dtype}, {weights.dtype}, not int32, float32")
    if not (ids.is_contiguous() and weights.is_contiguous()):
        raise ValueError("routing must be contiguous")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not fit x")
