"""Products in the formats of bitsandbytes."""

from __future__ import annotations

import json
from typing import Any

import torch
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.base import Matrix, QuantisedScheme, check_scales
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.shared.formats.quantised import Int8Channels

_KINDS = ("nf4", "fp4")


class BitsAndBytesScheme(QuantisedScheme):
    """A `Scheme` of the weights that bitsandbytes writes.

    8 bits: `weight`, int8 [rows, columns], and `SCB`, the magnitude of each row that 127 stands
    for. 4 bits: `weight`, uint8 [rows * columns / 2, 1], of which the upper half is the first
    number, an index into `quant_map`; each block of numbers is multiplied by its `absmax`. That may
    be in 8 bits itself: an index into `nested_quant_map`, multiplied by the `nested_absmax` of a
    block of them, plus an offset. JSON in `quant_state.bitsandbytes__nf4` has sizes and offset.

    The kernels take no tables of numbers, so products of 4 bits become floats.
    """

    def ignores(self, spec: LinearSpec, weights: Weights) -> bool:
        return all(self.ignores_name(name, weights) for name in spec.modules)

    def ignores_name(self, name: str, weights: Weights) -> bool:
        return weights.dtype_of(f"{name}.weight") not in (torch.uint8, torch.int8)

    def matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        parts = spec.weights(weights.shard)
        if all(weights.dtype_of(part.name) == torch.int8 for part in parts):
            scales = torch.cat([_row_scales(part, weights) for part in parts])
            check_scales(scales, spec, weights, "SCB")
            return Int8Channels(weights.read(parts, dtype=torch.int8), scales)
        return torch.cat([self._floats(part, weights) for part in parts])

    def made(self, matrix: torch.Tensor) -> Matrix:
        raise AssertionError("weights of bitsandbytes are read, not made")

    def _floats(self, part: TensorSlice, weights: Weights) -> torch.Tensor:
        found = weights.dtype_of(part.name)
        if found == torch.uint8:
            return _of_four_bits(part, weights)[part.slices].to(weights.dtype)
        if found == torch.int8:
            numbers = weights.tensor(part, torch.int8).float()
            return (numbers * _row_scales(part, weights)[:, None]).to(weights.dtype)
        return weights.read([part])


def _row_scales(part: TensorSlice, weights: Weights) -> torch.Tensor:
    module = part.name.removesuffix(".weight")
    layout = f"{module}.weight_format"
    if weights.has(layout) and bool(_whole(layout, torch.uint8, weights).any()):
        raise ModelError(f"{weights.full_name(layout)}: only rows in order are supported")
    own = TensorSlice(f"{module}.SCB", part.shape[:1], part.slices[:1])
    return weights.tensor(own, torch.float32) / 127


def _of_four_bits(part: TensorSlice, weights: Weights) -> torch.Tensor:
    """The whole projection, float32."""
    name, count = part.name, part.shape[0] * part.shape[1]
    state = _state(part, weights)
    packed = weights.tensor(TensorSlice(name, ((count + 1) // 2, 1)), torch.uint8).flatten()
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[:count]
    if not weights.has(f"{name}.nested_absmax"):
        factors = _whole(f"{name}.absmax", torch.float32, weights)
    else:
        indices = _whole(f"{name}.absmax", torch.uint8, weights).long()
        blocks = _whole(f"{name}.nested_absmax", torch.float32, weights)
        size, offset = state["nested_blocksize"], state["nested_offset"]
        wide = blocks.repeat_interleave(size)[: len(indices)]
        numbers = _whole(f"{name}.nested_quant_map", torch.float32, weights)
        if len(numbers) != 256 or len(wide) != len(indices):
            raise ModelError(f"{weights.full_name(name)}: its scales' scales do not fit")
        factors = numbers[indices] * wide + offset
    values = _whole(f"{name}.quant_map", torch.float32, weights)
    wide = factors.repeat_interleave(state["blocksize"])[:count]
    if len(values) != 16 or len(wide) != count or not bool(torch.isfinite(wide).all()):
        raise ModelError(f"{weights.full_name(name)}: its scales do not fit, or are not finite")
    return (values[codes.long()] * wide).view(part.shape)


def _state(part: TensorSlice, weights: Weights) -> dict[str, Any]:
    """The JSON beside a projection of 4 bits. Raises ModelError if it does not say what is read."""
    names = [f"{part.name}.quant_state.bitsandbytes__{kind}" for kind in _KINDS]
    name = next((name for name in names if weights.has(name)), names[0])
    shape = weights.shape_of(name) or (0,)
    try:
        state = json.loads(bytes(weights.table(name, shape[0]).tolist()))
        sizes = [state["blocksize"]]
        if weights.has(f"{part.name}.nested_absmax"):
            sizes.append(state["nested_blocksize"])
            state["nested_offset"] = float(state["nested_offset"])
        is_good = all(isinstance(size, int) and size > 0 for size in sizes)
        if not is_good or tuple(state["shape"]) != part.shape:
            raise ValueError(f"shape {state['shape']}, blocks of {sizes}")
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{weights.full_name(name)}: {error!r}") from error
    assert isinstance(state, dict)
    return state


def _whole(name: str, dtype: torch.dtype, weights: Weights) -> torch.Tensor:
    """A tensor of whatever length, flat; [1] of 0 if it is missing, which is told at the end."""
    shape = weights.shape_of(name)
    return weights.tensor(TensorSlice(name, (1,) if shape is None else shape), dtype).flatten()
