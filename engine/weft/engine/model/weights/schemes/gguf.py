"""Products in the integers of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from weft.contract.errors import ModelError
from weft.engine.model.weights.gguf_file import GROUP, GgufFile, GgufGroups
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.base import Matrix, QuantisedScheme, listing
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.pack import multiplies_gguf, pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.shared.formats.int_groups import (
    IntGroups,
    join_rows,
    mxfp4_groups,
    pack_int_groups,
)

_FREXP_BIAS = 126
"""Bias of MXFP4's exponents, where a power of 2 is 0.5 times the next one."""


class GgufScheme(QuantisedScheme):
    """A `Scheme` of the number formats of a GGUF file.

    Projections of 4 and 8 bits in groups keep their format, of which GPUs multiply 4 bits. If one
    product has both, its 4-bit numbers become 8-bit ones. A product in any other format becomes
    floats of the model's dtype.
    """

    def matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        shares = spec.weights(weights.shard)
        parts = []
        for part in shares:
            groups = _groups(part.name, part.shape, weights)
            groups = None if groups is None else _part_of(groups, part)
            if groups is None:
                break
            parts.append(_on(groups, weights.device))
        bits = max((part.bits for part in parts), default=0)
        kinds = {part.is_e2m1 for part in parts}
        if len(parts) < len(shares) or len(kinds) > 1 or not multiplies_gguf(weights.device, bits):
            return weights.read(shares)
        try:
            return _joined(parts)
        except ValueError as error:
            raise ModelError(f"{listing(spec, weights)}: {error}") from error

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        is_own = weights.has("lm_head.weight")
        name = "lm_head.weight" if is_own else "model.embed_tokens.weight"
        groups = _groups(name, None, weights) if multiplies_gguf(weights.device, 8) else None
        if groups is None or groups.is_e2m1:
            return super().head(matrix, weights)
        added = (0, 0, 0, matrix.shape[0] - groups.numbers.shape[0])
        offsets = None if groups.offsets is None else F.pad(groups.offsets, added)
        numbers, scales = F.pad(groups.numbers, added), F.pad(groups.scales, added)
        whole = _joined([GgufGroups(numbers, scales, offsets, groups.bits)])
        return pack_linear(whole, None, weights.arena, weights.dtype)

    def made(self, matrix: torch.Tensor) -> Matrix:
        raise AssertionError("GGUF is read, not made")


def _groups(name: str, shape: tuple[int, ...] | None, weights: Weights) -> GgufGroups | None:
    """A projection's integers; None: it has none, or it has another shape, which reading then
    reports.
    """
    file = weights.reader
    full = weights.full_name(name)
    if not isinstance(file, GgufFile) or (shape is not None and file.shape_of(full) != shape):
        return None
    return file.groups(full)


def _part_of(whole: GgufGroups, part: TensorSlice) -> GgufGroups | None:
    """A rank's rows and columns; None: the columns do not begin or end between two groups."""
    if part.size == part.shape:
        return whole
    rows, columns = (*part.slices, slice(None), slice(None))[:2]
    if len(part.shape) != 2 or isinstance(rows, int) or isinstance(columns, int):
        return None
    first, end, _ = columns.indices(part.shape[1])
    if first % GROUP or end % GROUP:
        return None
    groups, offsets = slice(first // GROUP, end // GROUP), whole.offsets
    return whole._replace(
        numbers=whole.numbers[rows, first:end],
        scales=whole.scales[rows, groups],
        offsets=None if offsets is None else offsets[rows, groups],
    )


def _on(groups: GgufGroups, device: torch.device) -> GgufGroups:
    return groups._replace(
        numbers=groups.numbers.to(device),
        scales=groups.scales.to(device),
        offsets=None if groups.offsets is None else groups.offsets.to(device),
    )


def _joined(parts: Sequence[GgufGroups]) -> IntGroups:
    if parts[0].is_e2m1:
        return join_rows([_of_e2m1(part) for part in parts])
    bits = max(part.bits for part in parts)
    has_offsets = any(part.offsets is not None for part in parts)
    numbers, offsets = [], []
    for part in parts:
        shift = 0
        if has_offsets and part.offsets is None and bits == 4:
            shift = 8  # Numbers with offsets begin at 0.
        numbers.append(part.numbers + shift)
        own = -shift * part.scales if part.offsets is None else part.offsets
        offsets.append(own)
    return pack_int_groups(
        torch.cat(numbers),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if has_offsets else None,
        GROUP,
        4 if bits == 4 else 8,
    )


def _of_e2m1(part: GgufGroups) -> IntGroups:
    pairs = part.numbers.view(torch.uint8).view(len(part.numbers), -1, GROUP // 2, 2)
    exponents = torch.frexp(part.scales).exponent + _FREXP_BIAS
    return mxfp4_groups(pairs[..., 0] | pairs[..., 1] << 4, exponents.to(torch.uint8))
