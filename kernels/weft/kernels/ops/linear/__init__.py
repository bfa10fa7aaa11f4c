"""Linear layers over weights that are packed once at load."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.activation.spec import SILU, Gating
from weft.kernels.ops.linear.spec import (
    LinearWeight,
    NativeForm,
    OneDnnForm,
    PackableMatrix,
    PlainForm,
)
from weft.kernels.ops.lora import LoraAddition, add_lora, check_addition, describe_lora
from weft.kernels.ops.norm import rms_norm
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred
from weft.kernels.shared.formats.int_groups import IntGroups
from weft.kernels.shared.formats.packed_groups import PackedGroups, pack_groups
from weft.kernels.shared.formats.quantised import (
    Fp8Blocks,
    Fp8Channels,
    Int8Channels,
)
from weft.kernels.shared.formats.rotated import RotatedChannels, multiplies_rotated
from weft.kernels.shared.memory import WeightArena

if TYPE_CHECKING:
    from weft.kernels.ops.linear import gpu as _gpu
    from weft.kernels.ops.linear import gpu_fp8 as _gpu_fp8
    from weft.kernels.ops.linear import gpu_groups as _gpu_groups
    from weft.kernels.ops.linear import triton_int8 as _triton_int8
else:
    _gpu = deferred(__name__, "weft.kernels.ops.linear.gpu")
    _gpu_fp8 = deferred(__name__, "weft.kernels.ops.linear.gpu_fp8")
    _gpu_groups = deferred(__name__, "weft.kernels.ops.linear.gpu_groups")
    _triton_int8 = deferred(__name__, "weft.kernels.ops.linear.triton_int8")

_PANEL_ROWS = 32
"""`PANEL` of csrc/tile.h."""
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
        dtype: As in `pack_linear`.
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


def linear(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, and what adapters add.

    Args:
        x: [M, K], contiguous, the weight's dtype; M may be 0.
        residual: [M, N], contiguous, dtype of `x`; not changed.
        out_dtype: dtype of the result: that of `x` (default) or float32 (for logits).

    Returns:
        [M, N], accumulated in float32. The native form rounds once, and a row's result does not
        depend on the other rows. Other forms round what adapters add separately.
    """
    match w.form:
        case NativeForm():
            return _linear_native(x, w, residual, out_dtype, lora)
        case PlainForm(data) if data.is_cuda:
            if lora is not None:
                check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
            return _gpu.linear(x, data, w.bias, residual, out_dtype, lora, is_fixed=w.is_fixed)
        case Fp8Channels(data) | Fp8Blocks(data) if data.is_cuda:
            return _gpu_fp8.linear(x, w, residual, out_dtype, lora)
        case PackedGroups():
            return _gpu_groups.linear(x, w, residual, out_dtype, lora)
        case Int8Channels(data) if data.is_cuda:
            return _triton_int8.linear(x, w, residual, out_dtype, lora)
    out = _linear_torch(x, w, residual, out_dtype)
    if lora is not None:
        add_lora(out, x, lora)
    return out


def gate_up_silu(
    x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None = None
) -> torch.Tensor:
    """silu(x @ gate^T) * (x @ up^T), or another gating of the two, in one operation.

    Args:
        x: [M, K], contiguous, the weight's dtype; M may be 0.
        lora: What the adapters of these M tokens add before the activation, or None.

    Returns:
        [M, I], dtype of `x`.
    """
    match w.form:
        case NativeForm():
            return _linear_native(x, w, None, None, lora)
        case PlainForm(data) if data.is_cuda:
            if lora is not None:
                check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
            return _gpu.gate_up_silu(x, data, w.bias, lora, is_fixed=w.is_fixed)
        case Fp8Channels(data) | Fp8Blocks(data) if data.is_cuda:
            return _gpu_fp8.gate_up_silu(x, w, lora)
        case PackedGroups():
            return _gpu_groups.gate_up_silu(x, w, lora)
        case Int8Channels(data) if data.is_cuda:
            return _triton_int8.gate_up_silu(x, w, lora)
    both = _linear_torch(x, w)
    if lora is not None:
        add_lora(both, x, lora)
    return w.gating.of(both)


def normed_linear(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    w: LinearWeight,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`linear` of the RMS norm of `x`, or `gate_up_silu` of it where `w` is of a gated pair.

    Args:
        x: [M, K], contiguous, the weight's dtype.
        gain: [K]: weight of the norm.
        out_dtype: As in `linear`; None where gated.

    Returns:
        [M, N], or [M, I] where gated. On a GPU the product of a small input computes the norm in
        the same launch and does not round it.
    """
    if x.is_cuda and _gpu.supports_norm(x.shape[0], w, lora):
        return _gpu.normed_linear(x, gain, eps, w, out_dtype, lora)
    normed = rms_norm(x, gain, eps)
    if w.gated:
        return gate_up_silu(normed, w, lora)
    return linear(normed, w, out_dtype=out_dtype, lora=lora)


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
        case NativeForm(data, _, None):
            # [panel of rows][word][row of the panel], a word being one float32 or two bfloat16.
            num_words = -(-w.in_features * w.dtype.itemsize // 4)
            panels = data.view(-1, num_words, _PANEL_ROWS)
            words = panels[rows // _PANEL_ROWS, :, rows % _PANEL_ROWS].contiguous()
            return words.view(w.dtype)[:, : w.in_features].contiguous()
        case NativeForm(_, struct, _) if struct.group:
            return _native_group_rows(w.form, rows).dequantised(w.dtype)
        case NativeForm(data, struct, torch.Tensor() as scales) if struct.is_rotated:
            # [panel of rows][four numbers][row of the panel][4], int8.
            fours = data.view(torch.int8).view(-1, w.in_features // 4, _PANEL_ROWS, 4)
            numbers = fours[rows // _PANEL_ROWS, :, rows % _PANEL_ROWS].flatten(1)
            return RotatedChannels(Int8Channels(numbers, scales[rows])).dequantised(w.dtype)
        case NativeForm(data, _, torch.Tensor() as scales):
            # [panel of rows][pair of numbers][row of the panel][2], int8.
            num_pairs = -(-w.in_features // 2)
            pairs = data.view(torch.int8).view(-1, num_pairs, _PANEL_ROWS, 2)
            numbers = pairs[rows // _PANEL_ROWS, :, rows % _PANEL_ROWS].flatten(1)
            numbers = numbers[:, : w.in_features].contiguous()
            return Int8Channels(numbers, scales[rows]).dequantised(w.dtype)
        case OneDnnForm(data):
            return data.to_dense().index_select(0, rows)
        case PlainForm(data):
            return data.index_select(0, rows)
        case Int8Channels(data, scales):
            return Int8Channels(data[rows], scales[rows]).dequantised(w.dtype)
        case Fp8Channels() | Fp8Blocks() | IntGroups() | PackedGroups() as matrix:
            return matrix.dequantised_rows(rows, w.dtype)
    raise AssertionError(w.form)


def _native_group_rows(form: NativeForm, rows: torch.Tensor) -> IntGroups:
    """Inverts the layouts that `pack_fours_panel` and `pack_int8_panel` of csrc/linear.h write."""
    struct, scales = form.struct, form.scales
    assert scales is not None
    panel, place, columns = rows // _PANEL_ROWS, rows % _PANEL_ROWS, struct.in_features
    if struct.bits == 4:
        eights = form.data.view(torch.uint8).view(-1, -(-columns // 8), _PANEL_ROWS, 2, 2)
        pairs = eights[panel, :, place]  # [rows, eights, word of 16 bits, byte]
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(3)  # [.., word, 4]
        ordered = numbers.transpose(2, 3).flatten(1)[:, : columns + columns % 2]
        data = ordered[:, ::2] | ordered[:, 1::2] << 4
    else:
        pairs = form.data.view(torch.int8).view(-1, -(-columns // 2), _PANEL_ROWS, 2)
        data = pairs[panel, :, place].flatten(1)[:, :columns].contiguous()
    own = scales[panel, :, :, place]  # [rows, groups, kinds]
    offsets = own[..., 1].contiguous() if struct.has_offsets else None
    scales, is_e2m1 = own[..., 0].contiguous(), bool(struct.is_e2m1)
    return IntGroups(data, scales, offsets, columns, struct.group, is_e2m1, form.order)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`linear` in eager torch over the original weight, on any device."""
    out = F.linear(x, weight, bias)
    if residual is not None:
        out = out + residual
    return out if out_dtype is None else out.to(out_dtype)


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
        return _pack_native(
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


def _pack_native(
    native: cpu.NativeCpu,
    weight: PackableMatrix,
    bias: torch.Tensor | None,
    arena: WeightArena,
    dtype: torch.dtype,
    *,
    gated: bool,
    gating: Gating,
) -> LinearWeight:
    n, k = weight.shape
    if isinstance(weight, IntGroups):
        return _pack_groups(native, weight, bias, arena, dtype, gated=gated, gating=gating)
    scales = None
    if isinstance(weight, torch.Tensor):
        plain = weight.contiguous()
    else:
        plain, scales = weight.data.contiguous(), weight.scales.contiguous()
    shape = cpu.WeightStruct(
        out_features=n,
        in_features=k,
        is_bf16=dtype == torch.bfloat16,
        gated=gated,
        **_of_gating(gating),
        is_rotated=isinstance(weight, RotatedChannels),
    )
    address = ctypes.addressof(shape)

    def column_values() -> torch.Tensor:
        return torch.empty(native.packed_columns(address), dtype=torch.float32)

    packed_bias = packed_scales = None
    if bias is not None:
        bias, packed_bias = bias.contiguous(), column_values()
        shape.bias = packed_bias.data_ptr()
    if scales is not None:
        packed_scales = column_values()
        shape.scales = packed_scales.data_ptr()
    packed = arena.take(native.packed_words(address), torch.int32)
    shape.panels = packed.data_ptr()
    native.pack(
        address,
        plain.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        shape.bias,
        None if scales is None else scales.data_ptr(),
        shape.scales,
    )
    form = NativeForm(packed, shape, packed_scales)
    return LinearWeight(n, k, dtype, gated, form, packed_bias, gating=gating)


def _pack_groups(
    native: cpu.NativeCpu,
    weight: IntGroups,
    bias: torch.Tensor | None,
    arena: WeightArena,
    dtype: torch.dtype,
    *,
    gated: bool,
    gating: Gating,
) -> LinearWeight:
    n, k = weight.shape
    kinds = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    plain_scales = torch.stack(kinds)
    shape = cpu.WeightStruct(
        out_features=n,
        in_features=k,
        is_bf16=dtype == torch.bfloat16,
        gated=gated,
        **_of_gating(gating),
        group=weight.group,
        bits=weight.bits,
        has_offsets=weight.offsets is not None,
        is_half=weight.scales.dtype == torch.float16,
        is_e2m1=weight.is_e2m1,
        order=None if weight.order is None else weight.order.data_ptr(),
    )
    address = ctypes.addressof(shape)
    num_columns = native.packed_columns(address)
    scales = plain_scales.new_empty(
        (num_columns // _PANEL_ROWS, weight.scales.shape[1], len(kinds), _PANEL_ROWS)
    )
    packed = arena.take(native.packed_words(address), torch.int32)
    shape.panels, shape.group_scales = packed.data_ptr(), scales.data_ptr()
    packed_bias = None
    if bias is not None:
        bias, packed_bias = bias.contiguous(), torch.empty(num_columns, dtype=torch.float32)
        shape.bias = packed_bias.data_ptr()
    native.pack_groups(
        address,
        weight.data.data_ptr(),
        packed.data_ptr(),
        plain_scales.data_ptr(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        shape.bias,
    )
    form = NativeForm(packed, shape, scales, weight.order)
    return LinearWeight(n, k, dtype, gated, form, packed_bias, gating=gating)


def _of_gating(gating: Gating) -> dict[str, float]:
    limits = (gating.limit, gating.largest_gate)
    limit, gate_limit = (math.inf if most is None else most for most in limits)
    return {
        "alpha": gating.alpha,
        "limit": limit,
        "offset": gating.offset,
        "gate_limit": gate_limit,
        "cubic": gating.cubic,
    }


def _linear_native(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    lora: LoraAddition | None,
) -> torch.Tensor:
    dtype = w.dtype
    rows, width = x.shape
    columns = w.out_features // 2 if w.gated else w.out_features
    out = torch.empty((rows, columns), dtype=out_dtype or dtype)
    if width != w.in_features or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} contiguous={x.is_contiguous()} does not fit a weight "
            f"of {w.in_features} {dtype} columns"
        )
    residual_at = None
    if residual is not None:
        if residual.shape != out.shape or residual.dtype != dtype or not residual.is_contiguous():
            raise ValueError(
                f"residual {tuple(residual.shape)} {residual.dtype} is not a contiguous "
                f"{tuple(out.shape)} {dtype}"
            )
        residual_at = residual.data_ptr()
    native = cpu.native_cpu()
    assert native is not None
    added, layer = None, 0
    if lora is not None:
        check_addition((rows, w.out_features), x.shape, x.dtype, lora)
        added, layer = describe_lora(native, (lora.parts,), lora.segments), lora.layer
    status = native.linear(
        w.address,
        x.data_ptr(),
        rows,
        residual_at,
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        None if added is None else added.address,
        layer,
    )
    if status:
        cpu.check_status(status, "linear")
    return out


def _linear_torch(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    match w.form:
        case OneDnnForm(data):
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, data, w.bias, "none", [], "")
            if residual is not None:
                out = out + residual
            return out if out_dtype is None else out.to(out_dtype)
        case PlainForm(data):
            return linear_reference(x, data, w.bias, residual, out_dtype)
        case NativeForm():
            raise AssertionError("panels are multiplied by the native operations")
    weight = w.form.dequantised(w.dtype)
    return linear_reference(x, weight, w.bias, residual, out_dtype)


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
