"""Linear layers by native operations on a CPU (csrc/linear.h), and the panels that they read."""

from __future__ import annotations

import ctypes
import math

import torch
from weft.kernels.ops.activation.spec import Gating
from weft.kernels.ops.linear.spec import LinearWeight, NativeForm, PackableMatrix
from weft.kernels.ops.lora.checks import check_addition
from weft.kernels.ops.lora.cpu import describe_lora
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.int_groups import IntGroups
from weft.kernels.shared.formats.quantised import Int8Channels
from weft.kernels.shared.formats.rotated import RotatedChannels
from weft.kernels.shared.memory import WeightArena

_PANEL_ROWS = 32
"""`PANEL` of csrc/tile.h."""


def native_rows(w: LinearWeight, form: NativeForm, rows: torch.Tensor) -> torch.Tensor:
    """`weft.kernels.ops.linear.pack.weight_rows` of a weight in native form."""
    match form:
        case NativeForm(data, _, None):
            # [panel of rows][word][row of the panel], a word being one float32 or two bfloat16.
            num_words = -(-w.in_features * w.dtype.itemsize // 4)
            panels = data.view(-1, num_words, _PANEL_ROWS)
            words = panels[rows // _PANEL_ROWS, :, rows % _PANEL_ROWS].contiguous()
            return words.view(w.dtype)[:, : w.in_features].contiguous()
        case NativeForm(_, struct, _) if struct.group:
            return _group_rows(form, rows).dequantised(w.dtype)
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
    raise AssertionError(form)


def _group_rows(form: NativeForm, rows: torch.Tensor) -> IntGroups:
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
    factors = None if form.factors is None else form.factors[rows]
    return IntGroups(data, scales, offsets, columns, struct.group, is_e2m1, form.order, factors)


def pack_native(
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
        scale_size=weight.scales.itemsize,
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
    packed_bias = factors = None
    if bias is not None:
        bias, packed_bias = bias.contiguous(), torch.empty(num_columns, dtype=torch.float32)
        shape.bias = packed_bias.data_ptr()
    if weight.factors is not None:
        factors = torch.empty(num_columns, dtype=torch.float32)
        shape.scales = factors.data_ptr()
    native.pack_groups(
        address,
        weight.data.data_ptr(),
        packed.data_ptr(),
        plain_scales.data_ptr(),
        scales.data_ptr(),
        None if weight.factors is None else weight.factors.data_ptr(),
        shape.scales,
        None if bias is None else bias.data_ptr(),
        shape.bias,
    )
    form = NativeForm(packed, shape, scales, weight.order, factors)
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


def native_linear(
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
