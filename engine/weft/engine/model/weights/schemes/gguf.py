"""Products in the integers of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from weft.contract.errors import ModelError
from weft.engine.model.weights.gguf_file import GROUP, GgufFile, GgufGroups
from weft.engine.model.weights.schemes.base import Matrix, QuantisedScheme, listing
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.pack import multiplies_gguf, pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.shared.formats.int_groups import IntGroups, pack_int_groups


class GgufScheme(QuantisedScheme):
    """A `Scheme` of the number formats of a GGUF file.

    On a CPU, projections of 4 and 8 bits in groups keep their format. If one product has both, its
    4-bit numbers become 8-bit ones. A product in any other format becomes floats of the model's
    dtype.
    """

    def matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        shares = spec.weights(weights.shard)
        parts = []
        for part in shares if multiplies_gguf(weights.device) else ():
            groups = _groups(part.name, part.shape, weights)
            if groups is None or part.size != part.shape:
                break
            parts.append(groups)
        if len(parts) < len(shares):
            return weights.read(shares)
        try:
            return _joined(parts)
        except ValueError as error:
            raise ModelError(f"{listing(spec, weights)}: {error}") from error

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        is_own = weights.has("lm_head.weight")
        name = "lm_head.weight" if is_own else "model.embed_tokens.weight"
        groups = _groups(name, None, weights) if multiplies_gguf(weights.device) else None
        if groups is None:
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


def _joined(parts: Sequence[GgufGroups]) -> IntGroups:
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
