"""The experts of a layer by one native operation on a CPU (csrc/moe.h)."""

from __future__ import annotations

import ctypes

import torch
from weft.kernels.ops.lora.cpu import describe_group
from weft.kernels.ops.lora.spec import ExpertAddition
from weft.kernels.ops.moe.spec import ExpertWeights, Routing
from weft.kernels.shared import cpu


def native_moe(
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
