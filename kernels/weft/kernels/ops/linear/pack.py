"""Packs a layer's weight, when it is loaded, into the form that its device multiplies fastest."""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.kernels.ops.activation.spec import SILU, Gating
from weft.kernels.ops.linear.cpu import native_rows, pack_native
from weft.kernels.ops.linear.spec import (
    LinearWeight,
    NativeForm,
    OneDnnForm,
    PackableMatrix,
    PlainForm,
)
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.int_groups import IntGroups
from weft.kernels.shared.formats.packed_groups import PackedGroups, pack_groups
from weft.kernels.shared.formats.quantised import Fp8Blocks, Fp8Channels, Int8Channels
from weft.kernels.shared.formats.rotated import RotatedChannels, multiplies_rotated
from weft.kernels.shared.memory import WeightArena

_MIN_BLOCK_ROWS = 16
_INT8_UNIT = 16
"""Tensor cores take int8 weights whose rows and columns are multiples of this."""
_FP8_CAPABILITY = (9, 0)
"""Least compute capability with FP8 kernels that were measured."""


def pack_linear(
    weight: PackableMatrix,
    bias: torch.Tensor | None = None,
    arena: WeightArena | None = None,
    dtype: torch.dtype | None = None,
) -> LinearWeight:
    """Packs a layer's weight; drop the original afterwards.

    Args:
        weight: [N, K] as in `torch.nn.Linear`, in floats or quantised.
        bias: [N], dtype of the layer, or None.
        arena: Where the packed weight goes; None: memory of its own.
        dtype: What the layer computes in; None: that of `weight`, which must be in floats.
    """
    return _pack(weight, bias, arena, dtype, gated=False, gating=SILU)


def pack_gate_up(
    weight: PackableMatrix,
    bias: torch.Tensor | None = None,
    arena: WeightArena | None = None,
    dtype: torch.dtype | None = None,
    gating: Gating = SILU,
) -> LinearWeight:
    """Packs gate and up projection of a gated MLP for `gate_up_silu`.

    Args:
        weight: [2 * I, K], rows of gate first, in floats or quantised.
        bias: [2 * I], dtype of the layer, or None.
        arena: Where the packed weight goes; None: memory of its own.
        dtype: What the layer computes in; None: that of `weight`, which must be in floats.
        gating: How gate and up are combined; on a GPU only `SILU`.
    """
    if weight.shape[0] % 2:
        raise ValueError(f"gate and up together need an even row count, got {weight.shape[0]}")
    if gating != SILU and weight.data.is_cuda:
        raise ValueError(f"{gating} of a gated pair is not supported on a GPU")
    return _pack(weight, bias, arena, dtype, gated=True, gating=gating)


def packing_copies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing copies every weight of such a layer, so that the original's memory is unused
    afterwards.
    """
    return device.type == "cpu" and dtype in cpu.DTYPES and cpu.native_cpu() is not None


def with_gating(weight: LinearWeight) -> LinearWeight | None:
    """The same gate and up projections for `gate_up_silu`, in the same memory; None: that needs
    another form.
    """
    return replace(weight, gated=True) if weight.data.is_cuda else None


def multiplies_gguf(device: torch.device, bits: int) -> bool:
    """Whether a device multiplies groups of GGUF files of so many bits, with offsets or without, as
    they are. If not, they become floats at load.
    """
    return device.type == "cpu" or (device.type == "cuda" and bits == 4)


def weight_rows(w: LinearWeight, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a layer's original weight, whatever form it is kept in; it must not be a gated pair.

    Args:
        rows: [N] int64 on the weight's device.

    Returns:
        [N, in_features], a copy.
    """
    if w.gated:
        raise ValueError("rows are read of plain layers, not of a gate with its up projection")
    match w.form:
        case NativeForm():
            return native_rows(w, w.form, rows)
        case OneDnnForm(data):
            return data.to_dense().index_select(0, rows)
        case PlainForm(data):
            return data.index_select(0, rows)
        case Int8Channels(data, scales):
            return Int8Channels(data[rows], scales[rows]).dequantised(w.dtype)
        case Fp8Channels() | Fp8Blocks() | IntGroups() | PackedGroups() as matrix:
            return matrix.dequantised_rows(rows, w.dtype)
    raise AssertionError(w.form)


def _pack(
    weight: PackableMatrix,
    bias: torch.Tensor | None,
    arena: WeightArena | None,
    dtype: torch.dtype | None,
    *,
    gated: bool,
    gating: Gating,
) -> LinearWeight:
    data = weight if isinstance(weight, torch.Tensor) else weight.data
    if data.dim() != 2:
        raise ValueError(f"a linear weight is [N, K], got {tuple(data.shape)}")
    dtype = data.dtype if dtype is None else dtype
    if not dtype.is_floating_point or (data is weight and data.dtype != dtype):
        raise ValueError(f"a layer of {dtype} cannot have a weight of {data.dtype}")
    n, k = weight.shape
    if bias is not None and (bias.shape != (n,) or bias.dtype != dtype):
        raise ValueError(
            f"bias {tuple(bias.shape)} {bias.dtype} does not fit weight {n, k} of a {dtype} layer"
        )
    on_cpu = data.device.type == "cpu"
    is_fixed = arena is not None and arena.is_fixed
    if isinstance(weight, Fp8Channels | Fp8Blocks) and not stays_fp8(weight, dtype):
        weight = weight.dequantised(dtype)
    if isinstance(weight, RotatedChannels) and not multiplies_rotated(dtype, data.device, k):
        weight = weight.dequantised(dtype)
    form = gpu_form(weight, dtype)
    if form is not None:
        return LinearWeight(n, k, dtype, gated, form, bias, is_fixed, gating)
    native = cpu.native_cpu() if packing_copies(dtype, data.device) else None
    if native is not None:
        return pack_native(
            native, weight, bias, arena or WeightArena(0), dtype, gated=gated, gating=gating
        )
    assert not isinstance(weight, RotatedChannels)
    if not isinstance(weight, torch.Tensor):
        return LinearWeight(n, k, dtype, gated, weight, bias, is_fixed, gating)
    if on_cpu and dtype == torch.bfloat16 and onednn_has_bfloat16():
        # A hint of 16 rows serves every number of rows about equally well.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        return LinearWeight(n, k, dtype, gated, OneDnnForm(packed), bias, gating=gating)
    return LinearWeight(n, k, dtype, gated, PlainForm(weight), bias, is_fixed, gating)


def has_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies FP8 weights as they are. If not, they become floats at load."""
    return (
        device.type == "cuda"
        and dtype.itemsize == 2
        and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    )


def stays_fp8(weight: Fp8Channels | Fp8Blocks, dtype: torch.dtype) -> bool:
    """Whether an FP8 weight is multiplied as it is. Tensor cores need enough rows with one
    scale.
    """
    is_cut = isinstance(weight, Fp8Blocks) and weight.rows < _MIN_BLOCK_ROWS
    return not is_cut and has_fp8(weight.data.device, dtype)


def gpu_form(
    weight: PackableMatrix, dtype: torch.dtype
) -> PackedGroups | Int8Channels | PlainForm | None:
    """The form of an integer weight on a GPU. Layers that compute in 16-bit floats keep 4 bits
    packed, and int8 as it is if tensor cores take its shape; all others become floats. None: the
    weight is not of integers, or lies on a CPU.
    """
    if not isinstance(weight, IntGroups | Int8Channels) or not weight.data.is_cuda:
        return None
    if isinstance(weight, IntGroups) and weight.bits == 4 and dtype.itemsize == 2:
        return pack_groups(weight)
    is_even = not any(size % _INT8_UNIT for size in weight.shape)
    if isinstance(weight, Int8Channels) and dtype.itemsize == 2 and is_even:
        return weight
    return PlainForm(weight.dequantised(dtype))


def onednn_has_bfloat16() -> bool:
    """Whether this torch on this CPU multiplies packed bfloat16 weights."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
