"""Packs the experts of a layer when it is loaded."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable
from typing import TypeAlias

import torch
from weft.kernels.ops.activation.spec import SILU, Gating
from weft.kernels.ops.linear.pack import gpu_form, pack_gate_up, pack_linear, stays_fp8
from weft.kernels.ops.linear.spec import LinearWeight, PackableMatrix
from weft.kernels.ops.moe.spec import ExpertWeights, StackedWeight
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups
from weft.kernels.shared.formats.quantised import Fp8Blocks, Fp8Channels, Fp8Experts
from weft.kernels.shared.memory import WeightArena

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
        placement: [experts of all ranks] int32: each expert's place on this rank; None: it has all.

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


def stacks_experts(device: torch.device) -> bool:
    """Whether a device multiplies experts in floats as they are, all in one tensor per product."""
    return torch.empty(0, device=device).is_cuda


def can_widen(device: torch.device) -> bool:
    """Whether experts with 4 bits may become floats where a rank's share cuts a group: not on a
    GPU, whose memory would have to hold four times as much.
    """
    return device.type != "cuda"


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
