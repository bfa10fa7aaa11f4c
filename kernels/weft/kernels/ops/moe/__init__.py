"""Mixture of experts: a router picks a few MLPs for each row, and their results are weighed."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch
from weft.kernels.ops.activation.spec import SILU, Gating
from weft.kernels.ops.linear import (
    gate_up_silu,
    gpu_form,
    linear,
    pack_gate_up,
    pack_linear,
    stays_fp8,
)
from weft.kernels.ops.linear.spec import LinearWeight, PackableMatrix
from weft.kernels.ops.lora import (
    ExpertAddition,
    LoraAddition,
    LoraWeights,
    check_parts,
    describe_group,
    sort_tokens,
)
from weft.kernels.ops.lora.spec import LoraSegments
from weft.kernels.ops.moe.spec import SOFTMAX, ExpertWeights, RouterForm, Routing, StackedWeight
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups
from weft.kernels.shared.formats.quantised import (
    Fp8Blocks,
    Fp8Channels,
    Fp8Experts,
)
from weft.kernels.shared.memory import WeightArena

if TYPE_CHECKING:
    from weft.kernels.ops.moe import gpu as _gpu
    from weft.kernels.ops.moe import triton_parts as _triton_parts
    from weft.kernels.ops.moe import triton_route as _triton_route
else:
    _gpu = deferred(__name__, "weft.kernels.ops.moe.gpu")
    _triton_parts = deferred(__name__, "weft.kernels.ops.moe.triton_parts")
    _triton_route = deferred(__name__, "weft.kernels.ops.moe.triton_route")

logger = logging.getLogger(__name__)


def pack_experts(
    experts: Iterable[tuple[PackableMatrix, PackableMatrix]],
    count: int,
    arena: WeightArena | None = None,
    dtype: torch.dtype | None = None,
    *,
    gating: Gating = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    placement: torch.Tensor | None = None,
) -> ExpertWeights:
    """Packs a layer's experts one by one; each may be dropped when the next one is asked for.

    Args:
        experts: For each expert [2 * I, H], rows of gate first, and [H, I], in floats or, on a
            CPU, quantised.
        arena: Where packed weights go; None: memory of their own.
        dtype: What they compute in; None: that of the weights, which must be in floats.
        biases: [E, 2 * I] and [E, H] of the dtype, or None.
        placement: As in `ExpertWeights`.

    Raises:
        ValueError: Shapes or dtypes do not fit together, or a matrix is rotated.
    """
    w13: list[LinearWeight] = []
    w2: list[LinearWeight] = []
    stacked: list[StackedWeight] = []
    shape: tuple[int, int] | None = None
    num_packed = 0
    for gate_up, down in experts:
        shape = shape or (down.shape[0], down.shape[1])
        if dtype is None and isinstance(down, torch.Tensor):
            dtype = down.dtype
        given = (tuple(gate_up.shape), tuple(down.shape))
        dtypes = {w.dtype for w in (gate_up, down) if isinstance(w, torch.Tensor)}
        if given != ((2 * shape[1], shape[0]), shape) or dtypes - {dtype}:
            raise ValueError(
                f"expert {num_packed}: {given} {dtypes} do not fit, or not the first's {shape}"
            )
        if down.data.is_cuda:
            pair = _pair_on_gpu(gate_up, down, dtype)
            stacked = stacked or [_room(count, matrix) for matrix in pair]
            stacked = [
                _put(stack, num_packed, matrix) for stack, matrix in zip(stacked, pair, strict=True)
            ]
        else:
            own = (None, None) if biases is None else (biases[0][num_packed], biases[1][num_packed])
            w13.append(pack_gate_up(gate_up, own[0], arena, dtype, gating))
            w2.append(pack_linear(down, own[1], arena, dtype))
            if w13[-1].is_rotated or w2[-1].is_rotated:
                raise ValueError(f"expert {num_packed}: its matrices cannot be rotated")
        num_packed += 1
    if num_packed != count or shape is None or dtype is None:
        raise ValueError(f"{num_packed} experts, expected {count}")
    native = None
    if w13 and all(w.native is not None for w in (*w13, *w2)):
        native = (_addresses(w13), _addresses(w2))
    is_fixed = arena is not None and arena.is_fixed
    return ExpertWeights(
        *shape,
        dtype,
        tuple(w13),
        tuple(w2),
        (stacked[0], stacked[1]) if stacked else None,
        native,
        is_fixed,
        gating,
        biases if stacked else None,
        placement,
    )


_Stackable: TypeAlias = torch.Tensor | Fp8Channels | Fp8Blocks | PackedGroups


def _on_gpu(matrix: PackableMatrix, dtype: torch.dtype | None) -> _Stackable:
    if isinstance(matrix, torch.Tensor):
        return matrix
    assert dtype is not None
    if isinstance(matrix, Fp8Channels | Fp8Blocks) and stays_fp8(matrix, dtype):
        return matrix
    form = gpu_form(matrix, dtype)
    # The rows of several experts are multiplied together, so all experts share one order of
    # columns.
    if isinstance(form, PackedGroups) and form.order is None:
        return form
    if isinstance(form, PackedGroups):
        _warn_of_order(dtype)
    return matrix.dequantised(dtype)


@functools.cache
def _warn_of_order(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    logger.warning("experts with act order are computed in %s on a GPU", name)


def _pair_on_gpu(
    gate_up: PackableMatrix, down: PackableMatrix, dtype: torch.dtype | None
) -> tuple[_Stackable, _Stackable]:
    """If only one matrix of a pair has 4 bits it becomes floats, since both products of a layer
    share blocks of rows.
    """
    pair = _on_gpu(gate_up, dtype), _on_gpu(down, dtype)
    if isinstance(pair[0], PackedGroups) == isinstance(pair[1], PackedGroups):
        return pair
    assert dtype is not None
    first, second = (
        one.dequantised(dtype) if isinstance(one, PackedGroups) else one for one in pair
    )
    return first, second


def _room(count: int, first: _Stackable) -> StackedWeight:
    if isinstance(first, torch.Tensor):
        return first.new_empty((count, *first.shape))
    if isinstance(first, PackedGroups):
        return PackedExperts.empty(count, first)
    return Fp8Experts.empty(count, first)


def _put(stack: StackedWeight, index: int, matrix: _Stackable) -> StackedWeight:
    """Returns `stack`, or a wider copy of it if the matrix needs one."""
    match stack, matrix:
        case PackedExperts(), PackedGroups():
            return stack.put(index, matrix)
        case Fp8Experts(), Fp8Channels() | Fp8Blocks():
            stack.put(index, matrix)
        case torch.Tensor(), torch.Tensor():
            stack[index].copy_(matrix)
        case _:
            raise ValueError(f"expert {index} is of another format than the others")
    return stack


def _addresses(weights: list[LinearWeight]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(weights))(*(w.address for w in weights))


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    placement: torch.Tensor | None = None,
) -> Routing:
    """Scores all experts and keeps the `top_k` best of each row.

    Args:
        logits: [T, E] float32.
        top_k: 1 to the number of experts in the groups that a row may choose from.
        renormalise: Whether shares add up to 1, apart from the form's scale.
        placement: As in `ExpertWeights`.
    """
    if logits.is_cuda:
        return Routing(*_triton_route.route(logits, top_k, renormalise, form, placement))
    ids, shares = route_reference(logits, top_k, renormalise=renormalise, form=form)
    return Routing(ids if placement is None else placement[ids], shares)


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
        more = _triton_parts.ExpertParts(w.gating, w.biases, w.placement)
        return _gpu.moe(x, ids, shares, *w.stacked, residual, lora, more, is_fixed=w.is_fixed)
    if w.native is not None:
        return _moe_native(x, routing, w, w.native, residual, lora)
    return moe_reference(x, routing, w, residual, lora)


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


def _moe_native(
    x: torch.Tensor,
    routing: Routing,
    w: ExpertWeights,
    addresses: tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]],
    residual: torch.Tensor | None,
    lora: ExpertAddition | None,
) -> torch.Tensor:
    native = cpu.native_cpu()
    assert native is not None
    (rows, top_k), experts = routing.ids.shape, w.num_experts
    pairs = rows * top_k
    out = torch.empty_like(x)
    numbers = torch.empty(3 * (experts + 1) + pairs, dtype=torch.int64)
    begins, units, place = torch.split(numbers, [experts + 1, 2 * (experts + 1), pairs])
    gathered = torch.empty((pairs, w.hidden_size), dtype=x.dtype)
    inner = torch.empty((pairs, w.inner_size), dtype=x.dtype)
    products = torch.empty((pairs, w.hidden_size), dtype=torch.float32)
    added, place_slots = None, None
    if lora is not None:
        width = max(sum(part.max_rank for part in parts) for parts in (lora.w13, lora.w2))
        shrunk = torch.empty(pairs * width, dtype=torch.float32)
        place_slots = torch.empty(pairs, dtype=torch.int32)
        added = cpu.LoraStruct(
            groups=(cpu.LoraGroupStruct * 4)(describe_group(lora.w13), describe_group(lora.w2)),
            token_slots=lora.token_slots.data_ptr(),
            shrunk=shrunk.data_ptr(),
            tokens=rows,
            width=width,
        )
    described = cpu.ExpertsStruct(
        *(ctypes.addressof(array) for array in addresses),
        *(experts, top_k, rows),
        *(t.data_ptr() for t in (x, routing.ids, routing.weights)),
        None if residual is None else residual.data_ptr(),
        *(t.data_ptr() for t in (out, begins, units, place, gathered, inner, products)),
        None if added is None else ctypes.addressof(added),
        None if place_slots is None else place_slots.data_ptr(),
        0 if lora is None else lora.layer,
        w.placement is not None,
    )
    status = native.moe(ctypes.byref(described))
    if status:
        cpu.check_status(status, "moe")
    return out
